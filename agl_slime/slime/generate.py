"""One Agent Lightning rollout for one slime prompt: what ``agl_slime.slime_hooks.generate`` does.

A thread of this process, started with the first rollout, keeps the connection to the store; slime's event loop only
waits. slime does not say when it has no more prompts, so the thread, and the runner where the agent is in this process,
live as long as the process, or until ``stop_rollouts``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from agl_slime.datasource.read import collect
from agl_slime.errors import ConfigError, DataSourceError, RolloutError
from agl_slime.groups.results import MemberResult
from agl_slime.slime.args import PluginSettings
from agl_slime.slime.connection import Connection
from agl_slime.store.client import RemoteStore
from agl_slime.store.feed import FeedPosition
from agl_slime.types import Sample, set_rollout_id

logger = logging.getLogger(__name__)

# What a finished rollout says about a sample; the rest (index, group_index, prompt, label, session …) stays slime's.
_FROM_ROLLOUT = (
    "tokens",
    "response",
    "response_length",
    "loss_mask",
    "rollout_log_probs",
    "reward",
    "status",
    "weight_versions",
    "prefix_cache_info",
)

_STOPPED = DataSourceError("the rollouts of this process were stopped")


async def run_rollout(
    args: Any, sample: Sample, sampling_params: Mapping[str, Any], *, evaluation: bool
) -> Sample | list[Sample]:
    """See ``agl_slime.slime_hooks.generate``."""
    task = {**(sample.metadata or {}), "prompt": sample.prompt, "label": sample.label}
    future = _rollouts_for(args).run(task, sampling_params, mode="val" if evaluation else "train")
    member = await asyncio.wrap_future(future)
    if not member.ok:
        raise RolloutError(
            f"rollout {member.rollout_id} failed: {member.failure_message or member.failure}", reason=member.failure
        )
    completed = [_completed(sample, own) for own in member.samples]
    if len(completed) == 1:
        return completed[0]
    for sibling in completed:
        set_rollout_id(sibling, sample.index)
    return completed


def _completed(sample: Sample, own: Sample) -> Sample:
    result = Sample.from_dict(sample.to_dict())
    for name in _FROM_ROLLOUT:
        if hasattr(own, name):
            setattr(result, name, getattr(own, name))
    result.metadata = {**(sample.metadata or {}), **own.metadata}
    return result


class SingleRollouts:
    """Runs rollouts and hands each result to whoever asked for it, from any thread, until ``stop``."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._tokenizer = connection.tokenizer()
        self._loop = asyncio.new_event_loop()
        self._waiting: dict[str, Future[MemberResult]] = {}
        self._resources: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._main, name="agl-slime-rollouts", daemon=True)
        connection.start()
        self._thread.start()

    def stop(self) -> None:
        """End the runner of this process and the thread; whoever still waits for a rollout gets ``DataSourceError``.
        Safe to call twice."""
        self._connection.stop()
        if self._thread.is_alive():
            self._on_loop(self._loop.stop)
            self._thread.join()

    def run(self, task: dict[str, Any], sampling_params: Mapping[str, Any], *, mode: str) -> Future[MemberResult]:
        """Enqueue one rollout; the future has its result, succeeded or failed."""
        result: Future[MemberResult] = Future()
        if not self._on_loop(lambda: self._start(self._enqueue(task, dict(sampling_params), mode, result), result)):
            self._refuse(result, _STOPPED)
        return result

    def _on_loop(self, callback: Callable[[], Any]) -> bool:
        """Have the thread's loop call this; ``False`` when it has ended."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return False
        return True

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._start(self._follow(), None)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._end())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _end(self) -> None:
        self._unsubscribe()
        self._failure = _STOPPED
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            self._refuse(future, _STOPPED)
        if isinstance(self._connection.store, RemoteStore):
            await self._connection.store.close()

    def _start(self, work: Any, result: Future[MemberResult] | None) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, result))

    def _ended(self, task: asyncio.Task[None], result: Future[MemberResult] | None) -> None:
        self._tasks.discard(task)
        error = _STOPPED if task.cancelled() else task.exception()
        if error is None:
            return
        if result is not None:
            self._refuse(result, error)
            return
        self._failure = error
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            self._refuse(future, error)

    @staticmethod
    def _refuse(future: Future[MemberResult], error: BaseException) -> None:
        if not future.done():
            future.set_exception(DataSourceError(f"the rollout's end cannot be learned: {error}"))

    async def _enqueue(
        self, task: dict[str, Any], sampling: dict[str, Any], mode: str, result: Future[MemberResult]
    ) -> None:
        if self._failure is not None:
            raise self._failure
        key = json.dumps(sampling, sort_keys=True, default=str)
        if key not in self._resources:
            self._resources[key] = await self._connection.publish(sampling)
        request = self._connection.request(
            task, group_id=uuid.uuid4().hex, size=1, mode=mode, resources_id=self._resources[key]
        )
        [rollout] = await self._connection.store.enqueue_many_rollouts([request])
        self._waiting[rollout.rollout_id] = result
        self._connection.wake_runner()
        await self._look(rollout.rollout_id)  # it may have ended before it was waited for

    async def _follow(self) -> None:
        store: Any = self._connection.store
        subscribe = getattr(store, "subscribe_finished", None)
        if subscribe is not None:
            self._unsubscribe = subscribe(
                lambda rollout: self._on_loop(lambda: self._start(self._look(rollout.rollout_id), None))
            )
            return
        position = FeedPosition()
        async for page in store.follow_finished(position):
            position.instance_id, position.after = page["instance_id"], page["last"]
            for rollout_id in page["rollout_ids"] if not page["missed"] else list(self._waiting):
                await self._look(rollout_id)

    async def _look(self, rollout_id: str) -> None:
        if rollout_id not in self._waiting:
            return
        member = await collect(self._connection.store, rollout_id, tokenizer=self._tokenizer, convert_validation=True)
        future = self._waiting.pop(rollout_id, None) if member is not None else None
        if future is not None and member is not None and not future.done():
            future.set_result(member)


_rollouts: list[tuple[PluginSettings, SingleRollouts]] = []
_lock = threading.Lock()


def _rollouts_for(args: Any) -> SingleRollouts:
    settings = PluginSettings.from_args(args)
    if not settings.connected:
        raise ConfigError(
            "there is no agent to run: set agl_store_url (AGL_SLIME_STORE_URL) or agl_agent (AGL_SLIME_AGENT)"
        )
    with _lock:
        found = next((rollouts for known, rollouts in _rollouts if known == settings), None)
        if found is None:
            found = SingleRollouts(Connection(settings))
            _rollouts.append((settings, found))
        return found


def stop_rollouts() -> None:
    """End the runners and threads that rollouts of this process have started; the next rollout starts anew."""
    with _lock:
        stopped = [rollouts for _, rollouts in _rollouts]
        _rollouts.clear()
    for rollouts in stopped:
        rollouts.stop()
