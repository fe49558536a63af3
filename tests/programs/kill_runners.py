"""kill -9 of runner processes at random moments of a run; then: was each group trained on exactly once, each with its
own tokens?

python -m tests.programs.kill_runners --kills 50

A whole ``OnlineRLLoop`` with real worker processes; only the model and the trainer are played. Each task is a number,
and the engine says that number in each of the rollout's three turns, so the tokens and the reward of a sample tell
which task they belong to. A kill waits for a worker that is up, for rollouts that are in flight, and for a random share
of the iteration's rollouts to have ended.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
    """What the engine says in each turn of task ``n``; of different lengths, so that rollouts end at different
    times."""
    return f"it is {n}" + " and on" * (n % _PHASES)


def conversation_of(n: int) -> str:
    """All of the text of a rollout of task ``n``, up to its last end token, as the chat template writes it."""
    turn = f"<|im_start|>assistant\n{answer_of(n)}<|im_end|>\n"
    return "\n".join(
        [
            "<|im_start|>user",
            f"task {n} please<|im_end|>",
            (turn + "<|im_start|>user\nagain<|im_end|>\n") * (TURNS - 1) + turn,
        ]
    ).strip()


def counting_engine(*, token_s: float) -> ScriptedEngine:
    tokenizer: Any = small_tokenizer()
    eos = tokenizer.eos_token_id
    assert isinstance(eos, int)
    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)

    def next_id(ids: Sequence[int]) -> int:
        listed = list(ids)
        begins = next(
            i for i in range(len(listed) - len(opening), -1, -1) if listed[i : i + len(opening)] == opening
        ) + len(opening)
        n = int(re.findall(r"task (\d+) please", tokenizer.decode(listed))[0])
        words = [*tokenizer.encode(answer_of(n), add_special_tokens=False), eos]
        return words[len(listed) - begins]

    return ScriptedEngine(
        vocab_size=len(tokenizer),
        eos_id=eos,
        token_s=token_s,
        next_id=next_id,
        decode=lambda ids: tokenizer.decode(list(ids)),
    )


class WatchedStore(BridgeStore):
    """Remembers what was enqueued and how often each rollout has ended."""

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
    """What became of a run. ``faults`` are sentences; there are none when all is well."""

    kills: int
    seconds: float
    counts: dict[str, int]
    faults: list[str] = field(default_factory=list)


class Killer(threading.Thread):
    """Kills runner processes, ``plan[i]`` times in the i-th iteration, what is left over in later ones."""

    def __init__(self, *, rng: random.Random, store: WatchedStore, plan: Sequence[Sequence[float]], size: int) -> None:
        super().__init__(name="killer", daemon=True)
        self._rng, self._store, self._plan, self._size = rng, store, plan, size
        self._over = threading.Event()
        self.pool: ProcessPool | None = None
        self.kills = 0

    def run(self) -> None:
        due: deque[float] = deque()
        iteration = 0
        while not self._over.wait(0.01):
            begun = len(self._store.tasks) // self._size
            if begun > iteration:
                due.extend(share for shares in self._plan[iteration:begun] for share in shares)
                iteration = begun
            if due and self._store.ended_now >= due[0] * self._size and self._kill():
                due.popleft()

    def _kill(self) -> bool:
        if not self._victims() or self._over.wait(self._rng.uniform(0.0, 0.4)):
            return False
        ready = self._victims()
        if not ready:
            return False
        try:
            os.kill(self._rng.choice(ready), signal.SIGKILL)
        except ProcessLookupError:  # one that this thread has killed a moment ago
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
    while (left := kills - sum(map(len, plan))) > 0:
        plan.append(sorted(rng.uniform(0.0, 0.9) for _ in range(min(left, rng.choice([0, 1, 1, 2, 3])))))
    return plan


def run(
    *, kills: int, seed: int, groups: int = 8, group_size: int = 4, max_attempts: int = 1_000, token_s: float = 0.02
) -> Result:
    """A run of as many iterations of ``groups`` groups as ``kills`` need."""
    rng = random.Random(seed)
    plan = plan_kills(rng, kills)
    store = WatchedStore()
    tokenizer: Any = small_tokenizer()
    source = GroupSource(store=store, tokenizer=tokenizer, settings=DataSourceSettings(get_timeout_s=120))
    recorder, trainer = Recorder(), Trainer(source, n=groups)
    numbers = iter(range(1_000_000))
    killer = Killer(rng=rng, store=store, plan=plan, size=groups * group_size)
    began = time.monotonic()

    def make_task(_: random.Random) -> dict[str, Any]:
        if killer.pool is None and isinstance(loop._runner, ProcessPool):  # the loop makes its runners when it runs
            killer.pool = loop._runner
            killer.start()
        n = next(numbers)
        return {"prompt": f"task {n} please", "n": n}

    with in_thread(counting_engine(token_s=token_s)) as engine, source:
        loop = OnlineRLLoop(
            store=store,
            agent=CountAgent(tokenizer=tokenizer, client_settings=ClientSettings(total_timeout_s=60.0)),
            tasks=make_task,
            llm=LLM(
                endpoint=engine.url, model="scripted", sampling_parameters={"max_new_tokens": 64, "temperature": 1.0}
            ),
            data_source=source,
            slime_train_fn=trainer,
            # the last iterations are there for kills that found nothing in flight in theirs
            settings=LoopSettings(
                num_iterations=len(plan) + 2,
                rollout_batch_size=groups,
                n_samples_per_prompt=group_size,
                max_attempts=max_attempts,
                max_empty_iterations=100,
            ),
            runners=RunnerPlan(
                "process",
                PROCESSES,
                # spans are written while their rollout runs, so that killed attempts leave some behind
                settings=RunnerSettings(
                    max_concurrent=groups * group_size // 2,
                    claim_batch=4,
                    poll_interval_s=0.02,
                    heartbeat_interval_s=1.0,
                    flush_interval_s=0.02,
                    max_restarts=10 * kills,
                ),
            ),
            observer=recorder,
        )
        try:
            loop.run()
        finally:
            killer.end()
        result = Result(kills=killer.kills, seconds=time.monotonic() - began, counts={})
        _check(
            result,
            store=store,
            source=source,
            recorder=recorder,
            trained=[group for batch in trainer.batches for group in batch],
        )
    return result


def _check(
    result: Result,
    *,
    store: WatchedStore,
    source: GroupSource,
    recorder: Recorder,
    trained: Sequence[Sequence[Sample]],
) -> None:
    faults = result.faults
    tokenizer: Any = small_tokenizer()
    ledger = source.ledger.counts()
    told = Counter(event.rollout_id for event in recorder.events_of(RolloutFinished))
    settled = [group for event in recorder.events_of(GroupsCollected) for group in event.groups]
    settlements = Counter(group.group_id for group in settled)
    wanted = {group.group_id: [member.rollout_id for member in group.succeeded] for group in settled if group.ready}
    enqueued_groups = set(store.groups.values())

    handed_out: Counter[str] = Counter()
    in_samples: Counter[str] = Counter()
    wrong = 0
    for samples in trained:
        ids = [sample.metadata["agl_rollout_id"] for sample in samples]
        in_samples.update(ids)
        group_ids = {store.groups.get(rollout_id, "unknown") for rollout_id in ids}
        handed_out.update(group_ids)
        if len(group_ids) != 1 or sorted(ids) != sorted(wanted.get(next(iter(group_ids)), [])):
            faults.append(
                f"a trained group has {len(ids)} samples of the groups {sorted(group_ids)}, not one group's members"
            )
        for rollout_id, sample in zip(ids, samples, strict=True):
            n = store.tasks.get(rollout_id, -1)
            if sample.reward != n or tokenizer.decode(sample.tokens) != conversation_of(n):
                wrong += 1
                faults.append(
                    f"rollout {rollout_id} of task {n} has the reward {sample.reward} and says "
                    f"{tokenizer.decode(sample.tokens)!r}"
                )

    dropped = [group for group in settled if not group.ready]
    lost = [name for name in enqueued_groups if not settlements[name]] + [
        name for name in wanted if not handed_out[name]
    ]
    lost += [group.group_id for group in dropped if not group.reason]
    twice = [name for name, times in (handed_out + Counter()).items() if times > 1] + [
        name for name, times in settlements.items() if times > 1
    ]
    not_once = [name for name in store.tasks if store.ends[name] != 1]
    doubled = [name for name, times in in_samples.items() if times > 1]
    closed = {outcome.value: count for outcome, count in ledger.closed.items()}
    in_ledger = ledger.opened == len(store.tasks) == sum(closed.values()) and not ledger.open and not ledger.ready

    if lost:
        faults.append(f"{len(lost)} groups are lost: {lost[:5]}")
    if twice:
        faults.append(f"{len(twice)} groups were trained or settled twice: {twice[:5]}")
    if doubled:
        faults.append(f"{len(doubled)} rollouts are in the trained samples twice: {doubled[:5]}")
    if not_once:
        faults.append(
            f"{len(not_once)} rollouts did not end once in the store: "
            f"{[(name, store.ends[name]) for name in not_once[:5]]}"
        )
    repeated = [name for name, times in told.items() if times > 1]
    if repeated:
        faults.append(f"the run told of {len(repeated)} rollouts more than once: {repeated[:5]}")
    if set(told) != set(store.tasks):
        faults.append(f"the run told of the ends of {len(told)} rollouts, {len(store.tasks)} were enqueued")
    if not in_ledger:
        faults.append(f"the ledger does not add up to one end for each of {len(store.tasks)} rollouts: {ledger}")
    result.counts = {
        "rollouts enqueued": len(store.tasks),
        "rollouts with one end": len(store.tasks) - len(not_once),
        **{f"rollouts {name}": closed[name] for name in sorted(closed)},
        "rollouts told of more than once": len(repeated),
        "rollouts in the samples twice": len(doubled),
        "samples with another's tokens or reward": wrong,
        "groups enqueued": len(enqueued_groups),
        "groups trained": sum(times == 1 for times in handed_out.values()),
        "groups dropped with a reason": sum(bool(group.reason) for group in dropped),
        "groups lost": len(lost),
        "groups trained twice": len(twice),
    }
    cancelled = closed.get(Outcome.CANCELLED.value, 0)
    cut_off = sum(member.straggler for group in dropped for member in group.members)
    if cancelled != cut_off:
        faults.append(f"{cancelled} rollouts were cancelled, and {cut_off} members of groups were let go")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--max-attempts",
        type=int,
        default=1_000,
        help="of a rollout; with few of them groups may be dropped, with a reason",
    )
    options = parser.parse_args()
    logging.getLogger("agl_slime.runner.processes").setLevel(logging.ERROR)  # each kill is a warning there
    result = run(kills=options.kills, seed=options.seed, max_attempts=options.max_attempts)
    print(
        f"{result.kills} of {options.kills} kills in {result.seconds:.0f} s "
        f"(load {os.getloadavg()[0]:.1f}, seed {options.seed})"
    )
    for name, count in result.counts.items():
        print(f"  {name:<40}{count:>8}")
    for fault in result.faults:
        print(f"WRONG: {fault}")
    return 1 if result.faults or result.kills < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
