"""A run that breaks off leaves nothing behind, in each shape of slime's driver: real Ray, stand-ins for slime."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_slime.train.slime.trainer import SlimeTrainer
from tests.harness.guard import guarded_child
from tests.harness.processes import is_running
from tests.harness.slime_programs import REPOSITORY, start_guarded
from tests.harness.waiting import becomes_true
from tests.programs.slime.standins import driver
from tests.train.slime.test_driver import ORDER, calls, use

pytestmark = pytest.mark.ray

ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled"}  # a process that has imported Ray cannot turn it on
NOT_CRASHING = {"clear_memory", "save_model", "resume", "finish_tracking"}
PHASES = [
    (shape, call) for shape in driver.SHAPES for call in dict.fromkeys(ORDER[shape].split()) if call not in NOT_CRASHING
]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Not in this process: actors and their children end with it, however the test ends."""
    ray = pytest.importorskip("ray")
    command = [sys.executable, "-m", "tests.programs.slime.node"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with start_guarded(command, env=ENVIRONMENT, **pipes) as node:
        assert node.stdout is not None
        env = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        ray.init(address=node.stdout.readline().strip(), log_to_driver=False, runtime_env={"env_vars": env})
        yield ray
        ray.shutdown()


def run(trainer: SlimeTrainer) -> None:
    trainer.start()
    for step in range(2):
        trainer.train(step)
        trainer.update_weights()


@pytest.mark.parametrize(("shape", "crash"), PHASES)
def test_a_crash_in_each_phase_leaves_no_actor_process_or_placement_group(shape, crash, ray, monkeypatch, tmp_path):
    use(shape, monkeypatch)
    args = driver.driver_args(tmp_path / "calls", crash=crash)
    trainer = SlimeTrainer(args=args)
    if crash in ("dispose", "close"):
        run(trainer)
    else:
        with pytest.raises((RuntimeError, ray.exceptions.RayError), match=f"crash in {crash}|died"):
            run(trainer)
    trainer.stop()
    nothing_is_left(args)


def nothing_is_left(args: Any) -> None:
    assert becomes_true(lambda: not alive(), 20), alive()  # Ray kills actors asynchronously
    assert becomes_true(lambda: not placed(), 20), placed()
    pids = [int(line) for line in Path(f"{args.calls}.pids").read_text().split()] if "manager" in calls(args) else []
    assert becomes_true(lambda: not any(map(is_running, pids)), 20), pids


def alive() -> list[str]:
    from ray._private.state import actors

    return [actor["ActorClassName"] for actor in actors().values() if actor["State"] != "DEAD"]


def placed() -> list[str]:
    from ray.util import placement_group_table

    return [group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED"]


@pytest.mark.parametrize("shape", driver.SHAPES)
def test_a_driver_that_is_killed_leaves_nothing_or_the_next_one_ends_it(shape, ray, monkeypatch, tmp_path):
    args = driver.driver_args(tmp_path / "calls")
    command = [sys.executable, "-m", "tests.programs.slime.killed", shape, args.calls]
    environment = {**ENVIRONMENT, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    with start_guarded(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        guarded_child(process).kill()
        process.wait()
    if "attach" in ORDER[shape].split():  # detached, with the only GPU
        assert becomes_true(lambda: sorted(alive()) == ["ServedManager", "Serving"], 20), alive()
        use(shape, monkeypatch)
        trainer = SlimeTrainer(args=driver.driver_args(tmp_path / "next"))
        trainer.start()
        actors = ["LivingSession", "ServedManager", "Serving", "Worker"]
        assert becomes_true(lambda: sorted(alive()) == actors, 20), alive()
        trainer.stop()
    nothing_is_left(args)
