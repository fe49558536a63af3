"""Return freed memory to the system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def _malloc_trim() -> Any:
    """glibc's ``malloc_trim``; ``None`` with another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None


def return_freed_memory() -> None:
    """Return freed memory that the C library caches: gigabytes after a training step on long prompts, which it would
    keep as long as the process lives."""
    if (trim := _malloc_trim()) is not None:
        trim(0)
