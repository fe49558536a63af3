"""Tokens that other weights have sampled: the correction of the loss, and metrics by staleness."""

import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from agl_slime.train.local.batch import TrainBatch, token_staleness  # noqa: E402
from agl_slime.train.local.loss import MAX_STALENESS, Objective  # noqa: E402
from agl_slime.train.local.settings import LocalTrainerSettings  # noqa: E402
from agl_slime.train.local.trainer import LocalTrainer  # noqa: E402
from agl_slime.types import Sample  # noqa: E402
from tests.harness.trainer_policy import make_model, make_samples, response_log_probs  # noqa: E402

N = 64
CLIP = 0.2


def weight_of(k: float, *, off_policy: str) -> float:
    """Of a token whose probability under the proximal policy is ``k`` times that under the behaviour policy."""
    if off_policy == "tis":
        return min(k, 2.0)
    if off_policy == "icepop":
        return k if 0.5 <= k <= 5.0 else 0.0
    return 1.0


def plain_loss(now: float, old: float, engine: float, advantage: float, *, off_policy: str) -> float:
    ratio = math.exp(now - old)
    bounded = min(max(ratio, 1 - CLIP), 1 + CLIP)
    return -weight_of(math.exp(old - engine), off_policy=off_policy) * min(ratio * advantage, bounded * advantage)


def tokens(*, spread: float = 1.2) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(0)
    engine = -3 * torch.rand(N, generator=drawn, dtype=torch.float64) - 0.1
    old = engine + spread * torch.randn(N, generator=drawn, dtype=torch.float64)
    now = old + 0.3 * torch.randn(N, generator=drawn, dtype=torch.float64)
    return {"engine": engine, "old": old, "now": now, "advantages": torch.randn(N, generator=drawn).double()}


def objective(off_policy: Any, batch: dict[str, Any], *, loss: Any = "ppo", **settings: Any) -> Objective:
    return Objective(
        settings=LocalTrainerSettings(old_log_probs="recompute", off_policy=off_policy, loss=loss, clip=CLIP),
        old_log_probs=batch["old"],
        engine_log_probs=batch["engine"],
        advantages=batch["advantages"],
        weights=torch.full((N,), 1 / N, dtype=torch.float64),
        **settings,
    )


