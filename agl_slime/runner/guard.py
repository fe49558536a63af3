"""What stands between the runner's step and the user's agent: time limits, threads for sync agents, and a recorded
reason for every failure.

Agent Lightning's step marks an attempt as succeeded when the agent was cancelled, cannot stop an agent that hangs, and
runs sync agents on the event loop. The guard is the ``agent`` that the step sees: it turns each of those into an
ordinary exception with a reason, written as an ``agentlightning.exception`` span, so that whoever reads the attempt
knows why.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from agl_slime.errors import RewardError, RolloutError, RolloutTimeoutError
from agl_slime.runner.recording import current_recording
from agl_slime.runner.sync_threads import SyncThreads
from agl_slime.support.agl import LitAgent, NamedResources, Rollout, emit_exception

# Attribute of the exception span that names why the attempt failed, as one stable word for counting.
FAILURE_REASON = "agl_slime.failure.reason"

# How long a cancelled agent may take to clean up before it is abandoned.
_CANCEL_GRACE_S = 2.0


class _Run:
    """One agent at work. ``cancel`` cancels it, and lets whoever waits go on when it does not end within the grace
    period."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self.inner = asyncio.ensure_future(work)
        self.given_up: asyncio.Future[None] = self._loop.create_future()
        self._cancelled = False

    def cancel(self) -> None:
        if self._cancelled:  # told of it twice: a second one would interrupt the agent's cleaning up
            return
        self._cancelled = True
        self.inner.cancel()
        self._loop.call_later(_CANCEL_GRACE_S, self._give_up)

    def _give_up(self) -> None:
        if not self.given_up.done():
            self.given_up.set_result(None)


class GuardedAgent:
    """Runs one agent's rollouts under guard; everything else is the agent's own (hooks see it as the agent)."""

    def __init__(
        self, *, agent: LitAgent[Any], default_timeout_s: float | None = None, flush_interval_s: float | None = None
    ) -> None:
        self._agent = agent
        self._default_timeout_s = default_timeout_s
        self._flush_interval_s = flush_interval_s
        self._running: dict[str, _Run] = {}
        self._refused: set[str] = set()
        self.sync_threads = SyncThreads()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def is_async(self) -> bool:
        return True

    async def training_rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> Any:
        agent = self._agent
        return await self._run(agent.training_rollout_async, agent.training_rollout, task, resources, rollout)

    async def validation_rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> Any:
        agent = self._agent
        return await self._run(agent.validation_rollout_async, agent.validation_rollout, task, resources, rollout)

    def cancel_all(self) -> int:
        """Cancel every agent that is running; each attempt then fails with the reason ``cancelled``. Returns how many."""
        for run in self._running.values():
            run.cancel()
        return len(self._running)

    def cancel(self, rollout_id: str) -> bool:
        """Cancel the agent that runs this rollout; ``False`` when none does. One that is about to begin with it will
        not, until ``forget_refusals`` says that nobody is."""
        run = self._running.get(rollout_id)
        if run is not None:
            run.cancel()
        else:
            self._refused.add(rollout_id)
        return run is not None

    def forget_refusals(self, *, claimed: Callable[[], set[str]]) -> None:
        """Of what was cancelled and had no agent, only what is among the ``claimed`` can still get one. Costs nothing
        when there is none."""
        if self._refused:
            self._refused &= claimed()

    async def _run(
        self,
        method: Callable[..., Coroutine[Any, Any, Any]],
        sync_method: Callable[..., Any],
        task: Any,
        resources: NamedResources,
        rollout: Rollout,
    ) -> Any:
        work: Coroutine[Any, Any, Any]
        if (recording := current_recording.get()) is not None:
            recording.flush_after_s = self._flush_after_s(rollout)
        try:
            if rollout.rollout_id in self._refused:
                raise RolloutError("The rollout was cancelled before its agent had begun.", reason="cancelled")
            if self._agent.is_async():
                work = method(task, resources, rollout)
            else:
                work = self.sync_threads.run(
                    f"agl-slime-agent-{rollout.rollout_id}", sync_method, task, resources, rollout
                )
            result = await self._with_time_limit(_contained(work), rollout)
            check_result(result)
        except Exception as error:
            emit_exception(error, {FAILURE_REASON: failure_reason(error)})
            raise
        return result

    def _flush_after_s(self, rollout: Rollout) -> float | None:
        # the store takes an attempt without new spans for dead after unresponsive_seconds: show life well within them
        silence = rollout.config.unresponsive_seconds
        limits = [
            limit
            for limit in (self._flush_interval_s, silence / 3 if silence is not None else None)
            if limit is not None
        ]
        return min(limits) if limits else None

    async def _with_time_limit(self, work: Coroutine[Any, Any, Any], rollout: Rollout) -> Any:
        limit = rollout.config.timeout_seconds or self._default_timeout_s
        run = _Run(work)
        inner = run.inner
        self._running[rollout.rollout_id] = run
        try:
            await asyncio.wait({inner, run.given_up}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not inner.done() and not run.given_up.done():
                inner.cancel()
                await asyncio.wait({inner}, timeout=_CANCEL_GRACE_S)
                how = "was cancelled" if inner.done() else "ignored its cancellation; it was abandoned"
                raise RolloutTimeoutError(f"The agent ran past its limit of {limit:g} s and {how}.")
            if not inner.done():
                raise RolloutError(
                    "The rollout was cancelled; its agent ignored that and was abandoned.", reason="cancelled"
                )
            if inner.cancelled():
                raise RolloutError("The rollout was cancelled.", reason="cancelled")
            return inner.result()
        except asyncio.CancelledError:
            inner.cancel()
            raise
        finally:
            if self._running.get(rollout.rollout_id) is run:
                del self._running[rollout.rollout_id]


async def _contained(work: Coroutine[Any, Any, Any]) -> Any:
    """``work``, whose ``sys.exit()`` is its own end and not the runner's: asyncio lets ``SystemExit`` through to
    whoever runs the loop."""
    try:
        return await work
    except SystemExit as error:
        raise RolloutError(f"The agent called sys.exit({error.code!r}).", reason="SystemExit") from error


def failure_reason(error: BaseException) -> str:
    """One stable word for why an attempt failed: the error's own ``reason``, else the name of its class."""
    return error.reason if isinstance(error, RolloutError) else type(error).__name__


def check_result(result: Any) -> None:
    """What an agent may return: ``None``, a finite number (the reward) or a list of spans. Anything else is not a
    reward and is not made into one."""
    if result is None or isinstance(result, list):
        return
    if not isinstance(result, (int, float)):
        raise RewardError(f"The agent returned {result!r}; expected a number (the reward), None or a list of spans.")
    if not math.isfinite(result):
        raise RewardError(f"The agent returned the reward {result!r}; a reward must be a finite number.")


__all__ = ["FAILURE_REASON", "GuardedAgent", "check_result", "failure_reason"]
