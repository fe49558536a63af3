"""``report.html``: the page and its data in one file that needs no network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agl_slime.report.page import page, run_data, script_json
from agl_slime.report.read import Convert, RunReader, columns, distinct_names, find_runs, group_columns, no_other_runs
from agl_slime.report.records import parse
from agl_slime.support.files import unwritable_as_error, write_file

MOST_BYTES = 9_500_000  # of the file
MOST_CHARACTERS = 50_000  # of a text in it
_THINNED = f"Groups of some iterations are left out of this file to keep it under {MOST_BYTES / 1e6:g} MB."
_PACKED = re.compile(r"[A-Za-z0-9+/]+=*")  # arrays, see agl_slime.report.rollouts.pack


def write_report(paths: Sequence[Path], output: Path | None = None, convert: Convert = no_other_runs) -> Path:
    """Write the page of the runs at or below ``paths`` and return its path, by default ``report.html`` in the first of
    ``paths``."""
    found = [run for path in paths for run in find_runs(path, convert)]
    readers = [RunReader(run, convert, name=name) for run, name in zip(found, distinct_names(found), strict=True)]
    target = output or paths[0] / "report.html"
    runs = [run_data(reader) or {} for reader in readers]
    most = MOST_BYTES - len(page(title="", live=False).encode())
    thinned = _thin(readers, runs, most)
    budget = most - sum(len(script_json(run).encode()) for run in runs)
    blocks: list[tuple[str, str]] = []
    for number, (reader, run) in enumerate(zip(readers, runs, strict=True)):
        chosen, left_out = _choose(reader, budget // len(readers))
        blocks += [(f"r{number}-{place}", text) for place, text in enumerate(chosen.values())]
        run["blocks"] = {rollout_id: f"r{number}-{place}" for place, rollout_id in enumerate(chosen)}
        run["left_out"] = " ".join(filter(None, (thinned, left_out)))
    blocks.insert(0, ("runs-data", script_json(runs)))
    title = ", ".join(run["name"] for run in runs[:3]) + (" …" if len(runs) > 3 else "")
    with unwritable_as_error("--output", target):
        write_file(target, page(blocks, title=title, live=False), durable=False)
    return target


def _thin(readers: Sequence[RunReader], runs: list[dict[str, Any]], most: int) -> str:
    """Drop groups, then metrics, of more and more iterations until ``runs`` fit into ``most`` bytes; returns a sentence
    about it."""
    for table in ("groups", "metrics"):
        for stride in (2**power for power in range(1, 31)):
            if sum(len(script_json(run).encode()) for run in runs) <= most:
                return "" if table == "groups" and stride == 2 else _THINNED
            for reader, run in zip(readers, runs, strict=True):
                rows = [row for row in getattr(reader, table) if row["iteration"] % stride == 0]
                run |= group_columns(rows, reader.kept_rollouts) if table == "groups" else {"metrics": columns(rows)}
            if not any(row["iteration"] % stride == 0 for reader in readers for row in getattr(reader, table)):
                break
    return _THINNED


def _choose(reader: RunReader, budget: int) -> tuple[dict[str, str], str]:
    """Kept rollouts that fit into ``budget`` bytes, spread over all iterations, and a sentence about the rest."""
    by_iteration: dict[int, list[str]] = {}
    for rollout_id, (iteration, _, _) in reader.kept_rollouts.items():
        by_iteration.setdefault(iteration, []).append(rollout_id)
    total = sum(size for _, _, size in reader.kept_rollouts.values())
    order, stride = list(by_iteration), 1
    while total / stride > budget and stride < len(order):
        stride *= 2
    chosen: dict[str, str] = {}
    for first in range(stride):
        for iteration in order[first::stride]:
            for rollout_id in by_iteration[iteration]:
                line = reader.rollout(rollout_id)
                text = script_json(cut_texts(parse(line))) if line is not None else ""
                if line is None or (size := len(text.encode()) + 100) > budget:
                    continue
                budget -= size
                chosen[rollout_id] = text
        if budget < 20_000:
            break
    missing = len(reader.kept_rollouts) - len(chosen)
    if not missing:
        return chosen, ""
    why = f"to keep it under {MOST_BYTES / 1e6:g} MB"
    return chosen, (
        f"{missing} of {len(reader.kept_rollouts)} kept rollouts are left out of this file {why}; "
        "`agl-slime view` shows them all, and rollouts.jsonl has them."
    )


def cut_texts(value: Any) -> Any:
    """``value`` with long texts cut in their middle; packed arrays stay whole."""
    if isinstance(value, dict):
        return {key: cut_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [cut_texts(item) for item in value]
    if not isinstance(value, str) or len(value) <= MOST_CHARACTERS or _PACKED.fullmatch(value):
        return value
    half = MOST_CHARACTERS // 2
    return f"{value[:half]}\n… {len(value) - 2 * half} characters left out …\n{value[-half:]}"
