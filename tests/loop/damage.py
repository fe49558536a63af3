"""Ways in which a file or a directory on disk is damaged, drawn at random."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 3))):
        content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
    path.write_bytes(content)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def zeros(path: Path, rng: random.Random) -> None:
    """A power cut before the last blocks were written."""
    size = rng.randrange(path.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(content[:size] + bytes(len(content) - size))


def append(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 100)))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def nest(path: Path, rng: random.Random) -> None:
    path.write_text("[" * 100_000)


def other_json(path: Path, rng: random.Random) -> None:
    path.write_text(rng.choice(("null", "[]", "{}", "3", '"text"', '{"": null}', "NaN")))


def directory_in_its_place(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def fifo_in_its_place(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_itself(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(path)


OF_FILES: list[Callable[[Path, random.Random], None]] = [flip, cut, zeros, append, remove, nest, other_json]
OF_FILES += [directory_in_its_place, fifo_in_its_place, link_to_itself]


def stray(directory: Path, rng: random.Random) -> None:
    """An entry of ``directory`` that no run has made."""
    name = rng.choice(("step_last", "step_", "step_000099", "step_-1", "step_1e3", "step_²", "notes"))
    rng.choice((Path.touch, Path.mkdir))(directory / name)


def damage_checkpoint(path: Path, rng: random.Random) -> str:
    """Damage one file of the checkpoint, or a directory in it; returns a description."""
    if rng.random() < 0.05:
        shutil.rmtree(path / "trainer")
        return "no trainer"
    file = rng.choice(sorted(file for file in path.rglob("*") if file.is_file()))
    kind = rng.choice(OF_FILES)
    if not file.stat().st_size and kind in (flip, cut, zeros):
        kind = append
    kind(file, rng)
    return f"{kind.__name__} {file.name}"
