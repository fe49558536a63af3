"""A run directory as data for the page, all at once or incrementally; damage is reported, not raised."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agl_slime.errors import ConfigError
from agl_slime.report.files import RunDir, read_state
from agl_slime.report.records import Line, parse, read_lines

_GROUP_FIELDS = ("iteration", "collected", "group_id", "instance_id", "source", "ready", "code", "reason")
_MEMBER_FIELDS = {"rollouts": "id", "rewards": "reward", "outcomes": "outcome", "reasons": "why", "tokens": "tokens"}
_MEMBER_FIELDS |= {"turns": "turns", "samples": "samples"}


class ConvertedRun(Protocol):
    """A run of another program. ``update`` converts its new files into the directory ``run``, and counts in
    ``rewritten`` how often earlier lines were replaced; ``absent`` and ``damage`` are sentences about missing data and
    about unreadable files."""

    run: RunDir
    rewritten: int

    def update(self) -> None: ...
    def absent(self) -> list[str]: ...
    def damage(self) -> list[str]: ...


Convert = Callable[[Path], ConvertedRun | None]
"""Returns the run of another program at a path, the same one at each call; ``None`` where there is none."""


def no_other_runs(path: Path) -> None:
    """Converts nothing: only runs of this package are read."""


class Tail:
    """New records of a JSON-lines file at each ``read``. ``replaced``: the file is another one than at the last read,
    and was read from its start. ``bad``: numbers of damaged lines. ``unreadable``: why nothing could be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replaced, self.unreadable = False, ""
        self.bad: list[int] = []
        self._file = (0, 0)  # device and inode
        self._end = self._lines = 0

    def read(self) -> list[Line]:
        """New complete records; a last line without an end is left for the next read."""
        lines: list[Line] = []
        self.unreadable, self.replaced = "", False
        try:
            stat = self.path.stat()
            identity = stat.st_dev, stat.st_ino
            self._restart(bool(self._end) and (identity != self._file or stat.st_size < self._end))
            self._file = identity
            lines = list(read_lines(self.path, offset=self._end, number=self._lines))
        except FileNotFoundError:
            self._restart(bool(self._end))
        except (OSError, ValueError) as error:
            self.unreadable = error.strerror or "" if isinstance(error, OSError) else str(error)
        if lines:
            self._end, self._lines = lines[-1].offset + lines[-1].size, lines[-1].number
            self.bad += [line.number for line in lines if line.error]
        return [line for line in lines if not line.error]

    def _restart(self, replaced: bool) -> None:
        self.replaced = replaced
        if replaced:
            self._end, self._lines, self.bad = 0, 0, []


class RunReader:
    """The data of one run for the page. ``update`` returns the changes since the last call; ``convert`` reads runs of
    other programs."""

    def __init__(self, path: str | os.PathLike[str], convert: Convert = no_other_runs, *, name: str = "") -> None:
        self.path = Path(path)
        self.name = name or self.path.resolve().name
        self._converted = None if is_run(self.path) else convert(self.path)
        if self._converted is None and not is_run(self.path):
            raise ConfigError(f"{self.path} holds no run: neither config.json nor metrics.jsonl is there")
        self.run = RunDir(self.path) if self._converted is None else self._converted.run
        self.metrics: list[dict[str, Any]] = []
        self.groups: list[dict[str, Any]] = []
        self.kept_rollouts: dict[str, tuple[int, int, int]] = {}
        """Kept rollouts by id: iteration, and offset and length of the line in ``rollouts.jsonl``."""
        self._tails = {name: Tail(getattr(self.run, name)) for name in ("metrics", "groups", "rollouts")}
        self._last_status: Any = None
        self._rewritten = 0

    def update(self) -> dict[str, Any] | None:
        """The changes for the page (see ``agl_slime/report/web/model.js``); ``None`` without any. With ``reset`` they
        replace the data of all earlier calls."""
        replaced = False
        if self._converted is not None:
            self._converted.update()
            replaced, self._rewritten = self._converted.rewritten != self._rewritten, self._converted.rewritten
        read = {name: tail.read() for name, tail in self._tails.items()}
        replaced = replaced or any(tail.replaced for tail in self._tails.values())
        reset = self._last_status is None or replaced
        if replaced:  # a resumed run has replaced iterations
            self._tails = {name: Tail(tail.path) for name, tail in self._tails.items()}
            self.metrics, self.groups, self.kept_rollouts = [], [], {}
            read = {name: tail.read() for name, tail in self._tails.items()}
        metrics, groups = ([line.record for line in read[name]] for name in ("metrics", "groups"))
        kept_lines = {
            str(line.record.get("rollout_id")): (line.record["iteration"], line.offset, line.size)
            for line in read["rollouts"]
        }
        self.metrics += metrics
        self.groups += groups
        self.kept_rollouts |= kept_lines
        state, damage = read_state(self.run), self.damage()
        absent = [] if self._converted is None else self._converted.absent()
        status = (self.name, state, damage, absent, self.run.summary.exists())
        if not reset and status == self._last_status and not (metrics or groups or kept_lines):
            return None
        self._last_status = status
        return {
            "name": self.name,
            "reset": reset,
            "state": {"word": state.word, "text": state.text},
            "damage": damage,
            "absent": absent,
            "config": self.run.settings() or {},
            "metrics": columns(metrics),
            **group_columns(groups, kept_lines),
            "kept": list(kept_lines),
        }

    def damage(self) -> list[str]:
        """Sentences about missing, unreadable and damaged files."""
        sentences = []
        if self._converted is not None:
            sentences += self._converted.damage()
        elif not self.run.config.exists():
            sentences.append("config.json is missing: the settings of this run are unknown.")
        elif self.run.settings() is None:
            sentences.append("config.json is not a JSON object: the settings of this run are unknown.")
        for tail in self._tails.values():
            if tail.unreadable:
                sentences.append(f"{tail.path.name}: {tail.unreadable}.")
            if tail.bad:
                lines = ", ".join(map(str, tail.bad[:5])) + (" …" if len(tail.bad) > 5 else "")
                sentences.append(f"{tail.path.name}: {len(tail.bad)} damaged lines are left out ({lines}).")
        return sentences

    def rollout(self, rollout_id: str) -> bytes | None:
        if (place := self.kept_rollouts.get(rollout_id)) is None or not self.run.rollouts.is_file():
            return None
        with self.run.rollouts.open("rb") as file:
            file.seek(place[1])
            return file.read(place[2]).rstrip(b"\n")

    def ids_with(self, text: str) -> list[str]:
        """Kept rollouts whose messages have ``text``, in any case."""
        part = json.dumps(text, ensure_ascii=False)[1:-1].lower()
        lines = ((rollout_id, self.rollout(rollout_id)) for rollout_id in self.kept_rollouts)
        messages = ((rollout_id, parse(line).get("messages")) for rollout_id, line in lines if line is not None)
        return [name for name, each in messages if part in json.dumps(each, ensure_ascii=False).lower()]


