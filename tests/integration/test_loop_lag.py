"""No event loop of a run waits for a judge, a tokenizer, a report or a trainer."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.scripted_engine import ScriptedEngine
from tests.harness.loop import HelloAgent, LoopCase, hello_engine
from tests.harness.tokenizers import small_tokenizer

# What the slow parts take. A loop that one of them stands on is late by at least this; a busy machine alone makes it
# late by less.
SLOW_S = 0.5
LATE_S = 0.4
LONG_PROMPT = "say hello " * 2_000


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with hello_engine(context_length=100_000) as engine:
        with LoopCase(agent=HelloAgent(), url=engine.url) as case:
            case.loop.run()  # what is done once per process, such as a first garbage collection, is not measured
        yield engine


class SlowTokenizer:
    """A real tokenizer that takes its time over long texts."""

    def __init__(self) -> None:
        self._real = copy.deepcopy(small_tokenizer())
        self.slept = 0

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
            self.slept += 1
            time.sleep(SLOW_S)


async def lateness(stop: asyncio.Event) -> float:
    """The longest that the loop this runs on was late for a short sleep, in seconds."""
    worst = 0.0
    while not stop.is_set():
        began = time.monotonic()
        await asyncio.sleep(0.01)
        worst = max(worst, time.monotonic() - began - 0.01)
    return worst


async def lateness_of_all(case: LoopCase, measured: threading.Event | None = None) -> dict[str, float]:
    """Run the case, and measure its three event loops until the last iteration; ``measured`` is set then."""
    here = asyncio.Event()
    own = asyncio.ensure_future(lateness(here))
    elsewhere: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Event, Any]] = {}
    running = asyncio.ensure_future(case.loop.run_async())
    while case.loop._runner is None or case.loop._runner.runner._loop is None:  # noqa: ASYNC110 - it tells nobody when it has begun
        await asyncio.sleep(0.005)
    for name, loop in (("runner", case.loop._runner.runner._loop), ("data source", case.source.follower.thread.loop)):
        assert loop is not None
        stop = asyncio.Event()
        elsewhere[name] = (loop, stop, asyncio.run_coroutine_threadsafe(lateness(stop), loop))
    # the runner's loop ends with the run: measure until the last iteration begins
    while not running.done() and len(case.recorder.metrics) < case.settings.num_iterations - 1:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    found = {}
    for name, (loop, stop, measurement) in elsewhere.items():
        loop.call_soon_threadsafe(stop.set)
        found[name] = await asyncio.wait_for(asyncio.wrap_future(measurement), 5)
    if measured is not None:
        measured.set()
    await running
    here.set()
    found["loop"] = await own
    return found


def check(found: dict[str, float]) -> None:
    assert {name: late for name, late in found.items() if late > LATE_S} == {}


async def test_slow_judge_does_not_block_the_event_loops(engine: ScriptedEngine) -> None:
    def judge(task: dict[str, Any], response: str) -> float:
        time.sleep(SLOW_S)
        return 1.0

    with LoopCase(agent=HelloAgent(judge=judge), url=engine.url, num_iterations=2, rollout_batch_size=8) as case:
        began = time.monotonic()
        found = await lateness_of_all(case)
        took = time.monotonic() - began
    check(found)
    assert took < 2 * 16 * SLOW_S / 2  # judged at once, not one after the other


async def test_tokenizing_long_prompts_does_not_block_the_event_loops(engine: ScriptedEngine) -> None:
    tokenizer = SlowTokenizer()
    tasks = [{"prompt": LONG_PROMPT, "name": "long"}, {"prompt": "short", "name": "short"}]
    measured = threading.Event()

    def sync(iteration: int) -> None:
        if iteration > 1:
            measured.wait(10)  # its prompts are known, so it would be over before the measurement is

    agent = HelloAgent(tokenizer=tokenizer)
    with LoopCase(agent=agent, url=engine.url, tasks=tasks, sync=sync, num_iterations=2) as case:
        found = await lateness_of_all(case, measured)
        case.check_ledger()
    assert tokenizer.slept >= 2
    check(found)


async def test_slow_trainer_and_weight_sync_do_not_block_the_event_loops(engine: ScriptedEngine) -> None:
    measured = threading.Event()

    def slow(iteration: int) -> None:
        if iteration == 1:
            time.sleep(SLOW_S)
        else:
            measured.wait(10)

    with LoopCase(agent=HelloAgent(), url=engine.url, train=slow, sync=slow, num_iterations=2) as case:
        check(await lateness_of_all(case, measured))


async def test_the_measurement_sees_an_agent_that_blocks_its_loop(engine: ScriptedEngine) -> None:
    class Blocks(HelloAgent):
        async def score(self, task: dict[str, Any], trajectory: Any) -> float:
            time.sleep(SLOW_S)  # noqa: ASYNC251 - the mistake that users make
            return 1.0

    with LoopCase(agent=Blocks(), url=engine.url, num_iterations=2, rollout_batch_size=1) as case:
        found = await lateness_of_all(case)
    assert found["runner"] > LATE_S
    assert found["loop"] < LATE_S
    assert found["data source"] < LATE_S
