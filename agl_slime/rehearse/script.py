"""The commands that a launch script gives, from bash itself: arrays, sourced files and substitutions are evaluated, and
commands that would do harm or are absent here are stubs that record their arguments.

With bubblewrap the script also sees a read-only disk, no network and no process but its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError

STUBBED = (
    *("pkill", "kill", "killall", "fuser", "skill", "reboot", "shutdown", "systemctl", "service"),
    *("rm", "rmdir", "mv", "cp", "ln", "mkdir", "touch", "tee", "chmod", "chown", "dd", "mkfs", "mount", "umount"),
    *("ray", "python", "python3", "torchrun", "accelerate", "pip", "pip3", "uv", "conda", "apt", "apt-get", "yum"),
    *("ssh", "scp", "rsync", "pdsh", "mpirun", "srun", "sbatch", "kubectl", "docker", "podman", "curl", "wget", "git"),
    *("hf", "huggingface-cli", "modelscope", "aws", "gsutil", "nvidia-smi", "rocm-smi", "sleep", "sysctl"),
    *("sudo", "numactl"),
)
_STUB = Path(__file__).parent / "programs" / "stub.py"
_UNSET = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)(:?[-=?+])?")
_SET = re.compile(r"(?:^|[\s;(])(?:export\s+|local\s+|readonly\s+|declare\s+)?([A-Za-z_][A-Za-z0-9_]*)\+?=")
_LOOPED = re.compile(r"\b(?:for|read(?:\s+-\w+)*)\s+([A-Za-z_][A-Za-z0-9_]*)")
_SHELLS = {"BASH_SOURCE", "RANDOM", "SECONDS", "HOSTNAME", "UID", "EUID", "PPID", "LINENO", "FUNCNAME", "IFS", "OPTARG"}
_SHELLS |= {"SLURM_JOB_NODELIST", "NF", "NR"}  # the last two are awk's


@dataclass(frozen=True)
class Command:
    """A command of the script: its words, its directory, and the variables that the script has set for it."""

    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]


@dataclass(frozen=True)
class RayNode:
    """A ``ray start`` of the script; ``host`` is the machine that an ssh has named, or ``None`` for this one."""

    host: str | None
    head: bool
    address: str | None
    gpus: int | None


@dataclass(frozen=True)
class Played:
    """The commands of a script in their order, its exit code, its last words, and its unset variables."""

    commands: tuple[Command, ...]
    code: int
    stderr: str
    unset: tuple[str, ...] = ()
    isolated: bool = False
    assumed: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script demanded and the rehearsal has set."""

    @property
    def ray_nodes(self) -> list[RayNode]:
        """Every ``ray start``, also of machines that the script reaches by ssh."""
        return [node for command in self.commands for node in _ray_nodes(command)]

    @property
    def training(self) -> Training | None:
        """The training command: the last one that starts a Python file, preferably slime's."""
        given = [one for command in self.commands if (one := _training(command)) is not None]
        slimes = [one for one in given if Path(one.script).name in ("train.py", "train_async.py")]
        return (slimes or given or [None])[-1]


@dataclass(frozen=True)
class Training:
    """A training script with its flags. ``env``: the variables that its process gets; ``submitted``: by ``ray job
    submit``, with ``working_dir`` shipped to every node."""

    script: str
    flags: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    submitted: bool
    working_dir: str | None = None


def play(
    script: Path, *, gpus: int, arguments: Sequence[str] = (), scratch: Path, environ: Mapping[str, str] = os.environ
) -> Played:
    """Run ``script`` with stubs, which report ``gpus`` GPUs. A script that ends before it trains runs again with
    ``MASTER_ADDR`` set, if it is unset. Raises ``ConfigError`` when there is no such script, or no bash."""
    if not script.is_file():
        raise ConfigError(f"{script}: there is no such launch script; give the path of a bash script")
    if shutil.which("bash") is None:
        raise ConfigError("bash is not installed, and the launch script runs in it; install bash")
    played = _play(script, gpus, arguments, scratch, environ)
    if played.training is None and "MASTER_ADDR" not in environ and "MASTER_ADDR" in script.read_text():
        assumed = {"MASTER_ADDR": "10.77.0.1"}
        again = _play(script, gpus, arguments, scratch, {**environ, **assumed})
        played = replace(again, unset=(*played.unset,), assumed=assumed) if again.training is not None else played
    return played


