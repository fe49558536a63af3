"""What a data source writes beside a checkpoint, and reads back."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agl_slime.errors import DataSourceError


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSourceState:
    """Groups that wait to be trained on (``Sample.to_dict`` forms) and the next free numbers."""

    groups: list[list[dict[str, Any]]]
    index: int
    group_index: int
    rollout_number: int
    members: list[list[str]] | None = None
    """Ids of the rollouts in each group of ``groups``."""
    instances: list[str | None] | None = None
    """The task that each group of ``groups`` is one try at."""
    waiting: list[str] | None = None
    """Ids of finished rollouts that are not in ``groups`` yet: their groups wait for others, or they are being read."""
    ended: list[str] | None = None
    """Ids of the rollouts that were dealt with, where the store is looked through for new ones and would give them
    again."""
    follow: dict[str, Any] | None = None
    """Position in a remote store's feed."""
    demand: dict[str, Any] | None = None
    """Tasks that were drawn, and those that are under way."""
    closed: list[list[Any]] | None = None
    """Outcome, reason and number of the rollouts that have ended, where the ledger is not on disk."""
    early: list[str] | None = None
    """Groups that settled with rollouts still out, whose reports may be still to come."""
    version: int | None = None
    """Newest weight version that was known."""


def state_path(directory: Path, rollout_id: Any) -> Path:
    """slime keeps a data source's state under ``rollout/`` of the checkpoint directory, one file per step."""
    return directory / "rollout" / f"agl_datasource_{rollout_id}.json"


def save_state(directory: Path, rollout_id: Any, state: DataSourceState) -> Path:
    """Write atomically: a crash leaves the old file or the new one."""
    path = state_path(directory, rollout_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(asdict(state), allow_nan=False))
    except (TypeError, ValueError) as error:
        temporary.unlink(missing_ok=True)
        raise DataSourceError(
            f"a sample's metadata cannot be saved as JSON: {error}; keep plain values in it"
        ) from error
    temporary.replace(path)
    return path


def load_state(directory: Path, rollout_id: Any) -> DataSourceState | None:
    path = state_path(directory, rollout_id)
    if not path.exists():
        return None
    try:
        return DataSourceState(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise not_a_state(directory, rollout_id, error) from error


def not_a_state(directory: Path, rollout_id: Any, error: Exception) -> DataSourceError:
    """The error of a file that does not hold what ``save_state`` writes."""
    return DataSourceError(
        f"{state_path(directory, rollout_id)} is not a saved state of this data source: {type(error).__name__}: {error}"
    )
