"""Enqueueing of rollouts: requests for groups of tasks, and ``run_rollouts``, which yields results as they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

if TYPE_CHECKING:  # Agent Lightning takes seconds to import; --help should not
    from agl_slime.data.results import GroupResult, MemberResult, OnEnd
    from agl_slime.data.source import GroupSource
    from agl_slime.support.agl import EnqueueRolloutRequest, Rollout

Task = dict[str, Any] | str

_HEALTH_CHECK_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """A drawn task with the id of its group of rollouts; ``instance_id`` is its number in drawing order, from 0."""

    group_id: str
    task: Task
    instance_id: str | None = None


Enqueue = Callable[[Sequence[TaskGroup]], "Awaitable[Sequence[Rollout]]"]
"""Enqueues the rollouts of groups in the store, and returns them."""


class HealthCheck:
    """Calls ``raise_if_dead`` about once a second while something is awaited: not only in idle seconds, as rollouts of
    a dead engine keep failing for a while."""

    def __init__(self, raise_if_dead: Callable[[], None]) -> None:
        self._raise_if_dead = raise_if_dead
        self._last = float("-inf")

    async def wait(self, work: Awaitable[Any]) -> Any:
        """The result of ``work``, which is cancelled when a dependency dies meanwhile."""
        future = asyncio.ensure_future(work)
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # marks errors as retrieved
        try:
            while True:
                if (now := time.monotonic()) - self._last >= _HEALTH_CHECK_INTERVAL_S:
                    self._last = now
                    self._raise_if_dead()
                done, _ = await asyncio.wait({future}, timeout=_HEALTH_CHECK_INTERVAL_S)
                if done:
                    return future.result()
        finally:
            future.cancel()


async def enqueue_groups(
    source: GroupSource,
    groups: Sequence[TaskGroup],
    enqueue: Enqueue,
    *,
    size: int,
    mode: Literal["train", "val"],
    on_end: OnEnd | None = None,
) -> None:
    """Enqueue groups of ``size`` rollouts whose ends ``source`` expects; for ``on_end`` see ``GroupSource.expect``."""
    for group in groups:  # before enqueueing: a rollout may end before that call returns
        source.expect(group.group_id, size=size, mode=mode, on_end=on_end)
    source.opened(await source.follower.with_retries(lambda: enqueue(groups)))


async def run_rollouts(
    source: GroupSource,
    groups: Iterable[TaskGroup],
    enqueue: Enqueue,
    *,
    health: HealthCheck,
    max_in_flight: int | None = None,
    cancel_reason: str = "aborted",
) -> AsyncIterator[MemberResult]:
    """The results of one rollout per group, in the order in which they end. None is trained on. ``enqueue`` runs on the
    source's thread, and again for rollouts that a restarted store has lost. When the iteration ends early, unfinished
    rollouts are cancelled for ``cancel_reason``, in the ledger and in the store."""
    loop, remaining = asyncio.get_running_loop(), iter(groups)
    ends: asyncio.Queue[tuple[str, GroupResult | None]] = asyncio.Queue()
    in_flight: dict[str, TaskGroup] = {}

    def on_end(group_id: str, result: GroupResult | None) -> None:
        with suppress(RuntimeError):  # a late result, after the end of the loop
            loop.call_soon_threadsafe(ends.put_nowait, (group_id, result))

    async def start(some: list[TaskGroup]) -> None:
        source.raise_if_dead()
        # to its end, whatever becomes of the caller: the ledger has to see every rollout that is in the store
        work = enqueue_groups(source, some, enqueue, size=1, mode="val", on_end=on_end)
        try:
            await health.wait(asyncio.shield(source.follower.run(work)))
        except asyncio.CancelledError:
            source.raise_if_dead()  # it has ended, and cancelled the work
            raise

    try:
        while True:
            if ends.empty() or not in_flight:
                new = list(islice(remaining, None if max_in_flight is None else max_in_flight - len(in_flight)))
                in_flight.update((group.group_id, group) for group in new)
                if new:
                    await start(new)
            if not in_flight:
                return
            group_id, result = await health.wait(ends.get())
            if result is None and group_id in in_flight:
                await start([in_flight[group_id]])
            elif result is not None and in_flight.pop(group_id, None) is not None:
                yield result.members[0]
    finally:
        source.cancel(in_flight, reason=cancel_reason)


def enqueue_requests(
    groups: Iterable[TaskGroup],
    *,
    size: int,
    mode: Literal["train", "val"],
    resources_id: str | None,
    timeout_s: float,
    max_attempts: int = 1,
    seed: int = 0,
    **metadata: Any,
) -> list[EnqueueRolloutRequest]:
    """Requests for ``size`` rollouts per group; ``metadata`` joins the group's id, size and instance, the task's
    ``source_name``, which chooses teachers and is a key of metrics, and the seed of the member's sampling: the run's
    ``seed``, the mode, the task's number and the member's."""
    from agl_slime.support.agl import EnqueueRolloutRequest, RolloutConfig

    config = RolloutConfig(
        timeout_seconds=timeout_s,
        max_attempts=max_attempts,
        retry_condition=["failed", "timeout", "unresponsive"] if max_attempts > 1 else [],
    )
    return [
        EnqueueRolloutRequest(
            input=group.task,
            mode=mode,
            resources_id=resources_id,
            config=config,
            metadata={"group_id": group.group_id, "group_size": size, **metadata}
            | {"seed": f"{seed}/{mode}/{group.instance_id or group.group_id.rpartition('-')[2]}/{member}"}
            | ({} if group.instance_id is None else {"instance_id": group.instance_id})
            | ({"source_name": group.task["source_name"]} if _has_source(group.task) else {}),
        )
        for group in groups
        for member in range(size)
    ]


def _has_source(task: Task) -> TypeGuard[dict[str, Any]]:
    return isinstance(task, dict) and isinstance(task.get("source_name"), str)
