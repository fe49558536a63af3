import asyncio
import random
import time

import pytest

from agl_slime.errors import DataSourceError
from agl_slime.support.backoff import Backoff
from agl_slime.support.batching import Batcher


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


@pytest.mark.parametrize("parallel", [1, 2])
async def test_an_entry_that_comes_as_all_calls_end_is_handled(parallel: int) -> None:
    """All calls are answered in one iteration of the loop: the next entry must start a sender, although the senders of
    the answered calls have not been removed yet."""
    answered, sent = asyncio.Event(), []

    async def handle(entries: list[int]) -> list[int]:
        sent.append(entries)
        await answered.wait()
        return entries

    batcher = Batcher(handle, most=256, parallel=parallel)

    async def twice(n: int) -> list[int]:
        return [await batcher.add(n), await batcher.add(n + 10)]

    callers: list[asyncio.Task[list[int]]] = []
    for n in range(parallel):
        callers.append(asyncio.create_task(twice(n)))
        while len(sent) <= n:  # noqa: ASYNC110  until its call has begun
            await asyncio.sleep(0)
    answered.set()
    assert await asyncio.wait_for(asyncio.gather(*callers), 10) == [[n, n + 10] for n in range(parallel)]


async def test_cancelled_call_fails_its_waiting_callers() -> None:
    begun = asyncio.Event()

    async def handle(entries: list[int]) -> list[int]:
        begun.set()
        await asyncio.Event().wait()
        return []

    batcher = Batcher(handle, most=256)
    caller = asyncio.create_task(batcher.add(0))
    await asyncio.wait_for(begun.wait(), 10)
    await batcher.close(cancel=True)
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(caller, 10)


async def test_calls_keep_their_interval_and_the_first_after_a_pause_has_none() -> None:
    loop, calls = asyncio.get_running_loop(), []

    async def handle(entries: list[int]) -> list[int]:
        calls.append((loop.time(), entries))
        return entries

    unhurried = Batcher(handle, most=2, parallel=2, between_s=600.0)
    await asyncio.wait_for(unhurried.add(0), 60)
    calls.clear()
    batcher = Batcher(handle, most=2, parallel=2, between_s=0.1)
    began = loop.time()
    await batcher.add(0)
    await asyncio.gather(*(batcher.add(n) for n in (1, 2, 3)))
    assert [entries for _, entries in calls] == [[0], [1, 2], [3]]
    starts = [time - began for time, _ in calls]
    assert starts[1] >= 0.1
    assert starts[2] - starts[1] >= 0.1
