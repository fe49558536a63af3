"""kill -9 of runner processes at random moments of a run; then: was each group trained on exactly once, with its
rollouts' tokens?

A whole ``OnlineRLLoop`` with real worker processes; only the model and the trainer are played. Each task is a number,
and the engine says that number in each of the rollout's three turns, so the tokens and the reward of a sample identify
its task. A kill waits for a worker that is up, for rollouts that are in flight, and for a random share of the
iteration's rollouts to have ended.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.agent.scheduler import MultiTurnScheduler
from agl_slime.data.results import Outcome
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.engine.client.transport import ClientSettings
from agl_slime.events import GroupsCollected, RolloutFinished
from agl_slime.loop.online import OnlineRLLoop
from agl_slime.loop.settings import LoopSettings
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.concurrent import RunnerSettings
from agl_slime.runner.processes import ProcessPool
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, EnqueueRolloutRequest, Rollout
from agl_slime.types import Sample
from tests.harness.loop import Recorder, Trainer
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer

TURNS = 3
PROCESSES = 2
GROUPS, GROUP_SIZE = 8, 4
_PHASES = 8


class AskAgain(MultiTurnScheduler):
    def step(self, infer_request: Any, result: Any, current_turn: int) -> Any:
        infer_request.messages.append({"role": "user", "content": "again"})
        return infer_request


class CountAgent(SGLangLitAgent):
    """The reward is the number that the last answer says."""

    scheduler = AskAgain
    max_turns = TURNS

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return float(re.findall(r"\d+", response)[0])


def answer_of(n: int) -> str:
    """The engine's answer in each turn of task ``n``; lengths differ, so that rollouts end at different times."""
    return f"it is {n}" + " and on" * (n % _PHASES)


def conversation_of(n: int) -> str:
    """The text of a rollout of task ``n`` up to its last end token, as the chat template writes it."""
    turn = f"<|im_start|>assistant\n{answer_of(n)}<|im_end|>\n"
    turns = (turn + "<|im_start|>user\nagain<|im_end|>\n") * (TURNS - 1) + turn
    return f"<|im_start|>user\ntask {n} please<|im_end|>\n{turns}".strip()


def counting_engine() -> ScriptedEngine:
    tokenizer: Any = small_tokenizer()
    eos = tokenizer.eos_token_id
    assert isinstance(eos, int)
    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    size = len(opening)

    def next_id(sequence: Sequence[int]) -> int:
        ids = list(sequence)
        begins = next(i for i in range(len(ids), -1, -1) if ids[i - size : i] == opening)
        n = int(re.findall(r"task (\d+) please", tokenizer.decode(ids))[0])
        return [*tokenizer.encode(answer_of(n), add_special_tokens=False), eos][len(ids) - begins]

    return ScriptedEngine(
        vocab_size=len(tokenizer),
        eos_id=eos,
        token_s=0.02,
        next_id=next_id,
        decode=lambda ids: tokenizer.decode(list(ids)),
    )


