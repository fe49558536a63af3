"""The client against a real HTTP server that answers as SGLang does, and against engines; errors and their retries."""

import asyncio
import email.utils
import errno
import gc
import itertools
import json
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import aiohttp
import pytest

from agl_slime import errors
from agl_slime.engine.client.client import ClientSettings, SGLangClient
from agl_slime.engine.client.generation import Generation, SamplingParams, WeightSpan
from agl_slime.engine.client.retry import check_event, context_limit, engine_error, refusal, retry_after_s
from tests.harness.engine_faults import Abort
from tests.harness.engine_servers import Server
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine

QUICK = ClientSettings(backoff_base_s=0.001, backoff_cap_s=0.01)
ONE_TOKEN = SamplingParams(max_new_tokens=1)


async def test_ids_and_log_probs_are_the_engines() -> None:
    settings = ClientSettings(api_key="secret")
    assert "secret" not in repr(settings)
    async with (
        ScriptedEngine(weight_version="5") as engine,
        SGLangClient(base_url=engine.url, settings=settings) as client,
    ):
        generation = await client.generate([1, 2, 3], SamplingParams(max_new_tokens=8), rid="abc")
        assert list(generation.output_ids) == engine.continuation([1, 2, 3], 8)
        assert list(generation.log_probs) == engine.continuation_log_probs([1, 2, 3], 8)
        assert (generation.finish_reason, generation.request_id, generation.resumed) == ("length", "abc", 0)
        assert (generation.prompt_tokens, generation.cached_tokens) == (3, 0)
        assert generation.weight_versions == (WeightSpan("5", 0, 8),)
        assert generation.latency_s > 0
        await client.generate([1], ONE_TOKEN, routing_key="rollout-7")
        first, second = engine.received
        assert first.payload["return_logprob"] is True
        assert first.payload["input_ids"] == [1, 2, 3]
        assert "X-SMG-Routing-Key" not in first.headers
        assert second.headers["X-SMG-Routing-Key"] == "rollout-7"
        assert second.headers["Authorization"] == "Bearer secret"


async def test_invalid_generation_is_refused_before_it_is_sent() -> None:
    async with ScriptedEngine() as engine, SGLangClient(base_url=engine.url, vocab_size=16, context_length=8) as client:
        for ids, error, message in (
            ([1, 16], errors.OutOfVocabularyError, "token id 16, outside the model's vocabulary of 16"),
            ([-1, 2], errors.OutOfVocabularyError, "token id -1"),
            ([1] * 8, errors.ContextOverflowError, "8 tokens and leaves no room"),
            ([], errors.EngineRequestError, "no token ids"),
        ):
            with pytest.raises(error, match=message):
                await client.generate(ids, SamplingParams())
        assert engine.calls["/generate"] == 0


@pytest.mark.parametrize("configured", [True, False])
async def test_the_answer_is_shortened_to_the_context_length(configured: bool) -> None:
    """Also of calls in flight when the first refusal names the length."""
    async with (
        ScriptedEngine(context_length=8) as engine,
        SGLangClient(base_url=engine.url, context_length=8 if configured else None) as client,
    ):
        requests = []
        for in_flight in (5, 1):
            calls = [client.generate([1, 2], SamplingParams(max_new_tokens=100)) for _ in range(in_flight)]
            for generation in await asyncio.gather(*calls):
                assert (len(generation.output_ids), generation.finish_reason) == (6, "length")
            requests.append(engine.calls["/generate"])
        assert (requests[0] > 5) == (not configured)
        assert requests[1] == requests[0] + 1  # the length of the refusal is remembered


@pytest.mark.parametrize("engine_limit", [8, 100])
async def test_the_context_length_of_a_request_limits_prompt_and_answer(engine_limit: int) -> None:
    """slime's ``--rollout-max-context-len``; the engine's limit holds beside it."""
    sampling = SamplingParams(max_new_tokens=100, context_length=108 - engine_limit)
    async with ScriptedEngine(context_length=engine_limit) as engine, SGLangClient(base_url=engine.url) as client:
        generation = await client.generate([1, 2], sampling)
        assert (len(generation.output_ids), generation.finish_reason) == (6, "length")
        assert "context_length" not in engine.received[-1].payload["sampling_params"]
        with pytest.raises(errors.ContextOverflowError, match="8 tokens" if engine_limit == 100 else "context"):
            await client.generate([1] * 8, sampling)


