"""What a data source writes beside a checkpoint, and reads back: one JSON file per step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agl_slime.errors import DataSourceError, spell_exception
from agl_slime.support.files import write_file


def state_path(directory: Path, rollout_id: Any) -> Path:
    """slime keeps a data source's state under ``rollout/`` of the checkpoint directory, one file per step."""
    return directory / "rollout" / f"agl_datasource_{rollout_id}.json"


def save_state(directory: Path, rollout_id: Any, state: dict[str, Any]) -> None:
    """Write atomically: a crash leaves the old file or the new one."""
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataSourceError(f"a sample's metadata is not JSON ({error}); keep plain values in it") from error
    write_file(state_path(directory, rollout_id), text)


def load_state(directory: Path, rollout_id: Any) -> dict[str, Any] | None:
    """The state of that step; ``None`` when there is none, as on a fresh start."""
    path = state_path(directory, rollout_id)
    if not path.exists():
        return None
    try:
        state = json.loads(path.read_text())
    except ValueError as error:
        raise not_a_state(directory, rollout_id, error) from error
    if not isinstance(state, dict):
        raise not_a_state(directory, rollout_id, TypeError(f"a {type(state).__name__} and no object"))
    return state


def not_a_state(directory: Path, rollout_id: Any, error: Exception) -> DataSourceError:
    """The error of a file that does not hold what ``save_state`` writes."""
    path = state_path(directory, rollout_id)
    return DataSourceError(f"{path} is not a saved state of this data source: {spell_exception(error)}")
