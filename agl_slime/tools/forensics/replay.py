"""``agl-slime replay``: a training step computed again from the files of a run, as it was or with changes."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from agl_slime.errors import ConfigError
from agl_slime.loop.checkpoint import read_checkpoints
from agl_slime.report.files import RunDir, iter_jsonl, read_object
from agl_slime.report.rollouts import digest_sample
from agl_slime.support.flags import parse_flags, split_at_dashes
from agl_slime.support.terminal import print_line
from agl_slime.tools.forensics.replay_slime import print_replay, replay_dump
from agl_slime.tools.forensics.steps import (
    Replay,
    ReplayConfig,
    load_reward,
    print_columns,
    print_influences,
    take_step,
    trainer_class,
)
from agl_slime.tools.kept_rollouts import read_tokens
from agl_slime.tools.slime_dumps.runs import is_dump
from agl_slime.train.local.settings import LocalTrainerSettings
from agl_slime.types import Sample, flat_samples, sample_from_fields

COMPARED = ("loss", "grad_norm", "clip_fraction", "kl", "entropy", "logprob_diff_mean", "logprob_diff_max", "steps")
"""Metrics of the trainer that a replay must reproduce."""
Lines = Mapping[str, Mapping[str, Any]]
"""Lines of ``rollouts.jsonl`` by rollout."""


def main(arguments: Sequence[str]) -> None:
    ours, slime_flags = split_at_dashes(arguments)
    config = parse_flags(ReplayConfig, prog="agl-slime replay", arguments=ours)
    if is_dump(config.run_dir):
        print_replay(config, replay_dump(config, slime_flags=slime_flags))
        return
    if slime_flags:
        raise ConfigError(f"slime's flags after -- are for its dumps, and {config.run_dir} has none")
    result = replay(config)
    print_columns(result)
    print_line(f"\nLargest difference of recorded and again: {result.difference:.2g}")
    if result.earlier:
        print_line(f"In the {len(result.earlier)} steps before it that were computed, too: {max(result.earlier):.2g}")
    if result.influences is not None:
        print_influences(result.influences, most=config.influences)


def replay(config: ReplayConfig) -> Replay:
    """Raises ``ConfigError`` when the run's files lack data of the step."""
    LocalTrainer = trainer_class()
    run = RunDir(config.run_dir)
    settings = _settings(run)
    rows = {int(row["iteration"]): row for row in iter_jsonl(run.metrics)} if run.metrics.is_file() else {}
    if config.step not in rows:
        present = f"{min(rows, default=0)} to {max(rows, default=0)}"
        raise ConfigError(f"--step {config.step}: {run.metrics} has iterations {present}")
    local = _trainer_settings(settings)
    first, model, state = _start(run, config)
    batches = _batches(iter_jsonl(run.trained), first, config.step)
    lines = _lines_of_rollouts(run, batches)
    engine: dict[str, Any] = {"temperature": float(settings["temperature"]), "seed": int(settings["seed"])}
    trainer = LocalTrainer(model_path=model, settings=local, torch_threads="auto", **engine)
    if state is not None:
        trainer.load(state)
    earlier = []
    for iteration in range(first, config.step):
        metrics = trainer.train(rebuild(batches[iteration], lines), iteration=iteration)
        earlier.append(_compare(rows[iteration], metrics).difference)
    with tempfile.TemporaryDirectory() as directory:
        trainer.save(checkpoint := Path(directory) / "checkpoint")
        batch = rebuild(batches[config.step], lines)
        computed, influences = take_step(trainer, batch, lines, config)
        changed = None
        if config.changed:
            changed_settings = replace(local, **config.changes)
            trainer = LocalTrainer(model_path=model, settings=changed_settings, torch_threads="auto", **engine)
            trainer.load(checkpoint)
            changed = trainer.train(_change(batch, lines, config), iteration=config.step)
    return replace(_compare(rows[config.step], computed, changed), earlier=earlier, influences=influences)


def _compare(
    row: Mapping[str, Any], computed: Mapping[str, float], changed: Mapping[str, float] | None = None
) -> Replay:
    names = [f"train/{name}" for name in COMPARED if row.get(f"train/{name}") is not None]
    return Replay(
        recorded={name: row[name] for name in names},
        computed={name: computed[name] for name in names},
        changed=None if changed is None else {name: changed.get(name, float("nan")) for name in names},
    )


