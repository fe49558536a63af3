"""Memory that was freed goes back to the machine."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from agl_slime.support.memory import return_freed_memory

MB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_freed_pieces_below_one_in_use_are_returned_to_the_system() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    pieces = [libc.malloc(100_000) for _ in range(3_000)]  # larger pieces have separate mappings
    for piece in pieces:
        ctypes.memset(piece, 1, 100_000)
    full = resident()
    for piece in pieces[:-1]:
        libc.free(piece)
    freed = resident()
    return_freed_memory()
    assert full - freed < 100 * MB  # or nothing was left to return
    assert freed - resident() > 200 * MB
    libc.free(pieces[-1])
