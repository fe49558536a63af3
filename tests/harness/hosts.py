"""Hosts in network namespaces for tests with the marker ``hosts``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.namespaces import Network, why_no_namespaces


@pytest.fixture
def network() -> Iterator[Network]:
    """An empty network; the test adds its hosts."""
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with Network() as network:
        yield network
