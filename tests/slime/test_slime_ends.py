"""A run that breaks off leaves nothing behind, in each shape of slime's driver: real Ray, stand-ins for slime."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_slime.slime.trainer import SlimeTrainer
from tests.slime.standins import driver
from tests.slime.support import REPOSITORY
from tests.unit.test_slime_driver import ORDER, calls, use

pytestmark = pytest.mark.ray

_EVERYWHERE = ("init_tracking", "manager", "models", "update_weights", "generate", "train", "save", "dispose")
_IN_SOME = ("place", "attach", "training_ready", "training_completed", "pause", "close")
PHASES = [(shape, at) for shape in driver.SHAPES for at in (*_EVERYWHERE, *_IN_SOME) if at in ORDER[shape].split()]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    env = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=4,
        num_gpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100_000_000,
        runtime_env={"env_vars": env},
    )
    yield ray
    ray.shutdown()


def soon(true: Callable[[], bool], what: Callable[[], Any]) -> None:
    """Ray ends actors in its own time."""
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def run(trainer: SlimeTrainer) -> None:
    trainer.start()
    for step in range(2):
        trainer.train(step)
        trainer.update_weights()


@pytest.mark.parametrize(("shape", "crash"), PHASES)
def test_a_crash_in_each_phase_leaves_no_actor_process_or_placement_group(
    shape: str, crash: str, ray: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from ray._private.state import actors
    from ray.util import placement_group_table

    use(shape, monkeypatch)
    args = driver.driver_args(tmp_path / "calls", crash=crash)
    trainer = SlimeTrainer(args=args)
    if crash in ("dispose", "close"):
        run(trainer)
    else:
        with pytest.raises((RuntimeError, ray.exceptions.RayError), match=f"crash in {crash}|died"):
            run(trainer)
    trainer.stop()

    def alive() -> list[str]:
        return [actor["ActorClassName"] for actor in actors().values() if actor["State"] != "DEAD"]

    def placed() -> list[str]:
        return [group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED"]

    soon(lambda: not alive(), alive)
    soon(lambda: not placed(), placed)
    pids = [int(line) for line in Path(f"{args.calls}.pids").read_text().split()] if "manager" in calls(args) else []
    soon(lambda: not any(map(running, pids)), lambda: f"{pids} live on")


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return (
        "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[-1].split()[0]
        if sys.platform == "linux"
        else True
    )
