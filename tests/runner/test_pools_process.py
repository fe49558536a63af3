"""Runner processes: real ones, against a real store over HTTP."""

import asyncio
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from agl_slime.agent.loading import load_agent
from agl_slime.data.read import failure_of
from agl_slime.errors import ConfigError, LoopError
from agl_slime.runner.base import RunnerPlan, make_runners
from agl_slime.runner.concurrent import RunnerSettings
from agl_slime.runner.process_pool import READY, ProcessPool, process_main
from agl_slime.runner.worker import WorkerSpec
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LitAgent, emit_reward, find_final_reward
from tests.harness.processes import is_running
from tests.harness.stores import enqueue_inputs
from tests.harness.waiting import becomes_true, until
from tests.runner.function_agents import RESOURCES, spans_of

pytestmark = pytest.mark.slow  # every process imports Agent Lightning: seconds of a core each

SETTINGS = RunnerSettings(poll_interval_s=0.02, heartbeat_interval_s=1.0)


def workers_of_this_process() -> list[int]:
    """The ids of the processes that this one's pools have started and that run."""
    children = [child for child in psutil.Process().children() if is_running(child.pid)]
    return [child.pid for child in children if "spawn_main" in " ".join(child.cmdline())]


class EchoAgent(LitAgent[Any]):
    """Rewards with the task's number. A task can have it end its process, once, or wait for a file."""

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


