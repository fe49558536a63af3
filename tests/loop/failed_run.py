"""A run that ends with an error."""

from typing import Any

import pytest

from agl_slime.errors import LoopError
from tests.harness.loop import HelloAgent, LoopCase, threads_of_ours
from tests.harness.scripted_engine import ScriptedEngine


def failed_run(
    engine: ScriptedEngine, match: str | None = None, *, error: type[Exception] = LoopError, **settings: Any
) -> tuple[LoopCase, str]:
    """The case and the error's text. Whatever ended the run: its observer has the reason, each rollout has one outcome,
    and no thread is left."""
    with LoopCase(**{"agent": HelloAgent(), "url": engine.url, **settings}) as case:
        with pytest.raises(error, match=match) as caught:
            case.loop.run()
        counts = case.source.ledger.counts()
    assert counts.open == 0
    assert counts.opened == sum(counts.closed.values()) + counts.ready
    assert case.recorder.end.reason == str(caught.value)
    assert threads_of_ours() == []
    return case, str(caught.value)
