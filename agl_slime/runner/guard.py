"""What stands between the runner's step and the user's agent: time limits, threads for sync agents, and a recorded
reason for every failure.

Agent Lightning's step marks an attempt as succeeded when the agent was cancelled, cannot stop an agent that hangs, and
runs sync agents on the event loop. The guard is the ``agent`` that the step sees: it turns each of those into an
ordinary exception with a reason, written as an ``agentlightning.exception`` span, so that whoever reads the attempt
knows why.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from agl_slime.errors import RewardError, RolloutError, RolloutTimeoutError
from agl_slime.rollout.outcome import check_reward
from agl_slime.runner.base import RunnerSettings
from agl_slime.store.recording import current_recording
from agl_slime.support.agl import (
    LLM,
    LitAgent,
    NamedResources,
    Rollout,
    TraceStatus,
    emit_exception,
    get_active_tracer,
)
from agl_slime.support.threads import ThreadPool
from agl_slime.support.watch import named
from agl_slime.trace.attributes import FAILURE_REASON

if TYPE_CHECKING:
    from agl_slime.gateway.server import Gateway

# How long a cancelled agent may take to clean up before it is abandoned.
_CANCEL_GRACE_S = 2.0
# An agent that blocks the loop for longer when it begins is not begun with others at once.
_LONG_STEP_S = 0.005


class GuardedAgent:
    """Runs one agent's rollouts under guard; everything else is the agent's own (hooks see it as the agent).

    Of a sync agent's threads twice as many as may run at once may hang, abandoned at their rollouts' time limits,
    before further calls are refused. ``gateway`` is what agents find in the place of the engine; ``alone``: no two
    rollouts run at once, so the environment may name the gateway as well.
    """

    def __init__(
        self, *, agent: LitAgent[Any], settings: RunnerSettings, gateway: Gateway | None = None, alone: bool = False
    ) -> None:
        self._agent = agent
        self._settings = settings
        self._gateway = gateway
        self._alone = alone
        max_threads = settings.max_sync_threads
        self._running: dict[str, asyncio.Future[None]] = {}  # resolved to cancel the agent
        self._refused: set[str] = set()
        self._beginning = asyncio.Lock()
        self._first_step_s = math.inf  # of the last agent that was measured
        self.threads = ThreadPool(name="agl-slime-agent", max_running=max_threads, max_abandoned=2 * max_threads)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def is_async(self) -> bool:
        return True

    async def training_rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> Any:
        return await self._run("training_rollout", task, resources, rollout)

    async def validation_rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> Any:
        return await self._run("validation_rollout", task, resources, rollout)

    def cancel_all(self) -> None:
        """Cancel every agent that is running; each attempt then fails with the reason ``cancelled``."""
        for rollout_id in self._running:
            self.cancel(rollout_id)

    def cancel(self, rollout_id: str) -> None:
        """Cancel the agent that runs this rollout. One that is about to begin with it will not, until
        ``forget_refusals`` says that nobody is."""
        told = self._running.get(rollout_id)
        if told is None:
            self._refused.add(rollout_id)
        elif not told.done():
            told.set_result(None)

    def forget_refusals(self, *, claimed: Callable[[], set[str]]) -> None:
        """Drop cancellations of rollouts that this runner no longer holds (``claimed``). Costs nothing when there are
        none."""
        if self._refused:
            self._refused &= claimed()

    async def _run(self, method: str, task: Any, resources: NamedResources, rollout: Rollout) -> Any:
        try:
            if rollout.rollout_id in self._refused:
                raise RolloutError("The rollout was cancelled before its agent had begun.", reason="cancelled")
            async with self._served(resources) as resources:
                agent, told = self._agent, (task, resources, rollout)
                if agent.is_async():
                    work = getattr(agent, f"{method}_async")(*told)
                else:
                    work = self.threads.run(getattr(agent, method), *told)
                result = await self._with_time_limit(work, rollout)
            check_result(result)
        except Exception as error:
            reason = error.reason if isinstance(error, RolloutError) else type(error).__name__
            emit_exception(error, {FAILURE_REASON: reason})
            raise
        return result

    @asynccontextmanager
    async def _served(self, resources: NamedResources) -> AsyncIterator[NamedResources]:
        """The resources with the gateway's address in them, which is good as long as this lasts."""
        recording, tracer, context = current_recording.get(), get_active_tracer(), contextvars.copy_context()
        if self._gateway is None or recording is None or tracer is None:
            yield resources
            return

        def write(name: str, attributes: dict[str, Any], started: float) -> None:
            context.run(tracer.create_span, name, attributes, started, TraceStatus(status_code="OK"))

        attempt, served = self._gateway.open(recording.rollout_id, recording.attempt_id, resources, write)
        try:
            with environment(served) if self._alone and attempt is not None else nullcontext():
                yield served
        finally:
            if attempt is not None:
                await self._gateway.close(attempt)

    async def _with_time_limit(self, work: Coroutine[Any, Any, Any], rollout: Rollout) -> Any:
        limit = rollout.config.timeout_seconds or self._settings.timeout_s or math.inf
        told = asyncio.get_running_loop().create_future()
        self._running[rollout.rollout_id] = told
        inner = await self._begun(work)
        try:
            await self._first_of(inner, told, limit, rollout)
            if not inner.done():
                late = not told.done()
                inner.cancel()
                await asyncio.wait({inner}, timeout=_CANCEL_GRACE_S)
                if late:
                    how = "was cancelled" if inner.done() else "ignored its cancellation; it was abandoned"
                    raise RolloutTimeoutError(f"The agent ran past its limit of {limit:g} s and {how}.")
            if not inner.done() or inner.cancelled():
                how = "" if inner.done() else "; its agent was abandoned"
                raise RolloutError(f"The rollout was cancelled{how}.", reason="cancelled")
            return inner.result()
        except asyncio.CancelledError:
            inner.cancel()
            raise
        finally:
            if self._running.get(rollout.rollout_id) is told:
                del self._running[rollout.rollout_id]

    async def _begun(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """The agent's task. Where the first step of such an agent takes long, as making a client does, they begin one
        after the other: those that have begun could not connect in time while many block the loop together."""
        if self._gateway is None or self._first_step_s < _LONG_STEP_S:
            return asyncio.ensure_future(work)
        try:
            await self._beginning.acquire()
        except asyncio.CancelledError:
            work.close()
            raise
        try:
            loop = asyncio.get_running_loop()
            before, after = loop.create_future(), loop.create_future()
            loop.call_soon(lambda: before.set_result(time.perf_counter()))
            inner = asyncio.ensure_future(work)
            loop.call_soon(lambda: after.cancelled() or after.set_result(time.perf_counter()))
            self._first_step_s = await after - before.result()
            return inner
        finally:
            self._beginning.release()

    async def _first_of(
        self, inner: asyncio.Future[Any], told: asyncio.Future[None], limit_s: float, rollout: Rollout
    ) -> None:
        """Wait for the agent's end, its cancellation or the time limit, and write its spans meanwhile."""
        # an attempt without new spans is dead to the store after unresponsive_seconds: show life well within them
        flush_s = min(self._settings.flush_interval_s, (rollout.config.unresponsive_seconds or math.inf) / 3)
        recording, writing = current_recording.get(), None
        ends = time.monotonic() + limit_s
        while (left_s := ends - time.monotonic()) > 0:
            pause_s = min(left_s, flush_s)
            done, _ = await asyncio.wait({inner, told}, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            if recording is not None and (writing is None or writing.done()):
                writing = asyncio.ensure_future(recording.write_early())  # not awaited: the store may be away


@contextmanager
def environment(resources: NamedResources) -> Iterator[None]:
    """The model's address and key in the variables that clients read which are given neither; as it was afterwards."""
    llm = next(llm for llm in resources.values() if isinstance(llm, LLM))
    root = llm.endpoint.removesuffix("/v1")
    told = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), llm.endpoint) | {"ANTHROPIC_BASE_URL": root}
    told |= dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), llm.api_key or "")
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def check_result(result: Any) -> None:
    """What an agent may return: ``None``, a finite number (the reward) or a list of spans. Anything else is not a
    reward and is not made into one."""
    if result is None or isinstance(result, list):
        return
    if not isinstance(result, (int, float)):
        raise RewardError(f"The agent returned {result!r}; expected a number (the reward), None or a list of spans.")
    check_reward(result, source="The agent")


# -- tasks that agents start -----------------------------------------------------------------------------------------


async def _contained(work: Coroutine[Any, Any, Any]) -> Any:
    """``work``, whose ``SystemExit`` and ``KeyboardInterrupt`` are its own end: asyncio lets those two through to
    whoever runs the loop, which would be the end of all rollouts."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise RolloutError(f"The agent raised {error!r}.", reason=type(error).__name__) from error


def contain_tasks(loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """From now on tasks of this loop that belong to a rollout cannot end the loop; the returned function ends that."""
    before = loop.get_task_factory()

    def make_task(loop: asyncio.AbstractEventLoop, work: Any, **kwargs: Any) -> Any:
        recording = current_recording.get()
        inside = recording is not None and isinstance(work, Coroutine)
        begun = named(_contained, recording.rollout_id)(work) if recording is not None and inside else work
        task = asyncio.Task(begun, loop=loop, **kwargs) if before is None else before(loop, begun, **kwargs)
        if inside:
            task.add_done_callback(lambda _: work.close())  # else one that is cancelled before it begins warns
        return task

    loop.set_task_factory(make_task)
    return lambda: loop.set_task_factory(before)
