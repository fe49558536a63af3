"""``agl-slime replay`` of slime's dumps equals formulas that these tests write out, for the recorded step and for
changed ones."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from agl_slime.errors import ConfigError
from agl_slime.tools.forensics.replay import main
from agl_slime.tools.forensics.replay_slime import SlimeReplay, replay_dump
from agl_slime.tools.forensics.steps import ReplayConfig
from agl_slime.types import Sample
from tests.harness.slime_dumps import write_dump
from tests.harness.trainer_policy import make_model, make_samples, response_log_probs
from tests.harness.trainers import gradient
from tests.harness.training import needs_torch

pytestmark = needs_torch

SIZE, GROUPS, STEP = 4, 2, 3
FLAGS = ["--use-tis", "--tis-clip", "1.1", "--use-kl-loss", "--kl-loss-coef", "0.5", "--kl-loss-type", "k3"]


class Dumped:
    """The Samples of a step with slime's columns, whose advantages are written out here."""

    def __init__(self) -> None:
        rng, model = np.random.default_rng(0), make_model()
        self.samples = make_samples(model, groups=GROUPS, per_group=SIZE, seed=1)
        self.log_probs = [np.array(response_log_probs(model, s.tokens, s.response_length)) for s in self.samples]
        for number, (sample, exact) in enumerate(zip(self.samples, self.log_probs, strict=True)):
            sample.reward = (0.25, 1.0, 0.5, 0.0, 0.75, 0.75, 0.125, 1.0)[number]
            sample.rollout_log_probs = (exact + rng.normal(0, 0.15, len(exact))).astype("f4").tolist()
        self.engine = [np.array(sample.rollout_log_probs) for sample in self.samples]
        self.reference = [exact + rng.normal(0, 0.2, len(exact)) for exact in self.log_probs]
        self.rewards = normalized([sample.reward for sample in self.samples])

    def write(self, directory: Path, **changes: Any) -> Path:
        constant = [np.full(s.response_length, r) for s, r in zip(self.samples, self.rewards, strict=True)]
        columns = {"log_probs": self.log_probs, "rewards": self.rewards, "returns": constant, "advantages": constant}
        columns |= {"ref_log_probs": self.reference, "kl": [0 * sample for sample in constant]}
        return write_dump(directory, STEP, self.samples, columns | changes)


def normalized(rewards: Sequence[Any], size: int = SIZE) -> list[float]:
    """(r - mean) / (std + 1e-6) in groups of neighbours, std with n - 1."""
    result: list[float] = []
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        mean = sum(group) / len(group)
        std = (sum((r - mean) ** 2 for r in group) / (len(group) - 1)) ** 0.5
        result += [(r - mean) / (std + 1e-6) for r in group]
    return result


def loss_of(dumped: Dumped, token_loss: Callable[[int, int], float], rollouts: Sequence[int] = range(8)) -> float:
    """The mean over ``rollouts`` of the mean of their tokens' losses."""
    total = 0.0
    for number in rollouts:
        mask = dumped.samples[number].loss_mask or []
        total += sum(token_loss(number, t) for t, used in enumerate(mask) if used) / max(sum(mask), 1)
    return total / len(rollouts)


@pytest.fixture(scope="module")
def dumped() -> Dumped:
    return Dumped()


