"""slime's Megatron actors on this CPU, by the command that users have."""

import os
import sys
from pathlib import Path

import pytest

from agl_slime.errors import AglSlimeError
from agl_slime.tools.rehearse.megatron.sources import Sources
from tests.harness.slime_programs import REPOSITORY, require_slime, run_guarded


def require_megatron() -> dict[str, str]:
    """Variables with which a program finds slime and Megatron; skips the test without them."""
    root = require_slime("ray", "torch", "transformers", "sglang_router", "einops")
    environ = {**os.environ, "SLIME_DIR": str(root), "PYTHONPATH": str(REPOSITORY)}
    try:
        Sources.find(environ)
    except AglSlimeError as error:
        pytest.skip(f"Megatron-LM is not here: {error}")
    return environ


def command(directory: Path, *flags: object, script: str = "train.py") -> list[str]:
    """The command line of a run, whose dumps and weights are in ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-W", "ignore", "-m", "agl_slime.tools.rehearse.megatron", script]
    return [*map(str, [*program, "--dump-details", directory, *flags])]


def train_by_megatron(directory: Path, *flags: object, script: str = "train.py", timeout_s: float = 420) -> str:
    """The output of a run."""
    line = command(directory, *flags, script=script)
    code, output = run_guarded(line, timeout_s=timeout_s, env=require_megatron(), cwd=directory)
    assert code == 0, output[-6000:]
    return output
