"""What the tests share that run on the embedded engine and on a real SGLang alike, and how the real one is started on
the CPU: with ``AGL_SLIME_SGLANG_PYTHON`` and ``-m sglang``."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

MAX_RUNNING = 8
"""Requests that the engine decodes together; more wait."""

SGLANG_PYTHON = "AGL_SLIME_SGLANG_PYTHON"
SERVE_SCRIPT = Path(__file__).parents[2] / "scripts" / "serve_sglang_cpu.sh"


@dataclass(frozen=True)
class Server:
    """A running engine and the checkpoint that it serves."""

    url: str
    policy: Path
    real: bool


@contextmanager
def real_sglang(policy: Path, log: Path) -> Iterator[Server]:
    """Skips the test where no Python with SGLang is named."""
    if not os.environ.get(SGLANG_PYTHON):
        pytest.skip(f"{SGLANG_PYTHON} does not name a Python with SGLang; scripts/sglang_cpu.sh sets one up")
    port = _free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(SERVE_SCRIPT), str(policy), str(port), "--max-running-requests", str(MAX_RUNNING)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_healthy(f"http://127.0.0.1:{port}", process, log)
        yield Server(f"http://127.0.0.1:{port}", policy, real=True)
    finally:
        # SGLang's workers are children of this process and in its group; none are left when it ended by itself
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _free_port() -> int:
    """SGLang also takes ports up to 10,000 above its own and refuses to start when they do not exist."""
    for port in random.sample(range(20_000, 50_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    pytest.fail("no free port between 20000 and 50000")


def _wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path, limit_s: float = 240.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        assert process.poll() is None, (
            f"SGLang ended with {process.returncode}: {log.read_text(errors='replace')[-2000:]}"
        )
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"SGLang was not healthy within {limit_s} s: {log.read_text(errors='replace')[-2000:]}")
