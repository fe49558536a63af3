"""Token ids and log-probs as one string each: little-endian int32 or float32, base64.

A list attribute costs the store a pydantic validation and a size estimate per element; one string costs neither. 4
bytes a number become 5⅓ characters. Ids and log-probs, which are float32 in the engines, come back exactly.
"""

from __future__ import annotations

import base64
import binascii
import mmap
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from agl_slime.engine.client.prompt import PromptIds
from agl_slime.errors import TraceError

TokenArray: TypeAlias = npt.NDArray[np.int32]
LogProbArray: TypeAlias = npt.NDArray[np.float32]

# Old views pin superseded arrays: at growth 8 at most 1/8 of the data. Untouched pages are not committed.
_GROWTH = 8
_PAGES = 64 * 1024
_INT32 = np.iinfo(np.int32)
_LITTLE = {np.dtype(np.int32): np.dtype("<i4"), np.dtype(np.float32): np.dtype("<f4")}


def token_array(ids: Sequence[int] | npt.NDArray[Any], *, name: str = "token ids") -> TokenArray:
    """``ids`` as a read-only int32 array. ``TraceError`` when one is not an integer or does not fit into 32 bits."""
    if isinstance(ids, PromptIds):
        ids = ids.array
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TraceError(f"{name} must be a flat array of integers, got {ids.ndim} dimensions of {ids.dtype}")
        if ids.dtype == np.int32:
            return _frozen(ids.copy()) if ids.flags.writeable else ids
        ids = ids.tolist()
    if isinstance(ids, (str, bytes, bytearray)):
        raise TraceError(f"{name} must be a list of integers, got {type(ids).__name__}")
    try:
        # 1.3 ms for 100,000 ids, np.asarray takes 3.5; the copy frees the intermediate array
        return _frozen(np.frombuffer(array("i", ids), dtype=np.int32).copy())
    except OverflowError as error:
        bad = next(value for value in ids if not _INT32.min <= value <= _INT32.max)
        raise TraceError(f"{name} must fit into 32 bits, got {bad}") from error
    except TypeError as error:
        raise TraceError(f"{name} must be a flat list of integers: {error}") from error


def log_prob_array(values: Sequence[float] | npt.NDArray[Any], *, name: str = "log-probs") -> LogProbArray:
    """``values`` as a read-only float32 array. ``TraceError`` when one is no number, not finite, or beyond float32."""
    if isinstance(values, np.ndarray) and (values.dtype, values.ndim) == (np.float32, 1) and not values.flags.writeable:
        floats = values
    else:
        try:
            wide = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise TraceError(f"{name} must be a flat list of numbers: {error}") from error
        if wide.ndim != 1:
            raise TraceError(f"{name} must be a flat list of numbers, got {wide.ndim} dimensions")
        with np.errstate(over="ignore"):  # an overflow becomes inf, which is refused below
            floats = _frozen(wide.astype(np.float32))
    finite = np.isfinite(floats)
    if not finite.all():
        place = int(np.argmin(finite))
        raise TraceError(f"{name} must be finite float32 numbers, got {values[place]!r} at position {place}")
    return floats


def common_prefix(a: npt.NDArray[np.integer], b: npt.NDArray[np.integer]) -> int:
    """Number of leading tokens that ``a`` and ``b`` share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    place = int(differs.argmax()) if n else 0
    return place if n and differs[place] else n


def find_ids(ids: bytes, part: bytes, start: int = 0) -> int:
    """The index of the int32 ids ``part`` among ``ids``, from index ``start`` on; -1 if they are missing."""
    index = ids.find(part, 4 * start)
    while index >= 0 and index % 4:
        index = ids.find(part, index + 1)
    return index // 4


def shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Number of leading items that ``a`` and ``b`` share, by bisection over slices."""
    if not (isinstance(a, str) and isinstance(b, str)):
        a, b = list(a), list(b)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def unpack_token_ids(text: str, *, name: str = "token ids") -> TokenArray:
    """The integers of a string from ``pack_array``, read-only. ``TraceError`` for another string."""
    return _frozen(_unpack(text, name, np.dtype(np.int32)))


def unpack_log_probs(text: str) -> LogProbArray:
    """The floats of a string from ``pack_array``, read-only. ``TraceError`` for another string or NaN."""
    return log_prob_array(_frozen(_unpack(text, "log-probs", np.dtype(np.float32))))


def pack_array(values: TokenArray | LogProbArray) -> str:
    """An array from ``token_array`` or ``log_prob_array`` as one string."""
    return base64.b64encode(stored_bytes(values)).decode("ascii")


def stored_bytes(values: TokenArray | LogProbArray) -> memoryview:
    """The numbers in storage format, little-endian and contiguous; on most machines the array's own memory."""
    return np.ascontiguousarray(values, dtype=_LITTLE[values.dtype]).data


def _unpack(text: Any, name: str, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    if not isinstance(text, str):
        raise TraceError(f"packed {name} must be one string, got {type(text).__name__}")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TraceError(f"packed {name} are not valid base64: {error}") from error
    if len(raw) % 4:
        raise TraceError(f"packed {name} have {len(raw)} bytes, which is no whole number of 4-byte values")
    return np.frombuffer(raw, dtype=_LITTLE[kind]).astype(kind, copy=False)


def _frozen(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values.flags.writeable = False
    return values


def _allocate(ids: int) -> TokenArray:
    """Memory for N ids. Large arrays are mapped: malloc may return pages that are committed already."""
    if 4 * ids >= _PAGES:
        with suppress(OSError):  # the limit of mappings per process
            # private: after a fork parent and child do not share writes
            return np.frombuffer(mmap.mmap(-1, 4 * ids, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.int32)
    return np.empty(ids, np.int32)


class TokenBuffer:
    """Ids that grow at the end. Views never change, and share its memory as long as nothing is cut."""

    def __init__(self, ids: Sequence[int] | TokenArray = ()) -> None:
        self._ids: TokenArray = np.empty(256, dtype=np.int32)
        self._length = 0
        self.extend(ids)

    def __len__(self) -> int:
        return self._length

    def extend(self, ids: Sequence[int] | TokenArray) -> None:
        end = self._length + len(ids)
        if end > len(self._ids):
            grown = _allocate(max(end, _GROWTH * len(self._ids)))
            grown[: self._length] = self._ids[: self._length]
            self._ids = grown
        self._ids[self._length : end] = ids
        self._length = end

    def cut(self, length: int) -> None:
        """Drop all but the first ``length`` ids."""
        if length < self._length:
            old, self._ids = self._ids, _allocate(len(self._ids))  # views still have the dropped ids
            self._ids[:length] = old[:length]
            self._length = length

    def prompt(self, keep: int, added: TokenArray) -> PromptIds:
        """The first ``keep`` ids, then ``added``."""
        return PromptIds(_frozen(np.concatenate((self._ids[:keep], added))))

    @property
    def ids(self) -> TokenArray:
        """All ids, read-only."""
        return _frozen(self._ids[: self._length])
