"""What stands between the runner's step and the user's agent: time limits, threads for sync agents, and a recorded reason for every failure.

Agent Lightning's step marks an attempt as succeeded when the agent was cancelled, cannot stop an agent that hangs, and runs sync agents on the event
loop. The guard is the ``agent`` that the step sees: it turns each of those into an ordinary exception with a reason, written as an
``agentlightning.exception`` span, so that whoever reads the attempt knows why.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from agl_slime._agl import LitAgent, NamedResources, Rollout, emit_exception
from agl_slime.errors import RewardError, RolloutError, RolloutTimeoutError
from agl_slime.threads import run_in_thread

# Attribute of the exception span that names why the attempt failed, as one stable word for counting.
FAILURE_REASON = "agl_slime.failure.reason"

# How long a cancelled agent may take to clean up before it is abandoned.
_CANCEL_GRACE_S = 2.0


class GuardedAgent:
    """Runs one agent's rollouts under guard; everything else is the agent's own (hooks see it as the agent)."""

    def __init__(self, *, agent: LitAgent[Any], default_timeout_s: float | None = None) -> None:
        self._agent = agent
        self._default_timeout_s = default_timeout_s
        self._running: set[asyncio.Task[Any]] = set()

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
        for task in self._running:
            task.cancel()
        return len(self._running)

    async def _run(
        self,
        method: Callable[..., Coroutine[Any, Any, Any]],
        sync_method: Callable[..., Any],
        task: Any,
        resources: NamedResources,
        rollout: Rollout,
    ) -> Any:
        work: Coroutine[Any, Any, Any]
        work = method(task, resources, rollout) if self._agent.is_async() else run_in_thread(sync_method, task, resources, rollout)
        try:
            result = await self._with_time_limit(_contained(work), rollout)
            check_result(result)
        except Exception as error:
            emit_exception(error, {FAILURE_REASON: failure_reason(error)})
            raise
        return result

    async def _with_time_limit(self, work: Coroutine[Any, Any, Any], rollout: Rollout) -> Any:
        limit = rollout.config.timeout_seconds or self._default_timeout_s
        inner = asyncio.ensure_future(work)
        self._running.add(inner)
        try:
            await asyncio.wait({inner}, timeout=limit)
            timed_out = not inner.done()
            if timed_out:
                inner.cancel()
                await asyncio.wait({inner}, timeout=_CANCEL_GRACE_S)
            if not inner.done():
                raise RolloutTimeoutError(f"The agent ran past its limit of {limit:g} s and ignored its cancellation; it was abandoned.")
            if timed_out:
                raise RolloutTimeoutError(f"The agent ran past its limit of {limit:g} s and was cancelled.")
            if inner.cancelled():
                raise RolloutError("The rollout was cancelled because the runner stops.", reason="cancelled")
            return inner.result()
        except asyncio.CancelledError:
            inner.cancel()
            raise
        finally:
            self._running.discard(inner)


async def _contained(work: Coroutine[Any, Any, Any]) -> Any:
    """``work``, whose ``sys.exit()`` is its own end and not the runner's: asyncio lets ``SystemExit`` through to whoever runs the loop."""
    try:
        return await work
    except SystemExit as error:
        raise RolloutError(f"The agent called sys.exit({error.code!r}).", reason="SystemExit") from error


def failure_reason(error: BaseException) -> str:
    """One stable word for why an attempt failed: the error's own ``reason``, else the name of its class."""
    return error.reason if isinstance(error, RolloutError) else type(error).__name__


def check_result(result: Any) -> None:
    """What an agent may return: ``None``, a finite number (the reward) or a list of spans. Anything else is not a reward and is not made into one."""
    if result is None or isinstance(result, list):
        return
    if not isinstance(result, (int, float)):
        raise RewardError(f"The agent returned {result!r}; expected a number (the reward), None or a list of spans.")
    if not math.isfinite(result):
        raise RewardError(f"The agent returned the reward {result!r}; a reward must be a finite number.")


__all__ = ["FAILURE_REASON", "GuardedAgent", "check_result", "failure_reason"]