class PoisonAgent(LitAgent[Any]):
    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class UnpicklableAgent(LitAgent[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.keep = lambda: None


async def prepared(tasks: Sequence[dict[str, Any]], **config: Any) -> tuple[BridgeStore, list[str]]:
    store = BridgeStore()
    await store.add_resources(RESOURCES)
    return store, await enqueue_inputs(store, tasks, **config)


async def ends(store: BridgeStore, ids: Sequence[str]) -> list[Any]:
    return [await asyncio.wait_for(store.wait_for_rollout(rollout_id, timeout=60), 65) for rollout_id in ids]


async def expect_rewards(store: BridgeStore, rollouts: Sequence[Any]) -> None:
    for rollout in rollouts:
        assert rollout.status == "succeeded"
        assert find_final_reward(await spans_of(store, rollout)) == rollout.input["n"]


@asynccontextmanager
async def pool_of(
    count: int, agent: LitAgent[Any], store: BridgeStore, kind: Any = "process", **settings: Any
) -> AsyncIterator[Any]:
    plan = RunnerPlan(kind, count, replace(SETTINGS, **settings))
    pool = make_runners(plan, agent=agent, store=store)
    await asyncio.to_thread(pool.start)
    try:
        yield pool
    finally:
        assert await asyncio.to_thread(pool.stop)


@pytest.mark.parametrize("kind", ["process", pytest.param("ray", marks=pytest.mark.ray)])
async def test_workers_load_an_agent_by_its_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo agent.py").write_text(BY_FILE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    agent = load_agent(f"{tmp_path}/echo agent.py:Echo")
    store, ids = await prepared([{"n": n} for n in range(3)])
    async with pool_of(1, agent, store, kind):
        await expect_rewards(store, await ends(store, ids))


async def test_two_processes_share_the_work_and_nothing_is_left_running(tmp_path: Path) -> None:
    go = tmp_path / "go"
    tasks = [{"n": n, "spans": n % 3, **({"wait_for": str(go)} if n < 40 else {})} for n in range(120)]
    store, ids = await prepared(tasks)
    pool = ProcessPool(plan=RunnerPlan("process", 2, SETTINGS), agent=EchoAgent(), store=store)
    await asyncio.to_thread(pool.start)
    pids = workers_of_this_process()
    assert len(pids) == 2
    for _ in range(1_500):  # until both have come up and claimed a share
        attempts = [await store.get_latest_attempt(rollout_id) for rollout_id in ids]
        workers = {attempt.worker_id for attempt in attempts if attempt is not None}
        if len(workers) == 2 or (len(workers) == 1 and store.usage().queued == 0):
            break
        await asyncio.sleep(0.02)
    go.touch()
    ids += await enqueue_inputs(store, [{"n": n} for n in range(50)])
    pool.wake()
    rollouts = await ends(store, ids)
    await expect_rewards(store, rollouts)
    for n, rollout in enumerate(rollouts):
        n_spans = (n % 3 if n < 120 else 0) + 1
        assert [span.sequence_id for span in await spans_of(store, rollout)] == list(range(1, n_spans + 1))
    # called on an event loop, as in the training loop
    assert pool.stop()
    assert becomes_true(lambda: not any(map(is_running, pids)), 5)
    assert pool.failure is None


async def test_an_agent_that_kills_every_process_ends_the_pool_with_a_reason() -> None:
    store, [poison] = await prepared([{"n": 0}])
    pool = ProcessPool(
        plan=RunnerPlan("process", 1, replace(SETTINGS, max_restarts=0)), agent=PoisonAgent(), store=store
    )
    await asyncio.to_thread(pool.start)
    await until(lambda: pool.failure is not None, 60)
    assert isinstance(pool.failure, LoopError)
    assert "killed by signal 9, most often for memory" in str(pool.failure)
    await asyncio.to_thread(pool.stop)
    assert (await store.get_rollout_by_id(poison)).status == "requeuing"  # type: ignore[union-attr]  # for another pool


class BacktrackingAgent(LitAgent[Any]):
    """Scores some tasks with a regular expression that never returns the interpreter lock."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        if task.get("stuck"):
            re.match(r"(a+)+$", "a" * 40 + "b")
        return float(task["n"])


class StandingAgent(EchoAgent):
    """Blocks the event loop of its process for some tasks, without the lock."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> None:
        if task.get("stuck"):
            time.sleep(10_000)  # noqa: ASYNC251
        await super().rollout_async(task, resources, rollout)


@pytest.mark.parametrize(
    ("agent", "place", "stuck_after_s", "timeout_s"),
    [
        (BacktrackingAgent(), "rollout()", 3.0, 600.0),
        (StandingAgent(), "rollout_async()", 3.0, 600.0),
        pytest.param(BacktrackingAgent(), "rollout()", 40.0, 22.0, marks=pytest.mark.slow),
    ],
)
async def test_a_worker_that_is_stuck_costs_the_rollout_that_stops_it(agent, place, stuck_after_s, timeout_s, caplog):
    """Two such rollouts and one restart: the others are retried without an attempt left, the two are not."""
    tasks: list[dict[str, Any]] = [{"n": n} | ({"stuck": True} if n in (3, 5) else {}) for n in range(8)]
    store, ids = await prepared(tasks, max_attempts=1, timeout_seconds=timeout_s)
    async with pool_of(1, agent, store, max_restarts=1, stuck_after_s=stuck_after_s) as pool:
        [first] = workers_of_this_process()
        rollouts = await ends(store, ids)
        assert first not in workers_of_this_process()
        assert pool.failure is None
    assert becomes_true(lambda: not is_running(first), 5)
    assert [n for n, rollout in enumerate(rollouts) if rollout.status == "failed"] == [3, 5]
    for stuck in (ids[3], ids[5]):
        reason, message = failure_of([], await store.get_latest_attempt(stuck))
        assert reason == "unresponsive"
        assert message.startswith("its runner ended: killed ")
        assert f"{place} of rollout {stuck} at {__file__}:" in message
        why = message.removeprefix("its runner ended: ")
        assert sum(why in record.getMessage() for record in caplog.records) == 2  # of the pool, and of the store


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
    ours.close()  # as the kernel does when the pool's process dies
    await asyncio.to_thread(process.join, 30)
    assert process.exitcode == 0


async def test_stopping_cancels_in_the_other_processes_and_says_so(tmp_path: Path) -> None:
    store, ids = await prepared([{"n": 0, "wait_for": str(tmp_path / "never")}])
    async with pool_of(1, EchoAgent(), store):
        await until(lambda: store.usage().running)
    assert (await store.get_rollout_by_id(ids[0])).status == "failed"  # type: ignore[union-attr]


def test_an_agent_that_cannot_travel_is_one_sentence() -> None:
    pool = ProcessPool(plan=RunnerPlan("process", 1, SETTINGS), agent=UnpicklableAgent(), store=BridgeStore())
    with pytest.raises(ConfigError, match="UnpicklableAgent"):
        pool.start()
    assert workers_of_this_process() == []


# -- workers that cannot come up -------------------------------------------------------------------------------------

_SCRIPT = """
import sys
from agl_slime.support.agl import LitAgent
from agl_slime.runner.base import make_runners
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
def test_workers_that_cannot_start_fail_the_start_at_once_with_the_reason(tmp_path, broken, guard, in_worker):
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(broken=broken, guard=guard))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert in_worker in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("LoopError: ")
    assert "exit code 1" in last
    assert done.stderr.count(in_worker) <= 2  # no replacements, which would end in the same way


# -- Ray actors --------------------------------------------------------------------------------------------------------


@pytest.mark.ray
async def test_ray_actors_execute_rollouts_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    pid_file = tmp_path / "pid"
    tasks: list[dict[str, Any]] = [{"n": n} for n in range(30)]
    tasks[5]["die_unless"] = str(tmp_path / "died")
    tasks[6]["pid_to"] = str(pid_file)
    store, ids = await prepared(tasks, max_attempts=1)
    async with pool_of(1, PidAgent(), store, "ray", max_restarts=1):
        rollouts = await ends(store, ids)
    assert (tmp_path / "died").exists()
    await expect_rewards(store, rollouts)
    assert becomes_true(lambda: not is_running(int(pid_file.read_text())), 5)


@pytest.mark.ray
async def test_a_runner_without_a_place_in_ray_is_named_and_the_others_work(monkeypatch, caplog):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr("agl_slime.runner.ray._PLACE_S", 0.5)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        store, ids = await prepared([{"n": 0}], max_attempts=1)
        async with pool_of(2, EchoAgent(), store, "ray"):
            assert [rollout.status for rollout in await ends(store, ids)] == ["succeeded"]
            sentence = "A runner (ray) has not started within 0.5 s; Ray has 0 free CPUs."
            assert await asyncio.to_thread(becomes_true, lambda: sentence in caplog.messages, 30)
    finally:
        ray.shutdown()


class PidAgent(EchoAgent):
    """Writes its process's id into the task's file."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> None:
        if "pid_to" in task:
            Path(task["pid_to"]).write_text(str(os.getpid()))
        await super().rollout_async(task, resources, rollout)
