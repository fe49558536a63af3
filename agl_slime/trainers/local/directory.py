"""Directories that are there as a whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_directory(target: str | os.PathLike[str], *, durable: bool = False) -> Iterator[Path]:
    """A fresh directory next to ``target`` to write into; it takes the place of ``target`` when the block ends well and
    is removed when it does not.

    A reader sees the old content, or the new, or (for the moment between two renames, and only where ``target``
    existed) neither; never a part.

    Args:
        durable: write the files through to the disk first, so that the content survives a power failure as well as a
            crash of the process.
    """
    target = Path(target).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    suffix = uuid.uuid4().hex[:12]
    fresh = target.with_name(f".{target.name}.new-{suffix}")
    fresh.mkdir()
    try:
        yield fresh
        if durable:
            for path in [*fresh.rglob("*"), fresh]:
                _flush(path)
        if target.exists():
            former = target.with_name(f".{target.name}.old-{suffix}")
            target.rename(former)
            fresh.rename(target)
            shutil.rmtree(former)
        else:
            fresh.rename(target)
        if durable:
            _flush(target.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # only there when something went wrong


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = ["whole_directory"]
