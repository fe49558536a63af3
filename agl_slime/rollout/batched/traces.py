"""One JSON file per trajectory, for people to read: ``{step}-{ok|fail}-{id}.json``."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Predicate = Callable[[Mapping[str, Any]], bool]

# Ids are for training, not for reading, and a file of them is many times as large.
_LEFT_OUT = frozenset({"input_ids", "labels", "logprobs", "turn_records", "segments"})


class TraceWriter:
    """Writes finished trajectories to ``directory``; ``None``: none is written.

    ``keep(trajectory)`` decides whether one is written (all by default); ``succeeded(trajectory)`` whether its name
    says ``ok`` or ``fail`` (by default: it ended by itself). What goes wrong here is logged and never ends a rollout.
    """

    def __init__(
        self, directory: str | Path | None, *, keep: Predicate | None = None, succeeded: Predicate | None = None
    ) -> None:
        self._directory = None if directory is None else Path(directory)
        self._keep = keep or (lambda trajectory: True)
        self._succeeded = succeeded or (
            lambda trajectory: trajectory.get("stop_reason") == "stop" and not trajectory.get("truncated")
        )

    def write(self, trajectory: Mapping[str, Any], *, step: int, fallback_id: str) -> Path | None:
        """The file that was written, if one was. The id is the trajectory's ``id``, else ``fallback_id``."""
        if self._directory is None:
            return None
        try:
            if not self._keep(trajectory):
                return None
            name = re.sub(r"[^\w.-]", "_", str(trajectory.get("id", fallback_id)))[:100]
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"{step}-{'ok' if self._succeeded(trajectory) else 'fail'}-{name}.json"
            readable = {key: value for key, value in trajectory.items() if key not in _LEFT_OUT}
            path.write_text(json.dumps(readable, ensure_ascii=False, indent=1, default=str) + "\n", encoding="utf-8")
            return path
        except Exception:  # a callback of somebody else's, a full disk: neither is worth a rollout
            logger.exception("The trace of a trajectory could not be written to %s.", self._directory)
            return None
