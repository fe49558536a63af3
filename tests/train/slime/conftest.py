from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from agl_slime.store.bridge import BridgeStore


@pytest.fixture
def served() -> Iterator[tuple[BridgeStore, str]]:
    """A store, and its URL."""
    from agl_slime.store.bridge import BridgeStore
    from agl_slime.store.server import StoreService

    store = BridgeStore()
    with StoreService(store=store) as service:
        yield store, service.url


@pytest.fixture
def stopped_rollouts() -> Iterator[None]:
    """Threads that ``generate`` starts live as long as their process, which runs other tests here."""
    yield
    from agl_slime.train.slime.generate import stop_rollouts

    stop_rollouts()
    threads = {thread.name for thread in threading.enumerate()}
    assert not threads & {"agl-slime-datasource", "agl-slime-runner"}
