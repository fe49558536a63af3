"""Many rollouts at once in one process.

``ConcurrentRunner`` reuses Agent Lightning's own step (resources, hooks, tracing, result handling) and changes only what surrounds it: it claims as
many rollouts as it has room for and runs each as an asyncio task. Agents need not know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agl_slime._agl import AttemptedRollout, ExecutionEvent, Hook, LitAgent, LitAgentRunner
from agl_slime.errors import ConfigError
from agl_slime.runner.guard import GuardedAgent
from agl_slime.runner.recording import current_recording
from agl_slime.runner.tracer import ContextTracer

logger = logging.getLogger(__name__)

FinishedListener = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """How one process executes rollouts.

    ``max_concurrent``: rollouts in flight; a rollout that waits for the engine costs tens of kilobytes. ``claim_batch``: most rollouts claimed in one
    store call, so that several runners share a short queue. ``poll_interval_s``: pause between looks at an empty queue, cut short by ``wake``.
    ``timeout_s``: time limit of rollouts whose own configuration has none. ``heartbeat_interval_s``: as Agent Lightning's; 0 is off.
    """

    max_concurrent: int = 1024
    claim_batch: int = 128
    poll_interval_s: float = 0.05
    timeout_s: float | None = None
    heartbeat_interval_s: float = 10.0

    def __post_init__(self) -> None:
        if self.max_concurrent < 1:
            raise ConfigError(f"max_concurrent must be at least 1, got {self.max_concurrent}")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise ConfigError(f"timeout_s must be positive or None, got {self.timeout_s}")


class ConcurrentRunner(LitAgentRunner[Any]):
    """A ``LitAgentRunner`` that keeps up to ``max_concurrent`` rollouts in flight on one event loop.

    ``on_finished`` is called on the runner's loop with the rollout's id after each attempt has reached its end in the store; it must not block.
    """

    def __init__(
        self, *, settings: RunnerSettings | None = None, tracer: ContextTracer | None = None, on_finished: FinishedListener | None = None
    ) -> None:
        self.settings = settings or RunnerSettings()
        super().__init__(
            tracer or ContextTracer(),
            poll_interval=self.settings.poll_interval_s,
            heartbeat_interval=self.settings.heartbeat_interval_s,
            heartbeat_launch_mode="asyncio",
        )
        self._on_finished = on_finished
        self._guard: GuardedAgent | None = None
        self._in_flight: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._stopping = False

    def init(self, agent: LitAgent[Any], *, hooks: Sequence[Hook] | None = None, **kwargs: Any) -> None:
        super().init(agent, hooks=hooks, **kwargs)
        self._guard = GuardedAgent(agent=agent, default_timeout_s=self.settings.timeout_s)

    def get_agent(self) -> LitAgent[Any]:
        """The agent under guard: what Agent Lightning's step calls."""
        if self._guard is None:
            raise ValueError("The runner has no agent yet: call init() first.")
        return self._guard  # type: ignore[return-value]  # the guard passes everything else through

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    # -- from any thread --------------------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Look at the queue now rather than at the next poll."""
        self._on_loop(lambda: self._wake.set() if self._wake else None)

    def stop(self, *, cancel: bool = True) -> None:
        """End ``iter``: claim nothing more, and either cancel what is in flight or let it finish."""
        self._stopping = True

        def act() -> None:
            if cancel and self._guard is not None:
                self._guard.cancel_all()
            if self._wake is not None:
                self._wake.set()

        self._on_loop(act)

    def _on_loop(self, callback: Callable[[], Any]) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop closed between the check and the call: nothing is left to wake or stop
            logger.debug("The runner's loop is closed already.")

    # -- the loop ---------------------------------------------------------------------------------------------------------------------------

    async def iter(self, *, event: ExecutionEvent | None = None) -> None:
        """Execute rollouts from the store until ``stop`` is called or ``event`` is set; then wait for those in flight."""
        store = self.get_store()
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        stop_heartbeat = self._start_heartbeat_loop(store)
        try:
            while not self._should_stop(event):
                self._wake.clear()
                if not await self._claim():
                    await self._idle()
            if self._in_flight:
                await asyncio.wait(self._in_flight)
        finally:
            if stop_heartbeat is not None:
                await stop_heartbeat()

    def _should_stop(self, event: ExecutionEvent | None) -> bool:
        return self._stopping or (event is not None and event.is_set())

    async def _claim(self) -> bool:
        """Claim and start what there is room for; whether anything was claimed."""
        room = min(self.settings.max_concurrent - len(self._in_flight), self.settings.claim_batch)
        if room <= 0:
            return False
        claimed = await self.get_store().dequeue_many_rollouts(limit=room, worker_id=self.get_worker_id())
        for rollout in claimed:
            task = asyncio.create_task(self._execute(rollout), name=rollout.rollout_id)
            self._in_flight.add(task)
            task.add_done_callback(self._retire)
        return bool(claimed)

    async def _idle(self) -> None:
        assert self._wake is not None
        try:
            await asyncio.wait_for(self._wake.wait(), timeout=self.settings.poll_interval_s)
        except asyncio.TimeoutError:
            return

    def _retire(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("Rollout %s broke outside of its agent: %s", task.get_name(), error, exc_info=error)
        # With a full house the loop waits for room: a finished rollout makes some.
        if self._wake is not None and len(self._in_flight) >= self.settings.max_concurrent - 1:
            self._wake.set()

    async def _execute(self, rollout: AttemptedRollout) -> None:
        try:
            await self._step_impl(rollout)
            if current_recording.get() is None:
                # The step returned without running the agent, which it does only when the store holds no resources: left alone, the attempt would
                # stay "preparing" for ever.
                logger.error("Rollout %s: the store holds no resources; add `main_llm` before enqueueing.", rollout.rollout_id)
                await self.get_store().update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")
        finally:
            if self._on_finished is not None:
                self._on_finished(rollout.rollout_id)
