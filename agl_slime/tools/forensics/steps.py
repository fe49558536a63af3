"""A training step computed again, of a run of ours or of slime's: what both replays share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tyro

from agl_slime.agent.loading import load_function
from agl_slime.data.credit import mask_of
from agl_slime.errors import ConfigError, missing_as_error
from agl_slime.support.terminal import print_line
from agl_slime.tools.forensics.gaps import TokenGap, token_gaps
from agl_slime.types import Sample, flat_samples

if TYPE_CHECKING:
    from agl_slime.tools.forensics.influence import Influences
    from agl_slime.train.local.trainer import LocalTrainer

Advantages = Literal["std", "mean", "reward"]


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Compute a step of a run's local trainer again from its files and compare it with the recorded one; with changes,
    show the step as it would have been. Needs --keep-rollouts all and weights before the step: the start model or one
    of the last two checkpoints, from which the steps in between are computed, too. Of slime's --dump-details, rewards,
    advantages and losses are computed again; slime's flags of the run follow after --."""

    run_dir: tyro.conf.Positional[Path]
    """The directory of a run of the local trainer, or of slime's --dump-details."""
    step: int
    """The iteration; slime's rollout id."""
    model: Path | None = None
    """The policy before a step of slime's, as a Hugging Face checkpoint: adds gradient norm and entropy. For a run of
    the local trainer, where the start model is now."""
    without: tuple[str, ...] = ()
    """Rollouts to leave out."""
    reward: str | None = None
    """Another reward, as path/to/file.py:function of a kept rollout's line of rollouts.jsonl."""
    advantages: Advantages | None = None
    """Other advantages: the reward minus the mean of the prompt's rollouts (mean), also over their standard deviation
    (std), or the reward."""
    loss: str | None = None
    """Another --local.loss, or --advantage-estimator of slime's."""
    clip: float | None = None
    """Another --local.clip, or --eps-clip of slime's."""
    influences: int = 0
    """Show the rollouts that moved the step most, and the tokens whose log-probs it moved most: the top N of each."""

    @property
    def changes(self) -> dict[str, Any]:
        """The changed settings of the trainer."""
        changes = {name: value for name in ("loss", "clip") if (value := getattr(self, name)) is not None}
        if self.advantages is not None:
            changes |= {"rewards_normalization": self.advantages != "reward"}
            changes |= {"std_normalization": self.advantages == "std"}
        return changes

    @property
    def changed(self) -> bool:
        """Whether the step is also computed with changes."""
        return bool(self.changes or self.without or self.reward)


