"""Spans find their rollout from wherever the agent's code runs: tasks, threads, executors, third-party
instrumentation."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry import trace as otel

from agl_slime.runner.process import carry_recordings
from agl_slime.runner.tracer import ContextTracer
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.recording import Recording, current_recording
from agl_slime.support.agl import Span, SpanCoreFields, TraceStatus
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


@pytest.mark.slow
def test_runner_in_a_users_process_does_not_patch_its_threads() -> None:
    """Importing, making and running a runner replaces nothing; only the command line and workers do."""
    program = """
import gc, threading
from concurrent.futures import ThreadPoolExecutor
original = threading.Thread.start, ThreadPoolExecutor.submit, gc.get_threshold()
frozen = gc.get_freeze_count()  # not 0 on every Python
from agl_slime.runner.process import configure_worker_process
from agl_slime.runner.concurrent import RunnerThread
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


async def test_late_span_is_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    left_open: list[Any] = []

    async def work(task: int) -> None:
        left_open.extend([otel.get_tracer("third-party").start_span("late"), current_recording.get()])

    async with running(FnAgent(work)) as store:
        [rollout] = await finished(store, [0])
        left_open[0].end()
        assert await spans_of(store, rollout) == []
    assert "'late' ended after its rollout" in caplog.text


# -- the tracer's spans equal Agent Lightning's ----------------------------------------------------------------------

ATTRIBUTES = {"a": 1, "b": [1.5], "c": ["x"], "d": True, "e": "text"}
ERROR = {"status_code": "ERROR", "description": "d"}


async def made_by_tracer(*cores: dict[str, Any]) -> list[Span]:
    recording = Recording("ro", "at")
    token = current_recording.set(recording)
    try:
        for core in cores:
            span = ContextTracer().create_span(
                core["name"], core["attributes"], core["start_time"], TraceStatus(**ERROR)
            )
            span.end_time = core["end_time"]
    finally:
        current_recording.reset(token)
    await recording.write()
    return recording.written


async def test_span_equals_agent_lightnings_and_shares_no_mutable_state() -> None:
    core = {"name": "x", "attributes": ATTRIBUTES, "start_time": 1.0, "end_time": 2.0}
    ours, second = await made_by_tracer(core, core)
    stock = Span.from_core_fields(
        SpanCoreFields(**core, status=TraceStatus(**ERROR)), rollout_id="ro", attempt_id="at", sequence_id=1
    )
    assert ours.context is not None
    assert (ours.context.trace_id, ours.context.span_id) == (ours.trace_id, ours.span_id)
    assert (len(ours.trace_id), len(ours.span_id)) == (32, 16)
    ids = {"trace_id": ours.trace_id, "span_id": ours.span_id}
    assert stock.context is not None
    stock = stock.model_copy(update={**ids, "context": stock.context.model_copy(update=ids)})
    assert ours == stock
    assert ours.model_dump_json(exclude_unset=True) == stock.model_dump_json(exclude_unset=True)
    assert Span.model_validate_json(ours.model_dump_json()) == ours

    assert (ours.span_id, ours.trace_id) != (second.span_id, second.trace_id)
    for name in ("attributes", "events", "links", "status", "context", "resource"):
        assert getattr(ours, name) is not getattr(second, name), name
    assert second.context is not None
    assert ours.context.trace_state is not second.context.trace_state
    assert ours.resource.attributes is not second.resource.attributes


async def test_lone_surrogates_are_spelled_out() -> None:
    """JSON cannot encode them: the span, with its failure reason or reward, would be lost."""
    attributes = {"text": "caf\ud800 é", "texts": ["\udfff", "b"], "plain": "é"}
    [span] = await made_by_tracer({"name": "x", "attributes": attributes, "start_time": 1.0, "end_time": 2.0})
    assert span.attributes == {"text": "caf\\ud800 é", "texts": ["\\udfff", "b"], "plain": "é"}
    assert Span.model_validate_json(span.model_dump_json()) == span
