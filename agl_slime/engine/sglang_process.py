"""A real SGLang as a child process in its own Python environment, since its pins clash with this package's.

``python -m agl_slime.engine.sglang_process`` supervises it: it starts the server, prints the embedded engine's ready
line once the server answers, and ends the server together with the parent, which SGLang does not do by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from agl_slime.errors import ConfigError
from agl_slime.support.child import ServerChild, wait_beside_parent
from agl_slime.support.net import free_port
from agl_slime.support.other_python import installed_version, without_pythonpath
from agl_slime.support.threads import usable_cores

SGLANG_PYTHON = "AGL_SLIME_SGLANG_PYTHON"
_CPU_SCRIPT = Path(__file__).parent / "sglang_cpu" / "serve.sh"
_SMALL_BYTES = 40_000_000  # of weights: where the embedded engine takes one thread, too, at 10 M parameters
_HAS_GPU = "import torch; print(torch.cuda.is_available())"


class SGLangProcess(ServerChild):
    """Serves ``model_path`` with the SGLang of ``python`` (see ``find_sglang``): in float32 with the flags that a CPU
    needs where its torch finds no GPU, else as SGLang does by itself. ``flags`` are further flags of SGLang. Its output
    is appended to ``log``, if given."""

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        python: str,
        log: Path | None = None,
        random_seed: int = 0,
        flags: Sequence[str] = (),
        start_timeout_s: float = 600.0,
    ) -> None:
        options = {"python": python, "model-path": model_path, "random-seed": random_seed, "parent-pid": os.getpid()}
        command = [sys.executable, "-m", "agl_slime.engine.sglang_process"]
        command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        command += ["--", *flags]
        super().__init__(
            command, name="SGLang", served=str(model_path), start_timeout_s=start_timeout_s, env=os.environ, log=log
        )


def find_sglang() -> str:
    """The Python with SGLang that the environment variable names. Raises ``ConfigError`` without it."""
    candidate = os.environ.get(SGLANG_PYTHON, "")
    fix = "for a CPU, `bash scripts/sglang_cpu.sh DIR` makes one: DIR/bin/python"
    if not candidate:
        raise ConfigError(f"--engine sglang: {SGLANG_PYTHON} must name a Python that has SGLang; {fix}")
    installed_version(candidate, "sglang", setting=SGLANG_PYTHON, fix=fix, env=without_pythonpath())
    return candidate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m agl_slime.engine.sglang_process")
    parser.add_argument("--python", required=True)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--random-seed", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    env, port = without_pythonpath(), free_port()
    probe = subprocess.run([args.python, "-c", _HAS_GPU], env=env, stdout=subprocess.PIPE, text=True, check=False)
    if probe.returncode != 0:
        return probe.returncode  # the child has printed the reason
    gpu = probe.stdout.split()[-1:] == ["True"]
    if gpu:
        command = [args.python, "-m", "sglang.launch_server", "--model-path", args.model_path]
        command += ["--host", "127.0.0.1", "--port", str(port)]
    else:
        command = ["bash", str(_CPU_SCRIPT), args.model_path, str(port)]
        size = sum(file.stat().st_size for file in Path(args.model_path).glob("*.safetensors"))
        env[SGLANG_PYTHON] = args.python
        env.setdefault("AGL_SLIME_SGLANG_THREADS", str(1 if size < _SMALL_BYTES else usable_cores()))
    # a line for every request would be most of the log of a run
    command += ["--random-seed", args.random_seed, "--log-level-http", "warning", *args.flags]
    server = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    serving = f"SGLang serves {args.model_path} on {'a GPU' if gpu else 'the CPU'}"
    try:
        return _watch(server, port, args.parent_pid, serving)
    except BaseException:  # such as a closed standard output: the end of this process must end the server
        traceback.print_exc()
        os.killpg(os.getpgrp(), signal.SIGKILL)
        raise


def _watch(server: subprocess.Popen[bytes], port: int, parent_pid: int, serving: str) -> int:
    """Print the ready line once the server answers, end the server with the parent, and return when it has ended."""
    ready = False

    def announce() -> None:
        nonlocal ready
        if not ready and (ready := _healthy(port)):
            print(json.dumps({"url": f"http://127.0.0.1:{port}", "serving": serving}), flush=True)

    code = wait_beside_parent(server, parent_pid, announce)
    if code is None:
        os.killpg(os.getpgrp(), signal.SIGKILL)  # the parent was killed: server, its workers and this process
    return code or 1


def _healthy(port: int) -> bool:
    with closing(HTTPConnection("127.0.0.1", port, timeout=5)) as connection, suppress(OSError, HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


if __name__ == "__main__":
    sys.exit(main())
