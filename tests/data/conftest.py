from collections.abc import Iterator

import pytest

from tests.data.sources import Running


@pytest.fixture
def running() -> Iterator[Running]:
    with Running() as running:
        yield running
