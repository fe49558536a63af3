"""The terms of the loss and the overlong penalty, against the papers' formulas and numbers computed by hand."""

import math
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from agl_slime.data.normalize import normalize_rewards, overlong_penalty  # noqa: E402
from agl_slime.errors import ConfigError, TrainerError  # noqa: E402
from agl_slime.train.local.functions import user_advantages, user_metrics  # noqa: E402
from agl_slime.train.local.loss import (  # noqa: E402
    Objective,
    Reference,
    kl_k3,
    policy_loss,
    policy_terms,
    token_entropy,
    token_log_probs,
    token_weights,
)
from agl_slime.train.local.settings import LocalTrainerSettings  # noqa: E402


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_log_probs_are_of_the_tempered_softmax():
    logits = torch.tensor([[math.log(1.0), math.log(2.0), math.log(5.0)]] * 2, dtype=torch.float64)
    assert token_log_probs(logits, torch.tensor([0, 2])).tolist() == pytest.approx([math.log(1 / 8), math.log(5 / 8)])
    # At temperature 0.5 the probabilities are proportional to 1, 4, 25.
    assert token_log_probs(logits, torch.tensor([0, 2]), temperature=0.5).tolist() == pytest.approx(
        [math.log(1 / 30), math.log(25 / 30)]
    )


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    targets = torch.arange(4)
    assert token_log_probs(logits, targets).dtype == torch.float32
    assert torch.equal(token_log_probs(logits, targets), token_log_probs(logits.float(), targets))


def test_entropy_is_in_nats():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(3.0), 0.0, -math.inf, -1e9]], dtype=torch.float64)[
        :, [0, 1, 3]
    ]
    uniform, skewed = token_entropy(logits).tolist()
    assert uniform == pytest.approx(math.log(3))
    assert skewed == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        # Inside the range the loss is -r A and its slope in the log-prob is the same.
        (1.0, 2.0, -2.0, -2.0, 0.0),
        (1.1, 2.0, -2.2, -2.2, 0.0),
        # Too likely already, and good: clipped at 1 + 0.3. Too likely, and bad: not clipped.
        (1.5, 2.0, -2.6, 0.0, 1.0),
        (1.5, -2.0, 3.0, 3.0, 0.0),
        # Too unlikely already, and bad: clipped at 1 - 0.2. Too unlikely, and good: not clipped.
        (0.5, -2.0, 1.6, 0.0, 1.0),
        (0.5, 2.0, -1.0, -1.0, 0.0),
        (1.5, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_clipped_surrogate(ratio: float, advantage: float, loss: float, slope: float, clipped: float):
    log_probs = doubles(math.log(ratio) - 1.0).requires_grad_()
    terms = policy_terms(log_probs, doubles(-1.0), doubles(advantage), clip_low=0.2, clip_high=0.3)
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss)
    assert terms.ratio.item() == pytest.approx(ratio)
    assert terms.clipped.item() == clipped
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(slope)


def test_k3_is_zero_for_equal_policies_and_averages_to_the_divergence():
    p, q = doubles(0.5, 0.3, 0.2), doubles(0.2, 0.3, 0.5)
    k3 = kl_k3(p.log(), q.log())
    assert (k3 >= 0).all()
    assert k3[1].item() == 0.0
    assert (p * k3).sum().item() == pytest.approx((p * (p / q).log()).sum().item())


@pytest.mark.parametrize(("aggregation", "expected"), [("token", [1 / 3] * 3), ("rollout", [1 / 4, 1 / 4, 1 / 2])])
def test_weights_of_tokens_sum_to_one_per_minibatch(aggregation: Literal["token", "rollout"], expected: list[float]):
    sums = torch.tensor([2, 2, 1])  # rollout 0 has tokens 0 and 1, rollout 1 has token 2
    for n_minibatches in (1, 2):
        weights = token_weights(
            aggregation, rollout_mask_sums=sums, n_tokens=3, n_rollouts=2, n_minibatches=n_minibatches
        )
        assert weights.tolist() == pytest.approx([n_minibatches * weight for weight in expected])


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize(("now", "old"), [(-1.0, -120.0), (-120.0, -1.0)])
@pytest.mark.parametrize("off_policy", ["none", "tis", "icepop"])
def test_a_log_prob_far_from_the_engines_is_bounded_and_counted(advantage, now, old, off_policy):
    log_probs = torch.tensor([old, -2.0])
    objective = Objective(
        settings=LocalTrainerSettings(old_log_probs="recompute", off_policy=off_policy),  # type: ignore[arg-type]
        old_log_probs=log_probs,
        engine_log_probs=log_probs.flip(0),
        reference=Reference(log_probs=log_probs, coef=0.1),
        advantages=torch.tensor([advantage, 1.0]),
        weights=torch.tensor([0.5, 0.5]),
    )
    log_probs = torch.tensor([now, -2.0], requires_grad=True)
    loss = objective.loss(torch.arange(2), log_probs)
    loss.backward()
    assert math.isfinite(loss.item())
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()
    assert log_probs.grad.abs().max() <= 1.0
    assert all(math.isfinite(value) for value in objective.metrics().values())
    assert objective.metrics()["train/log_ratio_clamped"] == 0.5


