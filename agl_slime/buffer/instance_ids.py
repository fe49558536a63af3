"""``agl-slime assign-instance-id``: every line of a JSON-lines file gets an ``instance_id``, by which its rollouts are
grouped and skipped on resume."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import tyro

from agl_slime.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AssignInstanceIds:
    """Give each line of a JSON-lines file an instance_id. Lines that have one keep it."""

    input: Path
    """The file to read."""
    output: Path | None = None
    """Where to write; <input>_instance_id.jsonl beside the input by default."""
    prefix: str = "instance"
    """Ids are <prefix>_<number of the line>."""


def assign_instance_ids(settings: AssignInstanceIds) -> tuple[Path, int, int]:
    """Write the file; returns its path, its number of lines and how many of them got an id. Raises ``ConfigError``
    naming a line that cannot be used.

    The output appears whole or not at all.
    """
    output = settings.output or settings.input.with_name(f"{settings.input.stem}_instance_id.jsonl")
    temporary = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    taken = {str(row["instance_id"]) for _, row in _rows(settings.input) if row.get("instance_id") is not None}
    lines = assigned = 0
    seen: set[str] = set()
    try:
        with temporary.open("wb") as out:
            for number, row in _rows(settings.input):
                if row.get("instance_id") is None:
                    instance_id = f"{settings.prefix}_{lines}"
                    while instance_id in taken:
                        instance_id += "_"
                    row = {
                        "instance_id": instance_id,
                        **{key: value for key, value in row.items() if key != "instance_id"},
                    }
                    assigned += 1
                if str(row["instance_id"]) in seen:
                    raise ConfigError(
                        f"{settings.input}, line {number}: the instance_id {row['instance_id']!r} is there twice; ids must be unique"
                    )
                seen.add(str(row["instance_id"]))
                out.write(orjson.dumps(row) + b"\n")
                lines += 1
        temporary.replace(output)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return output, lines, assigned


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise ConfigError(f"{path}, line {number}: not JSON ({error})") from error
                if not isinstance(row, dict):
                    raise ConfigError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
                yield number, row
    except OSError as error:
        raise ConfigError(f"--input {path} cannot be read: {error}") from error


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    try:
        output, lines, assigned = assign_instance_ids(
            tyro.cli(AssignInstanceIds, prog="agl-slime assign-instance-id", args=list(arguments))
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{output}: {lines} lines, {assigned} got an instance_id")
    return 0
