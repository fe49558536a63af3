"""``ConcurrentRunner``: many concurrent rollouts in one process.

It reuses Agent Lightning's step (resources, hooks, tracing, result handling) and replaces the loop around it: it claims
rollouts up to its limit and runs each as an asyncio task. Agents need no change. ``RunnerThread`` runs it in a thread
of this process, with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from agl_slime.agent.agent import SGLangLitAgent
from agl_slime.errors import LoopError
from agl_slime.runner.base import FinishedListener, RunnerPool, RunnerSettings
from agl_slime.runner.guard import GuardedAgent, contain_tasks
from agl_slime.runner.lag import LagMonitor
from agl_slime.runner.process import freeze_gc
from agl_slime.runner.tracer import ContextTracer
from agl_slime.store.client import listen_for_ends
from agl_slime.store.recording import current_recording
from agl_slime.support.agl import AttemptedRollout, ExecutionEvent, LightningStore, LitAgent, LitAgentRunner, threaded
from agl_slime.support.net import bypass_proxies, public_host
from agl_slime.support.threads import LoopThread

if TYPE_CHECKING:
    from agl_slime.gateway.server import Gateway


logger = logging.getLogger(__name__)


# The first claim after an empty queue. Before it claims twice as many, a runner gives others a moment.
_FIRST_CLAIM = 8
_CLAIM_PAUSE_S = 0.002
# At the limit free slots are filled in batches: a 64th of the limit, or the slots that are free after this pause.
_FREE_SHARE = 64
_FREE_PAUSE_S = 0.01


class ConcurrentRunner(LitAgentRunner[Any]):
    """A ``LitAgentRunner`` that keeps up to ``max_concurrent`` rollouts in flight on one event loop.

    ``on_finished`` is called on the runner's loop with the rollout's id once an attempt has ended in the store; it must
    not block. ``name`` identifies this runner in the store and must be unique there. ``reason_fd`` marks a worker
    process, which is killed when it is stuck: the file descriptor that gets the reason, or -1.
    """

    def __init__(
        self,
        *,
        settings: RunnerSettings | None = None,
        on_finished: FinishedListener | None = None,
        name: str | None = None,
        reason_fd: int | None = None,
    ) -> None:
        self.settings = settings or RunnerSettings()
        super().__init__(
            ContextTracer(),
            poll_interval=self.settings.poll_interval_s,
            heartbeat_interval=self.settings.heartbeat_interval_s,
            heartbeat_launch_mode="asyncio",
        )
        self._on_finished = on_finished
        self._name = name
        self._guard: GuardedAgent | None = None
        self._gateway: Gateway | None = None
        self._in_flight: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self.stopping = False
        self._cancelling = False
        self._limit = self.settings.max_concurrent
        self._next_claim = _FIRST_CLAIM
        self._lag = LagMonitor(self.settings, reason_fd=reason_fd)

    def init(self, agent: LitAgent[Any], **options: Any) -> None:
        super().init(agent, **options)
        settings = self.settings
        if isinstance(agent, SGLangLitAgent):
            agent.check_settings()
        if not agent.is_async():
            self._limit = min(settings.max_concurrent, settings.max_sync_threads)
        if settings.gateway is not None and not isinstance(agent, SGLangLitAgent):
            from agl_slime.gateway.server import Gateway

            bypass_proxies(public_host(settings.gateway.host))
            self._gateway = Gateway(settings.gateway)
        self._guard = GuardedAgent(agent=agent, settings=settings, gateway=self._gateway, alone=self._limit == 1)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        if self._gateway is not None:
            self._gateway.stop()
        super().teardown(*args, **kwargs)

    def get_agent(self) -> Any:
        """The guarded agent, which Agent Lightning's step calls."""
        if self._guard is None:
            raise ValueError("The runner has no agent yet: call init() first.")
        return self._guard

    def get_worker_id(self) -> str:
        return self._name or super().get_worker_id()

    # -- from any thread ----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Poll the queue now."""
        self._on_loop(self._wake.set)

    def cancel(self, rollout_id: str) -> None:
        """Cancel the rollout's agent, if it runs here or is about to; its attempt fails as ``cancelled``."""
        self._on_loop(lambda: self.get_agent().cancel(rollout_id))

    def stop(self, *, cancel: bool = True) -> None:
        """End ``iter``: stop claiming, and cancel the rollouts in flight or let them finish."""
        self.stopping = True
        self._cancelling = self._cancelling or cancel
        if cancel:
            self._on_loop(lambda: self.get_agent().cancel_all())
        self.wake()

    def _on_loop(self, callback: Callable[[], Any]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(callback)

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def iter(self, *, event: ExecutionEvent | None = None) -> None:
        """Execute rollouts until ``stop`` or ``event``, then wait for those in flight; cancellation cancels them."""
        store = self.get_store()
        self._loop = asyncio.get_running_loop()
        stop_heartbeat = self._start_heartbeat_loop(store)
        unsubscribe = listen_for_ends(store, self.cancel, own_rollouts=self._claimed, only_cancelled=True)
        freeze_gc()
        stop_containing = contain_tasks(self._loop)
        self._lag.start()
        try:
            while not self.stopping and not (event is not None and event.is_set()):
                self._wake.clear()
                if not await self._claim():
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._wake.wait(), timeout=self.settings.poll_interval_s)
            await self._drain()
        except asyncio.CancelledError:
            self.stopping = self._cancelling = True
            await self._drain()
            raise
        finally:
            unsubscribe()
            stop_containing()
            self._lag.stop()
            if stop_heartbeat is not None:
                await stop_heartbeat()
            # connections belong to this loop, and Agent Lightning's Trainer has no hook in which an agent closes them
            close = getattr(self._agent, "aclose", None)
            if close is not None:
                await close()

    async def _drain(self) -> None:
        while self._in_flight:
            # repeatedly: a rollout that was claimed just before may not have started its agent yet
            if self._cancelling:
                self.get_agent().cancel_all()
            await asyncio.wait(self._in_flight, timeout=0.2)

    def _claimed(self) -> set[str]:
        return {task.get_name() for task in self._in_flight}

    async def _claim(self) -> bool:
        """Claim and start rollouts up to the limit; returns whether there were any."""
        # the store no longer delivers rollouts that were cancelled before this point
        self.get_agent().drop_cancellations(claimed=self._claimed)
        # abandoned threads of a sync agent count, too: running and abandoned together are at most twice the limit
        allowed = min(self._limit, 2 * self._limit - self.get_agent().threads.abandoned)
        limit = min(allowed - len(self._in_flight), self._next_claim)
        if limit <= 0:
            return False
        claimed = await self.get_store().dequeue_many_rollouts(limit=limit, worker_id=self.get_worker_id())
        for rollout in claimed:
            self._lag.extend_limit(rollout.config.timeout_seconds or self.settings.timeout_s or math.inf)
            task = asyncio.create_task(self._execute(rollout), name=rollout.rollout_id)
            self._in_flight.add(task)
            task.add_done_callback(self._retire)
        if len(claimed) < limit:
            self._next_claim = max(_FIRST_CLAIM, self._next_claim // 2)
        elif limit == self._next_claim < self.settings.claim_batch:
            self._next_claim = min(2 * self._next_claim, self.settings.claim_batch)
            await asyncio.sleep(_CLAIM_PAUSE_S)
        return bool(claimed)

    def _retire(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("Rollout %s broke outside of its agent: %s", task.get_name(), error, exc_info=error)
        # a store call for each free slot would cost more than an idle slot
        free = self._limit - len(self._in_flight)
        if free == max(1, self._limit // _FREE_SHARE):
            self._wake.set()
        elif free == 1:
            asyncio.get_running_loop().call_later(_FREE_PAUSE_S, self._wake.set)

    async def _execute(self, rollout: AttemptedRollout) -> None:
        try:
            await self._step_impl(rollout)
            if current_recording.get() is None:
                # the step returned without running the agent: the attempt would stay "preparing" for ever
                logger.error("Rollout %s: the store has no resources; add `main_llm` first.", rollout.rollout_id)
                await self.get_store().update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")
        finally:
            if self._on_finished is not None:
                self._on_finished(rollout.rollout_id)


class RunnerThread(RunnerPool):
    """Runs a ``ConcurrentRunner`` on a thread. A store that other threads use too must be thread-safe; an
    ``InMemoryLightningStore`` gets Agent Lightning's wrapper for threads."""

    def __init__(
        self,
        *,
        agent: LitAgent[Any],
        store: LightningStore,
        settings: RunnerSettings | None = None,
        on_finished: FinishedListener | None = None,
        name: str | None = None,
    ) -> None:
        self.runner = ConcurrentRunner(settings=settings, on_finished=on_finished, name=name)
        self._agent = agent
        self._store: LightningStore = threaded(store)
        self._thread: LoopThread | None = None

    @property
    def failure(self) -> BaseException | None:
        return None if self._thread is None else self._thread.failure

    def start(self) -> Self:
        if self._thread is not None:
            raise LoopError("The runner was started already; make a new RunnerThread to run again.")
        self._thread = LoopThread(self._serve, name="agl-slime-runner")
        self._thread.start()
        if self.failure is not None:
            raise LoopError(f"The runner could not start: {self.failure}") from self.failure
        return self

    def wake(self) -> None:
        self.runner.wake()

    def stop(self, *, cancel: bool = True, timeout_s: float = 10.0) -> bool:
        if self._thread is None:
            return True
        self.runner.stop(cancel=cancel)
        if not self._thread.join(timeout_s):
            place = self._thread.blocked_at()
            why = f"{place} blocks its event loop" if place else "its rollouts have not ended"
            logger.warning("The runner did not stop within %g s: %s.", timeout_s, why)
            return False
        return True

    async def _serve(self, ready: Callable[[], None]) -> None:
        with self.runner.run_context(agent=self._agent, store=self._store):
            asyncio.get_running_loop().call_soon(ready)
            await self.runner.iter()
