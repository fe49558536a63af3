"""Agent Lightning's in-memory store, as the bridge needs it: told when a rollout ends, safe across threads, cheap per span.

Stock behaviour that this avoids: completion must be polled for, and the size of every span is estimated by walking it (milliseconds for a long list
of ids).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from agl_slime._agl import InMemoryLightningStore, Rollout, Span

logger = logging.getLogger(__name__)

RolloutListener = Callable[[Rollout], None]

_FINISHED = frozenset({"succeeded", "failed", "cancelled"})
# A span's fields besides its attributes: ids, names, contexts, pydantic's own overhead. Measured once; exactness does not matter for an eviction
# threshold.
_SPAN_OVERHEAD_BYTES = 2_000


def estimate_span_bytes(span: Span) -> int:
    """Size of a span from its attributes' lengths alone, without walking them."""
    return _SPAN_OVERHEAD_BYTES + sum(len(key) + _attribute_bytes(value) for key, value in span.attributes.items())


def _attribute_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, (list, tuple)):
        return 32 * len(value)  # a boxed number and its place in the list
    return 32


class BridgeStore(InMemoryLightningStore):
    """An in-memory store that tells its listeners about each rollout that has ended, whoever ended it: a runner, the watchdog, a person.

    Listeners are called on the event loop that wrote the end; they must be quick and thread-safe.
    """

    def __init__(self, *, scan_debounce_seconds: float = 1.0, **kwargs: Any) -> None:
        super().__init__(thread_safe=True, span_size_estimator=estimate_span_bytes, scan_debounce_seconds=scan_debounce_seconds, **kwargs)
        self._finished_listeners: list[RolloutListener] = []

    def subscribe_finished(self, listener: RolloutListener) -> Callable[[], None]:
        """Call ``listener(rollout)`` for each rollout that ends from now on; the returned function ends the subscription."""
        self._finished_listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._finished_listeners:
                self._finished_listeners.remove(listener)

        return unsubscribe

    async def _post_update_rollout(self, rollouts: Sequence[tuple[Rollout, Sequence[str]]], skip_enqueue: bool = False) -> None:
        await super()._post_update_rollout(rollouts, skip_enqueue=skip_enqueue)
        for rollout, updated in rollouts:
            if "status" in updated and rollout.status in _FINISHED:
                for listener in list(self._finished_listeners):
                    listener(rollout)
