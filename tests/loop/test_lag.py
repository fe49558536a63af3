"""No event loop of a run waits for a judge, a trainer or a weight sync."""

import asyncio
import threading
from collections import Counter
from typing import Any

from agl_slime.data import read
from tests.harness.loop import HelloAgent, LoopCase
from tests.harness.waiting import until

LOOPS = {"loop", "runner", "data source"}
BEATS = 3
PATIENCE_S = 30.0  # for hundredths of a second


class Pulse:
    """Beats of a run's three event loops; slow code lasts until each of them has beaten on."""

    def __init__(self) -> None:
        self.stalled: list[set[str]] = []
        """For each call of ``hold``, the loops that did not beat."""
        self._beats, self._ended = Counter[str](), set[str]()
        self._changed = threading.Condition()

    async def beat(self, name: str, stop: asyncio.Event) -> None:
        try:
            while not stop.is_set():
                with self._changed:
                    self._beats[name] += 1
                    self._changed.notify_all()
                await asyncio.sleep(0.001)
        finally:
            with self._changed:
                self._ended.add(name)
                self._changed.notify_all()

    def hold(self) -> float:
        """Block the calling thread until each loop has beaten some times."""
        with self._changed:
            # a measurement that has yet to begin is waited for, and a loop that has ended has nothing to be late for
            self._changed.wait_for(lambda: self._beats.keys() | self._ended >= LOOPS, PATIENCE_S)
            start = self._beats.copy()

            def still() -> set[str]:
                return {name for name in LOOPS - self._ended if self._beats[name] - start[name] < BEATS}

            self._changed.wait_for(lambda: not still(), PATIENCE_S)
            self.stalled.append(still())
        return 1.0


async def run_with(pulse: Pulse, case: LoopCase) -> None:
    """Run the case while its three event loops beat."""
    stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    running = asyncio.ensure_future(case.loop.run_async())
    await until(lambda: case.loop._runner is not None and case.loop._runner.runner._loop is not None)
    await until(lambda: case.source.follower.thread.loop is not None)
    assert case.loop._runner is not None
    loops = (asyncio.get_running_loop(), case.loop._runner.runner._loop, case.source.follower.thread.loop)
    for name, loop in zip(("loop", "runner", "data source"), loops, strict=True):
        assert loop is not None
        stops.append((loop, asyncio.Event()))
        asyncio.run_coroutine_threadsafe(pulse.beat(name, stops[-1][1]), loop)
    await running
    for loop, stop in stops:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
    await until(lambda: pulse._ended == LOOPS)
    case.check_ledger()


async def test_slow_judge_trainer_and_sync_do_not_block_the_event_loops(engine, monkeypatch):
    """Nor does the conversion of a large trace."""
    pulse, together, convert = Pulse(), threading.Barrier(4), read.convert_rollout
    monkeypatch.setattr(read, "_HEAVY_TRACE_CHARS", 0)
    monkeypatch.setattr(read, "convert_rollout", lambda *of, **more: pulse.hold() and convert(*of, **more))

    def judge(task: dict[str, Any], response: str) -> float:
        together.wait(PATIENCE_S)  # concurrently, not in sequence
        return pulse.hold()

    def train(iteration: int) -> None:
        case.trainer(iteration)
        pulse.hold()

    def sync(iteration: int) -> None:
        pulse.hold()

    with LoopCase(
        agent=HelloAgent(judge=judge), url=engine.url, train=train, sync=sync, num_iterations=2, rollout_batch_size=8
    ) as case:
        await run_with(pulse, case)
    assert pulse.stalled == [set()] * (2 * 32 + 2 * 2)
