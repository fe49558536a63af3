"""Spans find their rollout from wherever the agent's code runs: tasks, threads, executors, third-party
instrumentation."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from aiohttp import web
from opentelemetry import trace as otel

from agl_slime.runner.process import carry_recordings
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.recording import Recording, current_recording
from agl_slime.support.agl import emit_reward, find_final_reward
from agl_slime.support.http import listening
from tests.runner.function_agents import FnAgent, finished, running, spans_of

ROLLOUTS = 30


@pytest.fixture(autouse=True)
def carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings are carried into threads, as in the command line's process and in workers."""
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", ThreadPoolExecutor.submit)
    carry_recordings()


def span(name: str) -> None:
    otel.get_tracer("third-party").start_span(name).end()


async def names_by_task(store: BridgeStore, rollouts: list[Any]) -> dict[Any, list[str]]:
    return {rollout.input: sorted(span.name for span in await spans_of(store, rollout)) for rollout in rollouts}


async def test_spans_of_a_thread_that_a_thread_starts_land_on_their_rollout() -> None:
    def outer(task: int) -> None:
        thread = threading.Thread(target=span, args=(f"span-{task}",))
        thread.start()
        thread.join()

    async with running(FnAgent(lambda task: asyncio.to_thread(outer, task))) as store:
        rollouts = await finished(store, range(ROLLOUTS))
        assert await names_by_task(store, rollouts) == {task: [f"span-{task}"] for task in range(ROLLOUTS)}


async def test_an_executor_that_all_rollouts_share_gives_each_its_own_spans() -> None:
    with ThreadPoolExecutor(max_workers=3) as executor:

        async def work(task: int) -> None:
            loop = asyncio.get_running_loop()
            await asyncio.gather(*(loop.run_in_executor(executor, span, f"span-{task}") for _ in range(3)))

        async with running(FnAgent(work)) as store:
            rollouts = await finished(store, range(ROLLOUTS))
            assert await names_by_task(store, rollouts) == {task: [f"span-{task}"] * 3 for task in range(ROLLOUTS)}
            recording = await asyncio.get_running_loop().run_in_executor(executor, current_recording.get)
            assert recording is None  # an outside call has no rollout, though rollouts started the executor's threads


async def test_a_parent_that_is_handed_on_explicitly_decides() -> None:
    """A library thread that works for all rollouts gets the caller's span, not its context."""
    with ThreadPoolExecutor(max_workers=1) as executor:
        executor.submit(int).result()  # its thread belongs to no rollout

        async def work(task: int) -> None:
            tracer = otel.get_tracer("third-party")
            with tracer.start_as_current_span(f"parent-{task}") as parent:
                context = otel.set_span_in_context(parent)
                token = current_recording.set(None)  # as in an older thread
                try:
                    await asyncio.wrap_future(
                        executor.submit(lambda: tracer.start_span(f"child-{task}", context=context).end())
                    )
                finally:
                    current_recording.reset(token)

        async with running(FnAgent(work)) as store:
            rollouts = await finished(store, range(ROLLOUTS))
            assert await names_by_task(store, rollouts) == {
                task: [f"child-{task}", f"parent-{task}"] for task in range(ROLLOUTS)
            }


def test_runner_in_a_users_process_does_not_patch_its_threads() -> None:
    """Importing, making and running a runner replaces nothing; only the command line and workers do."""
    program = """
import gc, threading
from concurrent.futures import ThreadPoolExecutor
original = threading.Thread.start, ThreadPoolExecutor.submit, gc.get_threshold()
frozen = gc.get_freeze_count()  # not 0 on every Python
from agl_slime.runner.process import configure_worker_process
from agl_slime.runner.thread import RunnerThread
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LitAgent
class Agent(LitAgent):
    async def rollout_async(self, task, resources, rollout): return 1.0
with RunnerThread(agent=Agent(), store=BridgeStore()):
    now = threading.Thread.start, ThreadPoolExecutor.submit, gc.get_threshold()
    print(now == original, gc.get_freeze_count() - frozen)
configure_worker_process()
with RunnerThread(agent=Agent(), store=BridgeStore()):
    configure_worker_process()
    start, submit, _ = original
    print(threading.Thread.start is start, ThreadPoolExecutor.submit is submit, gc.get_freeze_count() > frozen)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == ["True 0", "False False True"]


def test_a_subclass_of_thread_that_overrides_run_gets_the_recording_too() -> None:
    recordings: list[Recording | None] = []

    class Worker(threading.Thread):
        def run(self) -> None:
            recordings.append(current_recording.get())

    recording = Recording("ro", "at")
    token = current_recording.set(recording)
    try:
        thread = Worker()
        thread.start()
        thread.join()
    finally:
        current_recording.reset(token)
    assert recordings == [recording]
    assert "run" not in vars(thread)


async def echo(request: web.Request) -> web.Response:
    """A chat completion with the text of the last message."""
    messages = (await request.json())["messages"]
    message = {"role": "assistant", "content": messages[-1]["content"]}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    answer = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": choices, "usage": usage}
    return web.json_response(answer)


@pytest.fixture(scope="module")
def instrumented_openai() -> Iterator[Any]:
    instrumentation = pytest.importorskip("opentelemetry.instrumentation.openai", reason="needs the extra [peers]")
    openai = pytest.importorskip("openai")
    instrumentor = instrumentation.OpenAIInstrumentor()
    instrumentor.instrument()
    yield openai
    instrumentor.uninstrument()


async def test_an_instrumented_openai_client_inside_the_agent(instrumented_openai: Any) -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", echo)
    async with listening(app, host="127.0.0.1", port=0, backlog=64) as url:
        client = instrumented_openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")

        async def work(task: int) -> None:
            message = {"role": "user", "content": f"question-{task}"}
            await client.chat.completions.create(model="m", messages=[message])
            emit_reward(float(task))

        async with running(FnAgent(work)) as store:
            for task, rollout in enumerate(await finished(store, range(24))):
                assert rollout.status == "succeeded"
                spans = await spans_of(store, rollout)
                assert find_final_reward(spans) == task
                [call] = [span for span in spans if span.name.startswith("openai.chat")]
                assert f"question-{task}" in json.dumps(dict(call.attributes))


async def test_late_span_is_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    left_open: list[Any] = []

    async def work(task: int) -> None:
        left_open.extend([otel.get_tracer("third-party").start_span("late"), current_recording.get()])

    async with running(FnAgent(work)) as store:
        [rollout] = await finished(store, [0])
        left_open[0].end()
        assert await spans_of(store, rollout) == []
    assert "'late' ended after its rollout" in caplog.text


async def test_two_runners_in_one_process_share_the_tracing() -> None:
    both = threading.Event()
    together = 0

    async def work(task: int) -> None:
        nonlocal together
        together += 1
        if together == 2:
            both.set()
        assert await asyncio.to_thread(both.wait, 10)  # the first rollout waits for the other runner's
        span(f"span-{task}")
        together -= 1

    async with (
        running(FnAgent(work), name="one", max_concurrent=1) as store,
        running(FnAgent(work), store, name="two", max_concurrent=1),
    ):
        rollouts = await finished(store, range(ROLLOUTS))
        assert await names_by_task(store, rollouts) == {task: [f"span-{task}"] for task in range(ROLLOUTS)}
        attempts = [await store.get_latest_attempt(rollout.rollout_id) for rollout in rollouts]
        assert {attempt.worker_id for attempt in attempts if attempt is not None} == {"one", "two"}
