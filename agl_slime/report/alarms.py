"""Alarms that explain themselves: pure functions over what a run has recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """``kind`` is a word, ``text`` what was seen, ``advice`` what to try. ``iteration`` is where it was seen first,
    ``evidence`` the part of the page that shows it: a metric's name, or a rollout's id."""

    kind: str
    iteration: int
    text: str
    advice: str
    metric: str = ""
    rollout: str = ""

    def told(self) -> dict[str, Any]:
        return asdict(self)


def find_alarms(metrics: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> list[Alarm]:
    """The alarms of a run: ``metrics`` are the lines of metrics.jsonl, ``groups`` those of groups.jsonl."""
    return []
