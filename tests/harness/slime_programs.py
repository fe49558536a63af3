"""Running slime's own code in processes of its own, with stand-ins for what a CPU machine lacks (Megatron's options, an
importable SGLang).

Each program in ``tests/programs/slime/`` is a driver as a slime user would write it; it prints its findings as one
JSON line, which the test judges.
"""

from __future__ import annotations

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

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
STANDINS = REPOSITORY / "agl_slime" / "rehearse" / "standins"
_MARK = "RESULT "
NO_SLIME = (
    "slime is not here: set SLIME_DIR to a checkout of it, or AGL_SLIME_SOURCES to a folder with its archive "
    "(scripts/slime_cpu.sh makes an environment for it)"
)


def slime_dir() -> Path | None:
    """The root of slime's sources (``tests/harness/sources.py``), or of the importable package; ``None`` without."""
    if root := SOURCES["slime"].find():
        return root
    spec = importlib.util.find_spec("slime")
    locations = list(spec.submodule_search_locations or []) if spec is not None else []
    root = Path(locations[0]).parent if locations else None
    return root if root is not None and (root / "slime" / "ray").is_dir() else None


def slime_package() -> Path:
    """The ``slime`` package directory; importing it would need Ray and SGLang. Skips the test without one."""
    root = slime_dir()
    if root is None:
        pytest.skip(NO_SLIME)
    return root / "slime"


def require_slime(*modules: str) -> Path:
    """The slime checkout; skips the test with one sentence when it, or one of ``modules``, is missing."""
    root = slime_dir()
    if root is None:
        pytest.skip(NO_SLIME)
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(
            f"slime's tests need {', '.join(missing)}: run pytest with the Python that scripts/slime_cpu.sh made"
        )
    return root


def environment(root: Path) -> dict[str, str]:
    """Variables under which slime's code, the stand-ins and this repository are importable, in the program and in its
    Ray workers."""
    python_path = os.pathsep.join([str(STANDINS), str(root), str(REPOSITORY)])
    return {
        **os.environ,
        "PYTHONPATH": python_path,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
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


def model_flags(model: Path) -> list[str]:
    """Megatron's model options for a checkpoint, as slime's launch scripts give them."""
    config = json.loads((model / "config.json").read_text())
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    names = {
        "num-layers": "num_hidden_layers",
        "hidden-size": "hidden_size",
        "ffn-hidden-size": "intermediate_size",
        "num-attention-heads": "num_attention_heads",
        "norm-epsilon": "rms_norm_eps",
        "vocab-size": "vocab_size",
    }
    flags = [part for flag, field in names.items() for part in (f"--{flag}", str(config[field]))]
    untied = [] if config.get("tie_word_embeddings") else ["--untie-embeddings-and-output-weights"]
    return [*flags, "--rotary-base", str(theta), *untied]
