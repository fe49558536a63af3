"""``agl-slime replay``: a training step computed again from the files of a run, as it was or with changes."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tyro

from agl_slime.agent.loading import load_function
from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.loop.checkpoint import read_checkpoints
from agl_slime.report.files import RunDir, iter_jsonl, read_object
from agl_slime.report.rollouts import digest_sample, mask_of
from agl_slime.support.terminal import print_line
from agl_slime.tools.forensics.gaps import TokenGap, token_gaps, unpack
from agl_slime.tools.slime_dumps.runs import is_dump
from agl_slime.train.local.settings import LocalTrainerSettings
from agl_slime.types import Sample, flat_samples, sample_from_fields

if TYPE_CHECKING:
    from agl_slime.tools.forensics.influence import Influences
    from agl_slime.train.local.trainer import LocalTrainer

COMPARED = ("loss", "grad_norm", "clip_fraction", "kl", "entropy", "logprob_diff_mean", "logprob_diff_max", "steps")
"""Metrics of the trainer that a replay must reproduce."""
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
    """Show the rollouts that moved the step most, and the tokens whose log-probs it moved most: so many of each."""

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
class InfluencesOfStep:
    """The influences in a step's batch, the kept rollouts' ids in their order, the learning rate, and the tokens of the
    batch, the most moved first."""

    of: Influences
    rollouts: Sequence[str]
    lr: float
    tokens: Sequence[TokenGap]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The metrics of a step as recorded, as computed again, and with the changes."""

    recorded: Mapping[str, float]
    again: Mapping[str, float]
    changed: Mapping[str, float] | None = None
    earlier: Sequence[float] = ()
    """``difference`` of each step that was computed before this one."""
    influences: InfluencesOfStep | None = None

    @property
    def difference(self) -> float:
        """The largest difference between recorded and computed metrics, relative above 1."""
        return max(abs(self.again[n] - value) / max(1.0, abs(value)) for n, value in self.recorded.items())


def main(arguments: Sequence[str]) -> None:
    at = arguments.index("--") if "--" in arguments else len(arguments)  # slime's flags follow
    config = tyro.cli(ReplayConfig, prog="agl-slime replay", args=list(arguments[:at]))
    if is_dump(config.run_dir):
        from agl_slime.tools.forensics.replay_slime import print_replay, replay_dump

        print_replay(config, replay_dump(config, slime_flags=arguments[at + 1 :]))
        return
    if arguments[at + 1 :]:
        raise ConfigError(f"slime's flags after -- are for its dumps, and {config.run_dir} has none")
    result = replay(config)
    print_columns(result)
    print_line(f"\nLargest difference of recorded and again: {result.difference:.2g}")
    if result.earlier:
        print_line(f"In the {len(result.earlier)} steps before it that were computed, too: {max(result.earlier):.2g}")
    if result.influences is not None:
        print_influences(result.influences, most=config.influences)


def print_columns(result: Replay) -> None:
    """The metrics of each column, also where another column lacks them."""
    columns = {"recorded": result.recorded, "again": result.again}
    columns |= {} if result.changed is None else {"changed": result.changed}
    print_line(f"{'':<38}" + "".join(f"{title:>14}" for title in columns))
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        values = (column.get(name) for column in columns.values())
        print_line(f"{name:<38}" + "".join(f"{'-' if value is None else format(value, '.6g'):>14}" for value in values))


def print_influences(weighed: InfluencesOfStep, *, most: int) -> None:
    """The ``most`` influential rollouts and the ``most`` moved tokens."""
    of, shares = weighed.of, weighed.of.shares
    how = f"by sketches of {of.sketch:,} numbers per gradient" if of.sketch else "exact"
    print_line(f"\nRollouts by influence ({how}; first order, one plain gradient step with lr {weighed.lr:g}):")
    print_line("  share of the step  squared norm  own log-probs  rollout, and the one that it moves most")
    for i in sorted(range(len(shares)), key=lambda i: -abs(shares[i]))[:most]:
        moved = weighed.lr * of.on_log_probs[i]
        j = max((j for j in range(len(shares)) if j != i), key=lambda j: abs(moved[j]), default=i)
        figures = f"  {shares[i]:>17.1%}  {of.on_loss[i, i]:>12.4g}  {moved[i]:>+14.3g}"
        print_line(f"{figures}  {weighed.rollouts[i]}, most: {moved[j]:+.3g} in {weighed.rollouts[j]}")
    print_line("\nTokens by the change of their log-prob in the step:")
    for token in weighed.tokens[:most]:
        print_line(str(token))


