from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from agl_slime.store.bridge import BridgeStore
from agl_slime.store.server import StoreService
from agl_slime.train.slime.generate import stop_rollouts


@pytest.fixture
def served() -> Iterator[tuple[BridgeStore, str]]:
    """A store, and its URL."""
    store = BridgeStore()
    with StoreService(store=store) as service:
        yield store, service.url


@pytest.fixture
def stopped_rollouts() -> Iterator[None]:
    """Threads that ``generate`` starts live as long as their process, which runs other tests here."""
    yield
    stop_rollouts()
    threads = {thread.name for thread in threading.enumerate()}
    assert not threads & {"agl-slime-datasource", "agl-slime-runner"}
