"""``BridgeStore``: Agent Lightning's in-memory store with notifications, thread safety, and a cost that does not grow
with the number of past rollouts.

Changes to the stock behaviour:

- Completion: listeners are notified (``subscribe_finished``); the stock store must be polled.
- Retention: a reader *releases* the rollouts it has read, and only released ones are forgotten; too many unreleased
  bytes stop deliveries (backpressure). The stock store keeps finished rollouts, and drops the oldest spans, read or
  not, when memory is short.
- Watchdog: a scan visits only rollouts whose limits may have passed. The stock scan visits every running rollout, and
  every span for its size.
- Dead runners: their rollouts fail when the heartbeats stop, or by ``fail_worker``, and others retry them. In the stock
  store they wait for their limits.
- Final states: a rollout that was cancelled, or failed by the watchdog, stays so. In the stock store a later end of its
  attempt changes it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, get_args

from pydantic_core import PydanticSerializationError, to_json

from agl_slime.errors import ConfigError
from agl_slime.store.collections import BridgeCollections, do_not_measure, share_field_sets
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
from agl_slime.support.ranges import check_ranges

# Measured size of a span without attributes: ids, names, contexts, pydantic's overhead. A threshold needs no exact one.
_SPAN_OVERHEAD_BYTES = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Limits of a store's memory. Sizes are estimates of span bytes."""

    released_rollouts: int = 2_000
    """Released rollouts that are kept for inspection."""
    released_bytes: int = 256 * 2**20
    """Their size."""
    unreleased_bytes: int | None = None
    """Size of unreleased rollouts above which no more are delivered; ``None``: half of the memory. At 80 % it warns."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("released_rollouts released_bytes", lambda value: value >= 0, "0 (keep none) or more"),
            ("unreleased_bytes", lambda value: value >= 1, "at least 1 or None"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """Numbers of rollouts, estimated span bytes, and whether deliveries are stopped (``backpressure``)."""

    queued: int
    running: int
    stored: int
    """All rollouts in the store."""
    released: int
    """Released ones that are still kept."""
    span_bytes: int
    unreleased_bytes: int
    backpressure: bool


def estimate_span_bytes(span: Span) -> int:
    """Estimate the size of a span from the lengths of its attributes, without walking lists."""
    size = _SPAN_OVERHEAD_BYTES
    for key, value in span.attributes.items():
        if isinstance(value, str):
            size += len(key) + len(value)
        else:  # 32: a boxed number and its slot in a list
            size += len(key) + 32 * (len(value) if isinstance(value, (list, tuple)) else 1)
    return size


logger = logging.getLogger(__name__)

RolloutListener = Callable[[Rollout], None]
RolloutUpdate = tuple[Rollout, Sequence[str]]
"""A rollout and the names of the fields that changed."""

FINISHED = frozenset({"succeeded", "failed", "cancelled"})
RUNNING = frozenset({"preparing", "running"})
_ATTEMPT_STATUSES = frozenset(get_args(Attempt.model_fields["status"].annotation))

# Extra attempts of a rollout whose runners died, beyond its own number; after that the rollout may be the cause.
_RETRIED_DEATHS = 2
# Metadata key of attempts whose runner died.
WORKER_DIED = "agl_slime.worker_died"
_WARN_AT = 0.8  # of the unreleased bytes
# Resources snapshots to keep, one per weight version; no rollout is as far behind.
_RESOURCES_KEPT = 1_000


class BridgeStore(InMemoryLightningStore):
    """See the module's docstring. Listeners, quick and thread-safe, run on the loop of the call that ends a rollout.

    Args:
        scan_debounce_seconds: shortest time between two watchdog scans; the stock default is 10.
        retention: limits of retained rollouts.
        dead_worker_seconds: a runner without heartbeat for this long is dead, and its attempts fail; 0 = never. A
            runner that never sent a heartbeat is never considered dead.
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
        self._finished_listeners: dict[object, RolloutListener] = {}
        self._released: OrderedDict[str, None] = OrderedDict()  # ids, oldest release first
        self._released_bytes = 0
        self._unreleased_limit = self.retention.unreleased_bytes or self._memory_capacity_bytes // 2
        self._warned = False
        self._backpressure = False
        self._next_checks: dict[str, float] = {}  # of running rollouts with limits, in seconds since the epoch
        self._dead_worker_seconds = dead_worker_seconds
        self._next_worker_check = 0.0
        self._last_heartbeats: dict[str, float] = {}  # worker id -> its last heartbeat before it was failed
        self._ended_workers: set[str] = set()  # runners that have ended for good
        self.served = False
        """Whether other processes read the store: tasks must then be JSON."""

    # -- ends ---------------------------------------------------------------------------------------------------------

    def subscribe_finished(self, listener: RolloutListener) -> Callable[[], object]:
        """Call ``listener(rollout)`` for each rollout that ends from now on; the returned function unsubscribes."""
        key = object()
        self._finished_listeners[key] = listener
        return lambda: self._finished_listeners.pop(key, None)

    # -- for a controller, which starts attempts itself ---------------------------------------------------------------

    def waiting(self, limit: int) -> list[Rollout]:
        """Up to ``limit`` unclaimed rollouts, in the order of the queue."""
        with self.collections.lock:
            return list(islice(self.collections.waiting(), max(0, limit)))

    def running(self) -> list[Rollout]:
        """The running rollouts. The cost is proportional to their number."""
        with self.collections.lock:
            rollouts = map(self.collections.rollout, self._running_rollout_ids)
            return [rollout for rollout in rollouts if rollout is not None and rollout.status in RUNNING]

    async def begin(self, rollout_id: str, *, worker_id: str) -> AttemptedRollout:
        """Start an attempt at a queued rollout, whatever its position in the queue."""
        with self.collections.lock:
            self.collections.unqueue(rollout_id)
            return await self.start_attempt(rollout_id, worker_id)

    async def enqueue_rollout(self, input: Any, *args: Any, **kwargs: Any) -> Rollout:
        """Like Agent Lightning's. Raises ``ConfigError`` for a task that cannot be sent to another process."""
        if self.served:
            check_sendable(input)
        return await super().enqueue_rollout(input, *args, **kwargs)

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        """Like Agent Lightning's. Raises ``ConfigError`` for a task that cannot be sent to another process."""
        if self.served:
            for task in {id(request.input): request.input for request in rollouts}.values():
                check_sendable(task)
        return await super().enqueue_many_rollouts(rollouts)

    async def enqueue_as(self, request: EnqueueRolloutRequest, *, rollout_id: str | None) -> Rollout:
        """Enqueue under ``rollout_id``, which must be new; ``None`` generates one."""
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
        """Mark rollouts as read: they are kept only within the retention window. Returns the number of newly released
        ones; unfinished and unknown rollouts are ignored."""
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
        """The subset of ``rollout_ids`` that is released or already forgotten."""
        with self.collections.lock:
            return {name for name in rollout_ids if name in self._released or self.collections.rollout(name) is None}

    def usage(self) -> StoreUsage:
        with self.collections.lock:
            return StoreUsage(
                queued=len(self.collections._rollout_queue._items),
                running=len(self._running_rollout_ids),
                stored=self.collections._rollouts._size,
                released=len(self._released),
                span_bytes=self._total_span_bytes,
                unreleased_bytes=self._total_span_bytes - self._released_bytes,
                backpressure=self._backpressure,
            )

    def _trim(self) -> None:
        """Forget released rollouts beyond the window, oldest first, and update the backpressure. Needs the lock."""
        most, most_bytes = self.retention.released_rollouts, self.retention.released_bytes
        while self._released and (len(self._released) > most or self._released_bytes > most_bytes):
            self._forget(self._released.popitem(last=False)[0])
        waiting, limit = self._total_span_bytes - self._released_bytes, self._unreleased_limit
        if waiting <= _WARN_AT * limit:
            self._warned = self._backpressure = False
            return
        if not self._warned:
            self._warned = True
            logger.warning(
                "%.0f MB of spans are unreleased; above %.0f MB no more rollouts are delivered: call "
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
        self._next_checks.pop(rollout_id, None)

    # -- workers ------------------------------------------------------------------------------------------------------

    async def fail_worker(
        self, worker_id: str, *, reason: str = "the process ended", gone: bool = False, cause: str = ""
    ) -> list[str]:
        """Fail a dead runner: its attempts end as ``unresponsive`` and their rollouts are queued again, up to two times
        per rollout even if it has no attempt left; every time if another rollout is the ``cause``, which is not
        forgiven. Returns the ids of these rollouts. ``gone``: the runner has ended for good and gets no more rollouts,
        since an earlier request of it may still be in flight. The cost is proportional to the rollouts in flight."""
        with self.collections.lock:
            if gone:
                self._ended_workers.add(worker_id)
            lost = []
            for rollout_id in list(self._running_rollout_ids):
                latest = self.collections.latest_attempt(rollout_id)
                if latest is not None and latest.worker_id == worker_id and latest.status in RUNNING:
                    lost.append(latest)
        for attempt in lost:
            if attempt.rollout_id != cause:
                await self._allow_retry(attempt, blameless=bool(cause))
            died = {**(attempt.metadata or {}), WORKER_DIED: reason}
            await self.update_attempt(attempt.rollout_id, attempt.attempt_id, status="unresponsive", metadata=died)
        if lost:
            logger.warning("Runner %s is dead (%s); others retry its %d rollouts.", worker_id, reason, len(lost))
        return [attempt.rollout_id for attempt in lost]

    async def _allow_retry(self, attempt: Attempt, *, blameless: bool) -> None:
        """Allow the rollout one more attempt if few of its runners have died, or another rollout was the cause."""
        with self.collections.lock:
            rollout = self.collections.rollout(attempt.rollout_id)
            attempts = self.collections.attempts_of(attempt.rollout_id).values()
            deaths = sum(WORKER_DIED in (each.metadata or {}) for each in attempts)
        if rollout is None or (deaths >= _RETRIED_DEATHS and not blameless):
            return
        config = rollout.config
        if config.max_attempts > attempt.sequence_id and "unresponsive" in config.retry_condition:
            return
        changes = {
            "max_attempts": max(config.max_attempts, attempt.sequence_id + 1),
            "retry_condition": [*dict.fromkeys([*config.retry_condition, "unresponsive"])],
        }
        await self.update_rollout(attempt.rollout_id, config=config.model_copy(update=changes))

    async def _fail_silent_workers(self, now: float) -> None:
        with self.collections.lock:
            silent = [
                (worker.worker_id, worker.last_heartbeat_time)
                for worker in list(self.collections._workers._items.values())
                if worker.last_heartbeat_time is not None
                and now - worker.last_heartbeat_time > self._dead_worker_seconds
                and self._last_heartbeats.get(worker.worker_id) != worker.last_heartbeat_time
            ]
        for worker_id, heartbeat in silent:
            self._last_heartbeats[worker_id] = heartbeat
            await self.fail_worker(worker_id, reason=f"no heartbeat for {now - heartbeat:.0f} s")

    # -- Agent Lightning's hooks --------------------------------------------------------------------------------------

    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        with self.collections.lock:  # checked and delivered atomically
            return await super().dequeue_rollout(worker_id) if self._delivers_to(worker_id) else None

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        with self.collections.lock:
            if not self._delivers_to(worker_id):
                return []
            return await super().dequeue_many_rollouts(limit=limit, worker_id=worker_id)

    def _delivers_to(self, worker_id: str | None) -> bool:
        return not self._backpressure and worker_id not in self._ended_workers

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
                    self._next_checks.pop(rollout.rollout_id, None)
                else:
                    self._next_checks[rollout.rollout_id] = next_check
        for rollout, updated in rollouts:
            if "status" in updated and rollout.status in FINISHED:
                for listener in list(self._finished_listeners.values()):
                    listener(rollout)

    async def _unlocked_get_latest_attempt(self, collections: Any, rollout_id: str) -> Attempt | None:
        return self.collections.latest_attempt(rollout_id)

    async def _unlocked_update_attempt_and_rollout(  # type: ignore[override]  # all fields come by name
        self, collections: Any, rollout_id: str, attempt_id: str, **fields: Any
    ) -> tuple[Attempt, RolloutUpdate | None, bool]:
        """Like Agent Lightning's, in a third of its time. Unlike it, an ended rollout stays ended, and invalid fields
        are refused before any change."""
        rollout, latest = self.collections.rollout(rollout_id), self.collections.latest_attempt(rollout_id)
        attempt = latest if attempt_id == "latest" else self.collections.attempts_of(rollout_id).get(attempt_id)
        if rollout is None or attempt is None:
            raise ValueError(f"Rollout {rollout_id} has no attempt {attempt_id}, or is unknown")
        changes = {name: value for name, value in fields.items() if not isinstance(value, Unset)}
        # the check costs more than all else: the usual change goes without it
        if changes.keys() != {"status"} or changes["status"] not in _ATTEMPT_STATUSES:
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
            update = self._mark_alive(rollout_id, attempt_id)
            if update is not None:
                await self._post_update_rollout([update])
            for span in spans:
                share_field_sets(span)
            size = sum(map(estimate_span_bytes, spans))
            self._span_bytes_by_rollout[rollout_id] += size
            self._total_span_bytes += size
            if rollout_id in self._released:  # a late span of an abandoned attempt
                self._released_bytes += size
            self._trim()

    def _mark_alive(self, rollout_id: str, attempt_id: str) -> RolloutUpdate | None:
        """Agent Lightning's ``_on_attempt_heartbeat`` in a tenth of its time: new spans are a sign of life of the
        attempt, and of its rollout if it is the latest. Returns the rollout if it had been queued again."""
        rollout = self.collections.rollout(rollout_id)
        attempt = self.collections.attempts_of(rollout_id).get(attempt_id)
        if rollout is None or attempt is None:
            return None
        attempt.last_heartbeat_time = time.time()
        if attempt.status in ("preparing", "unresponsive"):
            attempt.status = "running"
        previous_status, is_latest = rollout.status, attempt is self.collections.latest_attempt(rollout_id)
        if previous_status not in ("preparing", "requeuing") or not is_latest:
            return None
        rollout.status = "running"
        return (rollout, ["status"]) if previous_status == "requeuing" else None

    async def _maybe_evict_spans(self, collections: Any) -> None:
        """Does nothing: stock eviction drops unread spans. See ``_trim``."""

    async def _scan_for_unhealthy_rollouts(self) -> None:
        now = time.time()
        if self._scan_debounce_seconds <= 0 or now - self._last_scan_entrance_time >= self._scan_debounce_seconds:
            await super()._scan_for_unhealthy_rollouts()
        if self._dead_worker_seconds > 0 and now >= self._next_worker_check:
            self._next_worker_check = now + min(5.0, self._dead_worker_seconds / 4)
            await self._fail_silent_workers(now)

    async def _unlocked_get_running_rollouts(self, collections: Any) -> list[AttemptedRollout]:
        """The running rollouts for the watchdog: only ones with a limit that may have passed."""
        now = time.time()
        due = []
        for rollout_id in [rollout_id for rollout_id, time_s in self._next_checks.items() if time_s <= now]:
            del self._next_checks[rollout_id]
            rollout, attempt = self.collections.rollout(rollout_id), self.collections.latest_attempt(rollout_id)
            if rollout is None or rollout.status not in RUNNING or attempt is None:
                continue
            next_check = _next_check(rollout.config, attempt)
            if next_check is not None:
                # checked again soon: the watchdog's clock is read after this one
                self._next_checks[rollout_id] = max(next_check, now + 0.05)
            due.append(AttemptedRollout(**rollout.model_dump(), attempt=attempt))
        return due


def _next_check(config: RolloutConfig, attempt: Attempt) -> float | None:
    """The time at which the first of an attempt's limits passes (Unix time); ``None`` without limits."""
    times = []
    if config.timeout_seconds is not None:
        times.append(attempt.start_time + config.timeout_seconds)
    if config.unresponsive_seconds is not None:
        times.append((attempt.last_heartbeat_time or attempt.start_time) + config.unresponsive_seconds)
    return min(times) if times else None


def check_sendable(task: Any) -> None:
    """Raise ``ConfigError`` with place and value for a task that JSON cannot hold."""
    try:
        written = to_json(task, inf_nan_mode="constants")
        if b"NaN" not in written and b"Infinity" not in written:
            return
    except (PydanticSerializationError, RecursionError):
        pass
    if (problem := _unsendable(task, "task")) is not None:
        raise ConfigError(f"{problem} for runners in other processes: change it, or run with --runners inproc")


def _unsendable(value: Any, place: str) -> str | None:
    if isinstance(value, Mapping):
        inside = [(each, f"{place}[{key!r:.80}]") for key, each in value.items()]
        inside += [(key, f"a key of {place}") for key in value]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = [(each, f"{place}[{number}]") for number, each in enumerate(value)]
    elif isinstance(value, float) and not math.isfinite(value):
        return f"{place} is {value!r}, which JSON cannot hold"
    else:
        try:
            to_json(value)
        except PydanticSerializationError:
            return f"{place} is {value!r:.80} ({type(value).__name__}), which JSON cannot hold"
        return None
    try:
        return next(filter(None, (_unsendable(each, location) for each, location in inside)), None)
    except RecursionError:
        return f"{place} is nested too deep, which JSON cannot hold"
