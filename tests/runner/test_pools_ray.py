"""Runners as Ray actors; starts a real Ray on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.make import make_runners
from agl_slime.support.agl import find_final_reward
from tests.harness.processes import is_running
from tests.harness.waiting import becomes_true
from tests.runner.test_pools_process import SETTINGS, EchoAgent, ends, prepared


@pytest.mark.ray
async def test_ray_actors_execute_rollouts_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from agl_slime.runner.ray import RayPool

    pid_file = tmp_path / "pid"
    tasks: list[dict[str, Any]] = [{"n": n} for n in range(30)]
    tasks[5]["die_unless"] = str(tmp_path / "died")
    tasks[6]["pid_to"] = str(pid_file)
    store, ids = await prepared(tasks, max_attempts=1)
    pool = RayPool(plan=RunnerPlan("ray", 1, replace(SETTINGS, max_restarts=1)), agent=PidAgent(), store=store)
    await asyncio.to_thread(pool.start)
    try:
        rollouts = await ends(store, ids)
    finally:
        assert await asyncio.to_thread(pool.stop)
    assert (tmp_path / "died").exists()
    for n, rollout in enumerate(rollouts):
        assert rollout.status == "succeeded"
        assert find_final_reward([*await store.query_spans(rollout.rollout_id, "latest")]) == n
    assert becomes_true(lambda: not is_running(int(pid_file.read_text())), 5)


@pytest.mark.ray
async def test_a_runner_without_a_place_in_ray_is_named_and_the_others_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr("agl_slime.runner.ray._PLACE_S", 0.5)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        store, ids = await prepared([{"n": 0}], max_attempts=1)
        pool = make_runners(RunnerPlan("ray", 2, SETTINGS), agent=EchoAgent(), store=store)
        await asyncio.to_thread(pool.start)
        try:
            assert [rollout.status for rollout in await ends(store, ids)] == ["succeeded"]
            sentence = "A runner (ray) has not started within 0.5 s; Ray has 0 free CPUs."
            assert await asyncio.to_thread(becomes_true, lambda: sentence in caplog.messages, 30)
        finally:
            assert await asyncio.to_thread(pool.stop)
    finally:
        ray.shutdown()


class PidAgent(EchoAgent):
    """Leaves its process's id where it is told to."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> None:
        if "pid_to" in task:
            Path(task["pid_to"]).write_text(str(os.getpid()))
        if (flag := task.get("die_unless")) and not Path(flag).exists():
            Path(flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        await super().rollout_async(task, resources, rollout)


def test_ray_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from agl_slime.errors import MissingDependencyError
    from agl_slime.store.bridge import BridgeStore

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        make_runners(RunnerPlan("ray", 2), agent=EchoAgent(), store=BridgeStore())