def is_run(path: Path) -> bool:
    """Whether ``path`` has files of a run."""
    run = RunDir(path)
    return any(file.exists() for file in (run.config, run.metrics, run.summary, run.groups))


def find_runs(path: Path, convert: Convert = no_other_runs) -> list[Path]:
    """``path`` if it is a run's directory, else the runs directly below it by name."""

    def holds_run(directory: Path) -> bool:
        return is_run(directory) or convert(directory) is not None

    if holds_run(path):
        return [path]
    below = [each for each in sorted(path.iterdir()) if each.is_dir() and holds_run(each)] if path.is_dir() else []
    if not below:
        raise ConfigError(f"{path} holds no run, nor does a directory below it: give the --output-dir of a run")
    return below


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The folder of each path, with its parents as far as another path ends in the same folders."""
    ends = [path.resolve().parts for path in paths]
    counts = Counter(parts[-n:] for parts in {*ends} for n in range(1, len(parts) + 1))
    names = (next(parts[-n:] for n in range(1, len(parts) + 1) if counts[parts[-n:]] == 1) for parts in ends)
    return [Path(*parts).as_posix() for parts in names]


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of ``metrics.jsonl`` as one column per metric, to 7 digits; ``None`` where a row lacks the metric."""
    names = dict.fromkeys(name for row in rows for name in row if name != "iteration")
    values = {name: [_short(row.get(name)) for row in rows] for name in names}
    return {"iteration": [row["iteration"] for row in rows], "columns": values}


def group_columns(groups: Sequence[Mapping[str, Any]], kept_rollouts: Iterable[str]) -> dict[str, Any]:
    """``groups`` and ``members`` as columns; repeated texts are indices into ``words``. A group owns the next ``size``
    members."""
    words: dict[Any, int] = {}
    table: dict[str, list[Any]] = {name: [] for name in (*_GROUP_FIELDS, "versions", "size")}
    members: dict[str, list[Any]] = {name: [] for name in (*_MEMBER_FIELDS.values(), "kept")}

    def word(text: Any) -> int:
        return words.setdefault(None if text is None else str(text), len(words))

    kept_ids = set(kept_rollouts)
    for group in groups:
        ids = group.get("rollouts")
        if not isinstance(ids, list):
            continue
        for name in _GROUP_FIELDS:
            value = group.get(name)
            table[name].append(word(value) if name in ("source", "code", "reason", "instance_id") else value)
        table["versions"].append(word(" ".join(map(str, group.get("weight_versions") or ()))))
        table["size"].append(len(ids))
        for name, short in _MEMBER_FIELDS.items():
            values = group.get(name)
            values = values if isinstance(values, list) and len(values) == len(ids) else [None] * len(ids)
            members[short] += map(word, values) if short in ("outcome", "why") else map(_short, values)
        members["kept"] += [int(rollout_id in kept_ids) for rollout_id in ids]
    return {"groups": table, "members": members, "words": list(words)}


def _short(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) else value
