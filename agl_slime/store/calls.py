"""The store calls that every rollout makes, straight on the records.

Agent Lightning composes each call of filtered look-ups and tracked coroutines, 42 and 26 per rollout, and validates
whole records on every change. The overrides here do the same to the same records in one step each, under the
collections' lock; what they do not override is Agent Lightning's own. ``tests/property/test_store_calls.py`` has both
run the same histories and compares all that can be seen.

On purpose they differ from it in three things. An attempt's end does not change a rollout that has its own: one that
was cancelled, or failed by the watchdog, stays so, though the agent comes to an end later. What is not valid is refused
before anything is changed. Of spans with one id the first is kept and reported as written, whatever else is in the
call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Literal

from agl_slime.store.collections import BridgeCollections
from agl_slime.support.agl import (
    UNSET,
    Attempt,
    AttemptedRollout,
    InMemoryLightningStore,
    PaginatedResult,
    Rollout,
    Span,
    Unset,
    generate_id,
    healthcheck_before,
    rollout_status_from_attempt,
)

logger = logging.getLogger(__name__)

RolloutUpdate = tuple[Rollout, Sequence[str]]
"""A rollout and the names of the fields that changed."""

FINISHED = frozenset({"succeeded", "failed", "cancelled"})
RUNNING = frozenset({"preparing", "running"})
_QUEUED = frozenset({"queuing", "requeuing"})
_ATTEMPT_STATUSES = frozenset({"preparing", "running", "failed", "succeeded", "unresponsive", "timeout"})
_WORKER_STATUS = {"succeeded": "idle", "failed": "idle", "timeout": "unknown", "unresponsive": "unknown"}  # else busy


class DirectCalls(InMemoryLightningStore):
    """An in-memory store on ``BridgeCollections``; see the module."""

    collections: BridgeCollections  # type: ignore[assignment]  # a subclass of what is declared

    # -- claiming -----------------------------------------------------------------------------------------------------

    async def _post_dequeue_rollouts(
        self, rollout_ids: Sequence[str], worker_id: str | None
    ) -> Sequence[tuple[AttemptedRollout, Sequence[str]]]:
        claimed = []
        with self.collections.lock:
            for rollout_id in rollout_ids:
                rollout = self.collections.rollout(rollout_id)
                if rollout is None or rollout.status not in _QUEUED:
                    status = "not there any more" if rollout is None else rollout.status
                    logger.warning("Rollout %s came up in the queue and is %s; it is passed over.", rollout_id, status)
                    continue
                attempt = Attempt(
                    rollout_id=rollout_id,
                    attempt_id=f"at-{generate_id(8)}",
                    sequence_id=self.collections.count_attempts(rollout_id) + 1,
                    start_time=time.time(),
                    status="preparing",
                    worker_id=worker_id,
                )
                self.collections.add_attempt(attempt)
                rollout = self.collections.change_rollout(rollout, {"status": "preparing"})
                claimed.append((_attempted(rollout, attempt), ["rollout_id", "status"]))
        return claimed

    # -- spans --------------------------------------------------------------------------------------------------------

    async def _issue_many_span_sequence_ids(self, rollout_ids: list[str]) -> list[int]:
        with self.collections.lock:
            return [self.collections.next_number(rollout_id) for rollout_id in rollout_ids]

    async def _sync_span_sequence_id(self, rollout_id: str, sequence_id: int) -> None:
        with self.collections.lock:
            self.collections.numbered_up_to(rollout_id, sequence_id)

    async def _add_many_spans_helper(self, rollout_id: str, attempt_id: str, spans: Sequence[Span]) -> Sequence[Span]:
        with self.collections.lock:
            if self.collections.rollout(rollout_id) is None:
                raise ValueError(f"Rollout {rollout_id} not found")
            if self.collections.attempt(rollout_id, attempt_id) is None:
                raise ValueError(f"Attempt {attempt_id} not found for rollout {rollout_id}")
            added = self.collections.add_spans(rollout_id, attempt_id, spans)
            if len(added) < len(spans):
                logger.error(
                    "%d spans of rollout %s, attempt %s, are there already; skipped.",
                    len(spans) - len(added),
                    rollout_id,
                    attempt_id,
                )
            if added:
                await self._post_add_spans(added, rollout_id, attempt_id)
        return added

    async def _on_attempt_heartbeat(self, rollout_id: str, attempt_id: str) -> RolloutUpdate | None:
        """Spans arrived: the attempt lives, and so does its rollout if it is the latest. Returns the rollout if that
        had been queued again."""
        with self.collections.lock:
            rollout, attempt = self.collections.rollout(rollout_id), self.collections.attempt(rollout_id, attempt_id)
            if rollout is None or attempt is None:
                return None
            attempt.last_heartbeat_time = time.time()
            if attempt.status in ("preparing", "unresponsive"):
                attempt.status = "running"
            before = rollout.status
            if before not in ("preparing", "requeuing") or attempt is not self.collections.latest_attempt(rollout_id):
                return None
            rollout.status = "running"
            return (rollout, ["status"]) if before == "requeuing" else None

    @healthcheck_before
    async def query_spans(
        self, rollout_id: str, attempt_id: str | Literal["latest"] | None = None, **options: Any
    ) -> PaginatedResult[Span]:
        if attempt_id is None or attempt_id == "latest" or options:
            return await super().query_spans(rollout_id, attempt_id, **options)
        with self.collections.lock:
            spans = self.collections.spans_of(rollout_id, attempt_id)
        spans.sort(key=_number)
        return PaginatedResult(items=spans, limit=-1, offset=0, total=len(spans))

    # -- attempts -----------------------------------------------------------------------------------------------------

    async def _unlocked_get_latest_attempt(self, collections: Any, rollout_id: str) -> Attempt | None:
        return self.collections.latest_attempt(rollout_id)

    async def _unlocked_rollout_to_attempted_rollout(
        self, collections: Any, rollout: Rollout
    ) -> Rollout | AttemptedRollout:
        attempt = self.collections.latest_attempt(rollout.rollout_id)
        return rollout if attempt is None else _attempted(rollout, attempt)

    async def _unlocked_update_attempt_and_rollout(
        self,
        collections: Any,
        rollout_id: str,
        attempt_id: str | Literal["latest"],
        status: Any = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
    ) -> tuple[Attempt, RolloutUpdate | None, bool]:
        rollout, latest = self.collections.rollout(rollout_id), self.collections.latest_attempt(rollout_id)
        if rollout is None:
            raise ValueError(f"Rollout {rollout_id} not found")
        if latest is None:
            raise ValueError(f"No attempts found for rollout {rollout_id}")
        attempt = latest if attempt_id == "latest" else self.collections.attempt(rollout_id, attempt_id)
        if attempt is None:
            raise ValueError(f"Attempt {attempt_id} not found for rollout {rollout_id}")

        given = {
            "status": status,
            "worker_id": worker_id,
            "last_heartbeat_time": last_heartbeat_time,
            "metadata": metadata,
        }
        changes = {name: value for name, value in given.items() if not isinstance(value, Unset)}
        if changes.keys() != {"status"} or status not in _ATTEMPT_STATUSES:
            Attempt.model_validate({**attempt.model_dump(), **changes})
        if changes.get("status") in ("failed", "succeeded"):
            changes["end_time"] = time.time()
        for name, value in changes.items():
            setattr(attempt, name, value)

        update: RolloutUpdate | None = None
        if attempt is latest and rollout.status not in FINISHED:
            follows = await rollout_status_from_attempt(attempt, rollout.config)
            if follows != rollout.status:
                fields: dict[str, Any] = {"status": follows}
                if follows in FINISHED:
                    fields["end_time"] = time.time()
                update = self.collections.change_rollout(rollout, fields), ["rollout_id", *fields]
        return attempt, update, bool(attempt.worker_id) and not changes.keys().isdisjoint(("status", "worker_id"))

    # -- workers ------------------------------------------------------------------------------------------------------

    async def _unlocked_sync_worker_with_attempt(self, collections: Any, attempt: Attempt, dequeue: bool) -> None:
        worker_id = attempt.worker_id
        if not worker_id:
            return
        now = time.time()
        changes: dict[str, Any] = {"last_dequeue_time": now} if dequeue else {}
        status = _WORKER_STATUS.get(attempt.status)
        if status is None:
            changes |= {
                "status": "busy",
                "last_busy_time": now,
                "current_rollout_id": attempt.rollout_id,
                "current_attempt_id": attempt.attempt_id,
            }
        else:
            changes |= {"status": status, "last_idle_time": now, "current_rollout_id": None, "current_attempt_id": None}
        self.collections.change_worker(worker_id, changes)


def _attempted(rollout: Rollout, attempt: Attempt) -> AttemptedRollout:
    # a dump, so that an agent that changes its task does not change the stored one
    return AttemptedRollout(**rollout.model_dump(), attempt=attempt)


def _number(span: Span) -> int:
    return span.sequence_id


__all__ = ["FINISHED", "RUNNING", "DirectCalls", "RolloutUpdate"]
