"""``agl-slime compare``: names the first group, rollout, turn and token in which two runs differ, and in what."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from agl_slime.cli.local import MAY_CHANGE
from agl_slime.errors import AglSlimeError, ConfigError
from agl_slime.report.files import RunDir, differences, iter_jsonl, read_object
from agl_slime.report.rollouts import unpack
from agl_slime.support.terminal import print_line

_CONTEXT = 12  # tokens of text in front of the one that differs

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
    weights = "and the weights" if _weight_digests(runs[0]) else "of runs without weights yet"
    print_line(f"{first} and {second} are equal: {groups:,} groups, {weights}")


def first_difference(first: RunDir, second: RunDir) -> str | None:
    """In the order of draw; ``None`` for equal runs."""
    return next((text for kind in (_settings, _groups, _weights) for text in kind(first, second)), None)


def _settings(first: RunDir, second: RunDir) -> Iterator[str]:
    left, right = (read_object(run.config) or {} for run in (first, second))
    for name in differences(left, right):
        if name not in MAY_CHANGE:
            values = (reduce(lambda part, key: (part or {}).get(key), name.split("."), each) for each in (left, right))
            yield "setting {}: {!r:.80} and {!r:.80}".format(name, *values)


def _groups(first: RunDir, second: RunDir) -> Iterator[str]:
    left, right = (
        {(row["iteration"], row["instance_id"]): row for row in iter_jsonl(run.groups)} for run in (first, second)
    )

    def place(key: tuple[int, str | None]) -> tuple[int, int]:
        return key[0], int(key[1]) if key[1] is not None and key[1].isdecimal() else 0

    for iteration, task in sorted({*left, *right}, key=place):
        key = iteration, task
        if key in left and key in right:
            yield from _members(first, second, left[key], right[key])
            continue
        iterations = {name: number for number, name in (right if key in left else left)}
        elsewhere = f"there in iteration {iterations[task]}" if task in iterations else "there in none"
        yield f"order: iteration {iteration} has the group of task {task} in one run alone, {elsewhere}"


def _members(first: RunDir, second: RunDir, left: Row, right: Row) -> Iterator[str]:
    about = f"iteration {left['iteration']}, task {left['instance_id']}"
    if (count := len(left["rollouts"])) != len(right["rollouts"]):
        yield f"{about}: the group has {count} and {len(right['rollouts'])} rollouts"
        return
    for number in range(count):
        about = f"iteration {left['iteration']}, task {left['instance_id']}, rollout {number} of its group"
        if sorted(left["sealed"][number]) != sorted(right["sealed"][number]):
            records = [_record(run, row["rollouts"][number]) for run, row in ((first, left), (second, right))]
            if records[0] is None or records[1] is None:
                yield f"{about}: unequal tokens, log-probs or versions; --keep-rollouts all keeps them"
            else:
                yield f"{about}, {_token(records[0], records[1])}"
        for name in ("outcomes", "reasons", "rewards"):
            if left[name][number] != right[name][number]:
                yield f"{about}: equal tokens, and {name} {left[name][number]!r} and {right[name][number]!r}"


def _record(run: RunDir, rollout_id: str) -> Row | None:
    return next((row for row in iter_jsonl(run.rollouts) if row["rollout_id"] == rollout_id), None)


def _content(sample: Row) -> tuple[Any, ...]:
    return sample["tokens"], sample["engine_log_probs"], sample["weight_versions"], sample["trained"]


def _token(left: Row, right: Row) -> str:
    """The first difference between two records of a rollout, whose Samples may have ended in another order."""
    contents = [[_content(sample) for sample in row["samples"]] for row in (left, right)]
    unequal = [
        sorted((sample for sample in row["samples"] if _content(sample) not in others), key=_content)
        for row, others in zip((left, right), reversed(contents), strict=True)
    ]
    if not (unequal[0] and unequal[1]):
        return f"{len(left['samples'])} and {len(right['samples'])} Samples"
    first, second = unequal[0][0], unequal[1][0]
    ids = [unpack(sample["tokens"], "<i4") for sample in (first, second)]
    shared = min(map(len, ids))
    index = next(iter(np.flatnonzero(ids[0][:shared] != ids[1][:shared]).tolist()), shared)
    if index < max(map(len, ids)):
        offset = index - first["prompt_length"]
        turn = next((n for n, (start, end) in enumerate(first["turn_spans"]) if start <= offset < end), None)
        texts = [[*sample["pieces"], *[""] * len(ids[0]), *[""] * len(ids[1])][index] for sample in (first, second)]
        context = "".join(first["pieces"][max(0, index - _CONTEXT) : index])
        subject = "prompt" if turn is None else f"turn {turn}: sampled token"
        return f"{subject} {index} is {texts[0]!r} and {texts[1]!r}, after {context!r}"
    for name, subject in (("weight_versions", "weight versions"), ("trained", "trained spans")):
        if first[name] != second[name]:
            return f"equal tokens, and {subject} {first[name]} and {second[name]}"
    scores = [unpack(sample["engine_log_probs"]) for sample in (first, second)]
    offset = int(np.flatnonzero(scores[0] != scores[1])[0])
    values = f"{float(scores[0][offset]):.9g} and {float(scores[1][offset]):.9g}"
    return f"equal tokens, and log-probs {values} of token {first['prompt_length'] + offset}"


def _weights(first: RunDir, second: RunDir) -> Iterator[str]:
    if _weight_digests(first) != _weight_digests(second):
        yield "all rollouts are equal, and the trained weights are not"


def _weight_digests(run: RunDir) -> dict[str, str]:
    digests = {}
    for path in (run.path / "model").glob("*.safetensors"):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
