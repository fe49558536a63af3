"""The process in which a generator runs: ``python -m agl_slime.buffer.generator_main FILE``, the payload as one line of
JSON on stdin.

It leads a process group of its own. When stdin ends, the buffer is gone, and the group ends with it, so that no
generator is left behind.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import orjson

from agl_slime.buffer.discovery import load_generator


def main() -> int:
    path = Path(sys.argv[1])
    stdin = os.fdopen(os.dup(0), "rb")
    payload = orjson.loads(stdin.readline())
    threading.Thread(target=_end_with_the_buffer, args=(stdin,), daemon=True).start()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # a generator that reads its input must not take the watch away
    load_generator(path).run_rollout(payload)
    return 0


def _end_with_the_buffer(stdin: object) -> None:
    stdin.read()  # type: ignore[attr-defined]  # nothing is ever written: this returns when the other end is closed
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
