"""Runner processes: real ones, against a real store over HTTP."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_slime.agent.loading import load_agent
from agl_slime.errors import ConfigError, LoopError
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.concurrent import RunnerSettings
from agl_slime.runner.make import make_runners
from agl_slime.runner.processes import READY, ProcessPool, process_main
from agl_slime.runner.thread import RunnerThread
from agl_slime.runner.worker import WorkerSpec
from agl_slime.store.bridge import WORKER_DIED, BridgeStore
from agl_slime.support.agl import LLM, EnqueueRolloutRequest, LitAgent, RolloutConfig, emit_reward, find_final_reward
from tests.harness.processes import is_running
from tests.harness.waiting import becomes_true, until

pytestmark = pytest.mark.slow  # every process imports Agent Lightning: seconds of a core each

SETTINGS = RunnerSettings(poll_interval_s=0.02, heartbeat_interval_s=1.0)


class EchoAgent(LitAgent[Any]):
    """Rewards with the task's number. May be told to end its process, once, or to wait."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> None:
        if (flag := task.get("die_unless")) and not Path(flag).exists():
            Path(flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2_000):
            if "wait_for" not in task or Path(task["wait_for"]).exists():
                break
            await asyncio.sleep(0.02)
        for _ in range(task.get("spans", 0)):
            emit_reward(-1.0)
        emit_reward(float(task["n"]))


BY_FILE = """
from agl_slime.support.agl import LitAgent, emit_reward

class Echo(LitAgent):
    async def rollout_async(self, task, resources, rollout):
        emit_reward(float(task["n"]))
"""


