"""``OnlineRLLoop``: collect, train, sync, and again.

Each iteration enqueues ``rollout_batch_size`` tasks, ``n_samples_per_prompt`` rollouts each, waits until their groups
are finalized, lets ``slime_train_fn`` train on the groups that are ready, lets ``weight_sync_fn`` bring the new weights
to SGLang, and publishes the new version as a resources snapshot in the store. A group that is not fit to train on is
replaced by one of another task.

Three threads share the work: the agents run on the runner's event loop, conversion on the data source's, and this loop
on the caller's, where nothing blocks.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agl_slime.datasource.source import GroupSource
from agl_slime.errors import AglSlimeError, ConfigError, LoopError, spell_exception
from agl_slime.groups.results import GroupResult, MemberResult
from agl_slime.loop.metrics import collect_metrics, eval_metrics, spell_failures
from agl_slime.loop.old_names import observer_and_runners
from agl_slime.loop.schedule import SerialSchedule
from agl_slime.loop.settings import LoopSettings, LoopState, RunResult
from agl_slime.loop.tasks import TaskCursor, Tasks, as_task_source
from agl_slime.report import events
from agl_slime.report.metrics import ITERATION_S, REWARD_MEAN, VAL_REWARD_MEAN, VAL_START_REWARD_MEAN, WEIGHTS_VERSION
from agl_slime.rollout.access import LLM_RESOURCE
from agl_slime.rollout.alarms import alike_answers, fork_examples, tool_never_fired
from agl_slime.runner.base import RunnerPlan, RunnerPool, make_runners
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, LightningStore, LitAgent, NamedResources
from agl_slime.support.threads import run_in_thread

logger = logging.getLogger(__name__)

StepFn = Callable[..., Any]


class OnlineRLLoop:
    """The closed loop over a store, an agent, tasks, a training function and a weight sync.

    Args:
        store: Where rollouts are enqueued and recorded. A ``BridgeStore`` is told of each end; any other thread-safe
            ``LightningStore`` works.
        agent: Any ``LitAgent``; ``None`` when the runners live elsewhere.
        tasks: A sequence of dicts, a function ``(rng) -> dict``, or a ``TaskSource``.
        llm: The engine, model and sampling parameters that agents find as ``main_llm``.
        data_source: Where finished groups come out; the training function takes them from there.
        slime_train_fn: ``(iteration) -> metrics or None``: takes samples from the data source and trains. Sync (run in
            a thread) or async. The iteration is passed to a parameter named ``iteration`` or ``rollout_id``, else to a
            first positional parameter that has no default; a function that has neither is called without.
        weight_sync_fn: ``(iteration) -> version or None``: brings the new weights to SGLang; ``None`` as a version
            means the iteration's number. Called as ``slime_train_fn`` is.
        val_tasks: Tasks of validation rollouts; ``None`` draws them from ``tasks`` with another seed when those are
            generated.
        resources: What agents find beside ``main_llm``.
        save_fn: ``(state) -> None``: writes a checkpoint of the trainer, the data source and this ``LoopState``. Sync
            or async.
        start: Where the run stood before the restart; the trainer, the data source and the engine's weights must have
            been brought there.
        runners: Where the agent runs, and how: a ``RunnerPlan``, or ``inproc`` (a thread of this process),
            ``process:N`` or ``ray:N``.
        observer: Takes the run's events (``agl_slime.report.events``), on the thread of the loop: it must not block.
        check_alive: Called about once a second; raises when something that the run needs, such as the engine, has died.
        old_names: The arguments that ``runners`` and ``observer`` replace; each warns.
    """

    def __init__(
        self,
        *,
        store: LightningStore,
        agent: LitAgent[Any] | None,
        tasks: Tasks,
        llm: LLM,
        data_source: GroupSource,
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
        **old_names: Any,
    ) -> None:
        self.settings = settings or LoopSettings()
        if agent is not None and not store.capabilities.get("thread_safe"):
            fix = "use agl_slime.BridgeStore() or InMemoryLightningStore(thread_safe=True)"
            raise ConfigError(f"{type(store).__name__} is not thread-safe; {fix}: agents run in a thread of their own")
        self.store = store
        self.data_source = data_source
        self._agent = agent
        self._state = start or LoopState()
        self._reward_means = list(self._state.reward_means)
        source = as_task_source(tasks, seed=self.settings.seed)
        self.tasks = TaskCursor(source, finished=data_source.ledger.finished_instances())
        if val_tasks is None and callable(tasks) and not hasattr(tasks, "next_batch"):
            val_tasks = tasks
        if val_tasks is None and self.settings.eval_interval:
            raise ConfigError("val_tasks is None and eval_interval is set; pass val_tasks, or set eval_interval to 0")
        val_source = source if val_tasks is None else as_task_source(val_tasks, seed=self.settings.seed + 1)
        self._val_tasks = TaskCursor(val_source, named=False)
        self._val_tasks.skip_to(self._state.validations * self.settings.eval_tasks)
        self._train_fn = taking_iteration(slime_train_fn, "slime_train_fn")
        self._sync_fn = None if weight_sync_fn is None else taking_iteration(weight_sync_fn, "weight_sync_fn")
        self._save_fn = save_fn
        self._resources: NamedResources = {**(resources or {}), LLM_RESOURCE: llm}
        self._observer, self._runners = observer_and_runners(observer, runners, old_names)
        self._check_alive = check_alive
        self._schedule = SerialSchedule(store, data_source, self.settings, self._raise_if_dead, self._wake)
        self._runner: RunnerPool | None = None
        self._empty_in_a_row = 0
        self._last_metrics: dict[str, Any] = {}

    def run(self) -> RunResult:
        """``run_async`` from a program without an event loop."""
        return asyncio.run(self.run_async())

    async def run_async(self) -> RunResult:
        """All iterations. Raises ``LoopError`` (or another ``AglSlimeError``) when the run cannot go on. When this
        ends, the runner has stopped, and every rollout that was enqueued has its end in the ledger, or is ready."""
        loop = asyncio.get_running_loop()
        settings = self.settings
        self.data_source.listen(
            on_member=lambda member: _post(loop, self._on_member, member),
            on_group=lambda group: _post(loop, self._schedule.finalized, group),
        )
        per_iteration = settings.rollout_batch_size * settings.n_samples_per_prompt
        self._emit(events.RunStarted(num_iterations=settings.num_iterations, rollouts_per_iteration=per_iteration))
        reason = "interrupted"
        try:
            await self._publish_weights(self._state.version)
            if self._agent is not None:
                # a BridgeStore tells the data source itself
                told = None if isinstance(self.store, BridgeStore) else self.data_source.notify
                self._runner = make_runners(self._runners, agent=self._agent, store=self.store, on_finished=told)
                await run_in_thread(self._runner.start)
            if self._state.iteration == 0:
                await self._save()
            for iteration in range(self._state.iteration + 1, settings.num_iterations + 1):
                self._state = replace(self._state, iteration=iteration)
                await self._iterate(iteration)
                if iteration % settings.save_interval == 0 or iteration == settings.num_iterations:
                    await self._save()
            reason = "finished"
        except AglSlimeError as error:
            reason = str(error)
            raise
        except Exception as error:  # of a task source, an observer, the store: one sentence, and the cause is kept
            where = f"iteration {self._state.iteration}: " if self._state.iteration else "the run "
            reason = f"{where}failed with {spell_exception(error)}"
            raise LoopError(reason) from error
        finally:
            if self._runner is not None:
                await asyncio.shield(run_in_thread(self._runner.stop, timeout_s=3.0))
            await self._schedule.cancel_outstanding()
            self._emit(events.RunFinished(reason=reason, summary={"ledger": _ledger_counts(self.data_source)}))
        return RunResult(
            iterations=settings.num_iterations, reward_means=tuple(self._reward_means), metrics=self._last_metrics
        )

    async def _iterate(self, iteration: int) -> None:
        settings = self.settings
        metrics: dict[str, Any] = {}
        began = time.monotonic()
        if iteration == 1 and settings.eval_interval:
            metrics[VAL_START_REWARD_MEAN] = (await self._evaluate(iteration))[VAL_REWARD_MEAN]
        self._emit(events.PhaseStarted(iteration=iteration, phase="collect"))
        collecting = time.monotonic()
        self._schedule.metadata = {"iteration": iteration, "weight_version": self._state.version}
        groups = await self._schedule.collect(self.tasks)
        collect_s = time.monotonic() - collecting
        metrics.update(collect_metrics(groups, collect_s=collect_s))
        self._sound_alarms(groups)
        self._emit(events.GroupsCollected(iteration=iteration, groups=groups))
        self._stop_if_hopeless(iteration, groups)
        training = time.monotonic()
        if any(group.ready for group in groups):
            self._emit(events.PhaseStarted(iteration=iteration, phase="train"))
            metrics.update(await self._step("training", self._train_fn(iteration), iteration) or {})
            train_s = time.monotonic() - training
            self._emit(events.PhaseStarted(iteration=iteration, phase="sync"))
            syncing = time.monotonic()
            version = None
            if self._sync_fn is not None:
                version = await self._step("weight sync", self._sync_fn(iteration), iteration)
            await self._publish_weights(str(iteration if version is None else version))
            metrics.update({"perf/train_s": train_s, "perf/sync_s": time.monotonic() - syncing})
        if settings.eval_interval and (iteration % settings.eval_interval == 0 or iteration == settings.num_iterations):
            metrics.update(await self._evaluate(iteration))
        metrics |= {"perf/collect_s": collect_s, "iteration": iteration, ITERATION_S: time.monotonic() - began}
        metrics[WEIGHTS_VERSION] = self._state.version
        self._reward_means.append(metrics[REWARD_MEAN])
        self._last_metrics = metrics
        self._emit(events.IterationFinished(iteration=iteration, metrics=metrics))

    async def _evaluate(self, iteration: int) -> dict[str, Any]:
        n = self.settings.eval_tasks
        self._emit(events.PhaseStarted(iteration=iteration, phase="eval", rollouts=n))
        self._state = replace(self._state, validations=self._state.validations + 1)
        self._schedule.metadata = {"iteration": iteration, "weight_version": self._state.version}
        return eval_metrics(await self._schedule.validate(self._val_tasks, n))

    def _sound_alarms(self, groups: Sequence[GroupResult]) -> None:
        """Warn of a tool that never fires, and of answers that are all alike and earn less than the best so far."""
        rewards: list[float] = [reward for group in groups for reward in group.rewards]
        if self._state.best_reward is not None:
            rewards.append(self._state.best_reward)
        best = max(rewards, default=None)
        self._state = replace(self._state, best_reward=best)
        short = [group.succeeded for group in groups if best is not None and max(group.rewards, default=best) < best]
        for text in tool_never_fired([member for group in groups for member in group.succeeded]):
            self._emit(events.Warning(text=text, key=text.partition(" was")[0]))
        for kind, text in fork_examples([member for group in groups for member in group.succeeded]).items():
            self._emit(events.Warning(text=text, key=f"fork:{kind}"))
        for text in alike_answers(short):
            self._emit(events.Warning(text=text, key="alike_answers"))

    def _stop_if_hopeless(self, iteration: int, groups: Sequence[GroupResult]) -> None:
        members = [member for group in groups for member in group.members if not member.straggler]
        if not any(member.ok for member in members):
            raise LoopError(f"iteration {iteration}: all {len(members)} rollouts failed: {spell_failures(members)}")
        if any(group.ready for group in groups):
            self._empty_in_a_row = 0
            return
        self._empty_in_a_row += 1
        reasons = "; ".join(sorted({group.reason for group in groups}))
        if self._empty_in_a_row >= self.settings.max_empty_iterations:
            empty = f"no group was fit to train on in {self._empty_in_a_row} iterations in a row ({reasons})"
            raise LoopError(f"iteration {iteration}: {empty}; failures: {spell_failures(members)}")
        logger.warning("Iteration %d: no group was fit to train on (%s).", iteration, reasons)

    async def _save(self) -> None:
        if self._save_fn is not None:
            state = replace(self._state, reward_means=tuple(self._reward_means))
            await self._step("writing the checkpoint", _call(partial(self._save_fn, state)), state.iteration)

    async def _step(self, name: str, work: Awaitable[Any], iteration: int) -> Any:
        """Wait for a function of the program's; an error says where it comes from."""
        try:
            return await self._schedule.while_alive(asyncio.ensure_future(work))
        except AglSlimeError:
            raise
        except Exception as error:
            raise LoopError(f"iteration {iteration}: {name} failed with {spell_exception(error)}") from error

    def _wake(self) -> None:
        if self._runner is not None:
            self._runner.wake()

    def _raise_if_dead(self) -> None:
        if self._runner is not None and self._runner.failure is not None:
            raise LoopError(f"the runner ended: {self._runner.failure}") from self._runner.failure
        self.data_source.raise_if_dead()
        if self._check_alive is not None:
            self._check_alive()

    async def _publish_weights(self, version: str) -> None:
        """A resources snapshot per weight version: a rollout names the one that it was enqueued under."""
        self._state = replace(self._state, version=version)
        self.data_source.set_version(version)
        self._schedule.resources_id = (await self.store.add_resources(self._resources)).resources_id

    def _on_member(self, member: MemberResult) -> None:
        self._emit(
            events.RolloutFinished(
                iteration=self._state.iteration,
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


def taking_iteration(function: StepFn, name: str) -> Callable[[int], Awaitable[Any]]:
    """``function`` as one that takes the iteration, which is passed on only where it asks for it (see
    ``OnlineRLLoop``). Raises ``ConfigError`` when it cannot be called so."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # something built in, which does not say what it takes
        signature = inspect.Signature()
    parameters = list(signature.parameters.values())
    named = [p.name for p in parameters if p.name in ("iteration", "rollout_id") and p.kind != p.POSITIONAL_ONLY]
    positional = any(
        p.kind == p.VAR_POSITIONAL
        or (p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is inspect.Parameter.empty)
        for p in parameters[:1]
    )

    def bind(iteration: int) -> Callable[[], Any]:
        if named:
            return partial(function, **{named[0]: iteration})
        return partial(function, iteration) if positional else function

    try:
        inspect.signature(bind(0)).bind()
    except TypeError as error:
        raise ConfigError(f"{name} cannot be called with the iteration alone: {error}") from error
    except ValueError:
        pass
    return lambda iteration: _call(bind(iteration))


async def _call(function: Callable[[], Any]) -> Any:
    """Call a function of the program's, a sync one in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function()
    result = await run_in_thread(function)
    return await result if inspect.isawaitable(result) else result


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[..., Any], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:  # the run is over and its loop closed; nobody waits for late results
        logger.debug("A result arrived after the run had ended.")


def _ledger_counts(source: GroupSource) -> dict[str, int]:
    counts = source.ledger.counts()
    ends = {outcome.value: n for outcome, n in counts.closed.items()}
    return {"opened": counts.opened, "open": counts.open, "ready": counts.ready, **ends}
