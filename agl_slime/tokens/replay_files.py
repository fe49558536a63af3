"""Routed experts and nuclei of large turns, in one file per rollout instead of its spans.

A run makes a directory and names it in the sampling parameters (``replay_files``). The writer of a turn appends the
arrays to a file there if the directory is on its machine, and the span has their place; on another host they travel in
the span. A rollout's file is removed when the rollout is released, and the directory at the end of the run.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from agl_slime.engine.client.replay import Nucleus, RoutedExperts
from agl_slime.errors import TraceError

logger = logging.getLogger(__name__)

FILED_FROM_BYTES = 256 * 1024
"""The total size from which a turn's arrays are written to a file."""

KINDS = {1: np.dtype("u1"), 2: np.dtype("<u2")}
_INT32 = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class FiledReplay:
    """The place of a turn's arrays: ``length`` bytes from ``offset`` on in ``file``, a path within the run's directory,
    with this CRC-32. ``experts`` are start, rows, layers, experts per token and bytes of each; ``nucleus`` numbers of
    ids and of offsets. One of them may be ``None``. Raises ``TraceError`` for sizes that do not fit ``length``."""

    file: str
    offset: int
    length: int
    checksum: int
    experts: tuple[int, int, int, int, int] | None = None
    nucleus: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        numbers = [self.offset, self.length, self.checksum, *(self.experts or ()), *(self.nucleus or ())]
        whole = all(type(number) is int and number >= 0 for number in numbers)
        if not whole or (self.experts and self.experts[4] not in KINDS) or self._bytes() != self.length:
            raise TraceError(f"the place of routed experts in a file is inconsistent: {self!r:.200}")
        if type(self.file) is not str or len(parts := self.file.split("/")) != 2 or {"", ".", ".."} & {*parts}:
            raise TraceError(f"routed experts are in ROLLOUT/FILE of the run's directory, not in {self.file!r:.80}")

    def _bytes(self) -> int:
        _, rows, layers, top_k, size = self.experts or (0,) * 5
        return rows * layers * top_k * size + 4 * sum(self.nucleus or ())

    @property
    def experts_end(self) -> int:
        """The first token without experts here."""
        return 0 if self.experts is None else self.experts[0] + self.experts[1]

    def read(self, directory: Path | None) -> dict[str, Any]:
        """``experts`` and ``nucleus`` of the turn. Raises ``TraceError`` when the file is missing or damaged."""
        if directory is None:
            raise TraceError(f"routed experts are in {self.file} of an unknown directory: give replay_files")
        raw = memoryview(_read(directory / self.file, self.offset, self.length))
        if zlib.crc32(raw) != self.checksum:
            raise TraceError(f"routed experts in {directory / self.file} do not have the checksum of their span")
        replay: dict[str, Any] = {}
        end = len(raw) - 4 * sum(self.nucleus or ())
        if self.experts is not None:
            start, *shape, size = self.experts
            replay["experts"] = RoutedExperts(start, np.frombuffer(raw[:end], dtype=KINDS[size]).reshape(shape))
        if self.nucleus is not None:
            numbers = np.frombuffer(raw[end:], dtype=_INT32).astype(np.int32, copy=False)
            replay["nucleus"] = Nucleus(numbers[: self.nucleus[0]], numbers[self.nucleus[0] :])
        return replay


def file_replay(
    directory: str, rollout_id: str, stream: str, experts: RoutedExperts | None, nucleus: Nucleus | None
) -> FiledReplay | None:
    """Append an answer's arrays to the file of ``stream``; ``None`` for small arrays, without a rollout, or where the
    directory is not on this machine or full. Blocks; concurrent calls are safe."""
    rows = None if experts is None else np.ascontiguousarray(experts.rows, dtype=KINDS[experts.rows.itemsize])
    kept = (
        [] if nucleus is None else [np.ascontiguousarray(part, dtype=_INT32) for part in (nucleus.ids, nucleus.offsets)]
    )
    arrays = [part for part in (rows, *kept) if part is not None]
    if not rollout_id or sum(part.nbytes for part in arrays) < FILED_FROM_BYTES:
        return None  # without a rollout's name they could not be removed with it
    name, checksum, length = f"{_name(rollout_id)}/{stream}", 0, 0
    path = Path(directory) / name
    try:
        with suppress(FileExistsError):
            path.parent.mkdir()
        with open(path, "ab", buffering=0) as file:
            # a single write: writes of the rollout's other branches cannot interleave
            raw = b"".join(part.data for part in arrays) if len(arrays) > 1 else arrays[0].data.cast("B")
            written, length = file.write(raw), len(raw)
            end, checksum = file.tell(), zlib.crc32(raw)
    except FileNotFoundError:  # another host, or the run has ended
        return None
    except OSError as error:
        logger.warning("Routed experts cannot be written to %s and stay in spans: %s", directory, error)
        return None
    if written != length:
        logger.warning("There is no space left in %s: routed experts stay in spans.", directory)
        return None
    return FiledReplay(
        file=name,
        offset=end - length,
        length=length,
        checksum=checksum,
        experts=None if experts is None or rows is None else (experts.start, *rows.shape, rows.itemsize),
        nucleus=None if nucleus is None else (len(nucleus.ids), len(nucleus.offsets)),
    )


def remove_replay(directory: Path, rollout_ids: Iterable[str]) -> None:
    """Remove the files of these rollouts."""
    for rollout_id in rollout_ids:
        shutil.rmtree(directory / _name(rollout_id), ignore_errors=True)


def _name(rollout_id: str) -> str:
    """A file name for any id."""
    return quote(rollout_id, safe="").replace(".", "%2E")


def _read(path: Path, offset: int, length: int) -> bytes:
    try:
        # spans are untrusted: neither a link out of the directory, nor a pipe on which reading would hang
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size < offset + length:
                raise TraceError(f"{path} does not have the routed experts that a span places there")
            file.seek(offset)
            return file.read(length)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise TraceError(f"the routed experts of a turn cannot be read: {error}") from error