@pytest.mark.parametrize("off_policy", ["none", "tis", "icepop"])
def test_off_policy_loss_and_gradient_equal_the_plain_formula(off_policy: str):
    batch = tokens()
    now = batch["now"].clone().requires_grad_()
    loss = objective(off_policy, batch).loss(torch.arange(N), now)
    loss.backward()
    columns = [batch[name].tolist() for name in ("now", "old", "engine", "advantages")]
    plain = [plain_loss(*row, off_policy=off_policy) for row in zip(*columns, strict=True)]
    assert loss.item() == pytest.approx(math.fsum(plain) / N, rel=1e-12)
    h = 1e-6
    for i, row in enumerate(zip(*columns, strict=True)):
        up, down = (plain_loss(row[0] + step, *row[1:], off_policy=off_policy) for step in (h, -h))
        assert now.grad[i].item() == pytest.approx((up - down) / (2 * h) / N, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("off_policy", ["none", "tis", "icepop"])
@pytest.mark.parametrize("of_tokens", [False, True], ids=["rollouts", "tokens"])
def test_the_gradient_of_gspo_is_that_of_its_loss_for_each_correction(off_policy: Any, of_tokens: bool):
    """The loss of whole rollouts with its graph, against the tokens in two calls, which divide rollouts; with an
    advantage of each token GSPO-token's (arXiv:2507.18071, eq. 13)."""
    batch, rollouts = tokens(), torch.arange(N) // 5
    advantages = torch.randn(N // 5 + 1, generator=torch.Generator().manual_seed(1)).double()[rollouts]
    advantages = batch["advantages"] if of_tokens else advantages
    whole, parts = (batch["now"].clone().requires_grad_() for _ in range(2))
    plain = torch.zeros((), dtype=torch.float64)
    for number in range(N // 5 + 1):
        of_rollout = rollouts == number
        ratio = (whole - batch["old"])[of_rollout].mean().exp()
        ks = (batch["old"] - batch["engine"])[of_rollout].exp().tolist()
        factors = torch.tensor([weight_of(k, off_policy=off_policy) for k in ks], dtype=torch.float64)
        if of_tokens:
            ratio = ratio.detach() * (whole - whole.detach())[of_rollout].exp()
        advantage = advantages[of_rollout]
        plain = (
            plain
            - (factors.mean() * torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)).sum()
        )
    (plain / N).backward()
    means = torch.stack([(batch["now"] - batch["old"])[rollouts == number].mean() for number in rollouts])
    result = objective(
        off_policy, batch | {"advantages": advantages}, loss="gspo", sequence_log_ratios=means, rollouts=rollouts
    )
    for index in (torch.arange(0, N, 2), torch.arange(1, N, 2)):
        result.loss(index, parts[index]).backward()
    assert torch.allclose(parts.grad, whole.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("off_policy", "cut"), [("tis", lambda k: k > 2), ("icepop", lambda k: not 0.5 <= k <= 5)])
def test_clipped_share_and_engine_kl_are_reported_per_staleness(off_policy: str, cut: Any):
    batch = tokens()
    lags = torch.arange(N) % 7 - 1  # -1 is not known; 4 and 5 are both "4 or more"
    result = objective(off_policy, batch, staleness=lags)
    result.loss(torch.arange(N // 2), batch["now"][: N // 2])
    result.loss(torch.arange(N // 2, N), batch["now"][N // 2 :])
    metrics = result.metrics()
    k = (batch["old"] - batch["engine"]).exp().tolist()
    cuts = [float(cut(value)) for value in k]
    kl = [value - 1 - math.log(value) for value in k]  # k3 of the engine's policy, which sampled, from the trainer's
    assert 0 < metrics["train/off_policy_clipped"] == pytest.approx(sum(cuts) / N)
    assert metrics["train/engine_kl"] == pytest.approx(sum(kl) / N)
    assert metrics["train/off_policy_weight"] == pytest.approx(
        sum(weight_of(value, off_policy=off_policy) for value in k) / N
    )
    aged = [min(lag, MAX_STALENESS) for lag in lags.tolist()]
    n_aged = sum(lag >= 0 for lag in aged)
    for lag in range(MAX_STALENESS + 1):
        of = [i for i in range(N) if aged[i] == lag]
        assert metrics[f"train/share/staleness_{lag}"] == pytest.approx(len(of) / n_aged)
        assert metrics[f"train/engine_kl/staleness_{lag}"] == pytest.approx(sum(kl[i] for i in of) / len(of))
        assert metrics[f"train/off_policy_clipped/staleness_{lag}"] == pytest.approx(sum(cuts[i] for i in of) / len(of))
    assert f"train/engine_kl/staleness_{MAX_STALENESS + 1}" not in metrics
    result = objective(off_policy, batch, staleness=torch.full((N,), 2))
    result.loss(torch.arange(N), batch["now"])
    series = {name for name in result.metrics() if "/staleness_" in name}  # none of ages that do not occur
    names = ("engine_kl", "off_policy_weight", "off_policy_clipped", "share")
    assert series == {f"train/{name}/staleness_2" for name in names}


# -- the trainer -----------------------------------------------------------------------------------------------------


def stepped(policy: Path, samples: list[Sample], **settings: Any) -> tuple[list[Any], dict[str, float]]:
    """The weights after one step, and the metrics."""
    plain: dict[str, Any] = {"n_minibatches": 1, "grad_clip": math.inf, "old_log_probs": "recompute"}
    trainer = LocalTrainer(model_path=policy, settings=LocalTrainerSettings(**plain | settings))
    metrics = trainer.train(samples, iteration=0)
    return [parameter.detach().clone() for parameter in trainer.model.parameters()], metrics


def test_the_trainer_weighs_by_its_own_log_probs_before_the_first_step(policy: Path):
    samples = make_samples(make_model(seed=1), groups=2)
    k = []
    for sample in samples:
        log_probs = response_log_probs(make_model(), sample.tokens, sample.response_length)
        rows = zip(log_probs, sample.rollout_log_probs or [], sample.loss_mask or [], strict=True)
        k += [math.exp(mine - engine) for mine, engine, trained in rows if trained]
    _, metrics = stepped(policy, samples, off_policy="tis", n_minibatches=4)
    expected = sum(min(value, 2.0) for value in k) / len(k)
    assert metrics["train/off_policy_weight"] == pytest.approx(expected, rel=1e-4)


def test_each_token_knows_how_old_the_weights_were_that_sampled_it(policy: Path):
    samples = make_samples(make_model(), groups=1, per_group=3, response_lengths=(6, 6), observations=False)
    samples[0].metadata = {"policy_version": 7, "weight_spans": [["5", 0, 2], ["7", 2, 6]]}
    samples[1].metadata = {"policy_version": 7, "weight_spans": [["default", 0, 3], ["8", 3, 6]]}
    samples[2].metadata = {"weight_spans": [["5", 0, 6]]}
    samples[0].loss_mask = [1, 1, 1, 0, 1, 1]
    lags = token_staleness(samples, TrainBatch.from_samples(samples))
    # "default" is no number, a token cannot be younger than the policy, and without a policy there is no age
    assert lags.tolist() == [2, 2, 0, 0, 0] + [-1] * 3 + [0] * 3 + [-1] * 6
    _, metrics = stepped(policy, samples)
    assert metrics["train/share/staleness_0"] == pytest.approx(6 / 8)
    assert metrics["train/share/staleness_2"] == pytest.approx(2 / 8)