@pytest.fixture(scope="module")
def dump(dumped: Dumped, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dumped.write(tmp_path_factory.mktemp("dump"))


def replayed(directory: Path, flags: Sequence[str] = (), **config: Any) -> SlimeReplay:
    return replay_dump(ReplayConfig(run_dir=directory, step=STEP, **config), slime_flags=flags)


def differences(result: SlimeReplay) -> dict[str, float | None]:
    return {sample.name: sample.difference for sample in result.comparisons}


@pytest.mark.parametrize("flags", [[], FLAGS])
def test_recorded_rewards_and_advantages_are_computed_again(dump: Path, flags: list[str]) -> None:
    result = replayed(dump, flags)
    assert str(result.rule) == "minus the mean, over the standard deviation, of groups of 4 by place"
    apart = differences(result)
    assert {"rewards", "normalized rewards", "returns", "advantages", "kl", "loss masks"} <= {*apart}
    assert max(value for value in apart.values() if value is not None) < 1e-6
    assert None not in apart.values()
    assert result.difference < 1e-6


def truncated(dumped: Dumped, advantages: Mapping[int, float]) -> Callable[[int, int], float]:
    """The loss of a token by its rollout's advantage, with the weight of --use-tis --tis-clip 1.1."""
    return lambda n, t: -min(np.exp(dumped.log_probs[n][t] - dumped.engine[n][t]), 1.1) * advantages[n]


def test_loss_of_a_step_equals_the_formula_with_tis_and_kl(dump: Path, dumped: Dumped) -> None:
    weighted = truncated(dumped, dict(enumerate(dumped.rewards)))

    def token_loss(number: int, t: int) -> float:
        ratio = dumped.reference[number][t] - dumped.log_probs[number][t]
        return weighted(number, t) + 0.5 * (np.exp(ratio) - 1 - ratio)

    def is_clipped(number: int, t: int) -> float:
        return float(dumped.log_probs[number][t] - dumped.engine[number][t] > np.log(1.1))

    result = replayed(dump, FLAGS)
    assert result.recorded["train/loss"] == pytest.approx(loss_of(dumped, token_loss), abs=1e-5)
    assert result.recorded["train/pg_clipfrac"] == 0.0
    assert result.recorded["train/tis_clipfrac"] == pytest.approx(loss_of(dumped, is_clipped), abs=1e-5)


def test_changes_give_the_step_that_would_have_been(dump: Path, dumped: Dumped, tmp_path: Path) -> None:
    rewards = [float(sample.reward) for sample in dumped.samples]  # type: ignore[arg-type]
    rollouts = [n for n in range(8) if n != 2]
    remaining = normalized([rewards[n] for n in (0, 1, 3)], 3) + dumped.rewards[4:]
    centered = {n: rewards[n] - fmean(rewards[n // 4 * 4 : n // 4 * 4 + 4]) for n in range(8)}
    (tmp_path / "mine.py").write_text("def last(line):\n    return int(line['rollout_id'][-1]) ** 2\n")
    mine = dict(enumerate(normalized([float(n**2) for n in range(8)])))
    of_recorded = truncated(dumped, dict(enumerate(dumped.rewards)))
    cases: list[tuple[dict[str, Any], float]] = [
        (
            {"without": (f"{STEP}-g0-2",)},
            loss_of(dumped, truncated(dumped, dict(zip(rollouts, remaining, strict=True))), rollouts),
        ),
        ({"advantages": "mean"}, loss_of(dumped, truncated(dumped, centered))),
        ({"loss": "cispo"}, loss_of(dumped, lambda n, t: of_recorded(n, t) * dumped.log_probs[n][t])),
        ({"reward": f"{tmp_path / 'mine.py'}:last"}, loss_of(dumped, truncated(dumped, mine))),
    ]
    for change, expected in cases:
        result = replayed(dump, ["--use-tis", "--tis-clip", "1.1"], **change)
        assert result.changed is not None
        assert abs(expected) > 1e-3  # or equality would say little
        assert result.changed["train/loss"] == pytest.approx(expected, abs=1e-5)
        assert result.changed["train/loss"] != pytest.approx(result.computed["train/loss"], abs=1e-4)


def test_clip_range_bounds_ratios_to_the_engine(dump: Path, dumped: Dumped) -> None:
    def token_loss(number: int, t: int) -> float:
        ratio, advantage = np.exp(dumped.log_probs[number][t] - dumped.engine[number][t]), dumped.rewards[number]
        return -min(ratio * advantage, np.clip(ratio, 0.95, 1.05) * advantage)

    result = replayed(dump, ["--use-rollout-logprobs"], clip=0.05)
    assert result.changed is not None
    assert result.changed["train/loss"] == pytest.approx(loss_of(dumped, token_loss), abs=1e-5)
    assert result.changed["train/pg_clipfrac"] > result.recorded["train/pg_clipfrac"]
    assert any("--clip makes no difference" in text for text in replayed(dump, clip=0.05).unknown)


def test_samples_and_tokens_show_where_trainer_and_engine_differ(dump: Path, dumped: Dumped) -> None:
    result = replayed(dump)
    apart = {}
    for number, sample in enumerate(dumped.samples):
        values = np.abs(dumped.log_probs[number] - dumped.engine[number])[np.array(sample.loss_mask, dtype=bool)]
        apart[f"{STEP}-g{number // 4}-{number}"] = values.max()
    assert {sample.rollout_id: pytest.approx(sample.logprob_diff_max, abs=1e-6) for sample in result.samples} == apart
    worst = max(apart, key=apart.__getitem__)
    assert (result.samples[0].rollout_id, result.tokens[0].rollout_id, len(result.tokens)) == (worst, worst, 5)
    assert result.tokens[0].size == pytest.approx(apart[worst], abs=1e-6)


def test_checkpoint_gives_the_log_probs_and_the_gradient(dump: Path, dumped: Dumped, policy: Path) -> None:
    def batch(rewards: Sequence[float], without: int | None = None) -> list[Sample]:
        copies = [Sample.from_dict(sample.to_dict()) for sample in dumped.samples]
        for number, (sample, reward) in enumerate(zip(copies, rewards, strict=True)):
            sample.reward, sample.remove_sample = reward, number == without
        return copies

    settings = {"rewards_normalization": False, "old_log_probs": "recompute", "aggregation": "rollout"}
    result = replayed(dump, model=policy, influences=2, without=(f"{STEP}-g0-2",))
    assert differences(result)["the checkpoint's log-probs"] == pytest.approx(0.0, abs=1e-5)
    expected = float(gradient(policy, batch(dumped.rewards), **settings).norm())
    assert result.computed["train/grad_norm"] == pytest.approx(expected, rel=1e-4)
    assert "train/grad_norm" not in result.recorded
    first = normalized([dumped.samples[n].reward for n in (0, 1, 3)], 3)
    remaining = [*first[:2], 0.0, first[2], *dumped.rewards[4:]]
    assert result.changed is not None
    expected = float(gradient(policy, batch(remaining, without=2), **settings).norm())
    assert result.changed["train/grad_norm"] == pytest.approx(expected, rel=1e-4)
    assert result.influences is not None
    assert result.influences.gradients.shares.sum() == pytest.approx(1.0)
    assert [*result.influences.rollouts] == [f"{STEP}-g{n // 4}-{n}" for n in range(8)]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_gradient_has_the_kl_loss(dump: Path, dumped: Dumped, policy: Path, kind: str) -> None:
    import torch

    model, total, entropy = make_model(), torch.zeros(()), 0.0
    for number, sample in enumerate(dumped.samples):
        ids, mask = torch.tensor(sample.tokens), torch.tensor(sample.loss_mask).bool()
        every = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        log_probs = every.gather(-1, ids[1:, None])[-sample.response_length :, 0]
        entropy -= float((every.exp() * every).sum(-1)[-sample.response_length :][mask].mean()) / len(dumped.samples)
        apart = log_probs - torch.tensor(dumped.reference[number], dtype=torch.float32)
        kl = {"k1": apart, "k2": apart**2 / 2}.get(kind, torch.exp(-apart) - 1 + apart)
        ratio = torch.exp(log_probs - log_probs.detach())
        total = total + (0.5 * kl - dumped.rewards[number] * ratio)[mask].mean() / len(dumped.samples)
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    result = replayed(dump, ["--use-kl-loss", "--kl-loss-coef", "0.5", "--kl-loss-type", kind], model=policy)
    assert result.computed["train/grad_norm"] == pytest.approx(float(expected), rel=1e-4)
    assert result.computed["train/entropy_loss"] == pytest.approx(entropy, abs=1e-5)


def test_command_names_figures_that_it_cannot_compute(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tis = ["--tis-clip-low", "0.5", "--custom-tis-function-path", "examples.mis.compute_mis_weights_with_cp"]
    main([str(dump), "--step", str(STEP), "--advantages", "reward", "--", *FLAGS, *tis, "--entropy-coef", "0.1"])
    output = " ".join(capsys.readouterr().out.split())
    for text in ("train/kl_loss", "changed", "Not computed: --entropy-coef.", "slime's dumps have no weights"):
        assert text in output
    assert "examples.mis.compute_mis_weights_with_cp is not called" in output
    assert "TIS has no lower bound here (--tis-clip-low)." in output
    assert "no settings" not in output


def test_dump_without_train_data_takes_the_engines_log_probs(dumped: Dumped, tmp_path: Path) -> None:
    result = replayed(write_dump(tmp_path, STEP, dumped.samples), loss="cispo")
    assert (result.recorded, result.computed["train/train_rollout_logprob_abs_diff"]) == ({}, 0.0)
    assert result.changed is not None
    expected = loss_of(dumped, lambda n, t: -dumped.rewards[n] * dumped.engine[n][t])
    assert result.changed["train/loss"] == pytest.approx(expected, abs=1e-5)
    assert any("There is no train data" in text for text in result.unknown)
    assert {*differences(result).values()} == {None}


def test_rewards_of_a_batch_or_of_an_unknown_rule_are_named(dumped: Dumped, tmp_path: Path) -> None:
    """Normalized over a batch that is not full groups, as slime does; by no rule of slime's; and a single Sample's."""
    columns = {"log_probs": dumped.log_probs[:7], "rewards": normalized([s.reward for s in dumped.samples[:7]], 7)}
    batch = replayed(write_dump(tmp_path / "batch", STEP, dumped.samples[:7], columns))
    assert batch.rule.groups == "batch"
    skewed = [value + 0.25 * (n == 5) for n, value in enumerate(dumped.rewards)]
    nan = [np.full(dumped.samples[0].response_length, np.nan)]
    columns = {"log_probs": dumped.log_probs[:1], "rewards": [float("nan")], "advantages": nan}
    alone = replayed(write_dump(tmp_path / "alone", STEP, dumped.samples[:1], columns))
    assert (alone.recorded, alone.computed) == ({}, {})
    for result, difference, sentence in (
        (batch, 0.0, "not each prompt's"),
        (replayed(dumped.write(tmp_path / "skewed", rewards=skewed)), 0.25, "No rule of slime's gives the recorded"),
        (alone, 0.0, "not finite"),
    ):
        assert differences(result)["normalized rewards"] == pytest.approx(difference, abs=1e-5)
        assert any(sentence in text for text in result.unknown)


@pytest.mark.parametrize(
    ("flags", "config", "message"),
    [
        (["--eps-clip", "wide"], {}, "slime's flags .*--eps-clip"),
        (["--kl-coef", "0.1", "--advantage-estimator", "ppo"], {}, "no values of this step"),
        ([], {"without": ("nobody",)}, "--without nobody: step 3 did not train"),
        ([], {"without": tuple(f"3-g{n // 4}-{n}" for n in range(8))}, "--without leaves no token"),
        ([], {"influences": 2}, "--influences needs --model:"),
        ([], {"step": 4}, "has no rollout id 4, only 3 to 3"),
    ],
)
def test_unusable_requests_are_errors(dump: Path, flags: list[str], config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay_dump(ReplayConfig(**{"run_dir": dump, "step": STEP, **config}), slime_flags=flags)