@dataclass(frozen=True, kw_only=True)
class StepInfluences:
    """The influences in a step's batch, the kept rollouts' ids in their order, the learning rate, and the tokens of the
    batch, the most moved first."""

    gradients: Influences
    rollouts: Sequence[str]
    lr: float
    tokens: Sequence[TokenGap]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The metrics of a step as recorded, as computed again, and with the changes."""

    recorded: Mapping[str, float]
    computed: Mapping[str, float]
    changed: Mapping[str, float] | None = None
    earlier: Sequence[float] = ()
    """``difference`` of each step that was computed before this one."""
    influences: StepInfluences | None = None

    @property
    def difference(self) -> float:
        """The largest difference between recorded and computed metrics, relative above 1."""
        return max(abs(self.computed[n] - value) / max(1.0, abs(value)) for n, value in self.recorded.items())


def print_columns(result: Replay) -> None:
    """The metrics of each column, also where another column lacks them."""
    columns = {"recorded": result.recorded, "again": result.computed}
    columns |= {} if result.changed is None else {"changed": result.changed}
    print_line(f"{'':<38}" + "".join(f"{title:>14}" for title in columns))
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        values = (column.get(name) for column in columns.values())
        print_line(f"{name:<38}" + "".join(f"{'-' if value is None else format(value, '.6g'):>14}" for value in values))


def print_influences(step: StepInfluences, *, most: int) -> None:
    """The ``most`` influential rollouts and the ``most`` moved tokens."""
    gradients, shares = step.gradients, step.gradients.shares
    method = f"by sketches of {gradients.sketch:,} numbers per gradient" if gradients.sketch else "exact"
    print_line(f"\nRollouts by influence ({method}; first order, one plain gradient step with lr {step.lr:g}):")
    print_line("  share of the step  squared norm  own log-probs  rollout, and the one that it moves most")
    for i in sorted(range(len(shares)), key=lambda i: -abs(shares[i]))[:most]:
        moved = step.lr * gradients.on_log_probs[i]
        j = max((j for j in range(len(shares)) if j != i), key=lambda j: abs(moved[j]), default=i)
        figures = f"  {shares[i]:>17.1%}  {gradients.on_loss[i, i]:>12.4g}  {moved[i]:>+14.3g}"
        print_line(f"{figures}  {step.rollouts[i]}, most: {moved[j]:+.3g} in {step.rollouts[j]}")
    print_line("\nTokens by the change of their log-prob in the step:")
    for token in step.tokens[:most]:
        print_line(str(token))


def trainer_class() -> type[LocalTrainer]:
    with missing_as_error('agl-slime replay needs torch: pip install "agl-slime[local]"'):
        from agl_slime.train.local.trainer import LocalTrainer
    return LocalTrainer


def take_step(
    trainer: LocalTrainer,
    batch: Sequence[Sequence[Sample]],
    lines: Mapping[str, Mapping[str, Any]],
    config: ReplayConfig,
) -> tuple[dict[str, float], StepInfluences | None]:
    """The metrics of the step on ``batch``, and its influences if ``config`` shows them. ``lines`` are lines of
    ``rollouts.jsonl`` by rollout."""
    if not config.influences:
        return trainer.train(batch, iteration=config.step), None
    from agl_slime.tools.forensics.influence import influences

    gradients, old = influences(trainer, batch), trainer.score(batch)
    metrics = trainer.train(batch, iteration=config.step)
    samples = [*flat_samples(batch)]
    moved = moved_tokens(samples, lines, old, trainer.score(batch))
    names = {sample.rollout_id: sample.metadata["agl_rollout_id"] for sample in samples}
    rollouts = [names[number] for number in gradients.rollouts]
    return metrics, StepInfluences(gradients=gradients, rollouts=rollouts, lr=trainer.lr, tokens=moved)


def moved_tokens(
    samples: Sequence[Sample], lines: Mapping[str, Mapping[str, Any]], old: Sequence[Any], new: Sequence[Any]
) -> list[TokenGap]:
    """The tokens under the mask of ``samples``, by the difference of ``old`` and ``new`` log-probs."""
    tokens, numbers = list[TokenGap](), Counter[str]()
    for sample, *columns in zip(samples, old, new, strict=True):
        name = sample.metadata["agl_rollout_id"]
        described = lines[name]["samples"]
        # long rollouts are not described whole
        pieces = described[numbers[name]].get("pieces") or () if numbers[name] < len(described) else ()
        numbers[name] += 1
        places = len(sample.tokens) - sample.response_length + np.flatnonzero(mask_of(sample))
        tokens += token_gaps(name, pieces, places, *columns)
    return sorted(tokens, key=lambda token: -token.size)


def load_reward(config: ReplayConfig, rollouts: Sequence[str]) -> Callable[[Mapping[str, Any]], Any] | None:
    """The function of ``--reward``, or ``None``. Raises ``ConfigError`` if it is missing, or if a rollout of
    ``--without`` is not in the step, which has ``rollouts``."""
    if missing := [rollout for rollout in config.without if rollout not in rollouts]:
        raise ConfigError(f"--without {missing[0]}: step {config.step} did not train on this rollout")
    return None if config.reward is None else load_function(config.reward, flag="--reward")
