"""The client on an engine that misbehaves: one clear outcome each time, within its limits, with no token of an
abandoned attempt in the answer."""

import asyncio
import time
from dataclasses import replace

import pytest

from agl_slime.engine.client.client import ClientSettings, SGLangClient
from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.errors import (
    EngineError,
    EngineProtocolError,
    EngineRequestError,
    EngineServerError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from tests.harness.engine_faults import (
    GARBAGE_JSON,
    HTML_PAGE,
    Abort,
    Body,
    Drip,
    Fault,
    NewVersion,
    Reset,
    Stall,
    Status,
)
from tests.harness.scripted_engine import ScriptedEngine

PROMPT = [1, 2, 3]
SAMPLING = SamplingParams(max_new_tokens=8)
QUICK = ClientSettings(backoff_base_s=0.001, backoff_cap_s=0.01, max_attempts=4)
NO_META = Body('{"text": "no meta_info"}')


def expect_undisturbed(engine: ScriptedEngine, generation: Generation) -> None:
    assert list(generation.output_ids) == engine.continuation(PROMPT, 8)
    assert list(generation.log_probs) == engine.continuation_log_probs(PROMPT, 8)


@pytest.mark.parametrize(
    "faults",
    [
        [Status(500), Status(429), GARBAGE_JSON],  # the limit of protocol errors counts those alone
        [Reset(), Reset(), Reset()],
        [Reset(in_body=True)],
        [GARBAGE_JSON, HTML_PAGE],
        [Body("")],
        [NO_META],
        [Status(500), Abort(n_tokens=3), Reset(), Abort(n_tokens=0), Status(503), Abort(n_tokens=2)],
        [Abort(n_tokens=1)] * 7,
    ],
    ids=repr,
)
async def test_it_recovers_and_the_answer_is_the_undisturbed_one(faults: list[Fault]) -> None:
    async with ScriptedEngine() as engine, SGLangClient(base_url=engine.url, settings=QUICK) as client:
        engine.script("/generate", *faults)
        expect_undisturbed(engine, await client.generate(PROMPT, SAMPLING))
        assert engine.calls["/generate"] == len(faults) + 1
        assert len(set(engine.rids)) == len(faults) + 1


@pytest.mark.parametrize(
    ("fault", "error", "calls", "message"),
    [
        (Status(500, "CUDA error"), EngineServerError, 4, "CUDA error"),
        (Reset(in_body=True), EngineUnreachableError, 4, "broke the connection"),
        (GARBAGE_JSON, EngineProtocolError, 3, "not JSON"),
        (HTML_PAGE, EngineProtocolError, 3, "text/html"),
        (NO_META, EngineProtocolError, 3, "no meta_info"),
        (Body('{"meta_info": {"finish_reason": {"type": "stop", "matched": "NaN happened"}}}'), EngineError, 1, "NaN"),
        (Status(400, "Duplicate request ID detected: x"), EngineRequestError, 1, "Duplicate"),
        (Status(401, "Unauthorized"), EngineRequestError, 1, "api_key"),
        (Status(307, "elsewhere"), EngineProtocolError, 3, "307"),
    ],
    ids=repr,
)
async def test_persistent_fault_ends_in_one_typed_error(fault, error, calls, message):
    async with ScriptedEngine() as engine, SGLangClient(base_url=engine.url, settings=QUICK) as client:
        engine.always("/generate", fault)
        with pytest.raises(error, match=message) as caught:
            await client.generate(PROMPT, SAMPLING)
        assert type(caught.value) is error
        assert f"{engine.url}/generate" in str(caught.value)
        assert engine.calls["/generate"] == calls
        engine.always("/generate", None)
        expect_undisturbed(engine, await client.generate(PROMPT, SAMPLING))  # the client still works


async def test_connection_refused_is_an_unreachable_error_after_all_attempts() -> None:
    async with ScriptedEngine() as engine:
        url = engine.url
    async with SGLangClient(base_url=url, settings=QUICK) as client:
        with pytest.raises(EngineUnreachableError, match=r"could not be reached.*gave up after 4 attempts"):
            await client.generate(PROMPT, SAMPLING)
        with pytest.raises(EngineUnreachableError, match=rf"no SGLang at {url}: .*check the URL"):
            await client.probe()


async def test_the_total_timeout_ends_a_body_that_drips() -> None:
    """The idle timeout never strikes."""
    settings = replace(QUICK, idle_timeout_s=60.0, total_timeout_s=0.3)
    async with ScriptedEngine() as engine, SGLangClient(base_url=engine.url, settings=settings) as client:
        engine.always("/generate", Drip(every_s=0.01))
        started = time.monotonic()
        with pytest.raises(EngineTimeoutError, match="did not answer within the time limit"):
            await client.generate(PROMPT, SAMPLING)
        assert 0.25 < time.monotonic() - started < 30
        assert engine.calls["/generate"] == 1


async def test_retry_after_is_kept() -> None:
    async with ScriptedEngine() as engine, SGLangClient(base_url=engine.url, settings=QUICK) as client:
        engine.script("/generate", Status(429, retry_after="0.2"))
        started = time.monotonic()
        expect_undisturbed(engine, await client.generate(PROMPT, SAMPLING))
        assert time.monotonic() - started >= 0.2
        engine.always("/generate", Status(429, retry_after="3600"))
        with pytest.raises(EngineServerError, match="leaves no room"):
            await client.generate(PROMPT, SAMPLING)
        assert engine.calls["/generate"] == 3


async def test_a_lost_attempt_is_aborted_and_the_next_one_is_not() -> None:
    settings = replace(QUICK, idle_timeout_s=0.3)
    async with ScriptedEngine() as engine, SGLangClient(base_url=engine.url, settings=settings) as client:
        engine.script("/generate", Stall(), Reset())
        expect_undisturbed(engine, await client.generate(PROMPT, SAMPLING, rid="abc"))
        await asyncio.wait_for(engine.arrived("/abort_request", 2), 5)
        aborted = [request.payload["rid"] for request in engine.received if request.path == "/abort_request"]
        assert sorted(aborted) == sorted(engine.rids[:2])
        assert not any(engine.rids[2].startswith(rid) for rid in aborted)


async def test_weight_update_within_an_answer_gives_version_spans() -> None:
    async with (
        ScriptedEngine(weight_version="1") as engine,
        SGLangClient(base_url=engine.url, settings=QUICK) as client,
    ):
        second_update = NewVersion(n_tokens=0, version="3")
        engine.script("/generate", NewVersion(n_tokens=2, version="2"), Abort(n_tokens=1), second_update)
        for spans in ([("1", 0, 2), ("2", 2, 8)], [("2", 0, 1), ("3", 1, 8)]):
            generation = await client.generate(PROMPT, SAMPLING)
            assert [(span.version, span.start, span.end) for span in generation.weight_versions] == spans


# -- the probe at start-up -------------------------------------------------------------------------------------------


async def test_probe_describes_the_server() -> None:
    async with ScriptedEngine(weight_version="4") as engine, SGLangClient(base_url=engine.url) as client:
        info = await client.probe()
        assert (info.base_url, info.model_path, info.weight_version) == (engine.url, "/models/scripted", "4")
        for engine.lists_versions in (True, False):
            assert await client.lists_weight_versions() is engine.lists_versions
        engine.always("/model_info", Stall())
        with pytest.raises(EngineUnreachableError, match="check the URL"):
            await client.probe(timeout_s=0.2)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        *(
            (fault, EngineProtocolError, "^http://.* answers but .*check the port")
            for fault in (Body('{"model_path": 3}'), Body('{"model_path": "m"}'), Body("[1]"), Status(404), Status(302))
        ),
        (HTML_PAGE, EngineProtocolError, "^http://.* answers but is not SGLang.*check the port"),
        (GARBAGE_JSON, EngineProtocolError, "^http://.* answers but .*check the port"),
        (Status(503, "loading"), EngineServerError, "loading.*wait until the server has started"),
        (Status(401, "Unauthorized"), EngineRequestError, "api_key"),
    ],
    ids=repr,
)
async def test_a_probe_names_the_server_that_is_no_sglang(fault: Fault, error: type[EngineError], message: str) -> None:
    async with ScriptedEngine() as engine, SGLangClient(base_url=engine.url, settings=QUICK) as client:
        engine.always("/model_info", fault)
        engine.always("/get_model_info", fault)
        with pytest.raises(error, match=message) as caught:
            await client.probe()
        assert engine.url in str(caught.value)
        assert "\n" not in str(caught.value)


async def test_probe_of_a_server_that_speaks_no_http() -> None:
    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, SGLangClient(base_url=url, settings=QUICK) as client:
        with pytest.raises(EngineProtocolError, match="does not speak HTTP"):
            await client.probe()
