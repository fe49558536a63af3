"""First prompts of recent conversations: the members of a group begin with the same messages, which are rendered and tokenized once."""

from __future__ import annotations

import marshal
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# Members of a group are claimed one after the other, so a few prompts are enough; these hold at most some 40 MB, usually a few.
_PROMPTS = 128
_LONGEST_BYTES = 64_000


class FirstPrompts(Generic[T]):
    """The last 128 results, by messages. Thread-safe; of two threads that ask at the same moment both may compute. Very long prompts are not kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, T] = OrderedDict()

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
            self._held[key] = made
            if len(self._held) > _PROMPTS:
                self._held.popitem(last=False)
        return made


def _key(messages: Sequence[Any]) -> bytes | None:
    """Messages are equal when their types, their order and their values are: a template may tell ``1`` from ``True``, a list from a tuple. ``None``
    when there is a value that is not Python's own, whose text nobody can know."""
    try:
        # format 2 writes equal values as equal bytes; later ones note which objects are the same object
        key = marshal.dumps(list(messages), 2)
    except ValueError:
        return None
    return key if len(key) <= _LONGEST_BYTES else None
