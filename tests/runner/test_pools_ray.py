"""Runners as Ray actors; starts a real Ray on this machine."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from agl_slime.errors import MissingDependencyError
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.make import make_runners
from agl_slime.store.bridge import BridgeStore
from tests.harness.processes import is_running
from tests.harness.waiting import becomes_true
from tests.runner.test_pools_process import EchoAgent, ends, expect_rewards, pool_of, prepared


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
async def test_a_runner_without_a_place_in_ray_is_named_and_the_others_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_ray_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        make_runners(RunnerPlan("ray", 2), agent=EchoAgent(), store=BridgeStore())
