"""The commands that a launch script gives, from bash itself: arrays, sourced files and substitutions are evaluated, and
commands that would do harm or are absent here are stubs that record their arguments (``Box`` keeps the others in)."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError
from agl_slime.tools.rehearse.box import Box
from agl_slime.tools.rehearse.names import nearest

STUBBED = (
    *("pkill", "kill", "killall", "fuser", "skill", "reboot", "shutdown", "systemctl", "service", "sudo", "numactl"),
    *("rm", "rmdir", "mv", "cp", "ln", "mkdir", "touch", "tee", "chmod", "chown", "dd", "mkfs", "mount", "umount"),
    *("ray", "python", "python3", "torchrun", "accelerate", "pip", "pip3", "uv", "conda", "apt", "apt-get", "yum"),
    *("ssh", "scp", "rsync", "pdsh", "mpirun", "srun", "sbatch", "kubectl", "docker", "podman", "curl", "wget", "git"),
    *("hf", "huggingface-cli", "modelscope", "aws", "gsutil", "nvidia-smi", "rocm-smi", "sleep", "sysctl"),
    *("hostname", "scontrol", "scancel", "squeue", "nc", "ping", "tail", "watch"),
)
DRIVERS = ("train.py", "train_async.py")
IMAGE_SLIME_DIR = "/root/slime"
"""Where slime's image has slime, and its scripts look for it."""
_STUB = Path(__file__).parent / "programs" / "stub.py"
_LIMIT_S, _REPEATS = 120.0, 300
_QUOTED = re.compile(r"""\\.|"(?:\\.|[^"\\])*"|'[^']*'|(?<!\S)#[^\n]*""", re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*(['\"\\])(\w+)['\"]?.*?^\s*\2$", re.DOTALL | re.MULTILINE)
_READ = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)(:?[-=?+])?")
_SET = re.compile(r"(?:^|[\s;(])(?:(?:export|local|readonly|declare)\s+)?([A-Za-z_][A-Za-z0-9_]*)(?:\[[^]\n]*\])?\+?=")
_SET_BY_COMMAND = re.compile(r"\b(?:for|printf\s+-v|read(?:\s+-\w+)*)\s+([A-Za-z_][A-Za-z0-9_]*)")
_TESTED = re.compile(r"-[znv]\s+\"?\$?\{?([A-Za-z_]\w*)")
# an unset variable is a false comparison there; in [ ] an unquoted one is an error
_COMPARED = re.compile(r"\[\[ .*? \]\]|\bcase\s+\S+\s+in\b|(?<![\w$])\[ (?:\"[^\"\n]*\"|[^]\s$]+|[ \t])+\]")
_BUILT_IN = {"BASH_SOURCE", "RANDOM", "SECONDS", "HOSTNAME", "UID", "EUID", "PPID", "LINENO", "FUNCNAME", "IFS"}
_BUILT_IN |= {"OPTARG", "NF", "NR"}  # the latter two are awk's
# others may write the paths that they name
_NOT_WRITERS = {"rm", "rmdir", "mkdir", "touch", "chmod", "chown", "pkill", "ssh"}
_OPTIONS_WITH_VALUE = set("bcDEeFIiJLlmOopQRSWw")  # ssh's and pdsh's options with a value


@dataclass(frozen=True)
class Command:
    """A command of the script: its words, its directory, the variables that the script has set for it, the words that
    are files at that time, and its standard input (of ssh)."""

    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    files: tuple[str, ...] = ()
    stdin: str = ""


@dataclass(frozen=True)
class RayNode:
    """A ``ray start`` of the script; ``host`` is the machine that an ssh has named, or ``None`` for this one.
    ``joins``: the head's address, of another node; ``port`` and ``dashboard`` (host and port): a head's; ``fault``:
    why the shell refuses it."""

    host: str | None
    head: bool
    address: str | None
    gpus: int | None
    joins: str | None = None
    port: str = "6379"
    dashboard: tuple[str, str] = "127.0.0.1", "8265"
    fault: str = ""


@dataclass(frozen=True)
class Played:
    """The commands of a script in their order, its exit code (``None`` if it was stopped for a ``reason``), the end of
    its output, and its unset variables."""

    commands: tuple[Command, ...]
    code: int | None
    output: str
    unset: tuple[str, ...] = ()
    isolated: bool = False
    assumed: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script demanded and the rehearsal has set."""
    reason: str = ""
    mapped: Mapping[str, Path] = field(default_factory=dict)
    """Directories that the script has seen at another place."""

    @property
    def ray_nodes(self) -> list[RayNode]:
        """Every ``ray start``, also of machines that the script reaches by ssh."""
        return [node for command in self.commands for node in _ray_nodes(command)]

    @property
    def training(self) -> Training | None:
        """The training command: the last one of slime's scripts, or of the file whose name is nearest to theirs."""
        candidates = [(_training(command, self.mapped), command) for command in self.commands]
        trainings = [training for training, _ in candidates if training is not None]
        if not trainings:
            return None
        names = [Path(training.script).name for training in trainings]
        rank = max(range(len(names)), key=lambda n: (names[n] in DRIVERS, bool(nearest(names[n], DRIVERS)), n))
        writers = {
            str(Path(command.cwd, word.rpartition("=")[2])): " ".join(command.argv)[:80]
            for training, command in candidates
            if training is not trainings[rank] and command.argv[0] not in _NOT_WRITERS
            for word in command.argv[1:]
        }
        return replace(trainings[rank], writers=writers)


@dataclass(frozen=True)
class Training:
    """A training script with its flags. ``env``: the variables that its process gets; ``submitted``: by ``ray job
    submit`` to ``address``, with ``working_dir`` shipped to every node; ``launcher``: a module that runs the script;
    ``files``: files that the script has made; ``faults``: what Ray refuses."""

    script: str
    flags: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    submitted: bool
    working_dir: str | None = None
    address: str | None = None
    launcher: str = ""
    files: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    mapped: Mapping[str, Path] = field(default_factory=dict)
    writers: Mapping[str, str] = field(default_factory=dict)
    """Commands of the script by the paths that they name, and may write."""

    def maker(self, path: str) -> str:
        """The command that may write ``path``, or ``""``."""
        file = Path(self.cwd, path)
        candidates = [str(place) for place in (file, *file.parents) if len(place.parts) > 2]
        return next((self.writers[place] for place in candidates if place in self.writers), "")

    def path(self, script_path: str | Path) -> Path:
        """The place of a script's path on this machine."""
        path = Path(self.cwd, script_path)
        for place, source in self.mapped.items():
            if path.is_relative_to(place):
                return source / path.relative_to(place)
        return path


def play(
    script: Path,
    *,
    gpus: int,
    nodes: int = 1,
    arguments: Sequence[str] = (),
    scratch: Path,
    environ: Mapping[str, str] = os.environ,
    sandbox: bool = True,
    slime_dir: Path | None = None,
) -> Played:
    """Run ``script`` with stubs, which report ``gpus`` GPUs on each of ``nodes``. A script that ends before it trains
    runs again with ``MASTER_ADDR`` set, if it is unset.

    Raises:
        ConfigError: there is no such script, it is none of bash, there is no bash, or no sandbox.
    """
    if not script.is_file():
        raise ConfigError(f"{script}: there is no such launch script; give the path of a bash script")
    if shutil.which("bash") is None:
        raise ConfigError("bash is not installed, and the launch script runs in it; install bash")
    text = script.read_bytes().decode(errors="replace")
    shebang = text.partition("\n")[0]
    if "\0" in text or (shebang.startswith("#!") and not re.search(r"sh\b", shebang)):
        raise ConfigError(f"{script} is no bash script ({shebang[:40]!r}); give the script that starts slime")
    if text.count("\r\n") * 2 > text.count("\n"):
        raise ConfigError(f"{script} has lines that end in CR LF: run sed -i 's/\\r$//' on it, as bash keeps the CR")
    mapped = {IMAGE_SLIME_DIR: slime_dir} if slime_dir is not None and not os.path.exists(IMAGE_SLIME_DIR) else {}
    environ = {**(_slurm(nodes, gpus) if "#SBATCH" in text else {}), **environ}
    settings = {"gpus": gpus, "nodes": nodes, "python": sys.executable, "sandbox": sandbox}

    def once(**assumed: str) -> Played:
        box = Box(scratch, sandbox=sandbox, mapped=mapped)
        box.write("settings.json", json.dumps(settings))
        played = _play(box, [str(script.resolve()), *arguments], text, {**environ, **assumed})
        return replace(played, assumed=assumed, mapped=mapped)

    played = once()
    if played.training is None and "MASTER_ADDR" not in environ and "MASTER_ADDR" in text:
        retried = once(MASTER_ADDR="10.77.0.1")
        played = replace(retried, unset=played.unset) if retried.training is not None else played
    return played


def _slurm(nodes: int, gpus: int) -> dict[str, str]:
    """The variables of a batch job."""
    names = {"SUBMIT_DIR": os.getcwd(), "JOB_ID": 1, "JOBID": 1, "JOB_NODELIST": "nodes", "NODELIST": "nodes"}
    names |= dict.fromkeys(("JOB_NUM_NODES", "NNODES", "NTASKS"), nodes)
    names |= {"GPUS_ON_NODE": gpus, "GPUS_PER_NODE": gpus, "PROCID": 0, "NODEID": 0, "LOCALID": 0}
    return {f"SLURM_{name}": str(value) for name, value in names.items()}


def _play(box: Box, script: Sequence[str], text: str, environ: Mapping[str, str]) -> Played:
    commands: list[Command] = []
    defined, counts = set[str](), Counter[tuple[str, ...]]()
    stub_env = _stubs(box, environ.get("PATH", os.defpath))
    hidden = {*stub_env, "SHLVL", "_", "PWD", "OLDPWD"}

    def read_log() -> str:
        for line in box.lines():
            try:
                record = json.loads(line)
                env = {name: _text(value) for name, value in record["env"].items() if environ.get(name) != value}
                argv, files, words = ([*map(_text, record[name])] for name in ("argv", "files", "set"))
                env = {name: value for name, value in env.items() if name not in hidden}
                command = Command((argv[0], *argv[1:]), _text(record["cwd"]), env, tuple(files), _text(record["stdin"]))
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                continue  # the script itself has written it
            commands.append(command)
            defined.update(words)
            counts[command.argv] += 1
        most = max(counts, key=lambda argv: (counts[argv] >= _REPEATS, argv[0] != "sleep", counts[argv]), default=())
        if counts[most] < _REPEATS:
            return ""
        return f"it has repeated `{' '.join(most)[:80]}` {counts[most]} times and waits for an answer that never comes"

    command, places, needs = ["bash", *script], [Path.cwd(), Path(script[0]).parent], [text, sys.prefix]
    ended = box.run(command, env={**environ, **stub_env}, places=places, needs=needs, seconds=_LIMIT_S, check=read_log)
    read_log()
    words = [line for line in ended.output.splitlines() if line.strip()]
    played = Played(tuple(commands), ended.code, "\n".join(words[-5:]), isolated=box.sandbox, reason=ended.reason)
    unset = _unset_variables(text, environ, compared=played.training is None)
    return replace(played, unset=tuple(name for name in unset if name not in defined))


def _stubs(box: Box, path: str) -> dict[str, str]:
    """Write the stubs; the variables with which bash finds them. Functions come before a PATH that the script extends,
    and stand for absolute paths, too."""
    stub, stubs = box.write("stub.py", _STUB.read_text()), box.home / "stubs"
    # set -x prints nothing, and sleep takes no time but advances bash's clock
    clock = 'case ${1-} in *[!0-9]* | "") ;; *) SECONDS=$((SECONDS + $1)) ;; esac'
    lines = ["exec {REHEARSE_TRACE}> /dev/null && BASH_XTRACEFD=$REHEARSE_TRACE"]
    for name in STUBBED:
        if box.sandbox and name == "kill":
            continue  # it reaches the script's own processes alone
        program = box.write(
            f"stubs/{name}", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {shlex.quote(str(stub))} {name} "$@"\n'
        )
        calls = {name, *filter(None, (shutil.which(name, path=part) for part in path.split(os.pathsep)))}
        body = f'REHEARSE_SET="$(compgen -v)" {shlex.quote(str(program))} "$@"; {clock if name == "sleep" else ""}'
        lines += [f"{call}() {{ {body.rstrip('; ')}; }}" for call in calls]
    functions = box.write("functions.sh", "\n".join(lines) + "\n")
    return {"BASH_ENV": str(functions), "PATH": f"{stubs}{os.pathsep}{path}"}


def _text(value: Any) -> str:
    """A text that every file can hold."""
    return str(value).encode(errors="replace").decode()


def _unset_variables(text: str, environ: Mapping[str, str], *, compared: bool) -> Iterator[str]:
    """Variables that the script reads without a default or a test, and neither sets nor gets; with or without the ones
    that it only compares."""
    text = "\n".join(line for line in text.splitlines() if "PYTHONPATH" not in line)  # where an empty part is no harm
    text = _QUOTED.sub(lambda match: match[0] if match[0][0] == '"' else " ", _HEREDOC.sub("", text))
    defaulted = {name for name, default in _READ.findall(text) if default}
    assigned = {*_SET.findall(text), *_SET_BY_COMMAND.findall(text), *_TESTED.findall(text)} | defaulted | _BUILT_IN
    for name in dict.fromkeys(name for name, _ in _READ.findall(text if compared else _COMPARED.sub(" ", text))):
        if name.isupper() and name not in assigned and name not in environ and not name.endswith("_ARGS"):
            yield name


def _ray_nodes(command: Command) -> Iterator[RayNode]:
    if command.argv[:2] == ("ray", "start"):
        yield _ray_node(command.argv[2:], command.env.get("SLURMD_NODENAME"))
    elif command.argv[0] in ("ssh", "pdsh"):
        for part in re.split(r";|&&|\|\||\n", " ".join((*command.argv[1:], "\n", command.stdin))):
            if (start := part.find("ray start")) >= 0:
                words, fault = _split(part[start:])
                yield from (replace(_ray_node(words[2:], host), fault=fault) for host in _hosts(command))


def _hosts(command: Command) -> list[str]:
    """The machines that ssh or pdsh is called for."""
    words, valued = iter(command.argv[1:]), ""
    for word in words:
        if word.startswith("-"):
            valued = next(words, "") if len(word) == 2 and word[1] in _OPTIONS_WITH_VALUE else word[2:]
            if word[:2] == "-w":  # pdsh's
                return valued.split(",")
        else:
            return [word.rpartition("@")[2]]
    return []


def _ray_node(words: Sequence[str], host: str | None) -> RayNode:
    flags = {name: value for name, value in _flags(words).items() if value}
    gpus, port = flags.get("--num-gpus", ""), flags.get("--port", "6379")
    dashboard = flags.get("--dashboard-host", "127.0.0.1"), flags.get("--dashboard-port", "8265")
    gpu_count, address = int(gpus) if gpus.isdecimal() else None, flags.get("--node-ip-address")
    return RayNode(host, "--head" in words, address, gpu_count, flags.get("--address"), port, dashboard)


def _split(text: str) -> tuple[list[str], str]:
    """The words of a shell's command, and why there is none."""
    try:
        return shlex.split(text), ""
    except ValueError as error:
        return text.split(), f"the shell refuses `{text.strip()[:80]}` ({error}): close the quote"


def _flags(words: Sequence[str]) -> dict[str, str]:
    """``--name value`` and ``--name=value`` of a command line."""
    flags: dict[str, str] = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            following = words[index + 1] if index + 1 < len(words) and not words[index + 1].startswith("--") else ""
            flags[name] = value if equals else following
    return flags


def _training(command: Command, mapped: Mapping[str, Path]) -> Training | None:
    name, *words = command.argv
    submitted, working_dir, address, faults = False, None, None, []
    env = dict(command.env)
    if command.argv[:3] == ("ray", "job", "submit"):
        if "--" not in words:
            return None
        separator = words.index("--")
        flags = _flags(words[:separator])
        runtime, faults = _runtime_env(flags)
        env |= runtime["env_vars"]
        working_dir = runtime.get("working_dir") or flags.get("--working-dir")
        address = flags.get("--address") or command.env.get("RAY_ADDRESS")
        words, submitted = words[separator + 1 :], True
        if len(words) == 1:
            words, fault = _split(words[0])
            faults += [fault] if fault else []
        while words and "=" in words[0] and not words[0].startswith("-"):  # NAME=value python3 …
            variable, _, value = words.pop(0).partition("=")
            env[variable] = value
        name, *words = words or [""]
    if not Path(name).name.startswith("python"):
        return None
    scripts = [index for index, word in enumerate(words) if word.endswith(".py")]
    if not scripts or any(word.startswith("--") for word in words[: scripts[0]]) or words[:1] == ["-c"]:
        return None
    start = scripts[0]
    launcher = words[words.index("-m") + 1] if "-m" in words[:start] else ""
    if launcher and start != words.index("-m") + 2:
        return None  # a module's own argument
    flags = tuple(words[start + 1 :])
    job = {"address": address, "launcher": launcher, "files": command.files, "faults": tuple(faults), "mapped": mapped}
    return Training(words[start], flags, env, command.cwd, submitted, str(working_dir) if working_dir else None, **job)


def _runtime_env(flags: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The job's runtime environment, with ``env_vars`` of strings, and sentences on what Ray refuses of it."""
    text = flags.get("--runtime-env-json") or "{}"
    try:
        runtime: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        runtime = str(error)
    env = (runtime.get("env_vars") or {}) if isinstance(runtime, dict) else None
    if isinstance(env, dict) and all(isinstance(value, str) for value in env.values()):
        return {**runtime, "env_vars": env}, []
    why = f"no JSON ({runtime})" if isinstance(runtime, str) else "no env_vars of names with texts"
    fault = f'--runtime-env-json of ray job submit has {why}, as in {{"env_vars": {{"A": "1"}}}}: correct {text[:200]}'
    return {"env_vars": {n: str(v) for n, v in env.items()} if isinstance(env, dict) else {}}, [fault]
