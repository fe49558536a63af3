"""``BridgeCollections``: Agent Lightning's in-memory collections under one lock, with look-ups by key.

Stock code takes up to three asynchronous locks per store call through an exit stack, a fifth of a rollout's CPU time
(docs/scale.md). The code under them never suspends (the collections are plain dicts), so one re-entrant thread lock,
taken for microseconds, does the same. Reads take it as well: a write would break a scan in another thread.

These are semi-private parts of Agent Lightning 0.3; ``tests/store/test_hooks.py`` pins them.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from types import MethodType
from typing import Any, TypeVar

from agl_slime.support.agl import (
    Attempt,
    InMemoryLightningCollections,
    InMemoryLightningStore,
    ListBasedCollection,
    Rollout,
    Span,
)

V = TypeVar("V")

_MEASURING = {InMemoryLightningStore.query_spans.__code__, ListBasedCollection.get.__code__}


def do_not_measure(part: Any) -> None:
    """Bypass the decorator that measures each call of a store or collection, for metrics that are never collected."""
    methods: list[tuple[str, Any]] = inspect.getmembers(type(part), inspect.isfunction)
    for name, method in methods:
        if method.__code__ in _MEASURING:
            setattr(part, name, MethodType(method.__wrapped__, part))


_field_sets: dict[type[Any], set[str]] = {}


def share_field_sets(span: Span) -> None:
    """Share one ``model_fields_set`` among spans: pydantic's sets are equal for nearly all spans, and a third of a
    span's memory without attributes."""
    for part in (span, span.context, span.status, span.resource):
        if part is not None:
            shared = _field_sets.setdefault(type(part), part.model_fields_set)
            if shared == part.model_fields_set:
                object.__setattr__(part, "__pydantic_fields_set__", shared)  # as ``model_construct`` does


class BridgeCollections(InMemoryLightningCollections):
    """See the module's docstring. ``lock`` guards everything; take it briefly, and never across an ``await``."""

    def __init__(self) -> None:
        super().__init__(lock_type="thread")
        self.lock = threading.RLock()
        records = (self._rollouts, self._attempts, self._spans, self._resources, self._workers)
        for part in (*records, self._rollout_queue, self._span_sequence_ids):
            do_not_measure(part)

    def atomic(self, **kwargs: Any) -> Any:
        return self

    async def __aenter__(self) -> BridgeCollections:
        self.lock.acquire()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.lock.release()

    async def execute(self, callback: Callable[[Any], Awaitable[V]], **kwargs: Any) -> V:
        with self.lock:
            return await callback(self)

    # -- records; callers take the lock -------------------------------------------------------------------------------

    def rollout(self, rollout_id: str) -> Rollout | None:
        return self._rollouts._items.get(rollout_id)

    def put_rollout(self, rollout: Rollout) -> None:
        self._rollouts._items[rollout.rollout_id] = rollout

    def waiting(self) -> Iterator[Rollout]:
        """The unclaimed rollouts, in the order of the queue; stale entries at its front are removed."""
        queue, front = self._rollout_queue._items, True
        for rollout_id in queue.copy():
            rollout = self.rollout(rollout_id)
            if rollout is not None and rollout.status in ("queuing", "requeuing"):
                front = False
                yield rollout
            elif front:
                queue.popleft()

    def unqueue(self, rollout_id: str) -> None:
        """Remove a rollout from the queue, if present; fast near the front."""
        with suppress(ValueError):
            self._rollout_queue._items.remove(rollout_id)

    def remove_rollout(self, rollout_id: str) -> None:
        """Forget a rollout, its attempts and its spans."""
        self._rollouts._size -= self._rollouts._items.pop(rollout_id, None) is not None
        self._attempts._size -= len(self._attempts._items.pop(rollout_id, ()))
        self._spans._size -= sum(map(len, self._spans._items.pop(rollout_id, {}).values()))
        self._span_sequence_ids._values.pop(rollout_id, None)

    def attempts_of(self, rollout_id: str) -> dict[str, Attempt]:
        """The attempts of a rollout by id, oldest first."""
        return self._attempts._items.get(rollout_id, {})

    def latest_attempt(self, rollout_id: str) -> Attempt | None:
        return next(reversed(self.attempts_of(rollout_id).values()), None)

    def trim_resources(self, keep: int) -> None:
        """Forget all but the newest ``keep`` resources snapshots."""
        items = self._resources._items
        while len(items) > keep:
            del items[next(iter(items))]
            self._resources._size -= 1
