"""slime's own code in separate processes, with stand-ins for Megatron's options and SGLang, which need a GPU.

A program in ``tests/programs/slime/`` prints its result as one JSON line.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.guard import guarded
from tests.harness.sources import SOURCES

REPOSITORY = Path(__file__).resolve().parents[2]
STANDINS = REPOSITORY / "agl_slime" / "tools" / "rehearse" / "standins"
_MARK = "RESULT "
NO_SLIME = (
    "slime is not here: set SLIME_DIR to a checkout of it, or AGL_SLIME_SOURCES to a folder with its archive "
    "(scripts/slime_cpu.sh makes an environment for it)"
)


def slime_dir() -> Path | None:
    """The root of slime's sources (``tests/harness/sources.py``), or of the importable package; ``None`` without."""
    spec = importlib.util.find_spec("slime")
    installed = [Path(location).parent for location in (spec and spec.submodule_search_locations) or ()]
    return SOURCES["slime"].find() or next((root for root in installed if (root / "slime" / "ray").is_dir()), None)


def slime_package() -> Path:
    """The ``slime`` package directory, without an import, which needs Ray and SGLang. Skips the test without one."""
    return require_slime() / "slime"


def require_slime(*modules: str) -> Path:
    """The slime checkout; skips the test when it, or one of ``modules``, is missing."""
    root = slime_dir() or pytest.skip(NO_SLIME)
    if missing := ", ".join(name for name in modules if importlib.util.find_spec(name) is None):
        pytest.skip(f"slime's tests need {missing}: run pytest with the Python that scripts/slime_cpu.sh made")
    return root


def model_words(name: str) -> list[str]:
    """Megatron's options in slime's ``scripts/models``."""
    program = 'source "$0"; printf "%s\\n" "${MODEL_ARGS[@]}"'
    file = require_slime() / "scripts" / "models" / f"{name}.sh"
    return subprocess.run(["bash", "-c", program, file], capture_output=True, text=True, check=True).stdout.split()


def environment(root: Path) -> dict[str, str]:
    """Variables with which a program and its Ray workers import slime, the stand-ins and this repository."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(STANDINS), str(root), str(REPOSITORY)]),
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "SLIME_HOST_IP": "127.0.0.1",
        "WANDB_MODE": "disabled",
    }


def run_program(root: Path, name: str, *arguments: str | Path, timeout_s: float) -> dict[str, Any]:
    """Run a program by its name; returns its result, else fails with its output."""
    command = [sys.executable, "-m", f"tests.programs.slime.{name}", *arguments]
    code, output = run_guarded(command, timeout_s=timeout_s, env=environment(root))
    if code != 0:
        pytest.fail(f"{name} ended with code {code}:\n{output[-8000:]}")
    return read_result(output)


def run_guarded(command: Sequence[object], *, timeout_s: float, **options: Any) -> tuple[int, str]:
    """The exit code and the output of a command, of which no process is left; fails after ``timeout_s``."""
    with start_guarded(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as process:
        return finish_guarded(process, timeout_s)


@contextmanager
def start_guarded(command: Sequence[object], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own; it ends with the block."""
    settings: dict[str, Any] = {"cwd": REPOSITORY, "text": True, "start_new_session": True, **options}
    process = subprocess.Popen(guarded(command), **settings)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def finish_guarded(process: subprocess.Popen[str], timeout_s: float) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate()
        pytest.fail(f"{process.args} did not end within {timeout_s:g} s:\n{output[-6000:]}")
    return process.returncode, output


def read_result(output: str) -> dict[str, Any]:
    """The result in a program's output; fails the test when there is none."""
    results = [line[len(_MARK) :] for line in output.splitlines() if line.startswith(_MARK)]
    assert results, output[-8000:]
    return json.loads(results[-1])


def report(result: dict[str, Any]) -> None:
    """Print a program's result for ``run_program``."""
    print(_MARK + json.dumps(result), flush=True)
