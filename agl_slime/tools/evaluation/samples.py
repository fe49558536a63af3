"""Samples of tasks: rollouts through a store and a runner, as in training, each a line of a file once it ended.

A kill loses only rollouts in flight: the same evaluation, started again, requests the samples without a line.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_slime.agent.access import LLM_RESOURCE
from agl_slime.data.enqueueing import HealthCheck, Task, TaskGroup, enqueue_requests, run_rollouts
from agl_slime.data.results import MemberResult
from agl_slime.data.source import GroupSource
from agl_slime.errors import LoopError
from agl_slime.report.files import IterationFile, iter_jsonl
from agl_slime.runner.base import RunnerPlan, make_runners
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, LitAgent, Rollout
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.reward import UNNAMED


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The agent (``None`` if other runners execute it), its runners and model, and the limits of a rollout.
    ``tokenizer`` is ``None`` for a model whose tokens are unknown."""

    agent: LitAgent[Any] | None
    llm: LLM
    tokenizer: Any
    runners: RunnerPlan
    timeout_s: float
    max_in_flight: int
    seed: int
    reward_key: str | None = None
    check_alive: Callable[[], None] | None = None


class SampleFile:
    """``samples.jsonl``: a line for each completed sample. ``task`` and ``sample`` are numbers from 0."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = list(iter_jsonl(path)) if path.exists() else []
        self.last: MemberResult | None = None
        """The newest sample, of which a line has a part."""
        self._file = IterationFile(path)

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def missing(self, *, tasks: int, k: int) -> list[tuple[int, int]]:
        """The (task, sample) pairs without a line, the first sample of every task first."""
        recorded = {(line["task"], line["sample"]) for line in self.lines}
        return [(task, sample) for sample in range(k) for task in range(tasks) if (task, sample) not in recorded]

    def add(self, task: int, sample: int, member: MemberResult) -> None:
        self.last, trajectory = member, member.trajectory
        line = {
            "task": task,
            "sample": sample,
            "rollout_id": member.rollout_id,
            "reward": member.reward if member.ok else None,
            "rewards": dict(member.rewards),
            "failure": member.failure,
            "message": member.failure_message,
            "tokens": member.sampled_tokens or None,  # None: unknown
            "turns": member.turns,
            "stop_reason": getattr(trajectory, "stop_reason", ""),
            "input": member.task,
            "messages": list(getattr(trajectory, "messages", ())),
        }
        # one iteration per line: IterationFile replaces an incomplete last line
        number = self.lines[-1]["iteration"] + 1 if self.lines else 1
        self._file.append(number, [line])
        self.lines.append({"iteration": number, **line})


def reward_name(lines: Iterable[Mapping[str, Any]]) -> str | None:
    """The name of the reward that samples were evaluated by; ``None`` for plain numbers."""
    return next((name for line in lines for name in [*line["rewards"]][:1] if name != UNNAMED), None)


def rewards_of(lines: Iterable[Mapping[str, Any]], numbers: Sequence[int]) -> dict[int, list[float]]:
    """The rewards of each task's samples, an empty list where all failed; ``numbers`` are equal for equal tasks."""
    by_task: dict[int, list[float]] = {}
    for line in lines:
        rewards = by_task.setdefault(numbers[line["task"]], [])
        if line["reward"] is not None:
            rewards.append(float(line["reward"]))
    return by_task


async def take_samples(
    tasks: Sequence[Task],
    *,
    k: int,
    into: SampleFile,
    sampling: Sampling,
    on_progress: Callable[[int, int], None],
    run_key: str | None = None,
) -> None:
    """Sample each task ``k`` times, without the samples in ``into``. ``on_progress`` receives completed and total
    samples; ``run_key`` is the ``reward_name`` of earlier ones. Raises ``LoopError`` when the runner or the engine
    dies; completed samples are kept."""
    missing = into.missing(tasks=len(tasks), k=k)
    on_progress(k * len(tasks) - len(missing), k * len(tasks))
    if not missing:
        return
    store, has_tokens = BridgeStore(), sampling.tokenizer is not None
    with GroupSource(
        store=store,
        tokenizer=sampling.tokenizer,
        reward_key=sampling.reward_key,
        convert_validation=has_tokens,
        text_only=not has_tokens,
    ) as source:
        source.ingestor.resume(run_key or reward_name(into.lines), ())
        resources_id = (await store.add_resources({LLM_RESOURCE: sampling.llm})).resources_id
        runner = make_runners(sampling.runners, agent=sampling.agent, store=store)

        def raise_if_dead() -> None:
            if runner.failure is not None:
                raise LoopError(f"the runner ended: {runner.failure}") from runner.failure
            source.raise_if_dead()
            if sampling.check_alive is not None:
                sampling.check_alive()

        async def enqueue(groups: Sequence[TaskGroup]) -> Sequence[Rollout]:
            options: dict[str, Any] = {"size": 1, "timeout_s": sampling.timeout_s, "seed": sampling.seed}
            requests = enqueue_requests(groups, mode="val", resources_id=resources_id, **options)
            rollouts = await store.enqueue_many_rollouts(requests)
            runner.wake()
            return rollouts

        # each sample is a group of one, so that failures are independent; its name's end decides the sample's seed
        pairs = {f"{uuid.uuid4().hex}-{task}.{sample}": (task, sample) for task, sample in missing}
        groups = (TaskGroup(group_id, tasks[task]) for group_id, (task, _) in pairs.items())
        health = HealthCheck(raise_if_dead)
        await run_in_thread(runner.start)
        try:
            rollouts = run_rollouts(source, groups, enqueue, health=health, max_in_flight=sampling.max_in_flight)
            async for member in rollouts:
                into.add(*pairs[member.group_id], member)
                on_progress(len(into.lines), k * len(tasks))
        finally:
            await asyncio.shield(run_in_thread(runner.stop, timeout_s=3.0))
