"""Processes of a test end with it, however it ends."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import psutil

from tests.harness.guard import guarded

ROOT = Path(__file__).parents[2]
# Ray and routers start daemons in new sessions, whose parents end at once
PROGRAM = """
import subprocess, sys, time
start = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
subprocess.run([sys.executable, "-c", start], check=True)
time.sleep(float(sys.argv[1]))
"""


def test_a_daemon_ends_with_its_program() -> None:
    output = subprocess.run(
        guarded([sys.executable, "-c", PROGRAM, "0"]), cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert not psutil.pid_exists(int(output))


def test_a_daemon_ends_with_the_process_of_the_test() -> None:
    starter = textwrap.dedent(
        f"""
        import subprocess, sys
        from tests.harness.guard import guarded
        subprocess.run(guarded([sys.executable, "-c", {PROGRAM!r}, "600"]))
        """
    )
    with subprocess.Popen([sys.executable, "-c", starter], cwd=ROOT, stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        daemon = psutil.Process(int(test.stdout.readline()))
        test.kill()
        daemon.wait(timeout=60)
