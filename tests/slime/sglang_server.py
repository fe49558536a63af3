"""Real SGLang servers on a CPU, from the Python that ``AGL_SLIME_SGLANG_PYTHON`` names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agl_slime.engine.sglang_process import SGLANG_PYTHON, SGLangProcess


@contextmanager
def serve_sglang(model: Path, log: Path) -> Iterator[str]:
    """Serve ``model``; yields the URL. Skips the test when there is no SGLang here."""
    if not os.environ.get(SGLANG_PYTHON):
        pytest.skip(f"{SGLANG_PYTHON} does not name a Python with SGLang; scripts/sglang_cpu.sh sets one up")
    with SGLangProcess(model, python=os.environ[SGLANG_PYTHON], log=log) as engine:
        yield engine.url
