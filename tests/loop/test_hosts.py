"""Training over several hosts in namespaces: engines and runners elsewhere, links that fail, hosts that die."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.tools.audit import audit
from tests.harness.hosts import ROOT, killed_after, network, start_engine, start_ray, wait_for_lost_packets
from tests.harness.namespaces import Host, Network, Process

__all__ = ["network"]

pytestmark = [pytest.mark.hosts, pytest.mark.slow]


def start_training(host: Host, run: Path, engine: str, *flags: str, **environ: str) -> Process:
    sizes = "--eval-interval 0 --rollout-batch-size 2 --n-samples-per-prompt 4 --num-iterations 4 --view lines"
    paths = ["--sglang-url", engine, "--output-dir", str(run), "--model-path", str(LOOKUP_POLICY)]
    return host.start(
        [sys.executable, "train.py", *sizes.split(), *paths, *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_first_iteration(training: Process) -> None:
    """Wait for its line; fails with the output after five minutes."""
    assert training.stdout is not None
    text = ""
    with killed_after(training, 300):
        for line in training.stdout:
            text += line
            if line.startswith("iter 1/"):
                return
    raise AssertionError(text)


def check_end(training: Process, run: Path) -> None:
    output, _ = training.communicate(timeout=300)
    assert training.returncode == 0, output
    result = audit(run)
    assert not result.findings, result


def test_an_engine_elsewhere_whose_link_goes_away(network: Network, tmp_path: Path) -> None:
    loop, far = network.add("loop"), network.add("far")
    training = start_training(loop, tmp_path / "run", start_engine(far))
    wait_for_first_iteration(training)
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
        loop, *nodes = hosts
        head = ("--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={sockets}")
        assert start_ray(loop, *head).wait(120) == 0
        for ray in [start_ray(node, f"--address={loop.address}:6379", "--num-cpus=1") for node in nodes]:
            assert ray.wait(120) == 0
        flags = ("--runners", "ray:2", "--store-host", "0.0.0.0")
        environ = {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": f"{loop.address}:6379"}
        training = start_training(loop, tmp_path / "run", start_engine(loop), *flags, **environ)
        wait_for_first_iteration(training)
        nodes[1].kill()
        check_end(training, tmp_path / "run")
        for host in hosts:
            host.kill()  # before its directory goes
