"""Two pools of threads: hung code of users takes no thread from this package's own work."""

import asyncio
import logging
import threading

import pytest

from agl_slime.errors import RolloutError
from agl_slime.loop.metrics import collect_metrics
from agl_slime.support import threads
from agl_slime.support.threads import ThreadPool, abandoned_threads, run_in_thread, run_user_code, usable_cores


@pytest.fixture(autouse=True)
def _threads_without_work_end_soon(monkeypatch):
    monkeypatch.setattr(threads, "_IDLE_S", 0.05)


@pytest.fixture
def gate():
    """An event that hung calls wait for; they end with the test."""
    event = threading.Event()
    yield event
    event.set()


async def hang(run, gate: threading.Event) -> asyncio.Task:
    """A task whose call has begun, and hangs until the gate opens."""
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hung() -> None:
        loop.call_soon_threadsafe(begun.set)
        gate.wait()

    task = asyncio.create_task(run(hung))
    await asyncio.wait_for(begun.wait(), 10)
    return task


async def abandon(task: asyncio.Task) -> None:
    task.cancel()
    await asyncio.wait({task})


async def returned(gate: threading.Event) -> None:
    """Let the hung calls of these tests go; returns when their threads have ended."""
    gate.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "test-abandoned"]:
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()


async def test_hung_rewards_do_not_stop_the_control_plane(gate):
    """64 hung calls of users' code leave threads for ``runner.stop`` and the train step."""
    rewards = [await hang(run_user_code, gate) for _ in range(64)]
    assert await asyncio.wait_for(run_in_thread(lambda: "stopped"), 10) == "stopped"
    gate.set()
    await asyncio.gather(*rewards)


async def test_abandoned_threads_are_replaced_counted_and_warned_about_once(gate, caplog, monkeypatch):
    pool = ThreadPool(name="test-abandoned", max_running=2, max_abandoned=100)
    earlier = abandoned_threads()
    with caplog.at_level(logging.WARNING, logger=threads.__name__):
        await abandon(await hang(pool.run, gate))
        assert caplog.records == []  # it has run for milliseconds
        monkeypatch.setattr(threads, "_SLOW_S", 0.0)
        for _ in range(4):
            await abandon(await hang(pool.run, gate))
    assert pool.abandoned == abandoned_threads() - earlier == 5
    assert collect_metrics([], collect_s=1.0)["rollout/abandoned_threads"] == abandoned_threads()
    assert len(caplog.records) == 1
    assert await asyncio.wait_for(pool.run(lambda: 7), 10) == 7
    await returned(gate)
    assert pool.abandoned == 0


async def test_abandoned_threads_are_bounded(gate):
    pool = ThreadPool(name="test-abandoned", max_running=2, max_abandoned=3)
    for _ in range(3):
        await abandon(await hang(pool.run, gate))
    with pytest.raises(RolloutError, match="3 earlier calls") as refused:
        await pool.run(lambda: 7)
    assert refused.value.reason == "threads_hung"
    await returned(gate)
    assert await pool.run(lambda: 7) == 7


async def test_a_waiting_call_gets_the_thread_of_an_abandoned_one(gate):
    pool = ThreadPool(name="test", max_running=1, max_abandoned=1)
    hung = await hang(pool.run, gate)
    called = []
    cancelled = asyncio.create_task(pool.run(called.append, 1))
    waiting = asyncio.create_task(pool.run(lambda: "served"))
    await asyncio.sleep(0)
    await abandon(cancelled)
    assert pool.abandoned == 0
    await abandon(hung)
    assert await asyncio.wait_for(waiting, 10) == "served"
    assert called == []


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration(1), asyncio.CancelledError()])
async def test_users_exceptions_end_their_own_call_only(error):
    """A future cannot carry StopIteration, and SystemExit would end the event loop."""

    def reward() -> float:
        raise error

    with pytest.raises(RolloutError) as failed:
        await asyncio.wait_for(run_user_code(reward), 10)
    assert failed.value.reason == type(error).__name__
    with pytest.raises(RuntimeError, match="next raised StopIteration"):
        await asyncio.wait_for(run_in_thread(next, iter(())), 10)


def test_no_more_cores_than_omp_num_threads_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    all_cores = usable_cores()
    assert all_cores >= 1
    for limit, cores in (("1", 1), ("4096", all_cores), ("", all_cores), ("0", all_cores), ("two", all_cores)):
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
        assert usable_cores() == cores