def replay(config: ReplayConfig) -> Replay:
    """Raises ``ConfigError`` when the run's files lack what the step needs."""
    LocalTrainer = trainer_class()
    run = RunDir(config.run_dir)
    settings = _settings(run)
    rows = {int(row["iteration"]): row for row in iter_jsonl(run.metrics)} if run.metrics.is_file() else {}
    if config.step not in rows:
        raise ConfigError(
            f"--step {config.step}: {run.metrics} has iterations {min(rows, default=0)} to {max(rows, default=0)}"
        )
    local = LocalTrainerSettings(**_local(settings))
    first, model, state = _before(run, config)
    trained = _by_iteration(iter_jsonl(run.trained), first, config.step)
    kept = _kept(run, trained)
    how = _how(settings)
    trainer = LocalTrainer(model_path=model, settings=local, **how)
    if state is not None:
        trainer.load(state)
    earlier = []
    for iteration in range(first, config.step):
        metrics = trainer.train(rebuild(trained[iteration], kept), iteration=iteration)
        earlier.append(_compared(rows[iteration], metrics).difference)
    with tempfile.TemporaryDirectory() as directory:
        trainer.save(before := Path(directory) / "before")
        batch = rebuild(trained[config.step], kept)
        again, weighed = take_step(trainer, batch, kept, config)
        changed = None
        if config.changed:
            other = LocalTrainer(model_path=model, settings=replace(local, **config.changes), **how)
            other.load(before)
            changed = other.train(_changed(batch, kept, config), iteration=config.step)
    return replace(_compared(rows[config.step], again, changed), earlier=earlier, influences=weighed)


def trainer_class() -> type[LocalTrainer]:
    try:
        from agl_slime.train.local.trainer import LocalTrainer
    except ImportError as error:
        raise MissingDependencyError('agl-slime replay needs torch: pip install "agl-slime[local]"') from error
    return LocalTrainer


def take_step(
    trainer: LocalTrainer,
    batch: Sequence[Sequence[Sample]],
    kept: Mapping[str, Mapping[str, Any]],
    config: ReplayConfig,
) -> tuple[dict[str, float], InfluencesOfStep | None]:
    """The metrics of the step on ``batch``, and its influences if ``config`` wants them. ``kept`` are lines of
    ``rollouts.jsonl`` by rollout."""
    if not config.influences:
        return trainer.train(batch, iteration=config.step), None
    from agl_slime.tools.forensics.influence import influences

    of, before = influences(trainer, batch), trainer.score(batch)
    metrics = trainer.train(batch, iteration=config.step)
    samples = [*flat_samples(batch)]
    moved = moved_tokens(samples, kept, before, trainer.score(batch))
    names_of = {one.rollout_id: one.metadata["agl_rollout_id"] for one in samples}
    names = [names_of[number] for number in of.rollouts]
    return metrics, InfluencesOfStep(of=of, rollouts=names, lr=trainer.lr, tokens=moved)


def moved_tokens(
    samples: Sequence[Sample], kept: Mapping[str, Mapping[str, Any]], before: Sequence[Any], after: Sequence[Any]
) -> list[TokenGap]:
    """The tokens under the mask of ``samples``, by the change of their log-probs."""
    tokens, seen = list[TokenGap](), Counter[str]()
    for sample, had, has in zip(samples, before, after, strict=True):
        name = sample.metadata["agl_rollout_id"]
        described = kept[name]["samples"][seen[name] : seen[name] + 1]  # long rollouts are not described whole
        pieces = described[0].get("pieces") or () if described else ()
        seen[name] += 1
        places = len(sample.tokens) - sample.response_length + np.flatnonzero(mask_of(sample))
        tokens += token_gaps(name, pieces, places, had, has)
    return sorted(tokens, key=lambda token: -token.size)


def _how(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"temperature": float(settings["temperature"]), "seed": int(settings["seed"]), "torch_threads": "auto"}


def _compared(row: Mapping[str, Any], again: Mapping[str, float], changed: Mapping[str, float] | None = None) -> Replay:
    names = [f"train/{name}" for name in COMPARED if row.get(f"train/{name}") is not None]
    metrics = [{name: each[name] for name in names} for each in (row, again)]
    after = None if changed is None else {name: changed.get(name, float("nan")) for name in names}
    return Replay(recorded=metrics[0], again=metrics[1], changed=after)


def rebuild(groups: Sequence[Mapping[str, Any]], kept: Mapping[str, Mapping[str, Any]]) -> list[list[Sample]]:
    """The batch of a step in its order, from lines of ``trained.jsonl`` and ``rollouts.jsonl``. Raises ``ConfigError``
    when ids, mask or log-probs of a Sample are not the trained ones, by its digest."""
    batch, numbers = [], {}
    for index, group in enumerate(groups):
        samples, seen = [], dict.fromkeys(group["rollouts"], 0)
        for rollout_id, digest, *_ in group["samples"]:
            line, number = kept[rollout_id], seen[rollout_id]
            seen[rollout_id] += 1
            numbers.setdefault(rollout_id, len(numbers))
            tokens = line["samples"][number] if number < len(line["samples"]) else None
            sample = (
                None if tokens is None else _sample(tokens, group["rollouts"][rollout_id], index, numbers[rollout_id])
            )
            if sample is None or digest_sample(sample)[0] != digest:
                raise ConfigError(
                    f"rollout {rollout_id} is not kept as it was trained on; train with --keep-rollouts all"
                )
            sample.metadata["agl_rollout_id"] = rollout_id
            samples.append(sample)
        batch.append(samples)
    return batch


