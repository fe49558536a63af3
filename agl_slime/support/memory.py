"""What a process holds of the machine's memory."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def _malloc_trim() -> Any:
    """glibc's; ``None`` where the C library is another."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None


def return_freed_memory() -> None:
    """Give back to the system what was freed and the C library keeps for later: of a step on long prompts gigabytes,
    for as long as the process lives."""
    if (trim := _malloc_trim()) is not None:
        trim(0)
