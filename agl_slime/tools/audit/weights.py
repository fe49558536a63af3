"""Checkpoints and models of a run, compared with the ledger and the metrics."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from agl_slime.report.records import read_object
from agl_slime.tools.audit.readers import CHECKSUMS, other_files

KEPT = 2  # newest checkpoints; older ones are removed
_ABOUT = "agl_slime_model.json"
_WEIGHTS = (".safetensors", ".bin")


def steps_of(checkpoints: Path) -> dict[int, Path]:
    """The checkpoints of a run by their iteration."""
    names = {path: path.name.removeprefix("step_") for path in checkpoints.glob("step_*") if path.is_dir()}
    return {int(name): path for path, name in names.items() if name.isdecimal()}


def missing_checkpoints(here: Collection[int], noted: Collection[int], *, finished: bool, last: int) -> list[int]:
    """The iterations of missing checkpoints. The ledger notes a checkpoint before it is written: the newest may be
    missing after a kill."""
    newest = sorted(noted, reverse=True)
    required = {*newest[:KEPT]} | ({last} if finished and last and newest else set())
    if not finished and newest and newest[0] not in here:
        required = {*newest[1 : 1 + KEPT]}
    return sorted(required - {*here})


def model_findings(
    run: Path, checkpoints: Mapping[int, Path], metrics: Mapping[int, Mapping[str, Any]], *, finished: bool, last: int
) -> Iterator[tuple[str, str]]:
    """Contradictions of ``model`` and ``model-best`` to checkpoints and metrics."""
    for name in ("model", "model-best"):
        directory = run / name
        if not directory.exists():
            if name == "model" and finished and checkpoints:
                yield name, "is missing, and the run has finished"
            continue
        try:
            about = read_object(directory / _ABOUT)
            iteration, validation = about["iteration"], about["validation"]
            sums = read_object(checkpoints[iteration] / "trainer" / CHECKSUMS) if iteration in checkpoints else {}
        except (ValueError, KeyError, TypeError) as error:
            yield f"{name}/{_ABOUT}", f"cannot be read: {error}"
            continue
        if name == "model" and finished and iteration != last:
            yield f"{name}/{_ABOUT}", f"its iteration is {iteration}, and the last one is {last}"
        if validation is not None and metrics.get(iteration, {}).get("val/reward_mean") != validation:
            yield f"{name}/{_ABOUT}", f"metrics.jsonl has no validation of {validation} in iteration {iteration}"
        weights = {part: sums[part] for part in sorted(sums) if name == "model" and part.endswith(_WEIGHTS)}
        for part, text in other_files(directory, weights, f"differs from the checkpoint of iteration {iteration}"):
            yield f"{name}/{part}", text
