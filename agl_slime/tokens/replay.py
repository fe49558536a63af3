"""Routed experts and nuclei of turns, as span attributes and along a segment's tokens as in slime's Samples.

A run makes a directory and names it in the sampling parameters (``replay_files``). The writer of a large turn appends
the arrays to a file there if the directory is on its machine, and the span has their place; on another host they travel
in the span. A rollout's file is removed when the rollout is released, and the directory at the end of the run.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import shutil
import stat
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from agl_slime.engine.client.replay import Nucleus, RoutedExperts
from agl_slime.errors import TraceError
from agl_slime.tokens import attributes as names
from agl_slime.tokens.codec import pack_array, unpack_token_ids

if TYPE_CHECKING:
    from agl_slime.tokens.turn import Turn


def replay_attributes(turn: Turn) -> dict[str, Any]:
    """The attributes of a turn's replay data; empty for a turn without any."""
    if turn.filed is not None:
        return {names.REPLAY_FILE: json.dumps(astuple(turn.filed))}
    attributes: dict[str, Any] = {}
    if turn.experts is not None:
        rows = np.ascontiguousarray(turn.experts.rows, dtype=EXPERT_DTYPES[turn.experts.rows.itemsize])
        shape = [turn.experts.start, *rows.shape, rows.itemsize, zlib.crc32(rows.data)]
        attributes[names.EXPERTS] = base64.b64encode(rows.data).decode("ascii")
        attributes[names.EXPERTS_SHAPE] = json.dumps(shape)
    if turn.nucleus is not None:
        attributes[names.NUCLEUS_IDS] = pack_array(turn.nucleus.ids)
        attributes[names.NUCLEUS_OFFSETS] = pack_array(turn.nucleus.offsets)
    return attributes


def decode_replay(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """``experts`` and ``nucleus`` of a turn, or ``filed``, if it has them. Raises ``TraceError`` for damaged ones."""
    replay: dict[str, Any] = {}
    if names.REPLAY_FILE in attributes:
        try:
            *place, experts, nucleus = json.loads(attributes[names.REPLAY_FILE])
            shapes = [None if shape is None else tuple(shape) for shape in (experts, nucleus)]
            return {"filed": FiledReplay(*place, *shapes)}
        except (TypeError, ValueError, IndexError) as error:
            raise TraceError(f"{names.REPLAY_FILE} cannot be read: {error}") from error
    if names.EXPERTS in attributes:
        try:
            start, *shape, size, checksum = json.loads(attributes[names.EXPERTS_SHAPE])
            raw = base64.b64decode(attributes[names.EXPERTS])  # the checksum is the validation
            rows = np.frombuffer(raw, dtype=EXPERT_DTYPES[size]).reshape(shape)
            whole = rows.ndim == 3 and start >= 0 and zlib.crc32(raw) == checksum
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{names.EXPERTS} cannot be read: {error}") from error
        if not whole:
            raise TraceError(f"{names.EXPERTS} does not match its checksum")
        replay["experts"] = RoutedExperts(start, rows)
    if names.NUCLEUS_IDS in attributes:
        pair = names.NUCLEUS_IDS, names.NUCLEUS_OFFSETS
        ids, offsets = (unpack_token_ids(str(attributes.get(name)), name=name) for name in pair)
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
            raise TraceError(f"{names.NUCLEUS_OFFSETS} do not divide the {len(ids)} ids of {names.NUCLEUS_IDS}")
        replay["nucleus"] = Nucleus(ids, offsets)
    return replay


def experts_of(turns: Sequence[Turn], index: int) -> NDArray[Any] | None:
    """``[tokens - 1, layers, experts per token]`` of all tokens of turn number ``index`` but the last; ``None`` if
    some tokens have none. Rows that a turn lacks are in its base turn."""
    end, number, pieces = turns[index].length - 1, index, []
    while end > 0:
        turn = turns[number]
        if turn.experts is None or turn.experts.end < end:
            return None
        start = min(turn.experts.start, end)
        pieces.append(turn.experts.rows[: end - start])
        if not (end := start):
            break
        if turn.base_turn is None:
            return None
        number = turn.base_turn
    if not pieces:
        return None
    pieces.reverse()
    return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def nucleus_of(turns: Sequence[Turn], places: Sequence[tuple[int, int]], length: int) -> Nucleus | None:
    """The nucleus of ``length`` tokens, of which turn ``places[i][0]`` sampled the tokens from ``places[i][1]`` on;
    other tokens keep no ids. ``None`` where a turn has no nucleus."""
    counts, ids = np.zeros(length, dtype=np.int32), []
    for turn, start in places:
        nucleus = turns[turn].nucleus
        if nucleus is None:
            return None
        counts[start : start + len(nucleus)] = np.diff(nucleus.offsets)
        ids.append(nucleus.ids)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return Nucleus(np.concatenate(ids), offsets)


logger = logging.getLogger(__name__)

FILED_FROM_BYTES = 256 * 1024
"""The total size from which a turn's arrays are written to a file."""

EXPERT_DTYPES = {1: np.dtype("u1"), 2: np.dtype("<u2")}
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
        if not whole or (self.experts and self.experts[4] not in EXPERT_DTYPES) or self._bytes() != self.length:
            raise TraceError(f"the place of routed experts in a file is inconsistent: {self!r:.200}")
        if type(self.file) is not str or len(path := self.file.split("/")) != 2 or {"", ".", ".."} & {*path}:
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
            replay["experts"] = RoutedExperts(start, np.frombuffer(raw[:end], dtype=EXPERT_DTYPES[size]).reshape(shape))
        if self.nucleus is not None:
            numbers = np.frombuffer(raw[end:], dtype=_INT32).astype(np.int32, copy=False)
            replay["nucleus"] = Nucleus(numbers[: self.nucleus[0]], numbers[self.nucleus[0] :])
        return replay


def file_replay(
    directory: str, rollout_id: str, stream: str, experts: RoutedExperts | None, nucleus: Nucleus | None
) -> FiledReplay | None:
    """Append an answer's arrays to the file of ``stream``; ``None`` for small arrays, without a rollout, or where the
    directory is not on this machine or full. Blocks; concurrent calls are safe."""
    rows = None if experts is None else np.ascontiguousarray(experts.rows, dtype=EXPERT_DTYPES[experts.rows.itemsize])
    pair = () if nucleus is None else (nucleus.ids, nucleus.offsets)
    nucleus_arrays = [np.ascontiguousarray(part, dtype=_INT32) for part in pair]
    arrays = [part for part in (rows, *nucleus_arrays) if part is not None]
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
