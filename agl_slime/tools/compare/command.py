"""``agl-slime compare``: names the first group, rollout, turn and token in which two runs differ, and in what."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from agl_slime.errors import AglSlimeError, ConfigError
from agl_slime.report.files import RunDir, iter_jsonl, read_object
from agl_slime.report.rollouts import unpack
from agl_slime.support.terminal import print_line

_OWN = frozenset(
    ("output_dir", "view", "track", "keep_rollouts", "sglang_url", "resume", "overwrite", "num_iterations")
)
"""Settings that may differ between equal runs."""
_CONTEXT = 12  # tokens shown before the one that differs

Row = Mapping[str, Any]


def compare(first: tyro.conf.Positional[Path], second: tyro.conf.Positional[Path]) -> None:
    """Name the first rollout, turn and token in which two runs differ, and in what: a setting, the order of groups, a
    prompt, a sampled token, a log-prob, a weight version, a reward, or the weights alone. Exit code 1 if they do.

    Args:
        first: The directory of a run, such as one of --deterministic.
        second: The directory of the run that should be equal.
    """
    runs = RunDir(first), RunDir(second)
    for run in runs:
        if read_object(run.config) is None:
            raise ConfigError(f"{run.path} holds no run: give the --output-dir of one")
    if (difference := first_difference(*runs)) is not None:
        raise AglSlimeError(f"{first} and {second} differ: {difference}")
    groups = sum(1 for _ in iter_jsonl(runs[0].groups))
    print_line(f"{first} and {second} are equal: {groups:,} groups, and the weights")


def first_difference(first: RunDir, second: RunDir) -> str | None:
    """In the order of draw; ``None`` for equal runs."""
    return next(
        (text for kind in (_settings, _groups, _weights) for text in kind(first, second)),
        None,
    )


def _settings(first: RunDir, second: RunDir) -> Iterator[str]:
    values = [_flat(read_object(run.config) or {}) for run in (first, second)]
    for name in sorted({*values[0], *values[1]}):
        one, two = (flat.get(name) for flat in values)
        if one != two and not _OWN.intersection(name.split(".")):
            yield f"setting {name}: {one!r:.80} and {two!r:.80}"


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {path: leaf for key, each in value.items() for path, leaf in _flat(each, f"{name}.{key}".strip(".")).items()}


def _groups(first: RunDir, second: RunDir) -> Iterator[str]:
    by_task = [
        {(row["iteration"], row["instance_id"]): row for row in iter_jsonl(run.groups)} for run in (first, second)
    ]
    tasks = [{task: iteration for iteration, task in groups} for groups in by_task]

    def place(key: tuple[int, str | None]) -> tuple[int, int]:
        return key[0], int(key[1]) if key[1] is not None and key[1].isdecimal() else 0

    for iteration, task in sorted({*by_task[0], *by_task[1]}, key=place):
        rows = [groups.get((iteration, task)) for groups in by_task]
        if rows[0] is None or rows[1] is None:
            other = tasks[rows[0] is not None].get(task)
            elsewhere = "and is in neither batch of the other" if other is None else f"there in iteration {other}"
            yield f"order: iteration {iteration} has the group of task {task} in one run alone, {elsewhere}"
            continue
        for number in range(max(len(row["rollouts"]) for row in rows if row is not None)):
            yield from _member(first, second, rows[0], rows[1], number)


def _member(first: RunDir, second: RunDir, one: Row, two: Row, number: int) -> Iterator[str]:
    about = f"iteration {one['iteration']}, task {one['instance_id']}, rollout {number} of its group"
    if len(one["rollouts"]) != len(two["rollouts"]):
        yield f"{about}: the group has {len(one['rollouts'])} and {len(two['rollouts'])} rollouts"
        return
    if sorted(one["sealed"][number]) != sorted(two["sealed"][number]):
        kept = [_kept(run, row["rollouts"][number]) for run, row in ((first, one), (second, two))]
        if kept[0] is None or kept[1] is None:
            yield f"{about}: other tokens, log-probs or versions; --keep-rollouts all keeps them"
        else:
            yield f"{about}, {_token(kept[0], kept[1])}"
    for name in ("outcomes", "reasons", "rewards"):
        if one[name][number] != two[name][number]:
            yield f"{about}: equal tokens, and {name} {one[name][number]!r} and {two[name][number]!r}"


def _kept(run: RunDir, rollout_id: str) -> Row | None:
    return next((row for row in iter_jsonl(run.rollouts) if row["rollout_id"] == rollout_id), None)


def _token(one: Row, two: Row) -> str:
    """The first difference between two records of a rollout: of the earliest turn that differs."""
    pairs = zip(*(sorted(row["samples"], key=lambda sample: sample["tokens"]) for row in (one, two)), strict=False)
    for first, second in pairs:
        ids = [unpack(sample["tokens"], "<i4") for sample in (first, second)]
        shared = min(map(len, ids))
        different = np.flatnonzero(ids[0][:shared] != ids[1][:shared])
        index = int(different[0]) if len(different) else shared
        if index < max(map(len, ids)):
            at = index - first["prompt_length"]
            turn = next((n for n, (start, end) in enumerate(first["turn_spans"]) if start <= at < end), None)
            texts = [
                sample["pieces"][index] if index < len(sample["pieces"]) else "(its end)" for sample in (first, second)
            ]
            before = "".join(first["pieces"][max(0, index - _CONTEXT) : index])
            what = "prompt" if turn is None else f"turn {turn}: sampled token"
            return f"{what} {index} is {texts[0]!r} and {texts[1]!r}, after {before!r}"
        for name, what in (("weight_versions", "weight versions"), ("trained", "trained spans")):
            if first[name] != second[name]:
                return f"equal tokens, and {what} {first[name]} and {second[name]}"
        scores = [unpack(sample["engine_log_probs"]) for sample in (first, second)]
        for place in np.flatnonzero(scores[0] != scores[1])[:1].tolist():
            values = (float(score[place]) for score in scores)
            return "equal tokens, and log-probs {:.9g} and {:.9g} of token {}".format(
                *values, first["prompt_length"] + place
            )
    return f"{len(one['samples'])} and {len(two['samples'])} Samples"


def _weights(first: RunDir, second: RunDir) -> Iterator[str]:
    files = [run.path / "model" / "model.safetensors" for run in (first, second)]
    if all(path.exists() for path in files):
        digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
        if digests[0] != digests[1]:
            yield "all rollouts are equal, and the trained weights are not"
