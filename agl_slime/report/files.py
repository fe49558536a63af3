"""The directory of a run and its JSON files: they survive a kill, and runs with different settings never mix."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import psutil
from pydantic_core import to_jsonable_python

from agl_slime.errors import ConfigError
from agl_slime.report import records
from agl_slime.support.files import disk_full_as_error, write_file
from agl_slime.support.net import shown_url

logger = logging.getLogger(__name__)

# Settings of a start, which may differ when a run is resumed.
_START_SETTINGS = frozenset({"output_dir", "overwrite", "resume"})
_SECRET = re.compile(r"(^|[_-])(api_?key|auth_?token|access_?token|bearer|password|secret)$|^token$", re.IGNORECASE)
_NOT_WRITTEN = "(not written)"


def jsonable(value: Any) -> Any:
    """``value`` as JSON types: NaN and infinity become None, scalars of numpy and torch numbers, unknown types text."""
    return to_jsonable_python(value, inf_nan_mode="null", bytes_mode="base64", fallback=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if getattr(value, "ndim", None) == 0 else str(value)


def dump(value: Any, indent: int | None = None) -> bytes:
    """JSON and a newline, as UTF-8; a lone surrogate becomes its JSON escape."""
    text = json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False, indent=indent)
    return (text + "\n").encode("utf-8", "backslashreplace")


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in the file; ``None`` without a file or an object."""
    try:
        return records.read_object(path)
    except ValueError:
        return None


