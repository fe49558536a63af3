import random
import time

import pytest

from agl_slime.errors import DataSourceError
from agl_slime.support.backoff import Backoff


def test_pauses_are_full_jitter_below_a_doubling_bound():
    random.seed(0)
    backoff = Backoff(base_s=1.0, cap_s=4.0)
    bounds = [1.0, 2.0, *[4.0] * 2000]  # finite after any number of failures
    pauses = [backoff.failed(OSError()) for _ in bounds]
    assert all(0.0 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))  # type: ignore[operator]
    assert len(set(pauses)) == len(pauses)
    pause = Backoff(base_s=1.0, cap_s=1.0).failed(OSError(), at_least_s=7.0)
    assert pause is not None
    assert 7.0 < pause <= 8.0  # a requested wait is spread as well


def test_tries_include_the_first_and_the_first_cause_is_raised():
    backoff = Backoff("the store did not answer", DataSourceError, base_s=0.0, tries=3)
    first, last = ConnectionResetError("peer"), TimeoutError("late")
    assert backoff.failed(first) is not None
    assert backoff.failed(OSError()) is not None
    assert backoff.failed(last) is None
    error = backoff.given_up(last)
    assert isinstance(error, DataSourceError)
    assert error.__cause__ is first
    for part in ("the store did not answer", "3 tries", "ConnectionResetError: peer", "TimeoutError: late"):
        assert part in str(error)


def test_patience_counts_from_the_first_failure_and_reset_restarts_it(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backoff = Backoff(base_s=0.0, patience_s=10.0)
    pauses = []
    for now in (100.0, 109.0, 111.0):  # noqa: B007
        pauses.append(backoff.failed(OSError()))
    assert [pause is None for pause in pauses] == [False, False, True]
    backoff.reset()
    assert backoff.failed(OSError()) is not None
    assert backoff.failures == 1


def test_no_pause_goes_past_the_deadline(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    assert Backoff(base_s=0.0, deadline=105.0).failed(OSError(), at_least_s=4.0) is not None
    assert Backoff(base_s=0.0, deadline=105.0).failed(OSError(), at_least_s=5.0) is None


async def test_run_retries_matching_errors_only():
    outcomes: list[Exception | str] = [ConnectionError("one"), ConnectionError("two"), "answer", ValueError("three")]

    async def call() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    backoff = Backoff(base_s=0.0, tries=3)
    assert await backoff.run(call, lambda error: isinstance(error, ConnectionError)) == "answer"
    with pytest.raises(ValueError, match="three"):
        await backoff.run(call, lambda error: isinstance(error, ConnectionError))
