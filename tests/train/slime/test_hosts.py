"""slime over seven hosts in namespaces: one host has the driver and the logical GPU, one the engine, and five share
slime's manager with its router, its lock, its client of the engine and two runners. The engine's link is cut for a
while, and a runner's host dies.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.harness.hosts import network, start_engine, start_ray, wait_for_lost_packets
from tests.harness.namespaces import Host, Network, Process
from tests.harness.slime_programs import REPOSITORY, environment, read_result, require_slime

__all__ = ["network"]

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.slime, pytest.mark.ray]

STEPS = int(os.environ.get("AGL_TEST_HOSTS_STEPS", "6"))
LIMIT_S = 240 + 20 * STEPS
PORT = 6379


@contextmanager
def cluster(network: Network, root: Path) -> Iterator[tuple[Host, list[Host], dict[str, str]]]:
    """The driver's host, the others of its Ray, which have place for an actor each, and the driver's variables."""
    with ExitStack() as stack:
        sockets = stack.enter_context(TemporaryDirectory(prefix="ray"))  # pytest's paths are too long for a socket
        names = ("driver", "first", "second", "third", "fourth", "fifth")
        hosts = [network.add(name, private=("/dev/shm", sockets)) for name in names]
        for host in hosts:
            stack.callback(host.kill)  # before its directory goes
        driver, *others = hosts
        env = environment(root)
        del env["SLIME_HOST_IP"]  # each node has its own
        head = ("--head", f"--port={PORT}", "--num-gpus=1", "--include-dashboard=false", f"--temp-dir={sockets}")
        assert start_ray(driver, *head, "--num-cpus=1", env=env).wait(120) == 0
        for host in others:
            assert start_ray(host, f"--address={driver.address}:{PORT}", "--num-cpus=1", env=env).wait(120) == 0
        settings = {"TEST_RAY_ADDRESS": f"{driver.address}:{PORT}", "SLIME_HOST_IP": driver.address}
        yield driver, others, {**env, **settings, "RAY_AUTH_MODE": "disabled"}


def wait_for(condition: Callable[[], bool], program: Process | None, output: Path) -> None:
    """Fails with the output at the end of ``program``, or of the time."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert program is None or program.poll() is None, output.read_text()[-6000:]
        assert time.monotonic() < end, output.read_text()[-6000:]
        time.sleep(0.2)


def steps_of(metrics: Path) -> list[dict[str, Any]]:
    """The steps of the stand-in for Megatron's actor."""
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def cut_and_kill(program: Process, driver: Host, far: Host, others: list[Host], work: Path, output: Path) -> None:
    """Cut the engine's link after a third of the steps until packets are lost, then end a host that has a runner."""
    metrics = work / "metrics.jsonl"
    wait_for(lambda: len(steps_of(metrics)) >= STEPS // 3, program, output)
    far.cut()
    wait_for_lost_packets(far, driver, *others)  # slime's router may be on any of them
    stalled = len(steps_of(metrics))
    assert stalled < STEPS
    far.restore()
    wait_for(lambda: len(steps_of(metrics)) > stalled, program, output)
    runners = [host for host in others if has_actor(host, "Worker") and not has_actor(host, "RolloutManager")]
    assert len(steps_of(metrics)) < STEPS
    runners[0].kill()


def has_actor(host: Host, name: str) -> bool:
    processes = host.run(["ps", "-eo", "args"]).stdout.splitlines()
    return any(line.startswith(f"ray::{name}") for line in processes)


@pytest.mark.parametrize("loop", ["train", "train_async"])
def test_slimes_own_loop_over_hosts_that_fail(loop: str, network: Network, tmp_path: Path) -> None:
    root = require_slime("ray", "torch", "transformers", "sglang_router")
    output = tmp_path / "output.txt"
    with cluster(network, root) as (driver, others, env):
        far = network.add("far")
        words = (tmp_path, loop, STEPS, "hosts", start_engine(far))
        command = [sys.executable, "-m", "tests.programs.slime.loop", *map(str, words)]
        with output.open("wb") as file:
            program = driver.start(command, cwd=REPOSITORY, env=env, stdout=file, stderr=subprocess.STDOUT)
        cut_and_kill(program, driver, far, others, tmp_path, output)
        wait_for(lambda: program.poll() is not None, None, output)
        assert program.returncode == 0, output.read_text()[-8000:]
    result = read_result(output.read_text())
    assert len(result["rewards"]) == STEPS
    assert result["versions"] == [str(STEPS + 1)]
    trained = Counter(rollout_ids(tmp_path / "dump"))
    assert len(trained) == STEPS * 2 * 4
    assert set(trained.values()) == {1}


def rollout_ids(dump: Path) -> Iterator[str]:
    """The rollouts of each batch that slime's manager gave to training."""
    import torch

    for path in dump.glob("rollout_data/[0-9]*.pt"):
        for sample in torch.load(path, weights_only=False)["samples"]:
            yield sample["metadata"]["agl_rollout_id"]