def iter_jsonl(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of the file in order. Damaged lines are left out with a warning; a last line without an end, which a
    kill cut short, is left out. Raises ``ConfigError`` for a missing file."""
    damaged: list[records.Line] = []
    try:
        for line in records.read_lines(Path(path)):
            if line.error:
                damaged.append(line)
            else:
                yield line.record
    except ValueError as error:
        raise ConfigError(f"{os.fspath(path)} {error}") from None
    if damaged:
        first, n = damaged[0], len(damaged)
        text = "%d damaged lines of %s are left out; line %d %s."
        logger.warning(text, n, os.fspath(path), first.number, first.error)


def size_of(iteration: int, lines: Sequence[Mapping[str, Any]]) -> int:
    """Upper bound of the bytes that ``IterationFile.append`` writes."""
    return sum(len(dump({"iteration": iteration, **record})) + len(', "crc": 4294967295') for record in lines)


class IterationFile:
    """Appends records of iterations as JSON lines. Appending never cuts: an iteration at or before the file's last one
    raises ``ValueError`` (see ``cut``). The first ``append`` opens the file, and replaces an incomplete last line.

    Each line ends with ``crc``, the CRC-32 of all bytes before it in the file, by which ``agl-slime audit`` finds lines
    that were changed, moved or removed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None
        self._last = -math.inf
        self._crc = 0

    def append(self, iteration: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write the records, each with ``iteration`` first, and flush them to the operating system."""
        with disk_full_as_error(self.path):
            if self._file is None:
                self._file = self._open()
            if iteration <= self._last:
                last = f"{self.path} has records of iteration {self._last} already"
                raise ValueError(f"{last}; iteration {iteration} cannot be appended, only a resume cuts the file")
            for record in lines:
                line = dump({"iteration": iteration, **record})[:-2]
                self._crc = zlib.crc32(line, self._crc)
                self._file.write(b'%b, "crc": %d}\n' % (line, self._crc))
            self._file.flush()
        self._last = iteration

    def _open(self) -> IO[bytes]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last, self._crc, end = -math.inf, 0, 0
        for line in records.read_lines(self.path) if self.path.exists() else ():
            end = line.offset + line.size
            if not line.error:
                self._crc, self._last = line.crc, max(self._last, line.record["iteration"])
        file = self.path.open("ab")
        file.truncate(end)
        return file

    def close(self) -> None:
        if self._file is not None:
            with disk_full_as_error(self.path), self._file:
                self._file = None


def cut(iteration: int, *paths: Path) -> None:
    """Remove the lines of iterations after ``iteration`` from files of ``IterationFile``, for a run that resumes there.
    Earlier lines stay as they are, damaged ones included."""
    ends = {path: _end_of(iteration, path) for path in paths if path.is_file()}
    for path, end in ends.items():  # nothing slow in here: a kill between two of them leaves inconsistent files
        os.truncate(path, end)


def _end_of(iteration: int, path: Path) -> int:
    end = 0
    for line in records.read_lines(path):
        if not line.error:
            if line.record["iteration"] > iteration:
                break
            end = line.offset + line.size
    return end


class RunDir:
    """The paths of a run. ``changed`` names the settings that differ from the resumed run's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changed: tuple[str, ...] = ()
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.summary = path / "summary.json"
        self.groups = path / "groups.jsonl"
        """Every group with the outcomes of its rollouts."""
        self.rollouts = path / "rollouts.jsonl"
        """Kept rollouts, token by token."""
        self.environment = path / "environment"
        """Records of an environment's own framework, by rollout id."""
        self.alive = path / "running.json"
        """The process that writes here; removed when the run ends."""
        self.trackers = path / "trackers.json"
        """The run's ids in its trackers."""
        self.sglang_log = path / "sglang.log"
        """The log of the SGLang that the run started."""
        self.controller_log = path / "controller.log"
        """The log of Agent Lightning 1.0's controller and its agents."""
        self.trained = path / "trained.jsonl"
        """The tasks and rollouts that each iteration trained on."""
        self.start = path / "start.json"
        """The initial model and the number of held-out tasks, which the settings do not have."""
        self.ledger = path / "ledger.sqlite"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        """The newest weights as a Hugging Face directory."""
        self.best_model = path / "model-best"
        """The weights of the best validation, with ``--keep-best``."""
        self.weights = path / "weights"
        """Checkpoints that the engine loads, each in a directory named by ``version_name``."""
        reports = (self.metrics, self.summary, self.tensorboard, self.trained, self.start, self.groups)
        reports += (self.rollouts, self.alive, self.trackers, self.controller_log)
        database = (self.ledger.with_name(self.ledger.name + suffix) for suffix in ("", "-wal", "-shm"))
        self.reports = (*reports, self.checkpoints, self.model, self.best_model, *database)
        """The files that ``--overwrite`` replaces. The engine's log is appended to, also by a failing start."""

    @property
    def has_begun(self) -> bool:
        """Whether the directory has more of a run than its settings."""
        return any(path.exists() for path in self.reports if path not in (self.start, self.alive))

    def rewind(self, iteration: int) -> set[str]:
        """Remove the records of iterations after ``iteration``, and the summary. Returns the tasks of the groups that
        are left."""
        self.summary.unlink(missing_ok=True)
        cut(iteration, self.metrics, self.trained, self.groups, self.rollouts)
        lines = iter_jsonl(self.groups) if self.groups.is_file() else ()
        return {str(line["instance_id"]) for line in lines}

    def settings(self) -> dict[str, Any] | None:
        """The content of ``config.json``; ``None`` without a file or a JSON object."""
        return read_object(self.config)


def version_name(version: str) -> str:
    """The name of a directory with the weights of ``version``."""
    return f"v{int(version):06d}"


@dataclass
class PendingRun:
    """A run that may begin in its directory; ``begin`` writes its first files."""

    run: RunDir
    settings: dict[str, Any]
    replaces: bool = False
    begun: bool = False

    def begin(self, start: Mapping[str, Any] | None = None) -> None:
        """Remove the files of the run that this one ``replaces``; write ``config.json``, and ``start`` to
        ``start.json``."""
        run, self.begun = self.run, True
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            for path in run.reports if self.replaces else ():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            write_file(run.config, dump(self.settings, indent=2))
            if start is not None:
                write_file(run.start, dump(start))
        except OSError as error:
            raise _unusable(run.path, "written", error) from error


def check_run_dir(
    path: str | os.PathLike[str],
    *,
    settings: Any,
    resume: bool = False,
    overwrite: bool = False,
    fixed: Collection[str] = (),
) -> PendingRun:
    """The run with these ``settings`` (a mapping or a dataclass) in the directory ``path``. Raises ``ConfigError`` if
    it may not begin.

    The directory of another run is refused, unless ``resume`` continues that run or ``overwrite`` replaces it: then its
    reports, checkpoints and ledger are removed, and no other file. ``fixed`` settings may not change on a resume.
    Passwords and API keys, by the setting's name or in an address, are not written.
    """
    current = redacted(settings)
    run = RunDir(Path(path))
    _refuse_file(run.path)
    fix = "choose another --output-dir, or replace what is there with --overwrite"
    if run.config.exists():
        previous = run.settings()
        if previous is None and not overwrite:
            raise ConfigError(f"{run.config} is not a JSON object; {fix}")
        changed = differences(previous or {}, current)
        if (changed or run.has_begun) and not (resume or overwrite):
            some = ", ".join(changed[:5]) + (", ..." if len(changed) > 5 else "")
            which = f"a run with other settings ({some})" if changed else "this run already"
            fix = "continue it with --resume, replace it with --overwrite, or choose another --output-dir"
            raise ConfigError(f"output directory {run.path} holds {which}: {fix}")
        if resume and (must := next((name for name in changed if name in fixed), None)):
            recorded, now = (previous or {}).get(must), current.get(must)
            raise ConfigError(f"the run in {run.path} began with {must} {recorded!r}, not {now!r}: resume it with that")
        run.changed = changed if resume else ()
    elif resume:
        raise ConfigError(f"output directory {run.path} holds no run to resume ({run.config.name} is missing)")
    elif not overwrite and (foreign := [path.name for path in run.reports if path.exists()]):
        why = f"holds {foreign[0]} but no {run.config.name}, so it may not be a run's"
        raise ConfigError(f"output directory {run.path} {why}; {fix}")
    return PendingRun(run, current, replaces=not resume)


def open_run_dir(path: Path | None, *, agent: str, settings: Any, root: Path | str = "runs", **options: Any) -> RunDir:
    """The directory of a run that begins now, with its ``config.json``; ``options`` go to ``check_run_dir``.
    ``path=None`` makes a new ``<root>/<time>-<agent>``."""
    pending = check_run_dir(new_run_dir(agent, root) if path is None else path, settings=settings, **options)
    pending.begin()
    return pending.run


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    """The names of settings that differ, nested ones with dots, in alphabetical order."""
    names: list[str] = []
    for key in sorted({*old, *new} - (_START_SETTINGS if not prefix else frozenset())):
        old_value, new_value = old.get(key), new.get(key)
        if isinstance(old_value, Mapping) and isinstance(new_value, Mapping):
            names += differences(old_value, new_value, f"{prefix}{key}.")
        elif old_value != new_value:
            names.append(f"{prefix}{key}")
    return tuple(names)


def redacted(settings: Any) -> dict[str, Any]:
    """``settings`` as JSON has them, without passwords and API keys."""
    return json.loads(dump(settings), object_hook=_redact)


def _redact(settings: dict[str, Any]) -> dict[str, Any]:
    secrets = {key for key, value in settings.items() if value and _SECRET.search(key)}
    return {k: _NOT_WRITTEN if k in secrets else _without_passwords(value) for k, value in settings.items()}


def _without_passwords(value: Any) -> Any:
    if isinstance(value, list):  # perhaps of flags, each with its value after it or after "="
        pairs = zip(("", *value), value, strict=False)
        return [_NOT_WRITTEN if _names_secret(before) else _without_passwords(item) for before, item in pairs]
    if isinstance(value, str) and "=" in value and _names_secret(name := value.partition("=")[0]):
        return f"{name}={_NOT_WRITTEN}"
    return shown_url(value) if isinstance(value, str) and "://" in value else value


def _names_secret(flag: Any) -> bool:
    return str(flag).startswith("--") and bool(_SECRET.search(str(flag).rpartition(".")[2]))


def make_directories(path: Path) -> list[Path]:
    """Make the directory of a run if it is missing; returns the directories made, innermost first."""
    _refuse_file(path)
    try:
        missing = [directory for directory in (path, *path.parents) if not directory.exists()]
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, "made", error) from error
    return missing


def _refuse_file(path: Path) -> None:
    if os.fsencode(path.absolute()).decode(errors="ignore") != str(path.absolute()):
        raise ConfigError(f"output directory {path.absolute()} has bytes that are not UTF-8; choose another path")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"output directory {path} is a file; choose another path")


