"""The engine that the tests of a module share; a test that scripts it starts its own (``hello_engine``)."""

from collections.abc import Iterator

import pytest

from tests.harness.loop import hello_engine
from tests.harness.scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with hello_engine(context_length=100_000) as engine:
        yield engine
