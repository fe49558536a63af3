"""Sessions of the agent rollout."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh_sessions() -> Iterator[None]:
    """An agent rollout without the sessions of other tests."""
    from agl_slime.buffer import agent_rollout

    agent_rollout.sessions.clear()
    yield
    agent_rollout.sessions.clear()
