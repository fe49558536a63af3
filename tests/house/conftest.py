"""Fixtures of recipes."""

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest


@pytest.fixture(scope="module")
def modules(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """The agent and the data of the recipe in the test module's ``EXAMPLE``."""
    example = request.module.EXAMPLE
    sys.path.append(str(example))
    yield import_module(f"{example.name}_agent"), import_module(f"{example.name}_data")
    sys.path.remove(str(example))
