"""The ledger: where each rollout stands, and counts that add up at any moment.

A rollout is *open* (in flight), *ready* (its group waits to be trained on) or *closed* with one outcome. Closed
rollouts are kept as counts, not as entries, so memory does not grow with the run; the ids of the most recent ones are
remembered to recognise a second report of the same rollout.

``Ledger`` lives in memory; ``agl_slime.groups.ledger_disk.PersistentLedger`` keeps the same account on disk.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from agl_slime.groups.results import Outcome

# Late or repeated reports arrive within moments of the first; at least this many closed ids are remembered to recognise
# them, and at most twice as many: they are kept in two generations, and the older one is forgotten as a whole. Ids that
# are freed one by one leave holes all over the memory.
_REMEMBERED_CLOSED = 50_000


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """``opened == open + ready + sum(closed.values())`` always. ``reasons`` counts closed rollouts by (outcome,
    reason)."""

    opened: int
    open: int
    ready: int
    closed: dict[Outcome, int]
    reasons: dict[tuple[Outcome, str], int]


class RolloutLedger(Protocol):
    """What a data source asks of a ledger; ``Ledger`` and ``PersistentLedger`` say what each call does."""

    def batch(self) -> AbstractContextManager[None]: ...

    def open(self, rollout_id: str, *, instance_id: str | None = None) -> bool: ...

    def ready(self, rollout_id: str) -> bool: ...

    def close(self, rollout_id: str, outcome: Outcome, reason: str = "") -> bool: ...

    def open_many(self, rollouts: Sequence[tuple[str, str | None]]) -> int: ...

    def ready_many(self, rollout_ids: Sequence[str]) -> int: ...

    def close_many(self, rollout_ids: Sequence[str], outcome: Outcome, reason: str = "") -> int: ...

    def finish_instance(self, instance_id: str) -> None: ...

    def finished_instances(self) -> list[str]: ...

    def is_open(self, rollout_id: str) -> bool: ...

    def open_ids(self) -> list[str]: ...

    def recent_ids(self) -> list[str]: ...

    def remember(self, rollout_ids: Iterable[str]) -> None: ...

    def counts(self) -> LedgerCounts: ...


class Ledger:
    """Thread-safe; every call costs the same however long the run.

    A rollout may name the *instance* (task) that it belongs to. An instance is finished when its owner says so, as
    often as it says so (epochs).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened = 0
        self._open: dict[str, str | None] = {}
        self._finished: list[str] = []
        self._ready: dict[str, str | None] = {}
        self._closed: Counter[Outcome] = Counter()
        self._reasons: Counter[tuple[Outcome, str]] = Counter()
        self._recent: dict[str, None] = {}  # a set that keeps its order
        self._older: dict[str, None] = {}

    def batch(self) -> AbstractContextManager[None]:
        """Calls inside belong together; in memory that makes no difference."""
        return nullcontext()

    def open(self, rollout_id: str, *, instance_id: str | None = None) -> bool:
        """A rollout is in flight. ``False`` when it is known already."""
        with self._lock:
            if (
                rollout_id in self._open
                or rollout_id in self._ready
                or rollout_id in self._recent
                or rollout_id in self._older
            ):
                return False
            self._open[rollout_id] = instance_id
            self._opened += 1
            return True

    def ready(self, rollout_id: str) -> bool:
        """An open rollout waits to be trained on. ``False`` when it was not open."""
        with self._lock:
            if rollout_id not in self._open:
                return False
            self._ready[rollout_id] = self._open.pop(rollout_id)
            return True

    def close(self, rollout_id: str, outcome: Outcome, reason: str = "") -> bool:
        """An open or ready rollout has reached its one end. ``False`` when it had ended before or was never opened."""
        with self._lock:
            if rollout_id in self._open:
                del self._open[rollout_id]
            elif rollout_id in self._ready:
                del self._ready[rollout_id]
            else:
                return False
            self._closed[outcome] += 1
            self._reasons[outcome, reason] += 1
            self._remember(rollout_id)
            return True

    def open_many(self, rollouts: Sequence[tuple[str, str | None]]) -> int:
        """``open`` for pairs of rollout and instance; returns how many were new."""
        return sum(self.open(rollout_id, instance_id=instance_id) for rollout_id, instance_id in rollouts)

    def ready_many(self, rollout_ids: Sequence[str]) -> int:
        """``ready`` for many; returns how many were open."""
        return sum(self.ready(rollout_id) for rollout_id in rollout_ids)

    def close_many(self, rollout_ids: Sequence[str], outcome: Outcome, reason: str = "") -> int:
        """``close`` for many, with one outcome; returns how many had not ended before."""
        return sum(self.close(rollout_id, outcome, reason) for rollout_id in rollout_ids)

    def finish_instance(self, instance_id: str) -> None:
        """A group of this instance has been dealt with: a resumed run skips it, once per time said."""
        with self._lock:
            self._finished.append(instance_id)

    def finished_instances(self) -> list[str]:
        """The finished instances, oldest first, each as often as it was finished: what slime calls
        ``skip_instance_ids``."""
        with self._lock:
            return list(self._finished)

    def instances_in_flight(self) -> list[str]:
        """The instances that have open or ready rollouts, each once: what a resumed run must enqueue again."""
        with self._lock:
            instances = [*self._open.values(), *self._ready.values()]
            return list(dict.fromkeys(instance for instance in instances if instance is not None))

    def is_open(self, rollout_id: str) -> bool:
        """Whether the rollout is in flight."""
        with self._lock:
            return rollout_id in self._open

    def open_ids(self) -> list[str]:
        """The rollouts in flight."""
        with self._lock:
            return list(self._open)

    def recent_ids(self) -> list[str]:
        """The rollouts that closed last, oldest first: those whose late reports are recognised."""
        with self._lock:
            return [*self._older, *self._recent]

    def remember(self, rollout_ids: Iterable[str]) -> None:
        """These closed in a former life of the run: they are not counted again, and reports of them are recognised as
        late."""
        with self._lock:
            for rollout_id in rollout_ids:
                self._remember(rollout_id)

    def carry_over(self, closed: Iterable[tuple[Outcome, str, int]]) -> None:
        """So many rollouts closed with this outcome and reason in a former life of the run."""
        with self._lock:
            for outcome, reason, n in closed:
                self._opened += n
                self._closed[outcome] += n
                self._reasons[outcome, reason] += n

    def _remember(self, rollout_id: str) -> None:
        self._recent[rollout_id] = None
        if len(self._recent) >= _REMEMBERED_CLOSED:
            self._older, self._recent = self._recent, {}

    def counts(self) -> LedgerCounts:
        with self._lock:
            return LedgerCounts(
                self._opened, len(self._open), len(self._ready), dict(self._closed), dict(self._reasons)
            )