def rebuild(groups: Sequence[Mapping[str, Any]], lines: Lines) -> list[list[Sample]]:
    """The batch of a step in its order, from lines of ``trained.jsonl`` and ``rollouts.jsonl``. Raises ``ConfigError``
    when ids, mask or log-probs of a Sample are not the trained ones, by its digest."""
    batch, rollout_numbers = [], dict[str, int]()
    for index, group in enumerate(groups):
        samples, positions = [], Counter[str]()
        for rollout_id, digest, *_ in group["samples"]:
            described, position = lines[rollout_id]["samples"], positions[rollout_id]
            positions[rollout_id] += 1
            number = rollout_numbers.setdefault(rollout_id, len(rollout_numbers))
            sample = None
            if position < len(described):
                sample = _sample(described[position], group["rollouts"][rollout_id], index, number)
            if sample is None or digest_sample(sample)[0] != digest:
                why = "is not kept as it was trained on; train with --keep-rollouts all"
                raise ConfigError(f"rollout {rollout_id} {why}")
            sample.metadata["agl_rollout_id"] = rollout_id
            samples.append(sample)
        batch.append(samples)
    return batch


def _sample(tokens: Mapping[str, Any], reward: float, group: int, rollout: int) -> Sample | None:
    """The Sample; ``None`` when its arrays do not fit together."""
    ids, _, mask, log_probs, _ = read_tokens(tokens)
    if len(log_probs) != len(mask):
        return None
    return sample_from_fields(
        group_index=group,
        rollout_id=rollout,
        tokens=ids.tolist(),
        response_length=len(mask),
        loss_mask=mask.astype(int).tolist(),
        rollout_log_probs=np.nan_to_num(log_probs, nan=0.0).tolist(),
        reward=reward,
        status=Sample.Status.COMPLETED,
        metadata={"weight_spans": tokens["weight_versions"]},
    )


def _change(batch: list[list[Sample]], lines: Lines, config: ReplayConfig) -> list[list[Sample]]:
    samples = [*flat_samples(batch)]
    reward = load_reward(config, [sample.metadata["agl_rollout_id"] for sample in samples])
    for sample in samples:
        rollout_id = sample.metadata["agl_rollout_id"]
        sample.remove_sample = rollout_id in config.without
        if reward is not None:
            sample.reward = float(reward(lines[rollout_id]))
    return batch


def _settings(run: RunDir) -> dict[str, Any]:
    settings = run.settings()
    if settings is None or settings.get("trainer") != "local":
        raise ConfigError(f"{run.path} is not the directory of a run of the local trainer (config.json)")
    inputs = {"teacher_url": "a teacher", "routed_experts": "routed experts"}
    missing = [text for name, text in inputs.items() if settings.get(name)]
    missing += ["nuclei"] if (settings.get("top_p", 1.0), settings.get("top_k", -1)) != (1.0, -1) else []
    if missing:
        raise ConfigError(f"{run.path} trained with {missing[0]}, which its files do not have; it cannot be replayed")
    return settings


def _trainer_settings(settings: Mapping[str, Any]) -> LocalTrainerSettings:
    names = {field.name for field in fields(LocalTrainerSettings)}
    local = {name: value for name, value in (settings.get("local") or {}).items() if name in names}
    local = {name: tuple(value) if isinstance(value, list) else value for name, value in local.items()}
    return LocalTrainerSettings(**{**local, "rewards": ""})


def _start(run: RunDir, config: ReplayConfig) -> tuple[int, Path, Path | None]:
    """The first step to compute, the model, and the trainer's checkpoint (``None``: the start)."""
    checkpoints = read_checkpoints(run.checkpoints) if run.checkpoints.is_dir() else []
    checkpoint = next((each for each in checkpoints if each.loop.iteration < config.step), None)
    model = config.model or (read_object(run.start) or {}).get("model")
    if not model or not Path(model, "config.json").is_file():
        why = "names no start model on this machine, whose configuration a replay needs; give --model"
        raise ConfigError(f"{run.start} {why}")
    if checkpoint is None:
        return 1, Path(model), None
    return checkpoint.loop.iteration + 1, Path(model), checkpoint.trainer


def _batches(lines: Iterable[Mapping[str, Any]], first: int, last: int) -> dict[int, list[Mapping[str, Any]]]:
    batches: dict[int, list[Mapping[str, Any]]] = {iteration: [] for iteration in range(first, last + 1)}
    for line in lines:
        if line["iteration"] in batches:
            batches[line["iteration"]].append(line)
    return batches


def _lines_of_rollouts(run: RunDir, batches: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Mapping[str, Any]]:
    trained = {rollout for groups in batches.values() for group in groups for rollout in group["rollouts"]}
    lines = iter_jsonl(run.rollouts) if run.rollouts.is_file() else ()
    kept = (line for line in lines if line["rollout_id"] in trained)
    by_rollout: dict[str, Mapping[str, Any]] = {str(line["rollout_id"]): line for line in kept}
    if missing := len(trained - {*by_rollout}):
        raise ConfigError(f"{missing} of {len(trained)} rollouts are not kept; train with --keep-rollouts all")
    return by_rollout
