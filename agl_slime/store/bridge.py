"""Agent Lightning's in-memory store, as the bridge needs it: told when a rollout ends, safe across threads, and of the
same cost and size however many rollouts have gone through it.

Stock behaviour that this replaces:

- Completion must be polled for. Here listeners are told (``subscribe_finished``).
- Finished rollouts stay, and when memory is short the oldest spans are dropped, read or not. Here whoever has read a
  rollout *releases* it, and only what is released is forgotten; too much that is not stops deliveries.
- A watchdog scan looks at every running rollout, and at every span to know its size. Here neither depends on what is
  stored.
- The rollouts of a runner that dies wait for their own limits. Here they fail when its heartbeats stop, or when whoever
  started it says so (``fail_worker``), and other runners try again.
- The end of an attempt changes a rollout that has ended. Here one that was cancelled, or failed by the watchdog, stays
  so, though the agent comes to an end later.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, get_args

from agl_slime.store.collections import BridgeCollections, WatchList, do_not_measure, share_field_sets
from agl_slime.store.retention import Retention, StoreUsage, estimate_span_bytes
from agl_slime.store.sendable import check_sendable
from agl_slime.support.agl import (
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    InMemoryLightningStore,
    NamedResources,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Span,
    Unset,
    rollout_status_from_attempt,
)

logger = logging.getLogger(__name__)

RolloutListener = Callable[[Rollout], None]
RolloutUpdate = tuple[Rollout, Sequence[str]]
"""A rollout and the names of the fields that changed."""

FINISHED = frozenset({"succeeded", "failed", "cancelled"})
RUNNING = frozenset({"preparing", "running"})
_ATTEMPT_STATUSES = frozenset(get_args(Attempt.model_fields["status"].annotation))

# A rollout is tried again this often when the processes that ran it died, whatever its own number of attempts; then it
# counts as what kills them.
_DEATHS_FORGIVEN = 2
# Marks attempts whose runner died, in their metadata.
WORKER_DIED = "agl_slime.worker_died"
_WARN_AT = 0.8  # of the unreleased bytes
# Resources snapshots that are kept, one per weight version: rollouts that are this far behind do not exist.
_RESOURCES_KEPT = 1_000


class BridgeStore(InMemoryLightningStore):
    """See the module. Listeners are called on the event loop that wrote the end, whoever did; they must be quick and
    thread-safe.

    Args:
        scan_debounce_seconds: shortest time between two looks for rollouts past their limits; stock is 10.
        retention: what is kept, and for how long.
        dead_worker_seconds: a runner whose heartbeats stopped this long ago is dead, and its attempts fail; 0 is never.
            Runners that never sent one are not judged.
    """

    def __init__(
        self,
        *,
        scan_debounce_seconds: float = 1.0,
        retention: Retention | None = None,
        dead_worker_seconds: float = 60.0,
    ) -> None:
        super().__init__(
            thread_safe=True, span_size_estimator=estimate_span_bytes, scan_debounce_seconds=scan_debounce_seconds
        )
        self.retention = retention or Retention()
        do_not_measure(self)
        self.collections = BridgeCollections()
        self._finished_listeners: list[RolloutListener] = []
        self._released: OrderedDict[str, None] = OrderedDict()  # ids, oldest release first
        self._released_bytes = 0
        self._unreleased_limit = self.retention.unreleased_bytes or self._memory_capacity_bytes // 2
        self._warned = False
        self._backpressure = False
        self._watch = WatchList()
        self._dead_worker_seconds = dead_worker_seconds
        self._next_worker_check = 0.0
        self._judged_dead: dict[str, float] = {}  # worker id -> the heartbeat after which it was judged
        self._gone: set[str] = set()  # runners that will not come back
        self.served = False
        """Whether other processes read the store: tasks must then be JSON."""

    # -- ends ---------------------------------------------------------------------------------------------------------

    def subscribe_finished(self, listener: RolloutListener) -> Callable[[], None]:
        """Call ``listener(rollout)`` for each rollout that ends from now on; the returned function ends the
        subscription."""
        self._finished_listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._finished_listeners:
                self._finished_listeners.remove(listener)

        return unsubscribe

    # -- for a controller, which says itself when a rollout begins ----------------------------------------------------

    def waiting(self, limit: int) -> list[Rollout]:
        """Up to ``limit`` rollouts that nobody has begun, in the order of the queue."""
        with self.collections.lock:
            return list(islice(self.collections.waiting(), max(0, limit)))

    def running(self) -> list[Rollout]:
        """The rollouts that run; costs as much as there are in flight."""
        with self.collections.lock:
            known = map(self.collections.rollout, self._running_rollout_ids)
            return [rollout for rollout in known if rollout is not None and rollout.status in RUNNING]

    async def begin(self, rollout_id: str, *, worker_id: str) -> AttemptedRollout:
        """Start an attempt at a rollout that waits, wherever it stands in the queue."""
        with self.collections.lock:
            self.collections.unqueue(rollout_id)
            return await self.start_attempt(rollout_id, worker_id)

    async def enqueue_rollout(self, input: Any, *args: Any, **kwargs: Any) -> Rollout:
        """As Agent Lightning's. Raises ``ConfigError`` for a task that cannot be sent to another process."""
        if self.served:
            check_sendable(input)
        return await super().enqueue_rollout(input, *args, **kwargs)

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        """As Agent Lightning's. Raises ``ConfigError`` for a task that cannot be sent to another process."""
        if self.served:
            for task in {id(request.input): request.input for request in rollouts}.values():
                check_sendable(task)
        return await super().enqueue_many_rollouts(rollouts)

    async def enqueue_as(self, request: EnqueueRolloutRequest, *, rollout_id: str | None) -> Rollout:
        """Enqueue under an id of the caller's, which must be new; ``None`` takes one of Agent Lightning's."""
        fields = {name: getattr(request, name) for name in ("input", "mode", "resources_id", "config", "metadata")}
        if rollout_id is None:
            return await self.enqueue_rollout(**fields)
        if fields["resources_id"] is None and (latest := await self.get_latest_resources()) is not None:
            fields["resources_id"] = latest.resources_id
        rollout = (await self._prepare_single_rollout(**fields)).model_copy(update={"rollout_id": rollout_id})
        await self._enqueue_many_rollouts([rollout])
        await self._post_update_rollout([(rollout, list(Rollout.model_fields))], skip_enqueue=True)
        return rollout

    # -- retention ----------------------------------------------------------------------------------------------------

    async def release(self, rollout_ids: Iterable[str]) -> int:
        """These rollouts were read and are not needed any more: keep them only as long as there is room in the window.
        Returns how many were newly released; those that have not ended, or are unknown, stay as they are."""
        count = 0
        with self.collections.lock:
            for rollout_id in rollout_ids:
                rollout = self.collections.rollout(rollout_id)
                if rollout is None or rollout_id in self._released or rollout.status not in FINISHED:
                    continue
                self._released[rollout_id] = None
                self._released_bytes += self._span_bytes_by_rollout.get(rollout_id, 0)
                count += 1
            self._trim()
        return count

    def released(self, rollout_ids: Iterable[str]) -> set[str]:
        """Those of these that were released, or are not known any more."""
        with self.collections.lock:
            gone = (one for one in rollout_ids if one in self._released or self.collections.rollout(one) is None)
            return {*gone}

    def usage(self) -> StoreUsage:
        """Where the store stands; for metrics."""
        with self.collections.lock:
            return StoreUsage(
                queued=self.collections.queued,
                running=len(self._running_rollout_ids),
                stored=self.collections.stored,
                released=len(self._released),
                span_bytes=self._total_span_bytes,
                unreleased_bytes=self._total_span_bytes - self._released_bytes,
                backpressure=self._backpressure,
            )

    def _trim(self) -> None:
        """Forget what is beyond the window, oldest release first, and judge again whether there is backpressure. Under
        the lock."""
        keep = self.retention
        while self._released and (
            len(self._released) > keep.released_rollouts or self._released_bytes > keep.released_bytes
        ):
            self._forget(self._released.popitem(last=False)[0])
        waiting, limit = self._total_span_bytes - self._released_bytes, self._unreleased_limit
        if waiting <= _WARN_AT * limit:
            self._warned = self._backpressure = False
            return
        if not self._warned:
            self._warned = True
            logger.warning(
                "%.0f MB of spans are not released, of the %.0f MB after which no more rollouts are delivered: call "
                "`await store.release(ids)`, as a data source does.",
                waiting / 1e6,
                limit / 1e6,
            )
        if waiting > limit and not self._backpressure:
            self._backpressure = True
            logger.error("No more rollouts are delivered until some of the %.0f MB are released.", waiting / 1e6)

    def _forget(self, rollout_id: str) -> None:
        self.collections.remove_rollout(rollout_id)
        size = self._span_bytes_by_rollout.pop(rollout_id, 0)
        self._total_span_bytes -= size
        self._released_bytes -= size
        self._start_time_by_rollout.pop(rollout_id, None)
        self._completion_events.pop(rollout_id, None)
        self._running_rollout_ids.discard(rollout_id)
        self._watch.discard(rollout_id)

    # -- workers ------------------------------------------------------------------------------------------------------

    async def fail_worker(self, worker_id: str, *, reason: str = "the process ended", gone: bool = False) -> list[str]:
        """A runner is dead: its attempts end as ``unresponsive`` and their rollouts are queued again, also those that
        have no attempt left, up to two times per rollout: it is not their fault. Returns the ids of those rollouts.

        ``gone``: it will not come back, and gets no more rollouts: a request for some that it sent before its end may
        still be under way. Costs as much as there are rollouts in flight; runners do not die often.
        """
        with self.collections.lock:
            if gone:
                self._gone.add(worker_id)
            lost = []
            for rollout_id in list(self._running_rollout_ids):
                latest = self.collections.latest_attempt(rollout_id)
                if latest is not None and latest.worker_id == worker_id and latest.status in RUNNING:
                    lost.append(latest)
        for attempt in lost:
            await self._forgive(attempt)
            died = {**(attempt.metadata or {}), WORKER_DIED: reason}
            await self.update_attempt(attempt.rollout_id, attempt.attempt_id, status="unresponsive", metadata=died)
        if lost:
            logger.warning("Runner %s is dead (%s); others try its %d rollouts again.", worker_id, reason, len(lost))
        return [attempt.rollout_id for attempt in lost]

    async def _forgive(self, attempt: Attempt) -> None:
        """Give the rollout one attempt more if few of its runners have died."""
        with self.collections.lock:
            rollout = self.collections.rollout(attempt.rollout_id)
            attempts = self.collections.attempts_of(attempt.rollout_id).values()
            deaths = sum(WORKER_DIED in (other.metadata or {}) for other in attempts)
        if rollout is None or deaths >= _DEATHS_FORGIVEN:
            return
        config = rollout.config
        if config.max_attempts > attempt.sequence_id and "unresponsive" in config.retry_condition:
            return
        more = {
            "max_attempts": max(config.max_attempts, attempt.sequence_id + 1),
            "retry_condition": [*dict.fromkeys([*config.retry_condition, "unresponsive"])],
        }
        await self.update_rollout(attempt.rollout_id, config=config.model_copy(update=more))

    async def _fail_silent_workers(self, now: float) -> None:
        with self.collections.lock:
            silent = [
                (worker.worker_id, worker.last_heartbeat_time)
                for worker in list(self.collections._workers._items.values())
                if worker.last_heartbeat_time is not None
                and now - worker.last_heartbeat_time > self._dead_worker_seconds
                and self._judged_dead.get(worker.worker_id) != worker.last_heartbeat_time
            ]
        for worker_id, heartbeat in silent:
            self._judged_dead[worker_id] = heartbeat
            await self.fail_worker(worker_id, reason=f"no heartbeat for {now - heartbeat:.0f} s")

    # -- Agent Lightning's hooks --------------------------------------------------------------------------------------

    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        with self.collections.lock:  # judged and delivered in one step
            return await super().dequeue_rollout(worker_id) if self._delivers_to(worker_id) else None

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        with self.collections.lock:
            if not self._delivers_to(worker_id):
                return []
            return await super().dequeue_many_rollouts(limit=limit, worker_id=worker_id)

    def _delivers_to(self, worker_id: str | None) -> bool:
        return not self._backpressure and worker_id not in self._gone

    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        update = await super().add_resources(resources)
        with self.collections.lock:
            self.collections.trim_resources(_RESOURCES_KEPT)
        return update

    async def _post_update_rollout(self, rollouts: Sequence[RolloutUpdate], skip_enqueue: bool = False) -> None:
        await super()._post_update_rollout(rollouts, skip_enqueue=skip_enqueue)
        with self.collections.lock:
            for rollout, _ in rollouts:
                attempt = self.collections.latest_attempt(rollout.rollout_id) if rollout.status in RUNNING else None
                next_check = _next_check(rollout.config, attempt) if attempt is not None else None
                if next_check is None:
                    self._watch.discard(rollout.rollout_id)
                else:
                    self._watch.set(rollout.rollout_id, next_check)
        for rollout, updated in rollouts:
            if "status" in updated and rollout.status in FINISHED:
                for listener in list(self._finished_listeners):
                    listener(rollout)

    async def _unlocked_get_latest_attempt(self, collections: Any, rollout_id: str) -> Attempt | None:
        return self.collections.latest_attempt(rollout_id)

    async def _unlocked_update_attempt_and_rollout(  # type: ignore[override]  # all fields come by name
        self, collections: Any, rollout_id: str, attempt_id: str, **fields: Any
    ) -> tuple[Attempt, RolloutUpdate | None, bool]:
        """What Agent Lightning does, in a third of its time; but an ended rollout stays ended, and what is not valid is
        refused before anything is changed."""
        rollout, latest = self.collections.rollout(rollout_id), self.collections.latest_attempt(rollout_id)
        attempt = latest if attempt_id == "latest" else self.collections.attempts_of(rollout_id).get(attempt_id)
        if rollout is None or attempt is None:
            raise ValueError(f"Rollout {rollout_id} has no attempt {attempt_id}, or is not known")
        changes = {name: value for name, value in fields.items() if not isinstance(value, Unset)}
        if changes.keys() != {"status"} or changes["status"] not in _ATTEMPT_STATUSES:  # the usual, of nearly all cost
            Attempt.model_validate({**attempt.model_dump(), **changes})
        if changes.get("status") in ("failed", "succeeded"):
            changes["end_time"] = time.time()
        for name, value in changes.items():
            setattr(attempt, name, value)
        update: RolloutUpdate | None = None
        if attempt is latest and rollout.status not in FINISHED:
            status = await rollout_status_from_attempt(attempt, rollout.config)
            if status != rollout.status:
                ended = {"end_time": time.time()} if status in FINISHED else {}
                changed = rollout.model_copy(update={"status": status, **ended})
                self.collections.put_rollout(changed)
                update = changed, ["rollout_id", "status", *ended]
        return attempt, update, bool(attempt.worker_id) and not changes.keys().isdisjoint(("status", "worker_id"))

    async def _post_add_spans(self, spans: Sequence[Span], rollout_id: str, attempt_id: str) -> None:
        with self.collections.lock:
            update = self._show_life(rollout_id, attempt_id)
            if update is not None:
                await self._post_update_rollout([update])
            for span in spans:
                share_field_sets(span)
            size = sum(map(estimate_span_bytes, spans))
            self._span_bytes_by_rollout[rollout_id] += size
            self._total_span_bytes += size
            if rollout_id in self._released:  # a late span of an attempt that was given up
                self._released_bytes += size
            self._trim()

    def _show_life(self, rollout_id: str, attempt_id: str) -> RolloutUpdate | None:
        """Spans arrived: the attempt lives, and so does its rollout if it is the latest. Returns the rollout if that
        had been queued again. Does what Agent Lightning's ``_on_attempt_heartbeat`` does, in a tenth of its time."""
        rollout = self.collections.rollout(rollout_id)
        attempt = self.collections.attempts_of(rollout_id).get(attempt_id)
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

    async def _maybe_evict_spans(self, collections: Any) -> None:
        """Stock eviction drops what nobody has read. ``_trim`` does what is to be done."""

    async def _scan_for_unhealthy_rollouts(self) -> None:
        now = time.time()
        if self._scan_debounce_seconds <= 0 or now - self._last_scan_entrance_time >= self._scan_debounce_seconds:
            await super()._scan_for_unhealthy_rollouts()
        if self._dead_worker_seconds > 0 and now >= self._next_worker_check:
            self._next_worker_check = now + min(5.0, self._dead_worker_seconds / 4)
            await self._fail_silent_workers(now)

    async def _unlocked_get_running_rollouts(self, collections: Any) -> list[AttemptedRollout]:
        """What the watchdog looks at: only the running rollouts one of whose limits may have passed."""
        now = time.time()
        due = []
        for rollout_id in self._watch.take_due(now):
            rollout, attempt = self.collections.rollout(rollout_id), self.collections.latest_attempt(rollout_id)
            if rollout is None or rollout.status not in RUNNING or attempt is None:
                continue
            next_check = _next_check(rollout.config, attempt)
            if next_check is not None:
                # once past its limit it is marked now; the second look is for what happens between the two clocks
                self._watch.set(rollout_id, max(next_check, now + 0.05))
            due.append(AttemptedRollout(**rollout.model_dump(), attempt=attempt))
        return due


def _next_check(config: RolloutConfig, attempt: Attempt) -> float | None:
    """When the first of an attempt's limits passes, in seconds since the epoch; ``None`` when it has none."""
    times = []
    if config.timeout_seconds is not None:
        times.append(attempt.start_time + config.timeout_seconds)
    if config.unresponsive_seconds is not None:
        times.append((attempt.last_heartbeat_time or attempt.start_time) + config.unresponsive_seconds)
    return min(times) if times else None
