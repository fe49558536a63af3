import asyncio

import pytest

from agl_slime.support.batching import Batcher


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
