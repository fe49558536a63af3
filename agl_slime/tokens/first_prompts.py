"""First prompts of recent conversations: the members of a group begin with the same messages, which are rendered and
tokenized once."""

from __future__ import annotations

import marshal
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# Members of a group are claimed one after the other, so a few prompts are enough. With Qwen's vocabulary, 2 MB of
# messages hold 20 MB of results.
_PROMPTS = 128
_HELD_BYTES = 2_000_000


class FirstPrompts(Generic[T]):
    """The last 128 results, by messages, or as many as belong to 2 MB of messages. Thread-safe; of two threads that ask
    at the same moment both may compute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, T] = OrderedDict()
        self._bytes = 0

    def get(self, messages: Sequence[Any], make: Callable[[], T]) -> T:
        """What ``make()`` gave for these messages before, or gives now."""
        key = _key(messages)
        if key is None:
            return make()
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
                return held
        made = make()
        with self._lock:
            if key not in self._held:
                self._bytes += len(key)
            self._held[key] = made
            while len(self._held) > _PROMPTS or self._bytes > _HELD_BYTES:
                oldest, _ = self._held.popitem(last=False)
                self._bytes -= len(oldest)
        return made


def _key(messages: Sequence[Any]) -> bytes | None:
    """Messages are equal when their types, their order and their values are: a template may tell ``1`` from ``True``, a
    list from a tuple. ``None`` when there is a value that is not Python's own, whose text nobody can know."""
    try:
        # format 2 writes equal values as equal bytes; later ones note which objects are the same object
        return marshal.dumps(list(messages), 2)
    except ValueError:
        return None
