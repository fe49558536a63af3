"""``OnlineRLLoop``: collect rollouts, train, sync weights, repeat.

Each iteration enqueues ``rollout_batch_size`` tasks with ``n_samples_per_prompt`` rollouts each, waits until their
groups are finalized, calls ``slime_train_fn`` to train on the ready groups and ``weight_sync_fn`` to update SGLang's
weights, and publishes the new version as a resources snapshot in the store. A dropped group is replaced by one of
another task.

Agents run on the runner's event loop, conversion on the data source's, and this loop on the caller's, where nothing
blocks: three threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import psutil

from agl_slime import events
from agl_slime import metric_names as names
from agl_slime.agent.access import LLM_RESOURCE
from agl_slime.data.enqueueing import HealthCheck
from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.data.source import GroupSource
from agl_slime.errors import AglSlimeError, ConfigError, LoopError, format_exception
from agl_slime.loop.failures import Failures
from agl_slime.loop.functions import StepFn, adapt_step_function, call_function, finish_step
from agl_slime.loop.metrics import collect_metrics, fork_examples, staleness_metrics
from agl_slime.loop.schedule import Schedule
from agl_slime.loop.settings import LoopSettings, LoopState, RunResult
from agl_slime.loop.tasks import TaskCursor, Tasks, ValidationTasks, as_task_source
from agl_slime.loop.validation import Validations
from agl_slime.runner.base import RunnerPlan, RunnerPool, make_runners
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, LightningStore, LitAgent, NamedResources, threaded
from agl_slime.support.threads import run_in_thread, run_user_code

logger = logging.getLogger(__name__)

# Longest wait for the current training step when a run is interrupted.
_STEP_TIMEOUT_S = 30.0


class OnlineRLLoop:
    """The training loop over a store, an agent, tasks, a training function and a weight sync.

    Args:
        store: The store of rollouts. A ``BridgeStore`` notifies at each completion; any other thread-safe
            one works, and an ``InMemoryLightningStore`` in Agent Lightning's wrapper, the loop's attribute ``store``.
        agent: Any ``LitAgent``; ``None`` when runners elsewhere execute the rollouts.
        tasks: A sequence of dicts, a function ``(rng) -> dict``, a ``TaskSource``, or a ``TaskSampler``.
        llm: Engine, model and sampling parameters; the agents' resource ``main_llm``.
        data_source: The ``GroupSource`` that the training function takes samples from, or an object with one as its
            attribute ``groups``, such as ``AGLDataSource``.
        slime_train_fn: ``(iteration) -> metrics or None``: takes samples from the data source and trains. Sync (run in
            a thread) or async. The iteration is passed to a parameter named ``iteration`` or ``rollout_id``, else to a
            first positional parameter without a default; a function with neither is called without arguments.
        weight_sync_fn: ``(iteration) -> version or None``: updates SGLang's weights; ``None`` as a version means the
            iteration's number. Called like ``slime_train_fn``.
        val_tasks: Tasks of validation rollouts; ``None`` draws them from ``tasks`` with another seed if ``tasks`` is a
            function.
        resources: Further resources of the agents, beside ``main_llm``.
        save_fn: ``(state) -> None``: writes a checkpoint of the trainer, the data source and this ``LoopState``. Sync
            or async.
        start: The state to resume from; the caller has restored the trainer, the data source and the engine's weights.
        runners: The runners of the agent: a ``RunnerPlan``, or ``inproc`` (a thread of this process), ``process:N`` or
            ``ray:N``.
        observer: Receives the run's events (``agl_slime.events``) on the loop's thread; must not block.
        check_alive: Called about once a second; raises when a dependency of the run, such as the engine, has died.
        val_llm: ``main_llm`` of validation rollouts, with sampling parameters or an engine of their own; ``llm`` by
            default.
        val_sync_fn: For an engine of ``val_llm``'s own, in asynchronous training (``max_staleness``): ``(version) ->
            None``, sync or async, which loads the last synced weights into it. Without it validations share the engine
            with training rollouts, ahead of the queue.
    """

    def __init__(
        self,
        *,
        store: LightningStore,
        agent: LitAgent[Any] | None,
        tasks: Tasks,
        llm: LLM,
        data_source: Any,
        slime_train_fn: StepFn,
        weight_sync_fn: StepFn | None = None,
        save_fn: Callable[[LoopState], Any] | None = None,
        start: LoopState | None = None,
        val_tasks: Tasks | None = None,
        settings: LoopSettings | None = None,
        resources: NamedResources | None = None,
        runners: RunnerPlan | str = "inproc",
        observer: events.Observer | None = None,
        check_alive: Callable[[], None] | None = None,
        val_llm: LLM | None = None,
        val_sync_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.settings = settings or LoopSettings()
        self.store = store = threaded(store)
        if agent is not None and not store.capabilities.get("thread_safe"):
            fix = "use agl_slime.BridgeStore() or InMemoryLightningStore()"
            raise ConfigError(f"{type(store).__name__} is not thread-safe; {fix}: agents run in a separate thread")
        self.data_source: GroupSource = getattr(data_source, "groups", data_source)
        self._agent = agent
        self._state = start or LoopState()
        self._reward_means = list(self._state.reward_means)
        source = as_task_source(tasks, seed=self.settings.seed, learnable=self.settings.learnable)
        # ready groups count as finished: their tasks are not drawn again
        ready = [group.instance_id for group in self.data_source.ready_groups()]
        finished = [*self.data_source.ledger.finished_instances(), *(name for name in ready if name is not None)]
        self.tasks = TaskCursor(source, finished=finished, sampling=self._state.sampling)
        self.data_source.assembler.teaches = self.tasks.teaches
        self._train_fn = adapt_step_function(slime_train_fn, "slime_train_fn")
        self._sync_fn = None if weight_sync_fn is None else adapt_step_function(weight_sync_fn, "weight_sync_fn")
        self._save_fn = save_fn
        self._resources: NamedResources = {**(resources or {}), LLM_RESOURCE: llm}
        self._observer = observer
        self._plan = RunnerPlan.parse(runners) if isinstance(runners, str) else runners
        self._check_alive = check_alive
        self._health = HealthCheck(self._raise_if_dead)
        self._schedule = Schedule(
            store, self.data_source, self.settings, start=self._state, health=self._health, wake=self._wake
        )
        self._failures = Failures(self.settings, worked=any(mean is not None for mean in self._reward_means))
        if val_tasks is None and callable(tasks) and not hasattr(tasks, "next_batch"):
            val_tasks = tasks
        asynchronous = self.settings.max_staleness and self.settings.eval_interval
        if val_sync_fn is not None and (val_llm is None or not asynchronous):
            needs = "set val_llm, max_staleness and eval_interval, or leave it out"
            raise ConfigError(f"val_sync_fn is for asynchronous validations on an engine of their own: {needs}")
        self._val_llm, self._val_sync_fn = val_llm, val_sync_fn
        self._validations: Validations | None = None
        if self.settings.eval_interval:
            if val_tasks is None:
                why = "val_tasks is None and eval_interval is set"
                raise ConfigError(f"{why}; pass val_tasks, or set eval_interval to 0")
            val_source = as_task_source(val_tasks, seed=self.settings.seed + 1)
            self._validations = Validations(
                tasks=ValidationTasks(val_source, n=self.settings.eval_rollouts),
                settings=self.settings,
                schedule=self._schedule,
                start=self._state,
                version=lambda: self._state.version,
                emit=self._emit,
                prepare=self._prepare_validation,
                own_engine=val_sync_fn is not None,
            )
        self._runner: RunnerPool | None = None
        self._last_metrics: dict[str, Any] = {}
        self._iteration = self._state.iteration
        """Current iteration; ``_state.iteration`` is the last completed one."""
        self._saved = start.iteration if start is not None else None
        self._in_step = False  # the trainer is between two iterations

    def run(self) -> RunResult:
        """``run_async`` for programs without an event loop."""
        return asyncio.run(self.run_async())

    async def run_async(self) -> RunResult:
        """Run all iterations. Raises ``LoopError`` (or another ``AglSlimeError``) when the run cannot continue. At the
        end the runner has stopped, and every enqueued rollout is closed or ready in the ledger."""
        loop = asyncio.get_running_loop()
        settings = self.settings
        self.data_source.listen(
            on_member=lambda member: _post(loop, self._on_member, member),
            on_group=lambda group: _post(loop, self._schedule.finalized, group),
        )
        per_iteration = settings.rollout_batch_size * settings.n_samples_per_prompt
        began, n = self._state.iteration, settings.num_iterations
        self._emit(events.RunStarted(iteration=began, num_iterations=n, rollouts_per_iteration=per_iteration))
        if ready := self.data_source.ready_groups():
            self._emit(events.GroupsRestored(iteration=self._state.iteration, groups=ready))
        reason = "interrupted"
        try:
            await self._publish_weights(self._state.version)
            if self._agent is not None or self._plan.kind == "controller":
                # a BridgeStore notifies the data source itself
                notify = None if isinstance(self.store, BridgeStore) else self.data_source.notify
                self._runner = make_runners(self._plan, agent=self._agent, store=self.store, on_finished=notify)
                await run_in_thread(self._runner.start)
            if self._validations is not None:
                self._validations.start(self._state.iteration)
            if self._state.iteration == 0:
                await self._save()
            for iteration in range(self._state.iteration + 1, settings.num_iterations + 1):
                self._iteration = iteration
                await self._iterate(iteration)
                if iteration % settings.save_interval == 0 or iteration == settings.num_iterations:
                    await self._save()
            reason = "finished"
        except AglSlimeError as error:
            reason = str(error)
            raise
        except Exception as error:  # from a task source, an observer, the store
            subject = f"iteration {self._iteration}: " if self._iteration else "the run "
            reason = f"{subject}failed with {format_exception(error)}"
            raise LoopError(reason) from error
        finally:
            if self._validations is not None:
                self._validations.cancel()
            try:
                await self._save_at_end()
                # before the runner stops, which would fail unfinished rollouts
                await self._schedule.cancel_outstanding()
            finally:
                if self._runner is not None:
                    await asyncio.shield(run_in_thread(self._runner.stop, timeout_s=3.0))
            counts = self.data_source.ledger.counts()
            ledger = {"opened": counts.opened, "open": counts.open, "ready": counts.ready}
            ledger |= {outcome.value: n for outcome, n in counts.closed.items()}
            self._emit(events.RunFinished(reason=reason, summary={"ledger": ledger}))
        return RunResult(
            iterations=settings.num_iterations, reward_means=tuple(self._reward_means), metrics=self._last_metrics
        )

    async def _iterate(self, iteration: int) -> None:
        metrics: dict[str, Any] = {}
        began = time.monotonic()
        idle_s = self._schedule.idle_s
        psutil.cpu_percent()  # the next call measures the time since this one
        if self._validations is not None:
            metrics.update(await self._validations.before_iteration(iteration))
        self._emit(events.PhaseStarted(iteration=iteration, phase="collect"))
        collecting = time.monotonic()
        self._schedule.metadata = {"iteration": iteration, "weight_version": self._state.version}
        groups = await self._collect(iteration)
        collect_s = time.monotonic() - collecting
        metrics.update(collect_metrics(groups, collect_s=collect_s))
        for kind, text in fork_examples([member for group in groups for member in group.succeeded]).items():
            self._emit(events.Warning(text=text, key=f"fork:{kind}"))
        metrics.update(staleness_metrics(groups, self._state.version))
        interrupted = False
        synced_s = idle_in_sync_s = 0.0
        if any(group.ready for group in groups):
            learning = asyncio.ensure_future(self._train_and_sync(iteration))
            interrupted = await finish_step(learning, timeout_s=_STEP_TIMEOUT_S if self._save_fn is not None else 0.0)
            metrics.update(learning.result())
            synced_s, idle_in_sync_s = metrics[names.SYNC_S], self._idle_in_sync_s
        self._schedule.metadata = {"iteration": iteration + 1, "weight_version": self._state.version}
        self._schedule.advance()
        iteration_s = time.monotonic() - began
        if self.settings.max_staleness:
            waited_s = self._schedule.idle_s - idle_s - idle_in_sync_s
            metrics |= {names.TRAINER_WAITED: collect_s / iteration_s, names.ENGINE_WAITED: waited_s / iteration_s}
            metrics[names.ROLL_S] = max(0.0, iteration_s - waited_s - synced_s)
            metrics[names.CPU_BUSY] = psutil.cpu_percent() / 100
            if (rate := metrics[names.TOKENS_PER_S]) is not None:  # tokens are sampled during the whole iteration
                metrics[names.TOKENS_PER_S] = rate * collect_s / iteration_s
        try:
            if self._validations is not None and not interrupted:
                metrics.update(await self._validations.after_iteration(iteration))
        finally:  # report the iteration even if validation fails
            if not self.settings.max_staleness:
                iteration_s = time.monotonic() - began
            metrics |= {"perf/collect_s": collect_s, "iteration": iteration, names.ITERATION_S: iteration_s}
            metrics |= self.tasks.sampling_metrics()
            metrics[names.WEIGHTS_VERSION] = self._state.version
            self._state = replace(self._state, iteration=iteration)
            self._reward_means.append(metrics[names.REWARD_MEAN])
            self._last_metrics = metrics
            self._emit(events.IterationFinished(iteration=iteration, metrics=metrics))
        if interrupted:
            raise asyncio.CancelledError

    async def _collect(self, iteration: int) -> list[GroupResult]:
        """The next batch. If all rollouts fail where some succeeded before, another batch is tried after a pause."""
        groups: list[GroupResult] = []
        try:
            while True:
                groups += (batch := await self._schedule.collect(self.tasks))
                if (pause_s := self._failures.pause_after(iteration, batch)) is None:
                    return groups
                text = f"{self._failures.why}; trying again in {pause_s:.0f} s"
                self._emit(events.Warning(text=text, key=f"all_failed:{iteration}:{len(groups)}"))
                await self._health.wait(asyncio.sleep(pause_s))
                self._schedule.reject()
        finally:
            if groups:
                self._emit(events.GroupsCollected(iteration=iteration, groups=groups))

    async def _train_and_sync(self, iteration: int) -> dict[str, Any]:
        """Train on the batch, and update the engine's weights."""
        self._in_step = True
        began = time.monotonic()
        self._emit(events.PhaseStarted(iteration=iteration, phase="train"))
        metrics = await self._perform("training", self._train_fn(iteration), iteration) or {}
        if self.settings.deterministic:  # an update in the middle of an answer would come at another token each time
            await self._schedule.drain()
            if self._validations is not None:
                await self._validations.wait()
        self._emit(events.PhaseStarted(iteration=iteration, phase="sync"))
        syncing, idle_before_s = time.monotonic(), self._schedule.idle_s
        version = None
        if self._sync_fn is not None:
            version = await self._perform("weight sync", self._sync_fn(iteration), iteration)
        await self._publish_weights(str(iteration if version is None else version))
        self._in_step = False
        self._idle_in_sync_s = self._schedule.idle_s - idle_before_s
        return {**metrics, names.TRAIN_S: syncing - began, names.SYNC_S: time.monotonic() - syncing}

    async def _prepare_validation(self, version: str) -> str | None:
        if self._val_sync_fn is not None:
            name = "weight sync of the validation engine"
            await self._perform(name, call_function(partial(self._val_sync_fn, version)), self._iteration)
        if self._val_llm is None:
            return None
        return (await self.store.add_resources({**self._resources, LLM_RESOURCE: self._val_llm})).resources_id

    async def _current_state(self) -> LoopState:
        sampling = await run_user_code(self.tasks.sampling_state)  # what is admitted from here on is drawn again
        means, admitted = tuple(self._reward_means), self._schedule.admitted()
        state = replace(self._state, reward_means=means, admitted=admitted, sampling=sampling)
        if self._validations is None:
            return state
        return replace(state, validations=self._validations.count, val_first=self._validations.first)

    async def _save(self) -> None:
        if self._save_fn is not None:
            state = await self._current_state()
            await self._perform("writing the checkpoint", call_function(partial(self._save_fn, state)), state.iteration)
            self._saved = state.iteration

    async def _save_at_end(self) -> None:
        """Write a checkpoint of a run that ends early, unless its trainer is in the middle of a step."""
        self._schedule.stop()
        if self._save_fn is None or self._in_step or self._state.iteration == (self._saved or 0):
            return
        state = await self._current_state()
        try:
            await call_function(partial(self._save_fn, state))
        except Exception as error:  # the run ends for another reason, which is reported
            logger.warning("No checkpoint of iteration %d was written: %s", state.iteration, format_exception(error))

    async def _perform(self, name: str, work: Awaitable[Any], iteration: int) -> Any:
        """The result of a user's function; an error names the function as ``name``."""
        try:
            return await self._health.wait(work)
        except AglSlimeError:
            raise
        except Exception as error:
            raise LoopError(f"iteration {iteration}: {name} failed with {format_exception(error)}") from error

    def _wake(self) -> None:
        if self._runner is not None:
            self._runner.wake()

    def _raise_if_dead(self) -> None:
        if self._runner is not None and self._runner.failure is not None:
            raise LoopError(f"the runner ended: {self._runner.failure}") from self._runner.failure
        self._failures.raise_if_misnamed()
        self.data_source.raise_if_dead()
        if self._check_alive is not None:
            self._check_alive()

    async def _publish_weights(self, version: str) -> None:
        """Add a resources snapshot for this weight version; each rollout names its snapshot."""
        self._state = replace(self._state, version=version)
        self.data_source.set_version(version)
        # all workers have it; without a weight_sync_fn the engine's versions are of its own
        numbered = self._sync_fn is not None and version.isdecimal()
        self._schedule.oldest_version = int(version) if numbered else None
        self._schedule.resources_id = (await self.store.add_resources(self._resources)).resources_id

    def _on_member(self, member: MemberResult) -> None:
        self._failures.note(member)
        self._emit(
            events.RolloutFinished(
                iteration=self._iteration,
                rollout_id=member.rollout_id,
                outcome="succeeded" if member.ok else member.outcome_if_failed.value,
                reason=member.failure or "",
                reward=member.reward,
                tokens=member.sampled_tokens,
                turns=member.turns,
                mode="train" if member.mode == "train" else "val",
            )
        )

    def _emit(self, event: events.Event) -> None:
        if self._observer is not None:
            self._observer.handle(event)


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[..., Any], *args: Any) -> None:
    with suppress(RuntimeError):  # the run is over and its event loop closed
        loop.call_soon_threadsafe(callback, *args)