@given(n_tokens=st.integers(0, 60), longest=st.integers(2, 50), data=st.data())
def test_the_overlong_penalty_is_dapos(n_tokens: int, longest: int, data: st.DataObject):
    buffer = data.draw(st.integers(1, longest - 1))
    if n_tokens <= longest - buffer:
        expected = 0.0
    elif n_tokens <= longest:
        expected = ((longest - buffer) - n_tokens) / buffer
    else:
        expected = -1.0
    assert overlong_penalty(n_tokens, longest=longest, buffer=buffer) == pytest.approx(expected, abs=1e-12)
    assert overlong_penalty(n_tokens, longest=longest, buffer=0) == 0.0


def pages_file(directory: Path, more: str) -> Path:
    """The functions of docs/trainer.md, and ``more``."""
    page = (Path(__file__).parents[3] / "docs/trainer.md").read_text()
    (example,) = re.findall(r"```python\n# my_loss\.py\n(.*?)```", page, re.DOTALL)
    file = directory / "my_loss.py"
    file.write_text(f"{example}\n\n{more}\n")
    return file


def test_a_loss_by_path_is_the_users_own_and_its_errors_are_typed(tmp_path: Path):
    file = pages_file(
        tmp_path, "def mean(log_probs, *_, **__):\n    return log_probs.mean()\n\ndef broken():\n    pass"
    )
    new = doubles(0.0, 0.0, -1.0).requires_grad_()
    old, advantages, bounds = doubles(-1.5, -1.5, -1.0), doubles(-1.0, 1.0, 2.0), {"clip_low": 0.2, "clip_high": 0.2}
    terms = policy_loss(f"{file}:dual_clip")(new, old, advantages, **bounds)
    plain = policy_terms(new, old, advantages, **bounds)
    assert terms.loss.tolist() == pytest.approx([3.0, -1.2, -2.0])  # of exp(1.5), 4.48, the first is bounded by 3
    assert plain.loss.tolist() == pytest.approx([math.exp(1.5), -1.2, -2.0])
    assert torch.equal(terms.ratio, plain.ratio)
    terms.loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, 0.0, -2.0])
    for name, problem in (("mean", "returned []; return a loss per token, [3]"), ("broken", "failed with TypeError")):
        with pytest.raises(TrainerError, match=re.escape(problem)):
            policy_loss(f"{file}:{name}")(new, old, advantages, **bounds)
    with pytest.raises(ConfigError, match="has no function absent"):
        policy_loss(f"{file}:absent")


REWARDS, GROUPS, ROLLOUTS = [1.0, 1.0, 0.0, 5.0, 2.0], [7, 7, 7, None, 9], [3, 3, 4, 5, 6]  # siblings first


def test_advantages_by_path_are_of_rollouts_and_their_groups(tmp_path: Path):
    file = pages_file(
        tmp_path, "def short(rewards, groups):\n    return rewards[:1]\n\nnan = lambda r, g: r * numpy.nan"
    )
    keys: dict[str, Any] = {"group_indices": GROUPS, "rollout_ids": ROLLOUTS}
    values = normalize_rewards(REWARDS, **keys, advantages=user_advantages(f"{file}:leave_one_out"))
    assert values == [1.0, 1.0, -1.0, 0.0, 0.0]
    for name, problem in (
        ("short", "returned [1]; return a finite number per rollout, [4]"),
        ("nan", "a finite number"),
    ):
        with pytest.raises(TrainerError, match=re.escape(problem)):
            normalize_rewards(REWARDS, **keys, advantages=user_advantages(f"{file}:{name}"))


def test_metrics_by_path_are_numbers_by_name(tmp_path: Path):
    file = pages_file(tmp_path, "def nothing(**_):\n    pass\n\ndef endless(**_):\n    return {'ratio': numpy.inf}")
    arrays = {"log_probs": np.array([-1.0, -2.0, -4.0]), "advantages": np.array([1.0, 1.0, -1.0])}
    assert user_metrics(f"{file}:surprise", **arrays) == {"user/nats_of_the_good": 1.5}
    for name, problem in (("nothing", "no dict of numbers by name"), ("endless", "user/ratio is inf")):
        with pytest.raises(TrainerError, match=problem):
            user_metrics(f"{file}:{name}", **arrays)
