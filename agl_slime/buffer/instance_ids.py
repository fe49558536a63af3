"""``agl-slime assign-instance-id``: gives every line of a JSON-lines file an ``instance_id``, by which its rollouts are
grouped, and skipped on resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import arg

from agl_slime.errors import ConfigError
from agl_slime.loop.tasks import read_tasks
from agl_slime.support.files import whole_file
from agl_slime.support.terminal import print_line


def main(arguments: list[str]) -> None:
    output, lines, assigned = tyro.cli(assign_instance_ids, prog="agl-slime assign-instance-id", args=arguments)
    print_line(f"{output}: {lines} lines, {assigned} got an instance_id")


def assign_instance_ids(
    *, input: Annotated[Path, arg(aliases=["--input-path"])], output: Path | None = None, prefix: str = "instance"
) -> tuple[Path, int, int]:
    """Give each line of a JSON-lines file an instance_id. Lines that have one keep it.

    Args:
        input: The file to read.
        output: The file to write; by default <input>_instance_id.jsonl beside the input.
        prefix: Ids are <prefix>_<number of the line>.

    Returns:
        The path of the output (written atomically), its number of lines, and how many of them got an id.

    Raises:
        ConfigError: names an invalid line.
    """
    output = output or input.with_name(f"{input.stem}_instance_id.jsonl")
    rows = read_tasks(input, flag="--input", strings=False)
    existing = [str(row["instance_id"]) for row in rows if row.get("instance_id") is not None]
    taken = set(existing)
    if len(taken) < len(existing):
        repeated = next(instance_id for at, instance_id in enumerate(existing) if instance_id in existing[:at])
        raise ConfigError(f"--input {input}: the instance_id {repeated!r} occurs twice; ids must be unique")
    try:
        with whole_file(output) as file:
            for number, row in enumerate(rows):
                instance_id = row.pop("instance_id", None)
                if instance_id is None:
                    instance_id = f"{prefix}_{number}"
                    while instance_id in taken:
                        instance_id += "_"
                    taken.add(instance_id)
                text = json.dumps({"instance_id": instance_id, **row}, ensure_ascii=False, separators=(",", ":"))
                file.write(text.encode("utf-8", "backslashreplace") + b"\n")  # a lone surrogate as JSON's escape
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error}") from error
    return output, len(rows), len(rows) - len(existing)