def _play(script: Path, gpus: int, arguments: Sequence[str], scratch: Path, environ: Mapping[str, str]) -> Played:
    stubs, log, functions = scratch / "stubs", scratch / "commands.jsonl", scratch / "functions.sh"
    stubs.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    for name in STUBBED:
        (stubs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {_STUB} {name} "$@"\n')
        (stubs / name).chmod(0o755)
    # functions come before a PATH that the script extends
    functions.write_text("".join(f'{name}() {{ {stubs / name} "$@"; }}\n' for name in STUBBED))
    ours = {"REHEARSE_LOG": str(log), "REHEARSE_GPUS": str(gpus), "REHEARSE_PYTHON": sys.executable}
    ours |= {"BASH_ENV": str(functions), "PATH": f"{stubs}{os.pathsep}{environ.get('PATH', os.defpath)}"}
    command = [*_sandbox(scratch), "bash", str(script.resolve()), *arguments]
    finished = subprocess.run(
        command, env={**environ, **ours}, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    commands = []
    for line in log.read_text().splitlines():
        record = json.loads(line)
        env = {n: v for n, v in record["env"].items() if environ.get(n) != v and n not in {*ours, "SHLVL", "_", "PWD"}}
        commands.append(Command(tuple(record["argv"]), record["cwd"], env))
    last = [line for line in finished.stderr.splitlines() if not line.startswith("+")]
    words = last or finished.stdout.splitlines()
    isolated = command[0] == "bwrap"
    unset = tuple(_unset_variables(script, environ))
    return Played(tuple(commands), finished.returncode, "\n".join(words[-5:]), unset, isolated)


def _sandbox(scratch: Path) -> list[str]:
    bwrap = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--bind", str(scratch), str(scratch)]
    bwrap += ["--unshare-pid", "--unshare-net", "--die-with-parent"]
    works = shutil.which("bwrap") and subprocess.run([*bwrap, "true"], capture_output=True).returncode == 0
    return bwrap if works else []


def _unset_variables(script: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Variables that the script reads without a default, and neither sets nor gets."""
    lines = [line for line in script.read_text(errors="replace").splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines)
    defaulted = {name for name, default in _UNSET.findall(text) if default}
    assigned = {*_SET.findall(text), *_LOOPED.findall(text)} | defaulted | _SHELLS
    for name in dict.fromkeys(name for name, _ in _UNSET.findall(text)):
        if name.isupper() and name not in assigned and name not in environ and not name.endswith("_ARGS"):
            yield name


def _ray_nodes(command: Command) -> Iterator[RayNode]:
    if command.argv[:2] == ("ray", "start"):
        yield _ray_node(command.argv[2:], None)
    elif command.argv[0] in ("ssh", "pdsh", "srun"):
        words = " ".join(command.argv[1:])
        for part in re.split(r";|&&|\|\|", words):
            if (at := part.find("ray start")) >= 0:
                host = command.argv[1].rpartition("@")[2]
                yield _ray_node(shlex.split(part[at:])[2:], host)


def _ray_node(words: Sequence[str], host: str | None) -> RayNode:
    flags = _flags(words)
    gpus = flags.get("--num-gpus") or ""
    return RayNode(
        host=host,
        head="--head" in words,
        address=flags.get("--node-ip-address") or None,
        gpus=int(gpus) if gpus.isdecimal() else None,
    )


def _flags(words: Sequence[str]) -> dict[str, str]:
    """``--name value`` and ``--name=value`` of a command line."""
    flags: dict[str, str] = {}
    for at, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            following = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else ""
            flags[name] = value if equals else following
    return flags


def _training(command: Command) -> Training | None:
    name, *words = command.argv
    submitted, working_dir, env = False, None, dict(command.env)
    if command.argv[:3] == ("ray", "job", "submit"):
        if "--" not in words:
            return None
        at = words.index("--")
        runtime = _runtime_env(_flags(words[:at]))
        env |= runtime.get("env_vars") or {}
        working_dir = runtime.get("working_dir") or _flags(words[:at]).get("--working-dir")
        words, submitted = words[at + 1 :], True
        if len(words) == 1:
            words = shlex.split(words[0])
        while words and "=" in words[0] and not words[0].startswith("-"):  # NAME=value python3 …
            variable, _, value = words.pop(0).partition("=")
            env[variable] = value
        name, *words = words or [""]
    if not Path(name).name.startswith("python"):
        return None
    scripts = [at for at, word in enumerate(words) if word.endswith(".py")]
    if not scripts or any(word.startswith("--") for word in words[: scripts[0]]) or words[:1] == ["-c"]:
        return None
    at = scripts[0]
    return Training(words[at], tuple(words[at + 1 :]), env, command.cwd, submitted, working_dir)


def _runtime_env(flags: Mapping[str, str]) -> dict[str, Any]:
    given = flags.get("--runtime-env-json")
    try:
        parsed = json.loads(given) if given else {}
    except ValueError as error:
        raise ConfigError(f"--runtime-env-json of ray job submit is no JSON ({error}): {given}; correct it") from error
    return parsed if isinstance(parsed, dict) else {}