def new_run_dir(agent: str, root: Path | str = "runs") -> Path:
    """Make an empty directory named by the time and the agent."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", agent.rpartition(":")[2]).strip("-.") or "agent"
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    path, number = Path(root) / stem, 1
    _refuse_file(path)
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
            path = path.with_name(f"{stem}-{number}")
        except OSError as error:
            raise _unusable(path, "made", error) from error


def _unusable(path: Path, verb: str, error: OSError) -> ConfigError:
    return ConfigError(f"output directory {path} cannot be {verb}: {error.strerror}; choose another with --output-dir")


# A process on another host cannot be checked: it counts as killed after this long without a write.
_SILENT_S = 900.0


@dataclass(frozen=True)
class RunState:
    """``word`` is ``finished``, ``stopped``, ``running``, ``killed`` or ``unknown``; ``text`` a sentence about it."""

    word: str
    text: str


def read_state(run: RunDir) -> RunState:
    if (writer := read_object(run.alive)) is not None:
        last = max((path.stat().st_mtime for path in (run.alive, run.metrics, run.groups) if path.exists()), default=0)
        place = f"process {writer.get('pid')} on {writer.get('host')}"
        if _is_alive(writer, last):
            return RunState("running", f"This run is in progress ({place}).")
        when = datetime.fromtimestamp(last, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return RunState("killed", f"This run was killed: {place} is gone; it last wrote at {when}.")
    if (summary := read_object(run.summary)) is not None:
        if (reason := summary.get("reason")) == "finished":
            return RunState("finished", "This run has finished.")
        return RunState("stopped", f"This run was stopped: {reason}")
    if run.summary.exists():
        return RunState("unknown", f"{run.summary.name} is not a JSON object: how this run ended is unknown.")
    return RunState("unknown", "Neither running.json nor summary.json is there: how this run ended is unknown.")


def write_alive(run: RunDir) -> None:
    """Record this process as the run's writer, so that a killed run can be told from a current one."""
    pid = os.getpid()
    writer = {"host": socket.gethostname(), "pid": pid, "began": _process_began(pid), "at": time.time()}
    write_file(run.alive, dump(writer, indent=2), durable=False)


def _is_alive(writer: dict[str, Any], last: float) -> bool:
    pid = writer.get("pid")
    if writer.get("host") != socket.gethostname() or not isinstance(pid, int) or not 0 < pid < 2**31:
        return time.time() - last < _SILENT_S
    return psutil.pid_exists(pid) and writer.get("began") == _process_began(pid)


def _process_began(pid: int) -> str | None:
    """The start time of the process in kernel ticks, which tells a reused pid apart; ``None`` without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
