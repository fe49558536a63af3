"""What the tests share that run on the embedded engine and on a real SGLang alike, and how the real one is started on
the CPU: with ``AGL_SLIME_SGLANG_PYTHON`` and ``-m sglang``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from agl_slime.engine.sglang_process import SGLANG_PYTHON, SGLangProcess

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
