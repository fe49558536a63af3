"""Runs a command of a test. All its processes, also in sessions of their own (Ray's daemons, routers), end when it
ends, when this process gets SIGTERM, and when the process of the test is gone, however it ended.

    python tests/harness/guard.py PARENT COMMAND …
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h


def guarded(command: Sequence[object]) -> list[str]:
    """``command`` as run by this module, in any directory. End it with ``terminate``, not ``kill``."""
    return [sys.executable, "-P", __file__, str(os.getpid()), *map(str, command)]


def guarded_child(guard: subprocess.Popen[Any]) -> psutil.Process:
    """The process of the command itself, for tests that kill or signal it."""
    return min(psutil.Process(guard.pid).children(), key=psutil.Process.create_time)


def end_all() -> None:
    """Kill the descendants of this process, to which orphans of theirs fall, until there are none."""
    while family := psutil.Process().children(recursive=True):
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family)


def main(parent: int, command: Sequence[str]) -> int:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the call above
        return 128 + signal.SIGTERM
    try:
        code = subprocess.Popen(command).wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_all()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
