"""Training over several hosts in namespaces: engines and runners elsewhere, links that fail, hosts that die."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.rehearse.namespaces import Host, Network, Process
from agl_slime.report.audit import audit
from tests.harness.hosts import ROOT, killed_after, network, start_engine, start_ray, wait_for_lost_packets
from tests.harness.slow_host import SlowHost

__all__ = ["network"]

pytestmark = [pytest.mark.hosts, pytest.mark.slow]


def start_training(host: Host, run: Path, engine: str, *flags: str, iterations: int = 4, **environ: str) -> Process:
    words = ["train.py", "--sglang-url", engine, "--output-dir", str(run), "--view", "lines", "--eval-interval", "0"]
    sizes = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--num-iterations", str(iterations)]
    return host.start(
        [sys.executable, *words, *sizes, "--model-path", str(LOOKUP_POLICY), *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_iteration(training: Process, number: int) -> str:
    """The output until the line of an iteration; fails with it after five minutes."""
    assert training.stdout is not None
    text = ""
    with killed_after(training, 300):
        for line in training.stdout:
            text += line
            if line.startswith(f"iter {number}/"):
                return text
    raise AssertionError(text)


def check_end(training: Process, run: Path) -> None:
    output, _ = training.communicate(timeout=300)
    assert training.returncode == 0, output
    result = audit(run)
    assert not result.findings, result


def test_an_engine_elsewhere_behind_a_slow_link_that_goes_away(network: Network, tmp_path: Path) -> None:
    loop, far = network.add("loop"), network.add("far", kind=partial(SlowHost, delay_s=0.05))
    training = start_training(loop, tmp_path / "run", start_engine(far))
    wait_for_iteration(training, 1)
    far.cut()
    wait_for_lost_packets(loop, far)
    assert training.poll() is None
    far.restore()
    check_end(training, tmp_path / "run")


@pytest.mark.ray
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install ray")
def test_ray_runners_on_other_hosts_of_which_one_dies(network: Network, tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="ray") as sockets:  # pytest's own paths are too long for a socket
        hosts = [network.add(name, private=("/dev/shm", sockets)) for name in ("loop", "first", "second")]
        loop, *others = hosts
        head = ("--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={sockets}")
        assert start_ray(loop, *head).wait(120) == 0
        for node in [start_ray(host, f"--address={loop.address}:6379", "--num-cpus=1") for host in others]:
            assert node.wait(120) == 0
        train_while_one_dies(loop, others, tmp_path / "run")
        for host in hosts:
            host.kill()  # before its directory goes


def train_while_one_dies(loop: Host, others: Sequence[Host], run: Path) -> None:
    flags = ("--runners", "ray:2", "--store-host", "0.0.0.0")
    training = start_training(
        loop, run, start_engine(loop), *flags, RAY_AUTH_MODE="disabled", RAY_ADDRESS=f"{loop.address}:6379"
    )
    wait_for_iteration(training, 1)
    others[1].kill()
    check_end(training, run)
