"""Spans find their rollout from wherever the agent's code runs: tasks, threads, executors, third-party
instrumentation."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from opentelemetry import trace as otel

from agl_slime.runner.concurrent import RunnerSettings
from agl_slime.runner.process import carry_recordings
from agl_slime.runner.thread import RunnerThread
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.recording import Recording, current_recording
from agl_slime.support.agl import LitAgent, emit_reward, find_final_reward
from tests.runner.function_agents import RESOURCES, FnAgent, finished, running

ROLLOUTS = 60


@pytest.fixture(autouse=True)
def carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings are carried into threads, as in the command line's process and in workers."""
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", ThreadPoolExecutor.submit)
    carry_recordings()


def span(name: str) -> None:
    otel.get_tracer("third-party").start_span(name).end()


async def names_by_task(store: BridgeStore, rollouts: list[Any]) -> dict[Any, list[str]]:
    return {
        rollout.input: sorted(found.name for found in await store.query_spans(rollout.rollout_id, "latest"))
        for rollout in rollouts
    }


async def in_default_executor(task: int) -> None:
    await asyncio.get_running_loop().run_in_executor(None, span, f"span-{task}")


async def in_a_thread_of_its_own(task: int) -> None:
    thread = threading.Thread(target=span, args=(f"span-{task}",))
    thread.start()
    await asyncio.to_thread(thread.join)


async def in_a_nested_task(task: int) -> None:
    async def nested() -> None:
        await asyncio.sleep(0.001)
        span(f"span-{task}")

    await asyncio.create_task(nested())


async def in_a_thread_that_a_thread_starts(task: int) -> None:
    def outer() -> None:
        thread = threading.Thread(target=span, args=(f"span-{task}",))
        thread.start()
        thread.join()

    await asyncio.to_thread(outer)


@pytest.mark.parametrize(
    "place", [in_default_executor, in_a_thread_of_its_own, in_a_nested_task, in_a_thread_that_a_thread_starts]
)
async def test_spans_land_on_their_rollout(place: Any) -> None:
    async with running(FnAgent(place)) as store:
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
            seen = await asyncio.get_running_loop().run_in_executor(executor, current_recording.get)
            assert seen is None  # a call from outside belongs to nobody, though rollouts started the executor's threads


async def test_a_parent_that_is_handed_on_explicitly_decides() -> None:
    """A library thread that works for everybody gets the caller's span, not its context."""
    with ThreadPoolExecutor(max_workers=1) as executor:
        executor.submit(int).result()  # its thread belongs to no rollout

        async def work(task: int) -> None:
            tracer = otel.get_tracer("third-party")
            with tracer.start_as_current_span(f"parent-{task}") as parent:
                context = otel.set_span_in_context(parent)
                token = current_recording.set(None)  # as in a thread that was there before
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
    """What imports, makes and runs a runner does not replace anything; only the command line and workers do."""
    program = """
import gc, threading
from concurrent.futures import ThreadPoolExecutor
before = threading.Thread.start, ThreadPoolExecutor.submit, gc.get_threshold()
frozen = gc.get_freeze_count()  # not 0 on every Python
from agl_slime.runner.process import configure_worker_process
from agl_slime.runner.thread import RunnerThread
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LitAgent
class Agent(LitAgent):
    async def rollout_async(self, task, resources, rollout): return 1.0
with RunnerThread(agent=Agent(), store=BridgeStore()):
    now = threading.Thread.start, ThreadPoolExecutor.submit, gc.get_threshold()
    print(now == before, gc.get_freeze_count() - frozen)
configure_worker_process()
with RunnerThread(agent=Agent(), store=BridgeStore()):
    configure_worker_process()
    print(threading.Thread.start is before[0], ThreadPoolExecutor.submit is before[1], gc.get_freeze_count() > frozen)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == ["True 0", "False False True"]


def test_a_subclass_of_thread_that_overrides_run_gets_the_recording_too() -> None:
    seen: list[Recording | None] = []

    class Worker(threading.Thread):
        def run(self) -> None:
            seen.append(current_recording.get())

    recording = Recording("ro", "at")
    token = current_recording.set(recording)
    try:
        thread = Worker()
        thread.start()
        thread.join()
    finally:
        current_recording.reset(token)
    assert seen == [recording]
    assert "run" not in vars(thread)


@asynccontextmanager
async def openai_server() -> AsyncIterator[str]:
    """Answers chat completions with what it was asked."""

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        message = {"role": "assistant", "content": body["messages"][-1]["content"]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {
            "id": "c",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        await runner.cleanup()


class SyncOpenAIAgent(LitAgent[Any]):
    """Written for stock Agent Lightning: a blocking client, a returned reward."""

    def __init__(self, client: Any) -> None:
        super().__init__()
        self._client = client

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        answer = self._client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": f"question-{task}"}]
        )
        assert answer.choices[0].message.content == f"question-{task}"
        return float(task)


@pytest.fixture(scope="module")
def instrumented_openai() -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    instrumentation = pytest.importorskip("opentelemetry.instrumentation.openai", reason="needs the extra [peers]")
    instrumentor = instrumentation.OpenAIInstrumentor()
    instrumentor.instrument()
    yield openai
    instrumentor.uninstrument()


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_an_instrumented_openai_client_inside_the_agent(kind: str, instrumented_openai: Any) -> None:
    async with openai_server() as url:
        if kind == "sync":
            agent: LitAgent[Any] = SyncOpenAIAgent(instrumented_openai.OpenAI(base_url=url, api_key="none"))
        else:
            client = instrumented_openai.AsyncOpenAI(base_url=url, api_key="none")

            async def work(task: int) -> None:
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": f"question-{task}"}]
                )
                emit_reward(float(task))

            agent = FnAgent(work)
        async with running(agent) as store:
            rollouts = await finished(store, range(24))
            for task, rollout in enumerate(rollouts):
                assert rollout.status == "succeeded"
                spans = [*await store.query_spans(rollout.rollout_id, "latest")]
                assert find_final_reward(spans) == task
                [call] = [found for found in spans if found.name.startswith("openai.chat")]
                assert f"question-{task}" in json.dumps(dict(call.attributes))


async def test_late_span_is_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    left_open: list[Any] = []

    async def work(task: int) -> None:
        left_open.extend([otel.get_tracer("third-party").start_span("late"), current_recording.get()])

    async with running(FnAgent(work)) as store:
        [rollout] = await finished(store, [0])
        left_open[0].end()
        assert [*await store.query_spans(rollout.rollout_id, "latest")] == []
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

    store = BridgeStore()
    settings = RunnerSettings(poll_interval_s=0.01, heartbeat_interval_s=0, max_concurrent=1)
    await store.add_resources(RESOURCES)
    with (
        RunnerThread(agent=FnAgent(work), store=store, settings=settings, name="one"),
        RunnerThread(agent=FnAgent(work), store=store, settings=settings, name="two"),
    ):
        rollouts = await finished(store, range(ROLLOUTS))
        assert await names_by_task(store, rollouts) == {task: [f"span-{task}"] for task in range(ROLLOUTS)}
        attempts = [await store.get_latest_attempt(rollout.rollout_id) for rollout in rollouts]
        assert {attempt.worker_id for attempt in attempts if attempt is not None} == {"one", "two"}