async def test_aborted_generation_is_resumed_under_new_request_ids() -> None:
    async with ScriptedEngine() as engine, SGLangClient(base_url=engine.url, settings=QUICK) as client:
        engine.script("/generate", Abort(n_tokens=3), Abort(n_tokens=0), Abort(n_tokens=2))
        generation = await client.generate([1, 2], SamplingParams(max_new_tokens=9), rid="abc", routing_key="k")
        assert list(generation.output_ids) == engine.continuation([1, 2], 9)
        assert list(generation.log_probs) == engine.continuation_log_probs([1, 2], 9)
        assert (generation.resumed, generation.finish_reason) == (3, "length")
        assert (generation.prompt_tokens, generation.cached_tokens) == (2, 0)
        assert [request.payload["sampling_params"]["max_new_tokens"] for request in engine.received] == [9, 6, 6, 4]
        assert all(request.headers["X-SMG-Routing-Key"] == "k" for request in engine.received)
        assert len(set(engine.rids)) == 4
        # SGLang aborts by prefix
        assert not any(a != b and b.startswith(a) for a in engine.rids for b in engine.rids)


@pytest.mark.parametrize("n_tokens", [0, 1])
async def test_an_engine_that_always_aborts_is_an_error(n_tokens: int) -> None:
    settings = ClientSettings(resume_limit=5, backoff_base_s=0.001, backoff_cap_s=0.01)
    async with ScriptedEngine() as engine, SGLangClient(base_url=engine.url, settings=settings) as client:
        engine.always("/generate", Abort(n_tokens=n_tokens))
        with pytest.raises(errors.EngineServerError, match="aborted one generation 6 times"):
            await client.generate([1, 2], SamplingParams(max_new_tokens=100))
        assert engine.calls["/generate"] == 6


async def test_aborted_with_a_full_context_is_length() -> None:
    async with ScriptedEngine(context_length=8) as engine, SGLangClient(base_url=engine.url) as client:
        engine.script("/generate", Abort(n_tokens=6))
        generation = await client.generate([1, 2], SamplingParams(max_new_tokens=6))
        assert generation.finish_reason == "length"
        # the server aborts at the length limit and only reports it to the next request
        engine.script("/generate", Abort(n_tokens=6))
        client.context_length = None
        generation = await client.generate([1, 2, 3], SamplingParams(max_new_tokens=5))
        assert (len(generation.output_ids), generation.finish_reason) == (5, "length")


async def test_a_cancelled_call_aborts_in_the_engine_and_does_not_wait() -> None:
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
        await asyncio.wait_for(engine.idle(), 5)


def test_a_low_limit_of_open_files_is_a_warning() -> None:
    """In another process: a lowered limit cannot be raised."""
    pytest.importorskip("resource", reason="this system has no such limit")
    program = """
import asyncio, logging, resource, sys
from agl_slime.engine.client.client import ClientSettings, SGLangClient
from agl_slime.engine.client.generation import SamplingParams

logging.basicConfig()
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 100))

async def main():
    settings = ClientSettings(max_connections=400, max_attempts=1)
    async with SGLangClient(base_url=sys.argv[1], settings=settings) as client:
        results = await asyncio.gather(*(client.generate([1], SamplingParams(max_new_tokens=1)) for _ in range(200)))
        print(len(results))

asyncio.run(main())
"""
    with in_thread(ScriptedEngine(latency_s=0.05)) as engine:
        command = [sys.executable, "-c", program, engine.url]
        process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert process.stdout == "200\n", process.stderr
    assert "connections instead of 400" in process.stderr


