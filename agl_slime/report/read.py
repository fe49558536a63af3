"""A run directory as the page reads it, all at once or as it grows; damage is told and not raised."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from agl_slime.audit.records import Line, read_lines
from agl_slime.errors import ConfigError
from agl_slime.report.files import RunDir
from agl_slime.report.slime_runs import SlimeRun, dump_files
from agl_slime.report.state import read_state

_OF_GROUP = ("iteration", "collected", "group_id", "instance_id", "source", "ready", "code", "reason")
_OF_MEMBER = {"rollouts": "id", "rewards": "reward", "outcomes": "outcome", "reasons": "why", "tokens": "tokens"}
_OF_MEMBER |= {"turns": "turns", "samples": "samples"}


def dump_json(value: Any) -> bytes:
    """``value`` as JSON, lone surrogates as their escapes."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, allow_nan=False).encode()


class Tail:
    """The records of a JSON-lines file, those that are new at each ``read``. ``replaced``: the file is another one than
    at the read before, and its records were read from the start; ``bad`` are numbers of lines that are damaged,
    ``unreadable`` says why there is nothing to read at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replaced, self.unreadable = False, ""
        self.bad: list[int] = []
        self._file = (0, 0)  # device and inode
        self._end = self._lines = 0

    def read(self) -> list[Line]:
        """New whole records. What follows the last line's end is not read: it is being written, or was torn by a
        kill."""
        lines: list[Line] = []
        self.unreadable, self.replaced = "", False
        try:
            about = self.path.stat()
            identity = about.st_dev, about.st_ino
            self._start_anew(bool(self._end) and (identity != self._file or about.st_size < self._end))
            self._file = identity
            lines = list(read_lines(self.path, at=self._end, number=self._lines))
        except FileNotFoundError:
            self._start_anew(bool(self._end))
        except (OSError, ValueError) as error:
            self.unreadable = error.strerror or "" if isinstance(error, OSError) else str(error)
        if lines:
            self._end, self._lines = lines[-1].at + lines[-1].size, lines[-1].number
            self.bad += [line.number for line in lines if line.wrong]
        return [line for line in lines if not line.wrong]

    def _start_anew(self, replaced: bool) -> None:
        self.replaced = replaced
        if replaced:
            self._end, self._lines, self.bad = 0, 0, []


class RunReader:
    """What the page shows of one run, ours or slime's own. ``update`` gives what is new since the last one.
    ``tokenizer`` is for a run of slime's: a directory with a ``tokenizer.json``."""

    def __init__(self, path: str | os.PathLike[str], *, tokenizer: Path | None = None) -> None:
        self.path = Path(path)
        if not is_run(self.path):
            raise ConfigError(f"{self.path} holds no run: neither config.json nor metrics.jsonl is there")
        self._slime = None if _is_ours(self.path) else slime_run(self.path, tokenizer)
        self.run = RunDir(self.path) if self._slime is None else self._slime.run
        self.metrics: list[dict[str, Any]] = []
        self.groups: list[dict[str, Any]] = []
        self.kept: dict[str, tuple[int, int, int]] = {}
        """Of each kept rollout its iteration, and first byte and length of its line in ``rollouts.jsonl``."""
        self._tails = {name: Tail(getattr(self.run, name)) for name in ("metrics", "groups", "rollouts")}
        self._told: Any = None
        self._rewritten = 0

    def update(self) -> dict[str, Any] | None:
        """What the page has to be told, ``None`` when nothing is new: see ``agl_slime/report/web/model.js``. With
        ``reset`` it replaces all that was told before."""
        replaced = False
        if self._slime is not None:
            self._slime.update()
            replaced, self._rewritten = self._slime.rewritten != self._rewritten, self._slime.rewritten
        read = {name: tail.read() for name, tail in self._tails.items()}
        replaced = replaced or any(tail.replaced for tail in self._tails.values())
        reset = self._told is None or replaced
        if replaced:  # a resumed run has replaced iterations
            self._tails = {name: Tail(tail.path) for name, tail in self._tails.items()}
            self.metrics, self.groups, self.kept = [], [], {}
            read = {name: tail.read() for name, tail in self._tails.items()}
        metrics, groups = ([line.record for line in read[name]] for name in ("metrics", "groups"))
        kept = {str(at.record.get("rollout_id")): (at.record["iteration"], at.at, at.size) for at in read["rollouts"]}
        self.metrics += metrics
        self.groups += groups
        self.kept |= kept
        state, damage = read_state(self.run), self.damage()
        absent = [] if self._slime is None else self._slime.absent()
        told = (state, damage, absent, self.run.summary.exists())
        if not reset and told == self._told and not (metrics or groups or kept):
            return None
        self._told = told
        return {
            "name": self.path.resolve().name,
            "reset": reset,
            "state": {"word": state.word, "text": state.text},
            "damage": damage,
            "absent": absent,
            "config": self.run.settings() or {},
            "metrics": columns(metrics),
            **group_columns(groups, kept),
            "kept": list(kept),
        }

    def damage(self) -> list[str]:
        """Sentences about files that are not as the package writes them."""
        found = []
        if self._slime is not None:
            found += self._slime.damage()
        elif not self.run.config.exists():
            found.append("config.json is missing: the settings of this run are not known.")
        elif self.run.settings() is None:
            found.append("config.json is not a JSON object: the settings of this run are not known.")
        for tail in self._tails.values():
            if tail.unreadable:
                found.append(f"{tail.path.name}: {tail.unreadable}.")
            if tail.bad:
                lines = ", ".join(map(str, tail.bad[:5])) + (" …" if len(tail.bad) > 5 else "")
                found.append(f"{tail.path.name}: {len(tail.bad)} lines are left out, for they are damaged ({lines}).")
        return found

    def rollout(self, rollout_id: str) -> bytes | None:
        """The line of a kept rollout."""
        if (place := self.kept.get(rollout_id)) is None or not self.run.rollouts.is_file():
            return None
        with self.run.rollouts.open("rb") as file:
            file.seek(place[1])
            return file.read(place[2]).rstrip(b"\n")


