"""The directory of a run and the JSON in it: a kill leaves it whole, and runs with different settings never mix."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic_core import to_jsonable_python

from agl_slime.audit import records
from agl_slime.errors import ConfigError
from agl_slime.support.files import disk_full_as_error, write_file
from agl_slime.support.net import shown_url

logger = logging.getLogger(__name__)

# Settings that say where or how to start and not what is run; they may differ between a run and its continuation.
_NOT_COMPARED = frozenset({"output_dir", "overwrite", "resume"})
_SECRET = re.compile(r"(^|[_-])(api_?key|auth_?token|access_?token|bearer|password|secret)$|^token$", re.IGNORECASE)


def jsonable(value: Any) -> Any:
    """``value`` as what JSON can hold: NaN and infinity become None, scalars of numpy and torch numbers, and what is
    not known text."""
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
    """The JSON object in the file; ``None`` when it is not there or holds none."""
    try:
        return records.read_object(path)
    except ValueError:
        return None


def iter_jsonl(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of the file in order. Damaged lines are left out with a warning, and so is what follows the last
    line's end: a kill has torn it. Raises ``ConfigError`` where there is no such file."""
    damaged: list[records.Line] = []
    try:
        for line in records.read_lines(Path(path)):
            if line.wrong:
                damaged.append(line)
            else:
                yield line.record
    except ValueError as error:
        raise ConfigError(f"{os.fspath(path)} {error}") from None
    if damaged:
        first, n = damaged[0], len(damaged)
        logger.warning(
            "%d damaged lines of %s are left out; line %d %s.", n, os.fspath(path), first.number, first.wrong
        )


def size_of(iteration: int, lines: Sequence[Mapping[str, Any]]) -> int:
    """The bytes that ``IterationFile.append`` writes, at most."""
    return sum(len(dump({"iteration": iteration, **record})) + len(', "crc": 4294967295') for record in lines)


class IterationFile:
    """Appends records that belong to an iteration, as JSON lines. An append removes no record: it raises ``ValueError``
    for an iteration that is not after the last one of the file, see ``cut``. Nothing is touched before the first
    ``append``; that one replaces a line that a kill has torn at the end.

    Each line ends with ``crc``, the CRC-32 of all before it, in the line and in the file: a line that is changed, moved
    or missing is found (``agl-slime audit``)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None
        self._last = -math.inf
        self._crc = 0

    def append(self, iteration: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write the records, each with ``iteration`` first, and hand them to the operating system before returning."""
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
            end = line.at + line.size
            if not line.wrong:
                self._crc, self._last = line.crc, max(self._last, line.record["iteration"])
        file = self.path.open("ab")
        file.truncate(end)
        return file

    def close(self) -> None:
        if self._file is not None:
            with disk_full_as_error(self.path), self._file:
                self._file = None


def cut(iteration: int, *paths: Path) -> None:
    """Remove the lines of later iterations than ``iteration`` from files that ``IterationFile`` wrote, for a run
    that is resumed after it; earlier lines stay as they are, and so do those that are damaged among them."""
    ends = {path: _end_of(iteration, path) for path in paths if path.is_file()}
    for path, end in ends.items():  # nothing slow in here: a kill between two of them leaves files that do not agree
        os.truncate(path, end)


def _end_of(iteration: int, path: Path) -> int:
    end = 0
    for line in records.read_lines(path):
        if not line.wrong:
            if line.record["iteration"] > iteration:
                break
            end = line.at + line.size
    return end


class RunDir:
    """The paths of a run. ``changed`` names the settings that differ from those of the run that was resumed."""

    def __init__(self, path: Path, changed: tuple[str, ...] = ()) -> None:
        self.path = path
        self.changed = changed
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.plot = path / "reward.png"
        self.tensorboard = path / "tensorboard"
        self.transcripts = path / "transcripts"
        self.summary = path / "summary.json"
        self.groups = path / "groups.jsonl"
        """Every group with what became of its rollouts."""
        self.rollouts = path / "rollouts.jsonl"
        """The rollouts that are kept whole."""
        self.environment = path / "environment"
        """What an environment's own framework has recorded of a rollout, by its id."""
        self.alive = path / "running.json"
        """Which process writes here; gone when the run has ended."""
        self.trackers = path / "trackers.json"
        """The ids that trackers know the run by."""
        self.sglang_log = path / "sglang.log"
        """What the SGLang wrote that the run started."""
        self.controller_log = path / "controller.log"
        """What the controller of Agent Lightning 1.0 and its agents wrote."""
        self.trained = path / "trained.jsonl"
        """Which instances and rollouts each iteration trained on."""
        self.start = path / "start.json"
        """What the run began with and its settings do not say: the model, and how many tasks were held out."""
        self.ledger = path / "ledger.sqlite"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        """The newest weights as a Hugging Face directory."""
        self.best_model = path / "model-best"
        """Those of the best validation, with ``--keep-best``."""
        reports = (self.metrics, self.plot, self.summary, self.tensorboard, self.transcripts, self.trained)
        reports += (self.start, self.groups, self.rollouts, self.alive, self.trackers, self.controller_log)
        database = (self.ledger.with_name(self.ledger.name + suffix) for suffix in ("", "-wal", "-shm"))
        self.reports = (*reports, self.checkpoints, self.model, self.best_model, *database)
        """What a run with ``--overwrite`` replaces. The engine's log is appended to, also by a start that fails."""

    @property
    def has_begun(self) -> bool:
        """Whether a run has left more here than its settings."""
        return any(path.exists() for path in self.reports if path not in (self.start, self.alive))

    def rewind(self, iteration: int) -> set[str]:
        """The run is resumed after ``iteration``: what its files say of later ones goes, and how it ended. Returns the
        tasks whose groups they have."""
        self.summary.unlink(missing_ok=True)
        transcripts = self.transcripts / "transcripts.jsonl"
        cut(iteration, self.metrics, self.trained, self.groups, self.rollouts, transcripts)
        lines = iter_jsonl(self.groups) if self.groups.is_file() else ()
        return {str(line["instance_id"]) for line in lines}

    def settings(self) -> dict[str, Any] | None:
        """What ``config.json`` holds; ``None`` when it is not there or no JSON object."""
        return read_object(self.config)


