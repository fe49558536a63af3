"""``agl-slime compare``: names the first group, rollout, turn and token in which two runs differ, and in what."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from agl_slime.cli.local import MAY_CHANGE
from agl_slime.errors import AglSlimeError, ConfigError
from agl_slime.report.files import RunDir, differences, iter_jsonl, read_object
from agl_slime.support.terminal import print_line
from agl_slime.tools.kept_rollouts import unpack

_STEP = ("train/loss", "train/grad_norm")  # which do not depend on the order of a rollout's Samples
_CONTEXT = 12  # tokens of text in front of the one that differs
_IMAGE = re.compile("image ([0-9a-f]{64})")  # its mark in a message

Row = Mapping[str, Any]


def compare(first: tyro.conf.Positional[Path], second: tyro.conf.Positional[Path]) -> None:
    """Name the first rollout, turn and token in which two runs differ, and in what: a setting, the order of groups, a
    prompt, an image, a fork, a sampled token, a log-prob, a weight version, a mask, an outcome, a reward, the order or
    figures of a training step, or the weights alone. Exit code 1 if they do.

    Args:
        first: The directory of a run, such as one of --deterministic.
        second: The directory of the run that should be equal.
    """
    runs = RunDir(first), RunDir(second)
    for run in runs:
        if read_object(run.config) is None:
            raise ConfigError(f"{run.path} holds no run: give the --output-dir of one")
    if (difference := next(_differences(*runs), None)) is not None:
        raise AglSlimeError(f"{first} and {second} differ: {difference}")
    groups = sum(1 for _ in iter_jsonl(runs[0].groups))
    weights = "and the weights" if _weight_digests(runs[0]) else "of runs without weights yet"
    print_line(f"{first} and {second} are equal: {groups:,} groups, {weights}")


def _differences(first: RunDir, second: RunDir) -> Iterator[str]:
    """The differences in the order in which the runs made them."""
    yield from _settings(first, second)
    groups, batches, figures = (
        [_by_iteration(getattr(run, name)) for run in (first, second)] for name in ("groups", "trained", "metrics")
    )
    for iteration in sorted({*groups[0]} & {*groups[1]}):
        rows = [{row["instance_id"]: row for row in by_iteration[iteration]} for by_iteration in groups]
        for task in sorted({*rows[0], *rows[1]}, key=lambda name: int(name) if str(name).isdecimal() else -1):
            if task in rows[0] and task in rows[1]:
                yield from _members(first, second, rows[0][task], rows[1][task])
                continue
            other_run = groups[task in rows[0]].items()
            iterations = [n for n, others in other_run if any(row["instance_id"] == task for row in others)]
            elsewhere = f"there in iteration {iterations[0]}" if iterations else "there in none"
            yield f"order: iteration {iteration} has the group of task {task} in one run alone, {elsewhere}"
        yield from _training(iteration, *(rows_of_run.get(iteration, []) for rows_of_run in (*batches, *figures)))
    if groups[0].keys() != groups[1].keys():
        yield f"equal as far as both go, with {len(groups[0])} and {len(groups[1])} iterations"
    if _weight_digests(first) != _weight_digests(second):
        yield "all rollouts are equal, and the trained weights are not"


def _by_iteration(path: Path) -> dict[int, list[Row]]:
    rows: dict[int, list[Row]] = {}
    for row in iter_jsonl(path) if path.exists() else ():
        rows.setdefault(row["iteration"], []).append(row)
    return rows


def _settings(first: RunDir, second: RunDir) -> Iterator[str]:
    left, right = (read_object(run.config) or {} for run in (first, second))
    for name in differences(left, right):
        if name not in MAY_CHANGE:
            values = (reduce(lambda part, key: (part or {}).get(key), name.split("."), each) for each in (left, right))
            yield "setting {}: {!r:.80} and {!r:.80}".format(name, *values)


def _members(first: RunDir, second: RunDir, left: Row, right: Row) -> Iterator[str]:
    about = f"iteration {left['iteration']}, task {left['instance_id']}"
    if (count := len(left["rollouts"])) != len(right["rollouts"]):
        yield f"{about}: the group has {count} and {len(right['rollouts'])} rollouts"
        return
    for number in range(count):
        about = f"iteration {left['iteration']}, task {left['instance_id']}, rollout {number} of its group"
        sealed = [sorted(row["sealed"][number]) for row in (left, right)]
        if sealed[0] != sealed[1] and all(sealed):
            records = [_record(run, row["rollouts"][number]) for run, row in ((first, left), (second, right))]
            if records[0] is None or records[1] is None:
                yield f"{about}: unequal tokens, log-probs or versions; --keep-rollouts all keeps them"
            else:
                yield f"{about}, {_token(records[0], records[1])}"
        for name in ("outcomes", "reasons", "rewards"):
            if left[name][number] != right[name][number]:
                equal = "equal tokens, and " * (sealed[0] == sealed[1])
                yield f"{about}: {equal}{name} {left[name][number]!r} and {right[name][number]!r}"


def _training(iteration: int, *rows: Sequence[Row]) -> Iterator[str]:
    """Differences of a step, or of its validation, whose groups are equal."""
    *batches, left, right = rows
    for name, columns in (
        ("order of the groups", [[row["instance_id"] for row in batch] for batch in batches]),
        ("log-prob or advantage of the trainer", [[sorted(row.get("scores", ())) for row in b] for b in batches]),
    ):
        if columns[0] != columns[1]:
            yield f"iteration {iteration}: equal rollouts, and another {name} in training"
    for left_metrics, right_metrics in zip(left, right, strict=False):
        for name, value in left_metrics.items():
            compared = name in _STEP or name.startswith("val/")
            if compared and value != (other := right_metrics.get(name)):
                yield f"iteration {iteration}: equal batches, and {name} {value!r} and {other!r}"


def _record(run: RunDir, rollout_id: str) -> Row | None:
    return next((row for row in iter_jsonl(run.rollouts) if row["rollout_id"] == rollout_id), None)


def _content(sample: Row) -> tuple[Any, ...]:
    return sample["tokens"], sample["engine_log_probs"], sample["weight_versions"], sample["trained"]


def _first_unequal(left: np.ndarray, right: np.ndarray) -> int:
    """An index; the length of the shorter array where it begins the other one."""
    shared = min(len(left), len(right))
    return next(iter(np.flatnonzero(left[:shared] != right[:shared]).tolist()), shared)


def _token(left: Row, right: Row) -> str:
    """The first difference between two records of a rollout, whose Samples may have ended in another order."""
    rows = left, right
    contents = [[_content(sample) for sample in row["samples"]] for row in rows]
    unequal = [
        [(sample, unpack(sample["tokens"], "<i4")) for sample in row["samples"] if _content(sample) not in other]
        for row, other in zip(rows, reversed(contents), strict=True)
    ]
    forks = [f"{[sample['fork'] for sample in row['samples'] if sample['fork']]}" for row in rows]
    forked = f"{len(contents[0])} and {len(contents[1])} Samples, with forks {' and '.join(forks)}"
    if not (unequal[0] and unequal[1]):
        return forked
    pairs = [(_first_unequal(unequal[0][0][1], ids), number) for number, (_, ids) in enumerate(unequal[1])]
    index, number = max(pairs)
    (first, ids), (_, other_ids) = compared = unequal[0][0], unequal[1][number]
    if index == min(len(ids), len(other_ids)) and len(contents[0]) != len(contents[1]):
        return forked
    offset = index - first["prompt_length"]
    turn = next((n for n, (start, end) in enumerate(first["turn_spans"]) if start <= offset < end), None)
    images = [_IMAGE.findall(str(row["messages"])) for row in rows]
    if images[0] != images[1] and (turn is not None or np.array_equal(ids, other_ids)):
        return f"equal text before the answer, and images {images[0]} and {images[1]}"
    if not np.array_equal(ids, other_ids):
        texts = [f"{s['pieces'][index]!r}" if index < len(token_ids) else "the end" for s, token_ids in compared]
        context = "".join(first["pieces"][max(0, index - _CONTEXT) : index])
        following = sum(end <= offset for _, end in first["turn_spans"])
        subject = f"prompt of turn {following}: token" if turn is None else f"turn {turn}: sampled token"
        return f"{subject} {index} is {' and '.join(texts)}, after {context!r}"
    trained = [[[sample["prompt_length"] + n for n in span] for span in sample["trained"]] for sample, _ in compared]
    versions = [sample["weight_versions"] for sample, _ in compared]
    for name, values in (("trained", trained), ("weight versions", versions)):
        if values[0] != values[1]:
            return f"equal tokens, and {name} {values[0]} and {values[1]}"
    scores = [unpack(sample["engine_log_probs"]) for sample, _ in compared]
    offset = int(np.flatnonzero(scores[0] != scores[1])[0])
    values = f"{float(scores[0][offset]):.9g} and {float(scores[1][offset]):.9g}"
    return f"equal tokens, and log-probs {values} of token {first['prompt_length'] + offset}"


def _weight_digests(run: RunDir) -> dict[str, str]:
    digests = {}
    for path in (run.path / "model").glob("*.safetensors"):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
