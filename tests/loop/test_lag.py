"""No event loop of a run waits for a judge, a tokenizer, a trainer or a weight sync."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.harness.loop import HelloAgent, LoopCase
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer
from tests.harness.waiting import until

LOOPS = {"loop", "runner", "data source"}
BEATS = 3
PATIENCE_S = 30.0  # for hundredths of a second
LONG_PROMPT = "say hello " * 2_000


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


class SlowTokenizer:
    """A real tokenizer that takes its time over long texts."""

    def __init__(self, hold: Callable[[], object]) -> None:
        self._real = copy.deepcopy(small_tokenizer())
        self._hold = hold

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __len__(self) -> int:
        return len(self._real)

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self._take_time(text)
        return self._real(text, *args, **kwargs)

    def encode(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self._take_time(text)
        return self._real.encode(text, *args, **kwargs)

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("tokenize", True):
            self._take_time(str(conversation))
        return self._real.apply_chat_template(conversation, *args, **kwargs)

    def _take_time(self, text: Any) -> None:
        if len(text) >= len(LONG_PROMPT):
            self._hold()


async def run_with(pulse: Pulse, case: LoopCase) -> None:
    """Run the case while its three event loops beat."""
    stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    running = asyncio.ensure_future(case.loop.run_async())
    await until(lambda: case.loop._runner is not None and case.loop._runner.runner._loop is not None)
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


async def test_slow_judge_trainer_and_sync_do_not_block_the_event_loops(engine: ScriptedEngine) -> None:
    pulse, together = Pulse(), threading.Barrier(4)

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
    assert pulse.stalled == [set()] * (32 + 2 * 2)


async def test_tokenizing_long_prompts_does_not_block_the_event_loops(engine: ScriptedEngine) -> None:
    pulse = Pulse()
    tasks = [{"prompt": LONG_PROMPT, "name": "long"}, {"prompt": "short", "name": "short"}]
    agent = HelloAgent(tokenizer=SlowTokenizer(pulse.hold))
    with LoopCase(agent=agent, url=engine.url, tasks=tasks, num_iterations=2) as case:
        await run_with(pulse, case)
    assert len(pulse.stalled) >= 2
    assert not any(pulse.stalled)
