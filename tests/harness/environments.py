"""Programs that run with the Python that has verifiers."""

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@functools.cache
def env_python() -> str:
    """The Python that has verifiers; the test is skipped where AGL_ENV_PYTHON names none."""
    return os.environ.get("AGL_ENV_PYTHON") or pytest.skip("AGL_ENV_PYTHON names no Python that has verifiers")


def ask(program: str, *args: str, stdin: Any = None) -> Any:
    """The JSON output of `python -m tests.programs.environments.PROGRAM`; it runs once for all tests."""
    return json.loads(_output(program, args, json.dumps(stdin)))


@functools.cache
def _output(program: str, args: tuple[str, ...], stdin: str) -> str:
    run = subprocess.run(
        [env_python(), "-m", f"tests.programs.environments.{program}", *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout
