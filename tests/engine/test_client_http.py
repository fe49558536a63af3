"""The client against a real HTTP server on this machine that answers as SGLang does."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import warnings

import pytest

from agl_slime.engine.client.client import ClientSettings, SGLangClient
from agl_slime.engine.client.generation import SamplingParams, WeightSpan
from agl_slime.errors import (
    ConfigError,
    ContextOverflowError,
    EngineRequestError,
    EngineServerError,
    OutOfVocabularyError,
)
from tests.harness.engine_faults import Abort
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine

QUICK = ClientSettings(backoff_base_s=0.001, backoff_cap_s=0.01)


async def test_ids_and_log_probs_are_the_engines() -> None:
    async with ScriptedEngine(weight_version="5") as engine, SGLangClient(base_url=engine.url) as client:
        got = await client.generate([1, 2, 3], SamplingParams(max_new_tokens=8), rid="abc")
        assert list(got.output_ids) == engine.continuation([1, 2, 3], 8)
        assert list(got.log_probs) == engine.continuation_log_probs([1, 2, 3], 8)
        assert (got.finish_reason, got.prompt_tokens, got.cached_tokens, got.request_id, got.resumed) == (
            "length",
            3,
            0,
            "abc",
            0,
        )
        assert got.weight_versions == (WeightSpan("5", 0, 8),)
        assert got.latency_s > 0
        sent = engine.received[0]
        assert sent.payload["return_logprob"] is True
        assert sent.payload["input_ids"] == [1, 2, 3]
        assert "X-SMG-Routing-Key" not in sent.headers


async def test_the_routing_key_and_the_api_key_travel_as_headers() -> None:
    settings = ClientSettings(api_key="secret")
    assert "secret" not in repr(settings)
    async with ScriptedEngine() as engine, SGLangClient(base_url=engine.url, settings=settings) as client:
        await client.generate([1], SamplingParams(max_new_tokens=1), routing_key="rollout-7")
        assert engine.received[0].headers["X-SMG-Routing-Key"] == "rollout-7"
        assert engine.received[0].headers["Authorization"] == "Bearer secret"


async def test_invalid_generation_is_refused_before_it_is_sent() -> None:
    async with ScriptedEngine() as engine, SGLangClient(base_url=engine.url, vocab_size=16, context_length=8) as client:
        with pytest.raises(OutOfVocabularyError, match="token id 16, outside the model's vocabulary of 16"):
            await client.generate([1, 16], SamplingParams())
        with pytest.raises(OutOfVocabularyError, match="token id -1"):
            await client.generate([-1, 2], SamplingParams())
        with pytest.raises(ContextOverflowError, match="8 tokens and leaves no room"):
            await client.generate([1] * 8, SamplingParams())
        with pytest.raises(EngineRequestError, match="no token ids"):
            await client.generate([], SamplingParams())
        assert engine.calls["/generate"] == 0


async def test_engine_refuses_invalid_requests_and_they_are_not_retried() -> None:
    async with ScriptedEngine(context_length=8) as engine, SGLangClient(base_url=engine.url, settings=QUICK) as client:
        with pytest.raises(OutOfVocabularyError, match="vocab size"):
            await client.generate([99], SamplingParams(max_new_tokens=1))
        with pytest.raises(ContextOverflowError, match="longer than the model's context length"):
            await client.generate([1] * 9, SamplingParams(max_new_tokens=1))
        assert engine.calls["/generate"] == 2  # neither was sent again


async def test_calls_in_flight_share_the_learned_context_length() -> None:
    async with ScriptedEngine(context_length=8, latency_s=0.01) as engine, SGLangClient(base_url=engine.url) as client:
        results = await asyncio.gather(*(client.generate([1, 2], SamplingParams(max_new_tokens=100)) for _ in range(5)))
        assert [len(got.output_ids) for got in results] == [6] * 5


@pytest.mark.parametrize("known", [True, False])
async def test_the_answer_is_shortened_to_the_room_that_is_left(known: bool) -> None:
    async with (
        ScriptedEngine(context_length=8) as engine,
        SGLangClient(base_url=engine.url, context_length=8 if known else None) as client,
    ):
        for _ in range(2):
            got = await client.generate([1, 2], SamplingParams(max_new_tokens=100))
            assert (len(got.output_ids), got.finish_reason) == (6, "length")
        assert engine.calls["/generate"] == (2 if known else 3)  # told once, remembered


@pytest.mark.parametrize("engines", [8, 100])
async def test_the_context_length_of_a_request_limits_prompt_and_answer(engines: int) -> None:
    """slime's ``--rollout-max-context-len``; the engine's own limit holds beside it."""
    sampling = SamplingParams(max_new_tokens=100, context_length=108 - engines)
    async with ScriptedEngine(context_length=engines) as engine, SGLangClient(base_url=engine.url) as client:
        got = await client.generate([1, 2], sampling)
        assert (len(got.output_ids), got.finish_reason) == (6, "length")
        assert "context_length" not in engine.received[-1].payload["sampling_params"]
        with pytest.raises(ContextOverflowError, match="8 tokens" if engines == 100 else "context"):
            await client.generate([1] * 8, sampling)


async def test_aborted_generation_is_resumed_under_new_request_ids() -> None:
    async with ScriptedEngine() as engine, SGLangClient(base_url=engine.url, settings=QUICK) as client:
        engine.script("/generate", Abort(n_tokens=3), Abort(n_tokens=0), Abort(n_tokens=2))
        got = await client.generate([1, 2], SamplingParams(max_new_tokens=9), rid="abc", routing_key="k")
        assert list(got.output_ids) == engine.continuation([1, 2], 9)
        assert list(got.log_probs) == engine.continuation_log_probs([1, 2], 9)
        assert (got.resumed, got.prompt_tokens, got.cached_tokens, got.finish_reason) == (3, 2, 0, "length")
        assert [request.payload["sampling_params"]["max_new_tokens"] for request in engine.received] == [9, 6, 6, 4]
        assert all(request.headers["X-SMG-Routing-Key"] == "k" for request in engine.received)
        assert len(set(engine.rids)) == 4
        # SGLang aborts by prefix
        assert not any(one != other and other.startswith(one) for one in engine.rids for other in engine.rids)


async def test_an_abort_is_returned_when_the_caller_wants_it() -> None:
    async with ScriptedEngine() as engine, SGLangClient(base_url=engine.url) as client:
        engine.script("/generate", Abort(n_tokens=3))
        got = await client.generate([1, 2], SamplingParams(max_new_tokens=9), resume_aborted=False)
        assert (got.finish_reason, got.resumed, list(got.output_ids)) == ("abort", 0, engine.continuation([1, 2], 3))
        assert engine.calls["/generate"] == 1


@pytest.mark.parametrize("after", [0, 1])
async def test_an_engine_that_aborts_for_ever_is_left(after: int) -> None:
    settings = ClientSettings(resume_limit=5, backoff_base_s=0.001, backoff_cap_s=0.01)
    async with ScriptedEngine() as engine, SGLangClient(base_url=engine.url, settings=settings) as client:
        engine.always("/generate", Abort(n_tokens=after))
        with pytest.raises(EngineServerError, match="aborted one generation 6 times"):
            await client.generate([1, 2], SamplingParams(max_new_tokens=100))
        assert engine.calls["/generate"] == 6


async def test_aborted_with_a_full_context_is_length() -> None:
    async with ScriptedEngine(context_length=8) as engine, SGLangClient(base_url=engine.url) as client:
        engine.script("/generate", Abort(n_tokens=6))
        got = await client.generate([1, 2], SamplingParams(max_new_tokens=6))
        assert got.finish_reason == "length"
        # the server aborts where it would have ended, and says so only when asked again
        engine.script("/generate", Abort(n_tokens=6))
        client.context_length = None
        got = await client.generate([1, 2, 3], SamplingParams(max_new_tokens=5))
        assert (len(got.output_ids), got.finish_reason) == (5, "length")


async def test_a_cancelled_call_tells_the_engine_and_does_not_wait() -> None:
    async with ScriptedEngine(token_s=0.01) as engine, SGLangClient(base_url=engine.url) as client:
        task = asyncio.create_task(client.generate([1], SamplingParams(max_new_tokens=1000), rid="gone"))
        await engine.arrived("/generate")
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - started < 5  # of the 10 s that the answer takes
        await asyncio.wait_for(engine.arrived("/abort_request"), 5)
        assert engine.received[-1].payload == {"rid": "gone"}
        await asyncio.wait_for(engine.idle(), 5)  # it was heard


@pytest.mark.slow
async def test_cancelling_thousands_leaks_nothing() -> None:
    async with ScriptedEngine(latency_s=30.0) as engine:
        async with SGLangClient(base_url=engine.url) as client:
            tasks = [asyncio.create_task(client.generate([1], SamplingParams(max_new_tokens=1))) for _ in range(1000)]
            await asyncio.wait_for(engine.arrived("/generate", 1000), 30)
            assert engine.connections == 1000
            for task in tasks:
                task.cancel()
            assert all(
                isinstance(result, asyncio.CancelledError)
                for result in await asyncio.gather(*tasks, return_exceptions=True)
            )
        await asyncio.wait_for(engine.disconnected(), 60)


async def test_two_thousand_at_once() -> None:
    """CPU time of client and server together: a call among 2,000 costs less than three among 200."""
    async with ScriptedEngine(latency_s=0.05) as engine, SGLangClient(base_url=engine.url) as client:

        async def seconds_a_call(n_calls: int) -> float:
            started = time.process_time()
            prompts = [[n % 16, n // 16 % 16, n // 256] for n in range(n_calls)]
            sampling = SamplingParams(max_new_tokens=16)
            results = await asyncio.gather(*(client.generate(prompt, sampling) for prompt in prompts))
            seconds = time.process_time() - started
            for n in range(0, n_calls, 97):
                assert list(results[n].output_ids) == engine.continuation(prompts[n], 16)
            return seconds / n_calls

        few, many = await seconds_a_call(200), await seconds_a_call(2000)
        assert engine.calls["/generate"] == 2200
        assert many < 3 * few


async def test_connections_are_bounded() -> None:
    async with (
        ScriptedEngine(latency_s=0.01) as engine,
        SGLangClient(base_url=engine.url, settings=ClientSettings(max_connections=3)) as client,
    ):
        await asyncio.gather(*(client.generate([1], SamplingParams(max_new_tokens=1)) for _ in range(30)))
        assert engine.most_running == 3


@pytest.mark.parametrize(("hard", "warns"), [(1024, False), (100, True)])
def test_a_low_limit_of_open_files_is_no_failure(hard: int, warns: bool) -> None:
    """In a process of its own: a limit once lowered cannot be raised again."""
    pytest.importorskip("resource", reason="this system has no such limit")
    program = f"""
