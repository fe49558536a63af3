"""Hosts in network namespaces for tests with the marker ``hosts``."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import pytest

from agl_slime.cli.demo import LOOKUP_POLICY
from tests.harness.namespaces import Host, Network, Process, why_no_namespaces
from tests.harness.waiting import becomes_true

ROOT = Path(__file__).parents[2]


@pytest.fixture
def network() -> Iterator[Network]:
    """An empty network; the test adds its hosts."""
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with Network() as network:
        yield network


# as a real SGLang, which needs no key on any address
ENGINE = "import agl_slime.engine.__main__ as engine; engine.require_token = lambda *_, **__: None; engine.main()"


def start_engine(host: Host) -> str:
    """Start an engine on ``host``; its URL for other hosts."""
    arguments = ["--model-path", str(LOOKUP_POLICY), "--host", host.address, "--port", "0"]
    engine = host.start([sys.executable, "-c", ENGINE, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    with killed_after(engine, 120):
        return str(json.loads(engine.stdout.readline())["url"])


@contextmanager
def killed_after(process: Process, seconds: float) -> Iterator[None]:
    """A time limit for reading the output of ``process``, which ends when it is killed."""
    timer = Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def start_ray(host: Host, *flags: str, env: Mapping[str, str] = os.environ) -> Process:
    """Start a node of a Ray cluster on ``host``; the process ends with 0 once the node is up."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={host.address}", *flags]
    environ = {**env, "RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "120"}
    return host.start(
        [*command, "--disable-usage-stats", "--object-store-memory=80000000"],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.DEVNULL,
    )


def wait_for_lost_packets(host: Host, *peers: Host) -> None:
    """Wait until a connection between ``host`` and one of ``peers`` has sent a packet five times without an answer."""

    def lost() -> bool:
        pairs = [(host, peer) for peer in peers] + [(peer, host) for peer in peers]
        sockets = [sender.run(["ss", "-tin", "dst", receiver.address]).stdout for sender, receiver in pairs]
        return any(int(times) >= 4 for text in sockets for times in re.findall(r"backoff:(\d+)", text))

    assert becomes_true(lost, 120)
