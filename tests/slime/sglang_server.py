"""Real SGLang servers on a CPU, from the Python that ``AGL_SLIME_SGLANG_PYTHON`` names."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.slime.support import REPOSITORY

SGLANG_PYTHON = "AGL_SLIME_SGLANG_PYTHON"


@contextmanager
def serve_sglang(model: Path, log: Path, *, start_timeout_s: float = 240.0) -> Iterator[str]:
    """Serve ``model``; yields the URL. Skips the test when there is no SGLang here."""
    if not os.environ.get(SGLANG_PYTHON):
        pytest.skip(f"{SGLANG_PYTHON} does not name a Python with SGLang; scripts/sglang_cpu.sh sets one up")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    script = REPOSITORY / "scripts" / "serve_sglang_cpu.sh"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(script), str(model), str(port)], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + start_timeout_s
        while not _healthy(url):
            assert process.poll() is None, (
                f"SGLang ended with {process.returncode}: {log.read_text(errors='replace')[-2000:]}"
            )
            assert time.monotonic() < deadline, (
                f"SGLang was not healthy in time: {log.read_text(errors='replace')[-2000:]}"
            )
            time.sleep(0.5)
        yield url
    finally:
        # its workers are in its process group
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False