class WatchedStore(BridgeStore):
    """Counts how often each enqueued rollout has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: dict[str, int] = {}
        self.groups: dict[str, str] = {}
        self.ends: Counter[str] = Counter()
        self.ended_now = 0  # of the latest iteration
        self.subscribe_finished(self._end)

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        self.ended_now = 0
        enqueued = await super().enqueue_many_rollouts(rollouts)
        for rollout in enqueued:
            self.tasks[rollout.rollout_id] = rollout.input["n"]
            self.groups[rollout.rollout_id] = (rollout.metadata or {})["group_id"]
        return enqueued

    def _end(self, rollout: Rollout) -> None:
        self.ends[rollout.rollout_id] += 1
        self.ended_now += 1


@dataclass
class Result:
    """The counts of a run, and a sentence for each fault."""

    kills: int
    counts: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class Killer(threading.Thread):
    """Kills runner processes, ``plan[i]`` times in the i-th iteration; kills that are still due come in later ones."""

    def __init__(self, *, rng: random.Random, store: WatchedStore, plan: Sequence[Sequence[float]]) -> None:
        super().__init__(name="killer", daemon=True)
        self._rng, self._store, self._plan = rng, store, plan
        self._over = threading.Event()
        self.pool: ProcessPool | None = None
        self.kills = 0

    def run(self) -> None:
        due: deque[float] = deque()
        iteration, size = 0, GROUPS * GROUP_SIZE
        while not self._over.wait(0.01):
            begun = len(self._store.tasks) // size
            if begun > iteration:
                due.extend(share for shares in self._plan[iteration:begun] for share in shares)
                iteration = begun
            if due and self._store.ended_now >= due[0] * size and self._kill():
                due.popleft()

    def _kill(self) -> bool:
        if not self._victims() or self._over.wait(self._rng.uniform(0.0, 0.4)) or not (ready := self._victims()):
            return False
        try:
            os.kill(self._rng.choice(ready), signal.SIGKILL)
        except ProcessLookupError:  # it was killed a moment ago
            return False
        self.kills += 1
        return True

    def _victims(self) -> list[int]:
        return self.pool.pids(ready=True) if self.pool is not None and self._store.usage().running else []

    def end(self) -> None:
        self._over.set()
        if self.is_alive():
            self.join()


def plan_kills(rng: random.Random, kills: int) -> list[list[float]]:
    """For each iteration at which shares of it to kill: 0 to 3 times, ``kills`` in all."""
    plan: list[list[float]] = []
    while (missing := kills - sum(map(len, plan))) > 0:
        plan.append(sorted(rng.uniform(0.0, 0.9) for _ in range(min(missing, rng.choice([0, 1, 1, 2, 3])))))
    return plan


def run_with_kills(*, kills: int, seed: int) -> Result:
    """A run of as many iterations as ``kills`` need."""
    rng = random.Random(seed)
    plan, store, tokenizer = plan_kills(rng, kills), WatchedStore(), small_tokenizer()
    source = GroupSource(store=store, tokenizer=tokenizer, settings=DataSourceSettings(get_timeout_s=120))
    recorder, trainer = Recorder(), Trainer(source, n=GROUPS)
    numbers = iter(range(1_000_000))
    killer = Killer(rng=rng, store=store, plan=plan)

    def make_task(_: random.Random) -> dict[str, Any]:
        if killer.pool is None and isinstance(loop._runner, ProcessPool):  # the loop makes its runners when it runs
            killer.pool = loop._runner
            killer.start()
        n = next(numbers)
        return {"prompt": f"task {n} please", "n": n}

    # the last iterations are there for kills that met nothing in flight in theirs
    settings = LoopSettings(
        num_iterations=len(plan) + 2,
        rollout_batch_size=GROUPS,
        n_samples_per_prompt=GROUP_SIZE,
        max_attempts=1_000,
        max_empty_iterations=100,
    )
    # spans are written while their rollout runs, so that killed attempts leave some behind
    runner_settings = RunnerSettings(
        max_concurrent=GROUPS * GROUP_SIZE // 2,
        claim_batch=4,
        poll_interval_s=0.02,
        heartbeat_interval_s=1.0,
        flush_interval_s=0.02,
        max_restarts=10 * kills,
    )
    sampling: dict[str, Any] = {"max_new_tokens": 64, "temperature": 1.0}
    with in_thread(counting_engine()) as engine, source:
        loop = OnlineRLLoop(
            store=store,
            agent=CountAgent(tokenizer=tokenizer, client_settings=ClientSettings(total_timeout_s=60.0)),
            tasks=make_task,
            llm=LLM(endpoint=engine.url, model="scripted", sampling_parameters=sampling),
            data_source=source,
            slime_train_fn=trainer,
            settings=settings,
            runners=RunnerPlan("process", PROCESSES, settings=runner_settings),
            observer=recorder,
        )
        try:
            loop.run()
        finally:
            killer.end()
        result = Result(kills=killer.kills)
        _check(result, store, source, recorder, trained=[group for batch in trainer.batches for group in batch])
    return result


def _repeated(counts: Counter[str]) -> list[str]:
    return [name for name, times in counts.items() if times > 1]


def _check(
    result: Result, store: WatchedStore, source: GroupSource, recorder: Recorder, trained: Sequence[Sequence[Sample]]
) -> None:
    faults, tokenizer, ledger = result.faults, small_tokenizer(), source.ledger.counts()
    reported = Counter(event.rollout_id for event in recorder.events_of(RolloutFinished))
    collected = [group for event in recorder.events_of(GroupsCollected) for group in event.groups]
    finalized = Counter(group.group_id for group in collected)
    ready = {group.group_id: [member.rollout_id for member in group.succeeded] for group in collected if group.ready}
    dropped = [group for group in collected if not group.ready]

    delivered, in_samples = Counter[str](), Counter[str]()
    for samples in trained:
        ids = [sample.metadata["agl_rollout_id"] for sample in samples]
        in_samples.update(ids)
        groups = {store.groups.get(rollout_id, "unknown") for rollout_id in ids}
        delivered.update(groups)
        if len(groups) != 1 or sorted(ids) != sorted(ready.get(next(iter(groups)), [])):
            faults.append(f"a trained group has {len(ids)} samples of {sorted(groups)}, not one group's members")
        for rollout_id, sample in zip(ids, samples, strict=True):
            n, text = store.tasks.get(rollout_id, -1), tokenizer.decode(sample.tokens)
            if sample.reward != n or text != conversation_of(n):
                faults.append(f"rollout {rollout_id} of task {n} has the reward {sample.reward} and says {text!r}")

    groups = set(store.groups.values())
    lost = [name for name in groups if not finalized[name]] + [name for name in ready if not delivered[name]]
    lost += [group.group_id for group in dropped if not group.reason]
    closed = {outcome.value: count for outcome, count in ledger.closed.items()}
    for names, sentence in (
        (lost, "groups are lost"),
        (_repeated(delivered) + _repeated(finalized), "groups were trained on or finalized twice"),
        (_repeated(in_samples), "rollouts are in the trained samples twice"),
        ([name for name in store.tasks if store.ends[name] != 1], "rollouts did not end once in the store"),
        (_repeated(reported), "rollouts were reported twice"),
        (sorted(set(reported) ^ set(store.tasks)), "rollouts were enqueued or reported, and not both"),
    ):
        if names:
            faults.append(f"{len(names)} {sentence}: {names[:5]}")
    if not ledger.opened == len(store.tasks) == sum(closed.values()) or ledger.open or ledger.ready:
        faults.append(f"the ledger does not add up to one end for each of {len(store.tasks)} rollouts: {ledger}")
    cancelled = closed.get(Outcome.CANCELLED.value, 0)
    if cancelled != (stragglers := sum(member.straggler for group in dropped for member in group.members)):
        faults.append(f"{cancelled} rollouts were cancelled, and {stragglers} members of groups were stragglers")
    result.counts = {"groups enqueued": len(groups), "groups trained": sum(times == 1 for times in delivered.values())}


@pytest.mark.slow
def test_killed_runner_processes_lose_no_group_and_train_none_twice():
    result = run_with_kills(kills=3, seed=1)
    assert result.faults == []
    assert result.kills == 3
    assert result.counts["groups trained"] == result.counts["groups enqueued"] > 0
    assert multiprocessing.active_children() == []
