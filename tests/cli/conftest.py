"""Fixtures of tests that call the command line in their own process."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def logging_unchanged() -> Iterator[None]:
    """The command line sets logging up for a process of its own; this fixture restores it."""
    loggers = [logging.getLogger(name) for name in (None, "agl_slime", "agentlightning", "httpx", "LiteLLM", "asyncio")]
    state = [(logger.handlers[:], logger.level) for logger in loggers]
    yield
    for logger, (handlers, level) in zip(loggers, state, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)
