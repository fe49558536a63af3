"""``agl-slime assign-instance-id``: every line of a JSON-lines file gets an ``instance_id``, by which its rollouts are
grouped and skipped on resume."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import tyro

from agl_slime.errors import ConfigError
from agl_slime.loop.tasks import read_tasks
from agl_slime.support.files import whole_file


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
    rows = read_tasks(settings.input, flag="--input")
    given = [str(row["instance_id"]) for row in rows if row.get("instance_id") is not None]
    taken = set(given)
    if len(taken) < len(given):
        twice = next(instance_id for at, instance_id in enumerate(given) if instance_id in given[:at])
        raise ConfigError(f"--input {settings.input}: the instance_id {twice!r} is there twice; ids must be unique")
    try:
        with whole_file(output) as file:
            for number, row in enumerate(rows):
                instance_id = row.pop("instance_id", None)
                if instance_id is None:
                    instance_id = f"{settings.prefix}_{number}"
                    while instance_id in taken:
                        instance_id += "_"
                    taken.add(instance_id)
                file.write(orjson.dumps({"instance_id": instance_id, **row}) + b"\n")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error}") from error
    return output, len(rows), len(rows) - len(given)


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