@pytest.mark.parametrize("plan", ["process:1", pytest.param("ray:1", marks=pytest.mark.ray)])
async def test_workers_find_an_agent_that_was_loaded_by_its_file(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo agent.py").write_text(BY_FILE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    agent = load_agent(f"{tmp_path}/echo agent.py:Echo")
    store, ids = await prepared([{"n": n} for n in range(3)])
    pool = make_runners(replace(RunnerPlan.parse(plan), settings=SETTINGS), agent=agent, store=store)
    await asyncio.to_thread(pool.start)
    try:
        rollouts = await ends(store, ids)
    finally:
        assert await asyncio.to_thread(pool.stop)
    assert [rollout.status for rollout in rollouts] == ["succeeded"] * 3


class HangingAgent(LitAgent[Any]):
    """Waits for what never comes, and leaves a file when it is cancelled; a task without such a file is done at
    once."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        if "cancelled" not in task:
            return 1.0
        Path(task["begun"]).touch()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            Path(task["cancelled"]).touch()
            raise
        raise AssertionError("nobody sets the event")


class PoisonAgent(LitAgent[Any]):
    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class UnpicklableAgent(LitAgent[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.keep = lambda: None


async def prepared(tasks: Sequence[dict[str, Any]], **config: Any) -> tuple[BridgeStore, list[str]]:
    store = BridgeStore()
    await store.add_resources({"main_llm": LLM(endpoint="http://127.0.0.1:1", model="none")})
    requests = [EnqueueRolloutRequest(input=task, mode="train", config=RolloutConfig(**config)) for task in tasks]
    return store, [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]


async def ends(store: BridgeStore, ids: Sequence[str]) -> list[Any]:
    return [await asyncio.wait_for(store.wait_for_rollout(rollout_id, timeout=60), 65) for rollout_id in ids]


async def test_two_processes_share_the_work_and_nothing_is_left_running(tmp_path: Path) -> None:
    go = tmp_path / "go"
    tasks = [{"n": n, "spans": n % 3, **({"wait_for": str(go)} if n < 40 else {})} for n in range(120)]
    store, ids = await prepared(tasks)
    pool = ProcessPool(plan=RunnerPlan("process", 2, SETTINGS), agent=EchoAgent(), store=store)
    await asyncio.to_thread(pool.start)
    pids = pool.pids()
    assert len(pids) == 2
    for _ in range(1_500):  # until both have come up and taken a share
        workers = {
            attempt.worker_id
            for attempt in [await store.get_latest_attempt(rollout_id) for rollout_id in ids]
            if attempt is not None
        }
        if len(workers) == 2 or (len(workers) == 1 and store.usage().queued == 0):
            break
        await asyncio.sleep(0.02)
    go.touch()
    more = [
        r.rollout_id
        for r in await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input={"n": n}, mode="train") for n in range(50)]
        )
    ]
    pool.wake()
    for n, rollout in enumerate(await ends(store, [*ids, *more])):
        assert rollout.status == "succeeded"
        spans = [*await store.query_spans(rollout.rollout_id, "latest")]
        assert find_final_reward(spans) == rollout.input["n"]
        assert [span.sequence_id for span in spans] == list(range(1, len(spans) + 1))
        assert len(spans) == (n % 3 if n < 120 else 0) + 1
    # called on an event loop, as the training loop does
    assert pool.stop()
    assert becomes_true(lambda: not any(map(is_running, pids)), 5)
    assert pool.failure is None


async def test_rollouts_of_a_process_that_dies_are_executed_by_another(tmp_path: Path) -> None:
    tasks: list[dict[str, Any]] = [{"n": n} for n in range(20)]
    tasks[7]["die_unless"] = str(tmp_path / "died")
    store, ids = await prepared(tasks, max_attempts=1)
    pool = ProcessPool(plan=RunnerPlan("process", 1, replace(SETTINGS, max_restarts=1)), agent=EchoAgent(), store=store)
    await asyncio.to_thread(pool.start)
    try:
        rollouts = await ends(store, ids)
    finally:
        assert await asyncio.to_thread(pool.stop)
    assert (tmp_path / "died").exists()
    for n, rollout in enumerate(rollouts):
        assert rollout.status == "succeeded"
        assert find_final_reward([*await store.query_spans(rollout.rollout_id, "latest")]) == n
    assert len(await store.query_attempts(ids[7])) == 2


async def test_rollout_cancelled_in_the_store_is_cancelled_in_its_process(
    tmp_path: Path,
) -> None:
    begun, cancelled = tmp_path / "begun", tmp_path / "cancelled"
    store, [hanging] = await prepared([{"begun": str(begun), "cancelled": str(cancelled)}])
    pool = ProcessPool(
        plan=RunnerPlan("process", 1, replace(SETTINGS, max_concurrent=1, max_restarts=0)),
        agent=HangingAgent(),
        store=store,
    )
    await asyncio.to_thread(pool.start)
    try:
        await until(begun.exists, 60)
        [waiting] = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={}, mode="train")])
        await store.update_rollout(hanging, status="cancelled")
        await until(cancelled.exists, 60)
        [done] = await ends(
            store, [waiting.rollout_id]
        )  # there is room for one: the agent that was cancelled has made it
        assert done.status == "succeeded"
        rollout = await store.get_rollout_by_id(hanging)
        assert rollout is not None
        assert rollout.status == "cancelled"
    finally:
        assert await asyncio.to_thread(pool.stop)


async def test_an_agent_that_kills_every_process_ends_the_pool_with_a_reason() -> None:
    store, [poison] = await prepared([{"n": 0}])
    pool = ProcessPool(
        plan=RunnerPlan("process", 1, replace(SETTINGS, max_restarts=0)), agent=PoisonAgent(), store=store
    )
    await asyncio.to_thread(pool.start)
    for _ in range(3_000):
        if pool.failure is not None:
            break
        await asyncio.sleep(0.02)
    assert isinstance(pool.failure, LoopError)
    assert "killed by signal 9" in str(pool.failure)
    await asyncio.to_thread(pool.stop)
    assert (await store.get_rollout_by_id(poison)).status == "requeuing"  # type: ignore[union-attr]  # another pool may try it


class BacktrackingAgent(LitAgent[Any]):
    """Scores with a regular expression that holds the interpreter lock for longer than anybody lives, once."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        if (flag := task.get("stuck_unless")) and not Path(flag).exists():
            Path(flag).touch()
            re.match(r"(a+)+$", "a" * 40 + "b")
        return float(task["n"])


class StandingAgent(EchoAgent):
    """Blocks the event loop of its process, once, where it does not hold the lock."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> None:
        if (flag := task.get("stuck_unless")) and not Path(flag).exists():
            Path(flag).touch()
            time.sleep(10_000)  # noqa: ASYNC251
        await super().rollout_async(task, resources, rollout)


@pytest.mark.parametrize(("agent", "place"), [(BacktrackingAgent(), "rollout()"), (StandingAgent(), "rollout_async()")])
async def test_a_worker_that_is_stuck_is_replaced(
    agent: LitAgent[Any], place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks: list[dict[str, Any]] = [{"n": n} for n in range(8)]
    tasks[3]["stuck_unless"] = str(tmp_path / "stuck")
    store, ids = await prepared(tasks, max_attempts=1)
    settings = replace(SETTINGS, max_restarts=1, stuck_after_s=5.0)
    pool = ProcessPool(plan=RunnerPlan("process", 1, settings), agent=agent, store=store)
    await asyncio.to_thread(pool.start)
    [first] = pool.pids()
    try:
        rollouts = await ends(store, ids)
        assert first not in pool.pids()
    finally:
        assert await asyncio.to_thread(pool.stop)
    assert becomes_true(lambda: not is_running(first), 5)
    assert [rollout.status for rollout in rollouts] == ["succeeded"] * 8
    attempts = await store.query_attempts(ids[3])
    assert len(attempts) == 2
    reason = (attempts[0].metadata or {})[WORKER_DIED]
    assert place in reason
    assert f"of rollout {ids[3]} at {__file__}:" in reason
    assert sum(reason in record.getMessage() for record in caplog.records) == 2  # of the pool, and of the store


async def test_a_process_whose_pool_is_gone_ends_by_itself() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    spec = WorkerSpec(
        agent=EchoAgent(), store_url="http://127.0.0.1:1", store_token=None, settings=SETTINGS, name="orphan"
    )
    process = context.Process(target=process_main, args=(spec, theirs), daemon=True)
    process.start()
    theirs.close()
    assert await asyncio.to_thread(ours.poll, 60)
    assert ours.recv() == READY
    ours.close()  # what the kernel does when the pool's process dies
    await asyncio.to_thread(process.join, 30)
    assert process.exitcode == 0


async def test_stopping_cancels_in_the_other_processes_and_says_so(tmp_path: Path) -> None:
    store, ids = await prepared([{"n": 0, "wait_for": str(tmp_path / "never")}])
    pool = ProcessPool(plan=RunnerPlan("process", 1, SETTINGS), agent=EchoAgent(), store=store)
    await asyncio.to_thread(pool.start)
    for _ in range(1_000):
        if store.usage().running:
            break
        await asyncio.sleep(0.02)
    assert await asyncio.to_thread(pool.stop)
    assert (await store.get_rollout_by_id(ids[0])).status == "failed"  # type: ignore[union-attr]


def test_an_agent_that_cannot_travel_is_one_sentence() -> None:
    pool = ProcessPool(plan=RunnerPlan("process", 1, SETTINGS), agent=UnpicklableAgent(), store=BridgeStore())
    with pytest.raises(ConfigError, match="UnpicklableAgent"):
        pool.start()
    assert pool.pids() == []


def test_a_plan_makes_its_runners() -> None:
    store = BridgeStore()
    assert isinstance(make_runners("inproc", agent=EchoAgent(), store=store), RunnerThread)
    assert isinstance(make_runners(RunnerPlan("process", 3), agent=EchoAgent(), store=store), ProcessPool)


# -- workers that cannot come up -------------------------------------------------------------------------------------

_SCRIPT = """
import sys
from agl_slime.support.agl import LitAgent
from agl_slime.runner.make import make_runners
from agl_slime.store.bridge import WORKER_DIED, BridgeStore

class Agent(LitAgent):
    def __reduce__(self):
        return (unpicklable_there, ()) if {broken} else (Agent, ())

def unpicklable_there():
    raise RuntimeError("this agent needs a file that is not here")

def main():
    try:
        make_runners("process:2", agent=Agent(), store=BridgeStore()).start()
    except Exception as error:
        sys.exit(f"{{type(error).__name__}}: {{error}}")
    sys.exit("started")

{guard}main()
"""


@pytest.mark.parametrize(
    ("broken", "guard", "in_worker"),
    [
        (False, "", "put its code under `if __name__ == '__main__':`"),
        (True, "if __name__ == '__main__': ", "RuntimeError: this agent needs a file that is not here"),
    ],
)
def test_workers_that_cannot_start_fail_the_start_at_once_with_the_reason(
    tmp_path: Path, broken: bool, guard: str, in_worker: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(broken=broken, guard=guard))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert in_worker in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("LoopError: ")
    assert "exit code 1" in last
    assert done.stderr.count(in_worker) <= 2  # no replacements, which would end in the same way
