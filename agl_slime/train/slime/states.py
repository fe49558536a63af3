"""Saved states of the data source, and evaluation data in slime's form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agl_slime.data.results import MemberResult
from agl_slime.errors import DataSourceError
from agl_slime.train.slime.hooks import eval_entry


def state_path(directory: str | Path, rollout_id: Any) -> Path:
    """The file of a data source's state, under ``rollout/`` of the checkpoint directory, as slime's own."""
    return Path(directory) / "rollout" / f"agl_datasource_{rollout_id}.json"


def as_json(state: dict[str, Any]) -> str:
    try:
        return json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataSourceError(f"a sample's metadata is not JSON ({error}); keep plain values in it") from error


def eval_data(members: Sequence[MemberResult]) -> dict[str, Any]:
    """slime's evaluation data, with an entry per successful rollout."""
    entry = eval_entry([member.samples[-1] for member in members])
    return {**entry, "rewards": [member.reward for member in members]}