def test_made_in_one_thread_and_used_in_others() -> None:
    with in_thread(ScriptedEngine()) as engine:
        client = SGLangClient(base_url=engine.url)

        async def use(n: int) -> tuple[int, ...]:
            calls = (client.generate([n], SamplingParams(max_new_tokens=4)) for _ in range(20))
            return (await asyncio.gather(*calls))[0].output_ids

        results: dict[int, tuple[int, ...]] = {}
        threads = [threading.Thread(target=lambda n=n: results.__setitem__(n, asyncio.run(use(n)))) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert results == {n: tuple(engine.continuation([n], 4)) for n in range(4)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            asyncio.run(client.aclose())
            gc.collect()
        # the loops have ended, and their sessions with them
        assert not [warning for warning in caught if "Unclosed" in str(warning.message)]


async def test_workers_of_a_plain_server_and_of_a_router() -> None:
    async with ScriptedEngine() as worker, ScriptedEngine(workers=[worker.url, "http://127.0.0.1:9"]) as router:
        async with SGLangClient(base_url=worker.url) as client:
            assert await client.workers() == (worker.url,)
        async with SGLangClient(base_url=router.url + "/") as client:
            assert await client.workers() == (worker.url, "http://127.0.0.1:9")
            assert (await client.model_info())["model_path"] == "/models/scripted"  # a router only has the older path


@pytest.mark.parametrize("url", ["", "127.0.0.1:30000", "ftp://h:1", "http://", "http://h:99999", "http://h:1 2"])
def test_malformed_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(errors.ConfigError, match="must look like http://"):
        SGLangClient(base_url=url)


def test_url_with_a_password_beside_a_key_is_refused_at_once() -> None:
    with pytest.raises(errors.ConfigError, match=r"^http://\*\*\*@h:1 has a user or password, and there is a key"):
        SGLangClient(base_url="http://me:s3cret@h:1", settings=ClientSettings(api_key="k"))


def sglangs(message: str) -> str:
    return json.dumps({"error": {"message": message}})


# SGLang's messages, 0.5.15.post1
PROMPT_TOO_LONG = sglangs("The input (5000 tokens) is longer than the model's context length (4096 tokens).")
TOTAL_TOO_LONG = sglangs(
    "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of 4100 "
    "tokens: 4000 tokens from the input messages and 100 tokens for the completion. Please reduce the number of tokens."
)
POOL_TOO_SMALL = sglangs(
    "Input length (70000 tokens) exceeds the maximum allowed length (65530 tokens). Use a shorter input."
)
BAD_ID = sglangs("The input_ids [999] contains values greater than the vocab size (460).")


@pytest.mark.parametrize(
    ("status", "body", "error", "retry"),
    [
        (400, PROMPT_TOO_LONG, errors.ContextOverflowError, False),
        (400, TOTAL_TOO_LONG, errors.ContextOverflowError, False),
        (400, POOL_TOO_SMALL, errors.ContextOverflowError, False),
        (400, BAD_ID, errors.OutOfVocabularyError, False),
        (422, "", errors.EngineRequestError, False),
        (408, "", errors.EngineServerError, True),
        (429, "", errors.EngineServerError, True),
        (500, "x" * 100_000, errors.EngineServerError, True),
        (503, '{"detail": "The request queue is full."}', errors.EngineServerError, True),
    ],
)
def test_each_status_maps_to_an_error_and_a_retry_flag(
    status: int, body: str, error: type[errors.EngineError], retry: bool
):
    refused = refusal(status, body, endpoint="http://h:1/generate")
    assert type(refused) is error
    assert refused.transient is retry
    assert refused.status == status
    assert f"HTTP {status}" in str(refused)
    assert "http://h:1/generate" in str(refused)
    assert len(str(refused)) < 700


@pytest.mark.parametrize(
    "body", ['{"error": {"message": "why"}}', '{"message": "why"}', '{"detail": "why"}', '{"error": "why"}', "why"]
)
def test_the_reason_is_read_in_every_form(body: str) -> None:
    assert str(refusal(500, body)).endswith("HTTP 500: why")


def test_context_limit_only_from_the_total_refusal() -> None:
    total, prompt = refusal(400, TOTAL_TOO_LONG), refusal(400, PROMPT_TOO_LONG)
    assert isinstance(total, errors.ContextOverflowError)
    assert isinstance(prompt, errors.ContextOverflowError)
    assert context_limit(total) == 4096
    assert context_limit(prompt) is None


@pytest.mark.parametrize(
    ("exc", "error", "retry"),
    [
        (TimeoutError(), errors.EngineTimeoutError, True),
        (aiohttp.SocketTimeoutError("Timeout on reading data from socket"), errors.EngineTimeoutError, True),
        (aiohttp.ConnectionTimeoutError("Connection timeout"), errors.EngineUnreachableError, True),
        (aiohttp.ServerDisconnectedError(), errors.EngineUnreachableError, True),
        (aiohttp.ClientOSError(errno.ECONNRESET, "reset"), errors.EngineUnreachableError, True),
        (aiohttp.ClientPayloadError("not enough data"), errors.EngineUnreachableError, True),
        (errors.EngineProtocolError("no meta_info"), errors.EngineProtocolError, True),
        (refusal(400, BAD_ID), errors.OutOfVocabularyError, False),
    ],
)
def test_each_exception_maps_to_an_error_and_a_retry_flag(exc: Exception, error: type[errors.EngineError], retry: bool):
    verdict = engine_error(exc)
    assert type(verdict) is error
    assert verdict.transient is retry


def test_a_programming_error_is_not_the_engines() -> None:
    with pytest.raises(ZeroDivisionError):
        engine_error(ZeroDivisionError())


def test_retry_after_is_seconds_or_a_date() -> None:
    for value, seconds in (("7", 7.0), ("0.25", 0.25), ("-3", 0.0), ("soon", 0.0), ("nan", 0.0), ("inf", 0.0)):
        assert retry_after_s({"Retry-After": value}) == seconds
    value = email.utils.formatdate(time.time() + 30, usegmt=True)
    assert 25 < retry_after_s({"Retry-After": value}) <= 30
    assert retry_after_s({"Retry-After": email.utils.formatdate(time.time() - 30, usegmt=True)}) == 0.0


def test_a_stream_of_pieces_is_not_taken_for_the_answer() -> None:
    def event(listed: int, completed: int) -> dict[str, Any]:
        meta = {"output_token_logprobs": [[-0.5, 7, None]] * listed, "completion_tokens": completed}
        return {"text": "x", "output_ids": [7] * listed, "meta_info": {**meta, "finish_reason": None}}

    for whole in (event(1, 1), event(12, 12), {"meta_info": {"completion_tokens": 2}}, "no object"):
        check_event(whole, endpoint="/generate")
    with pytest.raises(errors.EngineProtocolError, match="start SGLang without --incremental-streaming-output"):
        check_event(event(2, 3), endpoint="/generate")  # the second event of 0.5.15 with that flag


# a cache that is filled in another order gives other roundings, in float32 some 1e-6
LOG_PROB_TOLERANCE = 1e-4


def greedy(n: int, *, stop: tuple[str, ...] = ()) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=n, stop=stop, extra={"ignore_eos": True})


def expect_same(joined: Generation, whole: Generation) -> None:
    for name in ("output_ids", "finish_reason", "matched_stop", "text", "prompt_tokens"):
        assert getattr(joined, name) == getattr(whole, name), name
    assert max(abs(a - b) for a, b in zip(joined.log_probs, whole.log_probs, strict=True)) < LOG_PROB_TOLERANCE
    ends = [0, *(span.end for span in joined.weight_versions)]
    assert [span.start for span in joined.weight_versions] == ends[:-1]
    assert ends[-1] == len(joined.output_ids)


async def test_generation_aborted_anywhere_resumes_with_equal_tokens(server: Server) -> None:
    """All generations are aborted after each 20 tokens that they have sampled together."""
    progress = asyncio.Semaphore(0)

    async def keep_aborting() -> None:
        while True:
            for _ in range(20):
                await progress.acquire()
            await client.abort()

    settings = ClientSettings(resume_limit=10_000, backoff_base_s=0.01)
    async with SGLangClient(base_url=server.url, settings=settings) as client:
        assert await client.workers() == (server.url,)
        prompt = list(range(20, 40))
        text = (await client.generate(prompt, greedy(60))).text
        for stop in [(), (text[35:50],)]:
            sampling = greedy(60, stop=stop)
            whole = await client.generate(prompt, sampling)
            assert (whole.finish_reason == "stop") == bool(stop)
            aborter = asyncio.create_task(keep_aborting())
            calls = (client.generate(prompt, sampling, on_progress=lambda _: progress.release()) for _ in range(4))
            results = await asyncio.gather(*calls)
            aborter.cancel()
            for joined in results:
                expect_same(joined, whole)
            assert stop or all(joined.resumed for joined in results)


async def test_lengths(server: Server) -> None:
    length = json.loads((server.policy / "config.json").read_text())["max_position_embeddings"]
    async with (
        SGLangClient(base_url=server.url, context_length=length) as knowing,
        SGLangClient(base_url=server.url) as unknowing,
    ):
        with pytest.raises(errors.ContextOverflowError):
            await unknowing.generate([1] * (length + 1), greedy(1))
        for client, room in itertools.product((knowing, unknowing), (8, 40)):
            generation = await client.generate([1] * (length - room), greedy(100))
            assert generation.finish_reason == "length"
            assert room - 4 <= len(generation.output_ids) <= room  # SGLang keeps a token or two for itself
