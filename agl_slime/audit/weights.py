"""What a run has left of its weights: its checkpoints, as far as the ledger has noted them, and its models."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from agl_slime.audit.records import SEAL, read_object, read_regular

KEPT = 2  # of the checkpoints; older ones are removed when a newer one is there
_ABOUT = "agl_slime_model.json"
_WEIGHTS = (".safetensors", ".bin")


def steps_of(checkpoints: Path) -> dict[int, Path]:
    """The checkpoints of a run by their iteration."""
    names = {path: path.name.removeprefix("step_") for path in checkpoints.glob("step_*") if path.is_dir()}
    return {int(name): path for path, name in names.items() if name.isdecimal()}


def missing_checkpoints(here: Collection[int], noted: Collection[int], *, finished: bool, last: int) -> list[int]:
    """The iterations whose checkpoints a run must have and has not. The ledger notes one before it is written, so that
    the newest may be missing where the run was killed."""
    newest = sorted(noted, reverse=True)
    wanted = {*newest[:KEPT]} | ({last} if finished and last and newest else set())
    if not finished and newest and newest[0] not in here:
        wanted = {*newest[1 : 1 + KEPT]}
    return sorted(wanted - {*here})


def model_findings(
    run: Path, checkpoints: Mapping[int, Path], metrics: Mapping[int, Mapping[str, Any]], *, finished: bool, last: int
) -> Iterator[tuple[str, str]]:
    """Where ``model`` and ``model-best`` are not what the checkpoints and the metrics say."""
    for name in ("model", "model-best"):
        directory = run / name
        if not directory.exists():
            if name == "model" and finished and checkpoints:
                yield name, "is missing, and the run has finished"
            continue
        try:
            about = read_object(directory / _ABOUT)
            iteration, validation = about["iteration"], about["validation"]
            sums = read_object(checkpoints[iteration] / "trainer" / SEAL) if iteration in checkpoints else {}
        except (ValueError, KeyError, TypeError) as error:
            yield f"{name}/{_ABOUT}", f"cannot be read: {error}"
            continue
        if name == "model" and finished and iteration != last:
            yield f"{name}/{_ABOUT}", f"it is of iteration {iteration}, and the last one is {last}"
        if validation is not None and metrics.get(iteration, {}).get("val/reward_mean") != validation:
            yield f"{name}/{_ABOUT}", f"metrics.jsonl has no validation of {validation} in iteration {iteration}"
        for part in sorted(sums) if name == "model" else ():
            if part.endswith(_WEIGHTS):
                try:
                    content = read_regular(directory / part)
                except ValueError as error:
                    yield f"{name}/{part}", str(error)
                    continue
                if [len(content), zlib.crc32(content)] != sums[part]:
                    yield f"{name}/{part}", f"is not as in the checkpoint of iteration {iteration}"
