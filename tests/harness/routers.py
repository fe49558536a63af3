"""A real sglang-router in a process of its own."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from agl_slime.support.net import free_port
from tests.harness.guard import guarded


@contextmanager
def sglang_router(workers: Sequence[str] = (), *, flags: Sequence[str] = (), host: str = "127.0.0.1") -> Iterator[str]:
    """The URL of a router to ``workers``, all healthy; more can be registered."""
    port, metrics_port = free_port(), free_port()
    url = f"http://{host}:{port}"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", host, "--port", str(port)]
    command += ["--policy", "manual", "--prometheus-port", str(metrics_port), "--log-level", "error", *flags]
    if workers:
        command += ["--worker-urls", *workers]
    process = subprocess.Popen(guarded(command))
    try:
        deadline = time.monotonic() + 30
        while (listed := _workers(url)) is None or sum(bool(each.get("is_healthy")) for each in listed) < len(workers):
            assert process.poll() is None, f"the router ended with {process.returncode}"
            assert time.monotonic() < deadline, f"the router lists {listed}"
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def _workers(url: str) -> list[dict[str, object]] | None:
    try:
        with urllib.request.urlopen(f"{url}/workers", timeout=5) as answer:
            return json.load(answer)["workers"]
    except (OSError, ValueError):
        return None
