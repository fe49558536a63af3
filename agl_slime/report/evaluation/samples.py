"""Samples of tasks: rollouts through a store and a runner, as in training, each a line of a file once it ended.

A kill loses only rollouts in flight: the same evaluation, started again, requests the samples without a line.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from agl_slime.agent.access import LLM_RESOURCE
from agl_slime.data.results import MemberResult
from agl_slime.data.source import GroupSource
from agl_slime.errors import LoopError
from agl_slime.loop.tasks import Task, TaskGroup, enqueue_requests
from agl_slime.report.files import IterationFile, iter_jsonl
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.make import make_runners
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, LightningStore, LitAgent
from agl_slime.support.threads import run_in_thread

_HEALTH_CHECK_S = 1.0  # between health checks of engine, runner and source


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
    check_alive: Callable[[], None] | None = None


class SampleFile:
    """``samples.jsonl``: a line for each completed sample. ``task`` and ``sample`` are numbers from 0."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = list(iter_jsonl(path)) if path.exists() else []
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
        trajectory = member.trajectory
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


def rewards_of(lines: Iterable[Mapping[str, Any]]) -> dict[int, list[float]]:
    """The rewards of each task's samples; an empty list where all failed."""
    by_task: dict[int, list[float]] = {}
    for line in lines:
        rewards = by_task.setdefault(line["task"], [])
        if line["reward"] is not None:
            rewards.append(float(line["reward"]))
    return by_task


async def take_samples(
    tasks: Sequence[Task], *, k: int, into: SampleFile, sampling: Sampling, on_progress: Callable[[int, int], None]
) -> None:
    """Sample each task ``k`` times, without the samples in ``into``. ``on_progress`` receives completed and total
    samples. Raises ``LoopError`` when the runner or the engine dies; completed samples are kept."""
    missing = into.missing(tasks=len(tasks), k=k)
    on_progress(k * len(tasks) - len(missing), k * len(tasks))
    if not missing:
        return
    store, ended = BridgeStore(), asyncio.Queue[MemberResult]()
    post = asyncio.get_running_loop().call_soon_threadsafe

    def put(member: MemberResult) -> None:
        with suppress(RuntimeError):  # a late result: the evaluation is over and its loop closed
            post(ended.put_nowait, member)

    has_tokens = sampling.tokenizer is not None
    with GroupSource(
        store=store, tokenizer=sampling.tokenizer, convert_validation=has_tokens, text_only=not has_tokens
    ) as source:
        source.listen(on_member=put, on_group=lambda group: None)
        resources = (await store.add_resources({LLM_RESOURCE: sampling.llm})).resources_id
        runner = make_runners(sampling.runners, agent=sampling.agent, store=store)
        await run_in_thread(runner.start)
        try:
            places = {f"{uuid.uuid4().hex}-{number}": pair for number, pair in zip(count(), missing, strict=False)}
            left, in_flight = iter(places.items()), 0
            while True:
                groups = [
                    TaskGroup(group_id, tasks[task])
                    for group_id, (task, _) in islice(left, sampling.max_in_flight - in_flight)
                ]
                await _enqueue(store, source, groups, resources=resources, timeout_s=sampling.timeout_s)
                runner.wake()
                in_flight += len(groups)
                if not in_flight:
                    return
                for member in await _ended(ended, lambda: _raise_if_dead(runner, source, sampling)):
                    into.add(*places[member.group_id], member)
                    in_flight -= 1
                    on_progress(len(into.lines), k * len(tasks))
        finally:
            await asyncio.shield(run_in_thread(runner.stop, timeout_s=3.0))


async def _enqueue(
    store: LightningStore, source: GroupSource, groups: Sequence[TaskGroup], *, resources: str, timeout_s: float
) -> None:
    """Enqueue each sample as a group of one, so that failures are independent."""
    for group in groups:
        source.expect(group.group_id, size=1, mode="val")
    requests = enqueue_requests(groups, size=1, mode="val", resources_id=resources, timeout_s=timeout_s)
    if requests:
        source.opened(await store.enqueue_many_rollouts(requests))


async def _ended(ended: asyncio.Queue[MemberResult], raise_if_dead: Callable[[], None]) -> Iterator[MemberResult]:
    """Completed samples, at least one."""
    while True:
        try:
            first = await asyncio.wait_for(ended.get(), _HEALTH_CHECK_S)
        except TimeoutError:
            raise_if_dead()
            continue
        return iter([first, *(ended.get_nowait() for _ in range(ended.qsize()))])


def _raise_if_dead(runner: Any, source: GroupSource, sampling: Sampling) -> None:
    if runner.failure is not None:
        raise LoopError(f"the runner ended: {runner.failure}") from runner.failure
    source.raise_if_dead()
    if sampling.check_alive is not None:
        sampling.check_alive()
