"""Engines for tests: the embedded one in a thread, and a real SGLang on the CPU, started with
``AGL_SLIME_SGLANG_PYTHON`` and ``-m sglang``."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agl_slime.engine.sglang_process import SGLANG_PYTHON, SGLangProcess
from tests.harness.loop_thread import in_thread

MAX_RUNNING = 8
"""Requests that the engine decodes together; more wait."""


@dataclass(frozen=True)
class Server:
    """A running engine and the checkpoint that it serves."""

    url: str
    policy: Path
    real: bool


@contextmanager
def real_sglang(
    policy: Path, log: Path, flags: Sequence[str] = ("--max-running-requests", str(MAX_RUNNING))
) -> Iterator[Server]:
    """Skips the test where no Python with SGLang is named."""
    if not os.environ.get(SGLANG_PYTHON):
        pytest.skip(f"{SGLANG_PYTHON} does not name a Python with SGLang; scripts/sglang_cpu.sh sets one up")
    with SGLangProcess(policy, python=os.environ[SGLANG_PYTHON], log=log, flags=flags) as engine:
        yield Server(engine.url, policy, real=True)


@contextmanager
def engine_in_thread(policy: Path, **limits: Any) -> Iterator[str]:
    """The URL of an embedded engine in this process; ``EmbeddedEngine`` starts a process, which imports torch and
    transformers for seconds. ``limits`` are settings of ``agl_slime.engine.engine.Engine``."""
    from agl_slime.engine.server import load_server

    server = load_server(str(policy), token=None, **limits)
    with in_thread(server.listening(host="127.0.0.1", port=0)) as url:
        yield url
