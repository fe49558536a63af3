"""Garbage collection for a process with thousands of rollouts in flight.

The collector's default is to look at everything again whenever a quarter of it is new. Imports alone leave some hundred
thousand objects, and each rollout in flight three hundred more, none of them garbage: with 4,096 in flight, full
collections took 40 % of the CPU time and stopped the event loop for up to half a second. A rollout leaves thirteen
objects that only the collector frees (closures of Agent Lightning's reward functions, a kilobyte), so it can come
rarely: with 512 in flight it takes 0.19 ms of a rollout's 1.1 ms when it comes every 10,000 objects, and 0.02 of 0.85
ms every 100,000.
"""

from __future__ import annotations

import gc
import threading

# Allocations until the young are looked at; such looks until the next older are; and those until all are.
_THRESHOLDS = (100_000, 5, 50)
_DEFAULTS = {(700, 10, 10), (2_000, 10, 0), (2_000, 10, 10)}

_lock = threading.Lock()
_tuned = False


def tune_garbage_collector() -> None:
    """Once per process: what exists now is never looked at again (it is freed by its reference counts as before), and
    collections become rarer, unless the program has set limits of its own."""
    global _tuned
    with _lock:
        if _tuned:
            return
        _tuned = True
        gc.collect()
        gc.freeze()
        if gc.get_threshold() in _DEFAULTS:
            gc.set_threshold(*_THRESHOLDS)


__all__ = ["tune_garbage_collector"]
