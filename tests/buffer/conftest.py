"""What tests of the agent rollout share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh_sessions() -> Iterator[None]:
    """An agent rollout that remembers nothing of other tests."""
    from agl_slime.buffer import agent_rollout

    agent_rollout.sessions.clear()
    yield
    agent_rollout.sessions.clear()
