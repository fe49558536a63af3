"""What a data source writes beside a checkpoint, and reads back: one JSON file per step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agl_slime.errors import DataSourceError, spell_exception
from agl_slime.support.files import write_file


def save_state(directory: Path, rollout_id: Any, state: dict[str, Any]) -> None:
    """Write atomically: a crash leaves the old file or the new one."""
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataSourceError(f"a sample's metadata is not JSON ({error}); keep plain values in it") from error
    write_file(_path(directory, rollout_id), text)


def load_state(directory: Path, rollout_id: Any, restore: Callable[[dict[str, Any]], None]) -> None:
    """``restore`` the state of that step; nothing where there is none, as on a fresh start."""
    path = _path(directory, rollout_id)
    if path.exists():
        try:
            restore({**json.loads(path.read_text())})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataSourceError(
                f"{path} is not a saved state of this data source: {spell_exception(error)}"
            ) from error


def _path(directory: Path, rollout_id: Any) -> Path:
    """slime keeps a data source's state under ``rollout/`` of the checkpoint directory."""
    return directory / "rollout" / f"agl_datasource_{rollout_id}.json"
