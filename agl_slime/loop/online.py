"""``OnlineRLLoop``: collect, train, sync, and again.

Each iteration enqueues ``rollout_batch_size`` tasks, ``n_samples_per_prompt`` rollouts each, waits until their groups
have settled, lets ``slime_train_fn`` train on the groups that are ready, lets ``weight_sync_fn`` bring the new weights
to SGLang, and publishes the new version as a resources snapshot in the store. A group that is not fit to train on is
replaced by one of another task.

Three threads share the work: the agents run on the runner's event loop, conversion on the data source's, and this loop
on the caller's, where nothing blocks.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agl_slime.datasource.source import GroupSource
from agl_slime.errors import AglSlimeError, ConfigError, LoopError, spell_exception
from agl_slime.groups.results import GroupResult, MemberResult
from agl_slime.loop.metrics import collect_metrics, eval_metrics
from agl_slime.loop.tasks import Task, TaskCursor, TaskSource, as_task_source, enqueue_requests
from agl_slime.report import (
    IterationFinished,
    PhaseStarted,
    Reporter,
    RolloutFinished,
    RunFinished,
    RunStarted,
    Warning,
)
from agl_slime.report.events import Event
from agl_slime.report.metrics import ITERATION_S, REWARD_MEAN, VAL_REWARD_MEAN, VAL_START_REWARD_MEAN, WEIGHTS_VERSION
from agl_slime.rollout.agent import LLM_RESOURCE
from agl_slime.rollout.alarms import alike_answers, tool_never_fired
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.concurrent import RunnerSettings
from agl_slime.runner.processes import RunnerPool, make_runners
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, LightningStore, LitAgent, NamedResources
from agl_slime.support.threads import run_in_thread

logger = logging.getLogger(__name__)

# Of an exception's message in the sentence that says why a run stopped; a judge may put a whole page into one.
_LONGEST_MESSAGE = 300
# Between looks at whether runner, data source and engine live.
_LOOK_INTERVAL_S = 1.0
# When a run ends, a store that does not answer is left alone after this long: Ctrl-C must not wait for it.
_CANCEL_TIMEOUT_S = 1.0

Tasks = TaskSource | Iterable[Task] | Callable[[random.Random], Task]
StepFn = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """``rollout_batch_size`` prompts of ``n_samples_per_prompt`` rollouts make an iteration. ``rollout_timeout_s`` and
    ``max_attempts`` go into each rollout's configuration.

    ``eval_interval``: a validation of ``eval_tasks`` rollouts before the first iteration, after every so many, and at
    the end; 0 is never. ``max_empty_iterations``: iterations in a row that give nothing to train on before the run
    stops. ``max_replaced_groups``: dropped groups that are replaced in an iteration; by default ``rollout_batch_size``,
    and 0 replaces none. While every rollout fails, nothing is replaced. ``save_interval``: ``save_fn`` is called after
    every so many iterations and at the end.
    """

    num_iterations: int = 40
    rollout_batch_size: int = 16
    n_samples_per_prompt: int = 4
    rollout_timeout_s: float = 600.0
    max_attempts: int = 1
    eval_interval: int = 0
    eval_tasks: int = 32
    max_empty_iterations: int = 3
    max_replaced_groups: int | None = None
    save_interval: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (
            "num_iterations",
            "rollout_batch_size",
            "n_samples_per_prompt",
            "max_attempts",
            "eval_tasks",
            "max_empty_iterations",
            "save_interval",
        )
        for name in counts:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_replaced_groups is not None and self.max_replaced_groups < 0:
            raise ConfigError(f"max_replaced_groups must be 0 (none) or more, got {self.max_replaced_groups}")
        if self.eval_interval < 0:
            raise ConfigError(f"eval_interval must be 0 (never) or more, got {self.eval_interval}")
        if not self.rollout_timeout_s > 0:
            raise ConfigError(f"rollout_timeout_s must be positive, got {self.rollout_timeout_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """Where a loop stands after ``iteration``: what a later life needs, beside the states of its trainer and its data
    source. ``version`` is that of the weights, ``validations`` how often was validated; ``best_reward`` and
    ``reward_means`` are what the reports go on from."""

    iteration: int = 0
    version: str = "0"
    validations: int = 0
    best_reward: float | None = None
    reward_means: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a finished run returns. ``reward_means`` has one entry per iteration."""

    iterations: int
    reward_means: tuple[float, ...]
    metrics: Mapping[str, Any] = field(default_factory=dict)


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
            a thread) or async.
        weight_sync_fn: ``(iteration) -> version or None``: brings the new weights to SGLang; ``None`` as a version
            means the iteration's number. Sync or async.
        val_tasks: Tasks of validation rollouts; ``None`` draws them from ``tasks`` with another seed when those are
            generated.
        resources: What agents find beside ``main_llm``.
        save_fn: ``(state) -> None``: writes a checkpoint of the trainer, the data source and this ``LoopState``. Sync
            or async.
        start: Where a former life of the run ended; the trainer, the data source and the engine's weights must have
            been brought there.
        runners: Where the agent runs: ``inproc`` (a thread of this process), ``process:N`` or ``ray:N``;
            ``runner_settings`` are those of each.
        store_host: The address on which the store is served to runners outside of this process.
        reporter: Takes the run's events; ``run_settings`` and ``output_dir`` are told to it.
        on_groups: Called with the iteration and its settled training groups before they are trained on; for transcripts
            and the like.
        check_alive: Called about once a second; raises when something that the run needs, such as the engine, has died.
        began: ``time.monotonic()`` of the moment from which reports count the run's time; by default when ``run`` is
            called.
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
        runner_settings: RunnerSettings | None = None,
        runners: RunnerPlan | str = "inproc",
        store_host: str = "127.0.0.1",
        reporter: Reporter | None = None,
        run_settings: Mapping[str, Any] | None = None,
        output_dir: Path | None = None,
        on_groups: Callable[[int, Sequence[GroupResult]], None] | None = None,
        check_alive: Callable[[], None] | None = None,
        began: float | None = None,
    ) -> None:
        self.settings = settings or LoopSettings()
        if agent is not None and not store.capabilities.get("thread_safe"):
            raise ConfigError(
                f"{type(store).__name__} is not thread-safe; use agl_slime.BridgeStore(), or InMemoryLightningStore(thread_safe=True): "
                "agents, conversion and this loop run in threads of their own"
            )
        self.store = store
        self.data_source = data_source
        self._agent = agent
        start = start or LoopState()
        source = as_task_source(tasks, seed=self.settings.seed)
        self._tasks = TaskCursor(source, finished=data_source.ledger.finished_instances())
        self._val_tasks = TaskCursor(self._validation_source(tasks, val_tasks) or source, named=False)
        self._val_tasks.skip_to(start.validations * self.settings.eval_tasks)
        self._validations = start.validations
        self._llm = llm
        self._train_fn = slime_train_fn
        self._sync_fn = weight_sync_fn
        self._save_fn = save_fn
        self._resources = dict(resources or {})
        self._last_look = -math.inf
        self._best_reward = -math.inf if start.best_reward is None else start.best_reward
        self._runner_settings = runner_settings
        self._runners = runners
        self._store_host = store_host
        self._reporter = reporter
        self._run_settings = dict(run_settings or {})
        self._output_dir = output_dir
        self._on_groups = on_groups
        self._check_alive = check_alive
        self._began = began
        self._version = start.version
        self._resources_id: str | None = None
        self._iteration = start.iteration
        self._settled: asyncio.Queue[GroupResult] = asyncio.Queue()
        self._runner: RunnerPool | None = None
        self._empty_in_a_row = 0
        self._reward_means: list[float] = list(start.reward_means)
        self._last_metrics: dict[str, Any] = {}

    def run(self) -> RunResult:
        """``run_async`` from a program without an event loop."""
        return asyncio.run(self.run_async())

    async def run_async(self) -> RunResult:
        """All iterations. Raises ``LoopError`` (or another ``AglSlimeError``) when the run cannot go on. Whatever
        happens, when this returns the runner has stopped, and every rollout that was enqueued has its end in the
        ledger, except those that are ready and were not trained on."""
        loop = asyncio.get_running_loop()
        settings = self.settings
        self.data_source.listen(
            on_member=lambda member: _post(loop, self._on_member, member),
            on_group=lambda group: _post(loop, self._settled.put_nowait, group),
        )
        self._emit(
            RunStarted(
                settings=self._run_settings,
                output_dir=self._output_dir,
                num_iterations=settings.num_iterations,
                rollouts_per_iteration=settings.rollout_batch_size * settings.n_samples_per_prompt,
                at=time.monotonic() if self._began is None else self._began,
            )
        )
        reason = "interrupted"
        try:
            await self._publish_weights(self._version)
            if self._agent is not None:
                self._runner = make_runners(
                    self._runners,
                    agent=self._agent,
                    store=self.store,
                    settings=self._runner_settings,
                    on_finished=self._completion_hook(),
                    store_host=self._store_host,
                )
                await run_in_thread(self._runner.start)
            if self._iteration == 0:
                await self._save()
            for iteration in range(self._iteration + 1, settings.num_iterations + 1):
                self._iteration = iteration
                await self._iterate(iteration)
                if iteration % settings.save_interval == 0 or iteration == settings.num_iterations:
                    await self._save()
            reason = "finished"
        except AglSlimeError as error:
            reason = str(error)
            raise
        except (
            Exception
        ) as error:  # of a task source, a listener, the store: the run ends with one sentence, and the cause is kept
            reason = f"{self._where()}failed with {spell_exception(error)}"
            raise LoopError(reason) from error
        finally:
            if self._runner is not None:
                await asyncio.shield(run_in_thread(self._runner.stop, timeout_s=3.0))
            await self._cancel_outstanding()
            self._emit(RunFinished(reason=reason, summary={"ledger": _spell_ledger(self.data_source)}))
        return RunResult(
            iterations=settings.num_iterations, reward_means=tuple(self._reward_means), metrics=self._last_metrics
        )

    # -- one iteration ------------------------------------------------------------------------------------------------

    async def _iterate(self, iteration: int) -> None:
        settings = self.settings
        metrics: dict[str, Any] = {}
        began = time.monotonic()
        if iteration == 1 and settings.eval_interval:
            metrics[VAL_START_REWARD_MEAN] = (await self._evaluate(iteration))[VAL_REWARD_MEAN]
        self._emit(PhaseStarted(iteration=iteration, phase="collect"))
        collecting = time.monotonic()
        groups = await self._collect_groups()
        collect_s = time.monotonic() - collecting
        metrics.update(collect_metrics(groups, collect_s=collect_s))
        self._sound_alarms(groups)
        if self._on_groups is not None:
            self._on_groups(iteration, groups)
        self._stop_if_hopeless(iteration, groups)
        training = time.monotonic()
        if any(group.ready for group in groups):
            self._emit(PhaseStarted(iteration=iteration, phase="train"))
            metrics.update(await self._step("training", self._train_fn, iteration) or {})
            train_s = time.monotonic() - training
            self._emit(PhaseStarted(iteration=iteration, phase="sync"))
            syncing = time.monotonic()
            version = await self._step("weight sync", self._sync_fn, iteration) if self._sync_fn is not None else None
            await self._publish_weights(str(iteration if version is None else version))
            metrics.update({"perf/train_s": train_s, "perf/sync_s": time.monotonic() - syncing})
        if settings.eval_interval and (iteration % settings.eval_interval == 0 or iteration == settings.num_iterations):
            metrics.update(await self._evaluate(iteration))
        metrics["perf/collect_s"] = collect_s
        metrics.update({"iteration": iteration, ITERATION_S: time.monotonic() - began, WEIGHTS_VERSION: self._version})
        self._reward_means.append(metrics[REWARD_MEAN])
        self._last_metrics = metrics
        self._emit(IterationFinished(iteration=iteration, metrics=metrics))

    def _sound_alarms(self, groups: Sequence[GroupResult]) -> None:
        """Warn of a tool that never fires and of answers that have become all alike. Alike answers that earn the best
        reward so far are what learning looks like; alike answers that earn less cannot be told apart by any baseline.
        """
        self._best_reward = max([self._best_reward, *(reward for group in groups for reward in group.rewards)])
        short = [group.succeeded for group in groups if group.rewards and max(group.rewards) < self._best_reward]
        for text in tool_never_fired([member for group in groups for member in group.succeeded]):
            self._emit(Warning(text=text, key=text.partition(" was")[0]))
        for text in alike_answers(short):
            self._emit(Warning(text=text, key="alike_answers"))

    async def _evaluate(self, iteration: int) -> dict[str, Any]:
        """Validation rollouts with the current weights: scored, reported, never trained on."""
        self._emit(PhaseStarted(iteration=iteration, phase="eval", rollouts=self.settings.eval_tasks))
        self._validations += 1
        waiting = await self._enqueue(self._val_tasks, self.settings.eval_tasks, size=1, mode="val")
        groups = [await self._next_settled() for _ in range(waiting)]
        return eval_metrics(groups)

    async def _collect_groups(self) -> list[GroupResult]:
        """Enqueue an iteration's groups and wait until each has settled; those that are dropped are replaced, as often
        as the settings say."""
        settings = self.settings
        budget = settings.rollout_batch_size if settings.max_replaced_groups is None else settings.max_replaced_groups
        size = settings.n_samples_per_prompt
        waiting = await self._enqueue(self._tasks, settings.rollout_batch_size, size=size, mode="train")
        settled: list[GroupResult] = []
        dropped = replaced = 0
        something_works = False
        while waiting:
            group = await self._next_settled()
            waiting -= 1
            settled.append(group)
            dropped += not group.ready
            something_works = something_works or bool(group.succeeded)
            missing = min(dropped, budget) - replaced
            if missing and something_works:  # an agent that always fails is told of at once, and not run as often again
                waiting += await self._enqueue(self._tasks, missing, size=size, mode="train")
                replaced += missing
        return settled

    async def _enqueue(self, cursor: TaskCursor, n: int, *, size: int, mode: Literal["train", "val"]) -> int:
        """Enqueue the next ``n`` groups; returns how many."""
        groups = cursor.take(n)
        for group in groups:  # before they are enqueued: a rollout may end before the call below returns
            self.data_source.expect(group.group_id, size=size, mode=mode)
        requests = enqueue_requests(
            groups,
            size=size,
            mode=mode,
            resources_id=self._resources_id,
            timeout_s=self.settings.rollout_timeout_s,
            max_attempts=self.settings.max_attempts,
            iteration=self._iteration,
            weight_version=self._version,
        )
        rollouts = await self.store.enqueue_many_rollouts(requests)
        # at once and not in a thread, although a ledger on disk writes (0.04 ms per rollout): what a cancellation finds
        # enqueued, the ledger knows
        self.data_source.opened(rollouts)
        if self._runner is not None:
            self._runner.wake()
        return len(groups)

    async def _cancel_outstanding(self) -> None:
        """What was enqueued and has not ended when the run does: taken from the store's queue, and counted as
        cancelled."""
        outstanding = self.data_source.ledger.open_ids()
        if not outstanding:
            return
        cancelling = asyncio.gather(
            *(self.store.update_rollout(name, status="cancelled") for name in outstanding), return_exceptions=True
        )
        done, _ = await asyncio.wait({cancelling}, timeout=_CANCEL_TIMEOUT_S)
        if not done:
            cancelling.cancel()
            logger.warning("The store did not cancel %d rollouts within %g s.", len(outstanding), _CANCEL_TIMEOUT_S)
        groups = [*self._tasks.under_way, *self._val_tasks.under_way]
        self.data_source.abandon(outstanding, group_ids=groups, reason="run_ended")

    async def _next_settled(self) -> GroupResult:
        """The next group of this phase that settles. Raises when the runner, the data source or the engine has died."""
        while True:
            settled = asyncio.ensure_future(self._settled.get())
            group = await self._while_alive(settled)
            if self._tasks.done(group.group_id) or self._val_tasks.done(group.group_id):
                return group

    async def _while_alive(self, work: asyncio.Future[Any]) -> Any:
        """The result of ``work``; it is given up when something that the run needs dies meanwhile."""
        work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # when it is given up, nobody asks
        try:
            while True:
                # looked at by the clock and not only when nothing happens: failures of a dead engine keep coming for a
                # while
                if (now := time.monotonic()) - self._last_look >= _LOOK_INTERVAL_S:
                    self._last_look = now
                    self._raise_if_dead()
                done, _ = await asyncio.wait({work}, timeout=_LOOK_INTERVAL_S)
                if done:
                    return work.result()
        finally:
            work.cancel()

    def _raise_if_dead(self) -> None:
        if self._runner is not None and self._runner.failure is not None:
            raise LoopError(f"the runner ended: {self._runner.failure}") from self._runner.failure
        self.data_source.raise_if_dead()
        if self._check_alive is not None:
            self._check_alive()

    async def _save(self) -> None:
        """Have a checkpoint written of where the run stands."""
        if self._save_fn is not None:
            state = LoopState(
                iteration=self._iteration,
                version=self._version,
                validations=self._validations,
                best_reward=None if math.isinf(self._best_reward) else self._best_reward,
                reward_means=tuple(self._reward_means),
            )
            await self._step("writing the checkpoint", lambda _: self._save_fn(state), self._iteration)  # type: ignore[misc]

    async def _step(self, name: str, function: StepFn, iteration: int) -> Any:
        """Call the training or the sync function; what is not an error of ours becomes one sentence that says where it
        comes from."""
        try:
            return await self._while_alive(asyncio.ensure_future(_call(function, iteration)))
        except AglSlimeError:
            raise
        except Exception as error:
            raise LoopError(f"iteration {iteration}: {name} failed with {spell_exception(error)}") from error

    def _where(self) -> str:
        return f"iteration {self._iteration}: " if self._iteration else "the run "

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
            raise LoopError(
                f"iteration {iteration}: no group was fit to train on in {self._empty_in_a_row} iterations in a row ({reasons}); "
                f"failures: {spell_failures(members)}"
            )
        logger.warning("Iteration %d: no group was fit to train on (%s).", iteration, reasons)

    # -- weights and reports ------------------------------------------------------------------------------------------

    async def _publish_weights(self, version: str) -> None:
        """A resources snapshot per weight version: a rollout names the one that it was enqueued under."""
        resources: NamedResources = {**self._resources, LLM_RESOURCE: self._llm}
        self._version = version
        self.data_source.set_version(version)
        self._resources_id = (await self.store.add_resources(resources)).resources_id

    def _completion_hook(self) -> Callable[[str], None] | None:
        # a BridgeStore tells the data source itself
        return None if isinstance(self.store, BridgeStore) else self.data_source.notify

    def _on_member(self, member: MemberResult) -> None:
        self._emit(
            RolloutFinished(
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

    def _emit(self, event: Event) -> None:
        if self._reporter is not None:
            self._reporter.handle(event)

    def _validation_source(self, tasks: Tasks, val_tasks: Tasks | None) -> TaskSource | None:
        if val_tasks is not None:
            return as_task_source(val_tasks, seed=self.settings.seed + 1)
        if callable(tasks) and not hasattr(tasks, "next_batch"):
            return as_task_source(tasks, seed=self.settings.seed + 1)
        if self.settings.eval_interval:
            raise ConfigError(
                "eval_interval is set but there are no val_tasks; pass val_tasks, or set eval_interval to 0"
            )
        return None


def spell_failures(members: Sequence[MemberResult]) -> str:
    """The reasons of failed rollouts, most frequent first, each with one example of its message."""
    counts = Counter(member.failure for member in members if not member.ok)
    examples = {member.failure: member.failure_message for member in members if not member.ok}
    spelled = [
        f"{count} x {reason}" + (f" ({_one_line(examples[reason])})" if examples[reason] else "")
        for reason, count in counts.most_common(5)
    ]
    return "; ".join(spelled) + (f"; and {len(counts) - 5} other reasons" if len(counts) > 5 else "")


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_MESSAGE else line[:_LONGEST_MESSAGE] + "..."


async def _call(function: StepFn, iteration: int) -> Any:
    """Call a training or sync function with the iteration if it takes an argument; a sync one runs in a thread."""
    takes_argument = bool(inspect.signature(function).parameters)
    args = (iteration,) if takes_argument else ()
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    result = await run_in_thread(function, *args)
    return await result if inspect.isawaitable(result) else result


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[..., Any], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:  # the run is over and its loop closed; nobody waits for late results
        logger.debug("A result arrived after the run had ended.")


def _spell_ledger(source: GroupSource) -> dict[str, int]:
    counts = source.ledger.counts()
    return {
        "opened": counts.opened,
        "open": counts.open,
        "ready": counts.ready,
        **{outcome.value: n for outcome, n in counts.closed.items()},
    }