import asyncio, logging, resource
from agl_slime.engine.client.client import ClientSettings, SGLangClient
from agl_slime.engine.client.generation import SamplingParams

logging.basicConfig()
resource.setrlimit(resource.RLIMIT_NOFILE, (60, {hard}))

async def main(url):
    async with SGLangClient(base_url=url, settings=ClientSettings(max_connections=400, max_attempts=1)) as client:
        results = await asyncio.gather(*(client.generate([1], SamplingParams(max_new_tokens=1)) for _ in range(400)))
        print(len(results))

asyncio.run(main("URL"))
"""
    with in_thread(ScriptedEngine(latency_s=0.05)) as engine:
        done = subprocess.run(
            [sys.executable, "-c", program.replace("URL", engine.url)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout == "400\n", done.stderr
    assert ("connections instead of 400" in done.stderr) == warns


def test_made_in_one_thread_and_used_in_others() -> None:
    with in_thread(ScriptedEngine()) as engine:
        client = SGLangClient(base_url=engine.url)

        async def use(n: int) -> tuple[int, ...]:
            parts = await asyncio.gather(*(client.generate([n], SamplingParams(max_new_tokens=4)) for _ in range(20)))
            return parts[0].output_ids

        results: dict[int, tuple[int, ...]] = {}
        threads = [threading.Thread(target=lambda n=n: results.__setitem__(n, asyncio.run(use(n)))) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert results == {n: tuple(engine.continuation([n], 4)) for n in range(4)}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            asyncio.run(client.aclose())
            gc.collect()
        # the loops have ended, and their sessions with them
        assert not [warning for warning in told if "Unclosed" in str(warning.message)]


async def test_closing_reaches_the_connections_of_a_loop_that_runs_elsewhere() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        async with ScriptedEngine() as engine:
            client = SGLangClient(base_url=engine.url)
            there = asyncio.run_coroutine_threadsafe(client.generate([1], SamplingParams(max_new_tokens=1)), loop)
            await asyncio.wrap_future(there)
            assert engine.connections == 1
            await client.aclose()
            await asyncio.wait_for(engine.disconnected(), 60)
            # and it can be used again
            assert (await client.generate([1], SamplingParams(max_new_tokens=1))).output_ids
            await client.aclose()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=5)
        loop.close()


# -- control ---------------------------------------------------------------------------------------------------------


async def test_control_calls() -> None:
    async with (
        ScriptedEngine(weight_version="1") as engine,
        SGLangClient(base_url=engine.url, settings=QUICK) as client,
    ):
        assert (await client.model_info())["model_path"] == "/models/scripted"
        assert await client.weight_version() == "1"
        await client.flush_cache()
        await client.update_weights_from_disk("/models/new", "2")
        assert await client.weight_version() == "2"
        assert (await client.model_info())["model_path"] == "/models/new"
        assert (
            next(request for request in engine.received if request.path == "/update_weights_from_disk").payload[
                "flush_cache"
            ]
            is False
        )


async def test_a_pause_aborts_the_running_and_holds_the_new() -> None:
    async with ScriptedEngine(token_s=0.005) as engine, SGLangClient(base_url=engine.url, settings=QUICK) as client:
        task = asyncio.create_task(client.generate([1], SamplingParams(max_new_tokens=20)))
        await engine.arrived("/generate")
        with pytest.raises(EngineRequestError, match="running"):
            await client.flush_cache()
        await client.pause_generation()
        await engine.arrived("/generate", 2)  # the resumed part waits
        assert engine.running == 0
        assert not task.done()
        await client.continue_generation()
        got = await task
        assert got.resumed == 1
        assert list(got.output_ids) == engine.continuation([1], 20)


async def test_abort_all_and_by_id() -> None:
    async with ScriptedEngine(token_s=0.005) as engine, SGLangClient(base_url=engine.url) as client:
        tasks = [
            asyncio.create_task(
                client.generate([1], SamplingParams(max_new_tokens=4000), rid=rid, resume_aborted=False)
            )
            for rid in ("x1", "y1", "z")
        ]
        await engine.arrived("/generate", 3)
        await client.abort("x")
        assert (await tasks[0]).finish_reason == "abort"
        assert not tasks[1].done()
        await client.abort()
        assert [(await task).finish_reason for task in tasks] == ["abort"] * 3


async def test_workers_of_a_plain_server_and_of_a_router() -> None:
    async with ScriptedEngine() as one, ScriptedEngine(workers=[one.url, "http://127.0.0.1:9"]) as router:
        async with SGLangClient(base_url=one.url) as client:
            assert await client.workers() == (one.url,)
        async with SGLangClient(base_url=router.url + "/") as client:
            assert await client.workers() == (one.url, "http://127.0.0.1:9")
            assert (await client.model_info())["model_path"] == "/models/scripted"  # a router only has the older path


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:30000", "ftp://h:1", "http://", "http://h:99999", "http://h:1 2", "localhost"]
)
def test_malformed_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="must look like http://"):
        SGLangClient(base_url=url)


@pytest.mark.parametrize(
    "wrong",
    [
        {"total_timeout_s": 0},
        {"max_attempts": 0},
        {"max_connections": -1},
        {"resume_limit": -1},
        {"backoff_cap_s": float("nan")},
    ],
)
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ClientSettings(**wrong)  # pyright: ignore[reportArgumentType]