@lru_cache(maxsize=64)
def slime_run(path: Path, tokenizer: Path | None) -> SlimeRun:
    """One for all readers of a path: its files are converted once."""
    return SlimeRun(path, tokenizer)


def is_run(path: Path) -> bool:
    """Whether ``path`` has the files of a run, or those that slime writes of its own."""
    return _is_ours(path) or bool(dump_files(path))


def _is_ours(path: Path) -> bool:
    run = RunDir(path)
    return any(file.exists() for file in (run.config, run.metrics, run.summary, run.groups))


def find_runs(path: Path) -> list[Path]:
    """``path`` itself when it is a run's directory, else the runs right below it, the newest last."""
    if is_run(path):
        return [path]
    below = [each for each in sorted(path.iterdir()) if each.is_dir() and is_run(each)] if path.is_dir() else []
    if not below:
        raise ConfigError(f"{path} holds no run, nor does a directory below it: give the --output-dir of a run")
    return below


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of ``metrics.jsonl`` as a column per metric, with 7 digits; ``None`` where a row lacks it."""
    names = dict.fromkeys(name for row in rows for name in row if name != "iteration")
    values = {name: [_short(row.get(name)) for row in rows] for name in names}
    return {"iteration": [row["iteration"] for row in rows], "columns": values}


def group_columns(groups: Sequence[Mapping[str, Any]], kept: Iterable[str]) -> dict[str, Any]:
    """``groups`` and ``members`` as columns; texts that repeat are numbers of ``words``. A group has its members in
    order: ``size`` of them."""
    words: dict[Any, int] = {}
    table: dict[str, list[Any]] = {name: [] for name in (*_OF_GROUP, "versions", "size")}
    members: dict[str, list[Any]] = {name: [] for name in (*_OF_MEMBER.values(), "kept")}

    def word(text: Any) -> int:
        return words.setdefault(None if text is None else str(text), len(words))

    whole = set(kept)
    for group in groups:
        ids = group.get("rollouts")
        if not isinstance(ids, list):
            continue
        for name in _OF_GROUP:
            value = group.get(name)
            table[name].append(word(value) if name in ("source", "code", "reason", "instance_id") else value)
        table["versions"].append(word(" ".join(map(str, group.get("weight_versions") or ()))))
        table["size"].append(len(ids))
        for name, short in _OF_MEMBER.items():
            values = group.get(name)
            values = values if isinstance(values, list) and len(values) == len(ids) else [None] * len(ids)
            members[short] += map(word, values) if short in ("outcome", "why") else map(_short, values)
        members["kept"] += [int(one in whole) for one in ids]
    return {"groups": table, "members": members, "words": list(words)}


def _short(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) else value