@dataclass
class PendingRun:
    """A run that may begin in its directory: nothing is written there before ``begin``."""

    run: RunDir
    settings: dict[str, Any]
    replaces: bool = False
    begun: bool = False

    def begin(self, start: Mapping[str, Any] | None = None) -> None:
        """Write ``config.json``, and ``start`` as ``start.json``, in the place of what an earlier run has left where
        this one ``replaces`` it."""
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
    """The run with these ``settings`` (a mapping or a dataclass) in the directory ``path``. Raises ``ConfigError``
    where it may not begin.

    A directory that holds a run is refused, unless ``resume`` continues that run (its files are kept) or ``overwrite``
    replaces it: its reports, checkpoints and ledger are removed, nothing else in the directory. A continuation with
    other values of the ``fixed`` settings is refused. Values of settings named like a password or an API key are not
    written, nor are passwords in addresses.
    """
    wanted = json.loads(dump(settings), object_hook=_redact)
    run = RunDir(Path(path))
    _refuse_file(run.path)
    fix = "choose another --output-dir, or replace what is there with --overwrite"
    if run.config.exists():
        known = run.settings()
        if known is None and not overwrite:
            raise ConfigError(f"{run.config} is not a JSON object; {fix}")
        changed = _differences(known or {}, wanted)
        if (changed or run.has_begun) and not (resume or overwrite):
            some = ", ".join(changed[:5]) + (", ..." if len(changed) > 5 else "")
            which = f"a run with other settings ({some})" if changed else "this run already"
            fix = "go on with it with --resume, replace it with --overwrite, or choose another --output-dir"
            raise ConfigError(f"output directory {run.path} holds {which}: {fix}")
        if resume and (must := next((name for name in changed if name in fixed), None)):
            began, now = (known or {}).get(must), wanted.get(must)
            raise ConfigError(f"the run in {run.path} began with {must} {began!r}, not {now!r}: resume it with that")
        run.changed = changed if resume else ()
    elif resume:
        raise ConfigError(f"output directory {run.path} holds no run to resume ({run.config.name} is missing)")
    elif not overwrite and (foreign := [path.name for path in run.reports if path.exists()]):
        why = f"holds {foreign[0]} but no {run.config.name}, so it may not be a run's"
        raise ConfigError(f"output directory {run.path} {why}; {fix}")
    return PendingRun(run, wanted, replaces=not resume)


def open_run_dir(
    path: str | os.PathLike[str] | None,
    *,
    agent: str,
    settings: Any,
    root: str | os.PathLike[str] = "runs",
    **how: Any,
) -> RunDir:
    """The directory of a run that begins now, with its ``config.json``: see ``check_run_dir``, which takes the rest.
    ``path=None`` makes a new ``<root>/<time>-<agent>``."""
    pending = check_run_dir(new_run_dir(agent, root) if path is None else path, settings=settings, **how)
    pending.begin()
    return pending.run


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    """The settings that differ, nested ones with dots, in alphabetical order."""
    found: list[str] = []
    for key in sorted({*old, *new} - (_NOT_COMPARED if not prefix else frozenset())):
        left, right = old.get(key), new.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += _differences(left, right, f"{prefix}{key}.")
        elif left != right:
            found.append(f"{prefix}{key}")
    return tuple(found)


def _redact(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: "(not written)" if value and _SECRET.search(key) else _shown(value) for key, value in settings.items()}


def _shown(value: Any) -> Any:
    """Without the passwords of addresses."""
    if isinstance(value, list):
        return [_shown(one) for one in value]
    return shown_url(value) if isinstance(value, str) and "://" in value else value


def make_directories(path: Path) -> list[Path]:
    """Make the directory of a run where it is missing; returns what was made, the innermost first."""
    _refuse_file(path)
    try:
        missing = [one for one in (path, *path.parents) if not one.exists()]
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, "made", error) from error
    return missing


def _refuse_file(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"output directory {path} is a file; choose another path")


def new_run_dir(agent: str, root: str | os.PathLike[str] = "runs") -> Path:
    """Make an empty directory that is named by the time and the agent."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", agent.rpartition(":")[2]).strip("-.") or "agent"
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    path, number = Path(root) / stem, 1
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