def _sample(tokens: Mapping[str, Any], reward: float, group: int, rollout: int) -> Sample | None:
    """The Sample; ``None`` when its arrays do not fit together."""
    ids, start = unpack(tokens["tokens"], "<i4").tolist(), int(tokens["prompt_length"])
    mask = [0] * (len(ids) - start)
    for first, end in tokens["trained"]:
        mask[first:end] = [1] * (end - first)
    log_probs = np.nan_to_num(unpack(tokens["engine_log_probs"]), nan=0.0).tolist()
    if len(log_probs) != len(mask):
        return None
    return sample_from_fields(
        group_index=group,
        rollout_id=rollout,
        tokens=ids,
        response_length=len(mask),
        loss_mask=mask,
        rollout_log_probs=log_probs,
        reward=reward,
        status=Sample.Status.COMPLETED,
        metadata={"weight_spans": tokens["weight_versions"]},
    )


def _changed(
    batch: list[list[Sample]], kept: Mapping[str, Mapping[str, Any]], config: ReplayConfig
) -> list[list[Sample]]:
    flat = [*flat_samples(batch)]
    judge = judge_of(config, [sample.metadata["agl_rollout_id"] for sample in flat])
    for sample in flat:
        sample.remove_sample = sample.metadata["agl_rollout_id"] in config.without
        if judge is not None:
            sample.reward = float(judge(kept[sample.metadata["agl_rollout_id"]]))  # type: ignore[arg-type]
    return batch


def judge_of(config: ReplayConfig, rollouts: Sequence[str]) -> Any:
    """The function of ``--reward``, or ``None``. Raises ``ConfigError`` if it is missing, or if a rollout of
    ``--without`` is not in the step, which has ``rollouts``."""
    if missing := [one for one in config.without if one not in rollouts]:
        raise ConfigError(f"--without {missing[0]}: step {config.step} did not train on this rollout")
    return None if config.reward is None else load_function(config.reward, flag="--reward")


def _settings(run: RunDir) -> dict[str, Any]:
    settings = run.settings()
    if settings is None or settings.get("trainer") != "local":
        raise ConfigError(f"{run.path} is not the directory of a run of the local trainer (config.json)")
    beside = {"teacher_url": "a teacher", "routed_experts": "routed experts"}
    unkept = [words for name, words in beside.items() if settings.get(name)]
    unkept += ["nuclei"] if (settings.get("top_p", 1.0), settings.get("top_k", -1)) != (1.0, -1) else []
    if unkept:
        raise ConfigError(f"{run.path} trained with {unkept[0]}, which its files do not have; it cannot be replayed")
    return settings


def _local(settings: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(LocalTrainerSettings)}
    given = {name: value for name, value in (settings.get("local") or {}).items() if name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()} | {
        "reward_key": None
    }


def _before(run: RunDir, config: ReplayConfig) -> tuple[int, Path, Path | None]:
    """The first step to compute, the model, and the trainer's state before it (``None``: of the start)."""
    checkpoints = read_checkpoints(run.checkpoints) if run.checkpoints.is_dir() else []
    earlier = next((one for one in checkpoints if one.loop.iteration < config.step), None)
    model = config.model or (read_object(run.start) or {}).get("model")
    if not model or not Path(model, "config.json").is_file():
        raise ConfigError(
            f"{run.start} names no start model on this machine, whose configuration a replay needs; give --model"
        )
    return (1, Path(model), None) if earlier is None else (earlier.loop.iteration + 1, Path(model), earlier.trainer)


def _by_iteration(lines: Iterable[Mapping[str, Any]], first: int, last: int) -> dict[int, list[Mapping[str, Any]]]:
    batches: dict[int, list[Mapping[str, Any]]] = {iteration: [] for iteration in range(first, last + 1)}
    for line in lines:
        if line["iteration"] in batches:
            batches[line["iteration"]].append(line)
    return batches


def _kept(run: RunDir, trained: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Mapping[str, Any]]:
    wanted = {rollout for groups in trained.values() for group in groups for rollout in group["rollouts"]}
    lines = iter_jsonl(run.rollouts) if run.rollouts.is_file() else ()
    kept: dict[str, Mapping[str, Any]] = {line["rollout_id"]: line for line in lines if line["rollout_id"] in wanted}
    if missing := len(wanted - {*kept}):
        raise ConfigError(f"{missing} of {len(wanted)} rollouts are not kept; train with --keep-rollouts all")
    return kept
