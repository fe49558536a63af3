"""``GuardedAgent``: time limits, threads for sync agents, and a recorded reason for every failure.

Agent Lightning's step marks an attempt as succeeded when its agent was cancelled, cannot stop an agent that hangs, and
runs sync agents on the event loop. The guard takes the agent's place in the step: it turns each of these cases into an
exception with a reason, written as an ``agentlightning.exception`` span.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial, partialmethod
from typing import TYPE_CHECKING, Any

from agl_slime.agent.access import limits_of
from agl_slime.agent.agent import emit_named
from agl_slime.errors import RolloutError, RolloutTimeoutError
from agl_slime.runner.base import RunnerSettings
from agl_slime.store.recording import current_recording
from agl_slime.support.agl import LLM, LitAgent, NamedResources, Rollout, TraceStatus, emit_exception, get_active_tracer
from agl_slime.support.threads import ThreadPool
from agl_slime.support.watch import named_for
from agl_slime.tokens.attributes import FAILURE_REASON
from agl_slime.tokens.reward import reward_number

if TYPE_CHECKING:
    from agl_slime.gateway.server import Gateway

# Time of a cancelled agent to clean up before it is abandoned.
_CANCEL_GRACE_S = 2.0


class GuardedAgent:
    """Runs one agent's rollouts with time limits and error reporting; other attributes are the agent's (for hooks).

    A sync agent's calls are refused once twice ``max_sync_threads`` threads hang, abandoned at their time limits.
    ``gateway`` replaces the engine in the resources; ``alone``: rollouts run one at a time, and variables name it, too.
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
        self._cancelled_early: set[str] = set()  # cancelled before their agents have started
        self._start_lock = asyncio.Lock()
        self.threads = ThreadPool(name="agl-slime-agent", max_running=max_threads, max_abandoned=2 * max_threads)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def is_async(self) -> bool:
        return True

    def cancel_all(self) -> None:
        """Cancel every running agent; the attempts fail with the reason ``cancelled``."""
        for rollout_id in self._running:
            self.cancel(rollout_id)

    def cancel(self, rollout_id: str) -> None:
        """Cancel the rollout's agent. If its agent has not started, it is prevented from starting."""
        cancel = self._running.get(rollout_id)
        if cancel is None:
            self._cancelled_early.add(rollout_id)
        elif not cancel.done():
            cancel.set_result(None)

    def drop_cancellations(self, *, claimed: Callable[[], set[str]]) -> None:
        """Forget cancelled rollouts that this runner has no longer claimed. Free of cost when there are none."""
        if self._cancelled_early:
            self._cancelled_early &= claimed()

    async def _run(self, method: str, task: Any, resources: NamedResources, rollout: Rollout) -> Any:
        try:
            if rollout.rollout_id in self._cancelled_early:
                raise RolloutError("The rollout was cancelled before its agent had begun.", reason="cancelled")
            async with self._with_gateway(resources, rollout) as resources:
                agent, args = self._agent, (task, resources, rollout)
                if agent.is_async():
                    call = partial(getattr(agent, f"{method}_async"), *args)
                else:
                    call = partial(self.threads.run, getattr(agent, method), *args)
                result = read_result(await self._with_time_limit(call, rollout))
        except Exception as error:
            reason = error.reason if isinstance(error, RolloutError) else type(error).__name__
            emit_exception(error, {FAILURE_REASON: reason})
            raise
        return result

    training_rollout_async = partialmethod(_run, "training_rollout")
    validation_rollout_async = partialmethod(_run, "validation_rollout")

    @asynccontextmanager
    async def _with_gateway(self, resources: NamedResources, rollout: Rollout) -> AsyncIterator[NamedResources]:
        """The resources with an address of the gateway for this attempt, which is closed on exit. Raises the
        ``failure`` that the gateway has noted, even if the agent has gone on."""
        recording, tracer, context = current_recording.get(), get_active_tracer(), contextvars.copy_context()
        if self._gateway is None or recording is None or tracer is None:
            yield resources
            return

        def write(name: str, attributes: dict[str, Any], started: float) -> None:
            context.run(tracer.create_span, name, attributes, started, TraceStatus(status_code="OK"))

        names = recording.rollout_id, recording.attempt_id
        attempt, served = self._gateway.open(*names, resources, write, limits=limits_of(rollout))
        try:
            with environment(served) if self._alone and attempt is not None else nullcontext():
                yield served
        except Exception as error:
            if attempt is None or attempt.failure is None or isinstance(error, RolloutError):
                raise
        finally:
            if attempt is not None:
                await self._gateway.close(attempt)
        if attempt is not None and attempt.failure is not None:
            raise attempt.failure

    async def _with_time_limit(self, call: Callable[[], Coroutine[Any, Any, Any]], rollout: Rollout) -> Any:
        limit = rollout.config.timeout_seconds or self._settings.timeout_s or math.inf
        cancel = asyncio.get_running_loop().create_future()
        self._running[rollout.rollout_id] = cancel
        inner = asyncio.ensure_future(call() if self._gateway is None else self._start_in_turn(call))
        try:
            await self._wait(inner, cancel, limit, rollout)
            if not inner.done():
                late = not cancel.done()
                inner.cancel()
                await asyncio.wait({inner}, timeout=_CANCEL_GRACE_S)
                if late:
                    end = "was cancelled" if inner.done() else "ignored its cancellation; it was abandoned"
                    raise RolloutTimeoutError(f"The agent ran past its limit of {limit:g} s and {end}.")
            if not inner.done() or inner.cancelled():
                end = "" if inner.done() else "; its agent was abandoned"
                raise RolloutError(f"The rollout was cancelled{end}.", reason="cancelled")
            return inner.result()
        except asyncio.CancelledError:
            inner.cancel()
            raise
        finally:
            if self._running.get(rollout.rollout_id) is cancel:
                del self._running[rollout.rollout_id]

    async def _start_in_turn(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run the agent, whose first step may be long (it makes a client), after the earlier ones: many such steps in a
        row would block the loop for longer than connections may take."""
        async with self._start_lock:
            await asyncio.sleep(0)  # others of the loop run between two starts
        return await call()

    async def _wait(
        self, inner: asyncio.Future[Any], cancel: asyncio.Future[None], limit_s: float, rollout: Rollout
    ) -> None:
        """Wait for the agent's end, its cancellation or the time limit, and write its spans meanwhile."""
        # the store ends an attempt without new spans after unresponsive_seconds
        flush_s = min(self._settings.flush_interval_s, (rollout.config.unresponsive_seconds or math.inf) / 3)
        recording, writing = current_recording.get(), None
        ends = time.monotonic() + limit_s
        while (left_s := ends - time.monotonic()) > 0:
            pause_s = min(left_s, flush_s)
            done, _ = await asyncio.wait({inner, cancel}, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            if recording is not None and (writing is None or writing.done()):
                writing = asyncio.ensure_future(recording.write_early())  # not awaited: the store may be unreachable


@contextmanager
def environment(resources: NamedResources) -> Iterator[None]:
    """The model's address and key in the variables that OpenAI's and Anthropic's clients read, restored on exit."""
    llm = next(llm for llm in resources.values() if isinstance(llm, LLM))
    root = llm.endpoint.removesuffix("/v1")
    variables = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), llm.endpoint) | {"ANTHROPIC_BASE_URL": root}
    variables |= dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), llm.api_key or "")
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def read_result(result: Any) -> Any:
    """An agent's ``result`` as Agent Lightning takes it: a number as a float, ``None`` or a list of spans; rewards by
    name are emitted. Raises ``RewardError``."""
    if result is None or (isinstance(result, list) and all(hasattr(span, "attributes") for span in result)):
        return result
    if isinstance(result, Mapping):
        return emit_named(result, source="The agent", attributes={})
    return reward_number(result, "The agent returned")


# -- tasks that agents start -----------------------------------------------------------------------------------------


async def _contained(work: Coroutine[Any, Any, Any]) -> Any:
    """Run ``work`` with its ``SystemExit`` and ``KeyboardInterrupt`` as ``RolloutError``: asyncio passes those two to
    the caller of the loop, which would end all rollouts."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise RolloutError(f"The agent raised {error!r}.", reason=type(error).__name__) from error


def contain_tasks(loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Keep tasks that belong to a rollout from ending this loop; the returned function undoes it."""
    previous = loop.get_task_factory()

    def make_task(loop: asyncio.AbstractEventLoop, work: Any, **kwargs: Any) -> Any:
        recording = current_recording.get()
        contain = recording is not None and isinstance(work, Coroutine)
        wrapped = named_for(_contained, recording.rollout_id)(work) if recording is not None and contain else work
        task = asyncio.Task(wrapped, loop=loop, **kwargs) if previous is None else previous(loop, wrapped, **kwargs)
        if contain:
            task.add_done_callback(lambda _: work.close())  # no "never awaited" warning if cancelled before its start
        return task

    loop.set_task_factory(make_task)
    return lambda: loop.set_task_factory(previous)
