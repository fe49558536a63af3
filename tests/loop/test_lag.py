"""No event loop of a run waits for a judge, a tokenizer, a report or a trainer."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.harness.loop import HelloAgent, LoopCase, hello_engine
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer
from tests.harness.waiting import until

LOOPS = {"loop", "runner", "data source"}
BEATS = 3
PATIENCE_S = 30.0  # for what takes hundredths of a second
LONG_PROMPT = "say hello " * 2_000


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with hello_engine(context_length=100_000) as engine:
        yield engine


class Pulse:
    """Beats of a run's three event loops; what is slow lasts until each of them has gone on."""

    def __init__(self) -> None:
        self.held: list[set[str]] = []
        """Of each call of ``hold``: the loops that stood still all the while."""
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

    def hold(self, *, patience_s: float = PATIENCE_S) -> float:
        """Hold the calling thread until each loop has beaten some times more."""
        with self._changed:
            # a measurement that has yet to begin is waited for, and a loop that has ended has nothing to be late for
            self._changed.wait_for(lambda: self._beats.keys() | self._ended >= LOOPS, patience_s)
            before = self._beats.copy()

            def still() -> set[str]:
                return {name for name in LOOPS - self._ended if self._beats[name] - before[name] < BEATS}

            self._changed.wait_for(lambda: not still(), patience_s)
            self.held.append(still())
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
    while case.loop._runner is None or case.loop._runner.runner._loop is None:  # noqa: ASYNC110 - it tells nobody when it has begun
        await asyncio.sleep(0.005)
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


async def test_slow_judge_does_not_block_the_event_loops(engine: ScriptedEngine) -> None:
    pulse, together = Pulse(), threading.Barrier(4)

    def judge(task: dict[str, Any], response: str) -> float:
        together.wait(PATIENCE_S)  # judged at once, not one after the other
        return pulse.hold()

    with LoopCase(agent=HelloAgent(judge=judge), url=engine.url, num_iterations=2, rollout_batch_size=8) as case:
        await run_with(pulse, case)
        case.check_ledger()
    assert pulse.held == [set()] * 32


async def test_tokenizing_long_prompts_does_not_block_the_event_loops(engine: ScriptedEngine) -> None:
    pulse = Pulse()
    tasks = [{"prompt": LONG_PROMPT, "name": "long"}, {"prompt": "short", "name": "short"}]
    agent = HelloAgent(tokenizer=SlowTokenizer(pulse.hold))
    with LoopCase(agent=agent, url=engine.url, tasks=tasks, num_iterations=2) as case:
        await run_with(pulse, case)
        case.check_ledger()
    assert len(pulse.held) >= 2
    assert not any(pulse.held)


async def test_slow_trainer_and_weight_sync_do_not_block_the_event_loops(engine: ScriptedEngine) -> None:
    pulse = Pulse()

    def slow(iteration: int) -> None:
        pulse.hold()

    with LoopCase(agent=HelloAgent(), url=engine.url, train=slow, sync=slow, num_iterations=2) as case:
        await run_with(pulse, case)
    assert pulse.held == [set()] * 4


async def test_the_measurement_sees_an_agent_that_blocks_its_loop(engine: ScriptedEngine) -> None:
    pulse = Pulse()

    class Blocks(HelloAgent):
        async def score(self, task: dict[str, Any], trajectory: Any) -> float:
            return pulse.hold(patience_s=1.0)  # the mistake that users make

    with LoopCase(agent=Blocks(), url=engine.url, rollout_batch_size=1, n_samples_per_prompt=1) as case:
        await run_with(pulse, case)
    assert pulse.held == [{"runner"}]
