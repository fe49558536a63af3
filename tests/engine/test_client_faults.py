"""The client on an engine that misbehaves: one clear outcome each time, within its limits, with no token of an
abandoned attempt in the answer."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agl_slime.engine.client.client import ClientSettings, SGLangClient
from agl_slime.engine.client.generation import FinishReason, Generation, SamplingParams, parse_generation
from agl_slime.engine.client.resumable import ResumableGeneration
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
    PIECES,
    Abort,
    Body,
    Drip,
    Fault,
    NewVersion,
    Reset,
    Stall,
    Status,
)
from tests.harness.examples import examples
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


# the bytes of each id, with halves of characters among them, as in byte-level vocabularies
BYTES = [piece.encode() for piece in PIECES] + [b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98", b"\x80", b"a\xe6\xb0", b"\xb4b"]


def decode(ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    return b"".join(BYTES[token % len(BYTES)] for token in ids).decode(errors="replace")


# a prompt ends in a whole character, as chat templates do
prompts = st.lists(st.integers(0, len(BYTES) - 1), max_size=5).map(lambda ids: [*ids, 0])
# few letters, so that they begin in one token and end in another, are contained in each other, and repeat themselves
stop_strings = st.lists(st.text(alphabet="abc</x>é水", min_size=1, max_size=5), max_size=3, unique=True)
stop_tokens = st.lists(st.integers(0, len(BYTES) - 1), max_size=1)
aborts = st.lists(st.integers(0, 6), max_size=8)


async def run(
    prompt: list[int], sampling: SamplingParams, faults: list[Abort | NewVersion], *, engine: ScriptedEngine
) -> tuple[Generation, list[int]]:
    """The client's loop without HTTP; also the size of each request's budget."""
    generation = ResumableGeneration(
        prompt_ids=prompt,
        sampling=sampling,
        eos_token_ids=[] if engine.eos_id is None else [engine.eos_id],
        decode=decode,
    )
    budgets = []
    script = list(faults)
    while not generation.done:
        request = generation.next_request()
        budgets.append(request.sampling.max_new_tokens)
        payload = {
            "rid": str(len(budgets)),
            "input_ids": list(request.input_ids),
            "sampling_params": request.sampling.to_payload(),
        }
        generation.add(parse_generation(await engine.sample(payload, script.pop(0) if script else None)))
    return generation.result(latency_s=0.0), budgets


@given(
    prompt=prompts,
    stop=stop_strings,
    stop_ids=stop_tokens,
    eos=st.none() | st.integers(0, len(BYTES) - 1),
    limit=st.integers(1, 24),
    cuts=aborts,
    trim=st.booleans(),
)
@settings(max_examples=examples(400))
@example(prompt=[0], stop=["éa"], stop_ids=[], eos=None, limit=24, cuts=[1] * 8, trim=True)
@example(prompt=[0], stop=["ab"], stop_ids=[], eos=None, limit=24, cuts=[1] * 8, trim=True)
def test_the_joined_generation_is_the_unaborted_one(prompt, stop, stop_ids, eos, limit, cuts, trim):
    sampling = SamplingParams(
        max_new_tokens=limit,
        stop=tuple(stop),
        stop_token_ids=tuple(stop_ids),
        extra={} if trim else {"no_stop_trim": True},
    )
    engine = ScriptedEngine(vocab_size=len(BYTES), decode=decode, eos_id=eos)
    whole, _ = asyncio.run(run(prompt, sampling, [], engine=engine))
    joined, budgets = asyncio.run(run(prompt, sampling, [Abort(n_tokens=n) for n in cuts], engine=engine))

    for name in ("output_ids", "log_probs", "text", "finish_reason", "matched_stop"):
        assert getattr(joined, name) == getattr(whole, name), name
    assert joined.prompt_tokens == len(prompt)
    assert joined.resumed <= len(cuts)
    assert all(1 <= budget <= limit for budget in budgets)


@given(
    prompt=prompts,
    limit=st.integers(1, 24),
    faults=st.lists(
        st.builds(Abort, n_tokens=st.integers(0, 6))
        | st.builds(NewVersion, n_tokens=st.integers(0, 6), version=st.sampled_from("123")),
        max_size=8,
    ),
    lists_versions=st.booleans(),
)
def test_weight_spans_tile_the_output(prompt, limit, faults, lists_versions):
    engine = ScriptedEngine(weight_version="0", lists_versions=lists_versions)
    joined, _ = asyncio.run(run(prompt, SamplingParams(max_new_tokens=limit), faults, engine=engine))
    assert len(joined.output_ids) == len(joined.log_probs) == limit
    end = 0
    for span, following in zip(joined.weight_versions, (*joined.weight_versions[1:], None), strict=True):
        assert span.start == end < span.end
        assert following is None or following.version != span.version  # neighbours of one version are one span
        end = span.end
    assert end == limit


@given(
    prompt=prompts,
    text=st.text(alphabet="ab é水😀日語。", max_size=12),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    step=st.integers(1, 9),
    lossy=st.booleans(),
)
@settings(max_examples=examples(300))
def test_the_text_of_a_stream_only_grows_wherever_its_parts_are_cut(prompt, text, cuts, step, lossy):
    """For each replacement of a character that is cut: U+FFFD on both sides, or nothing."""
    ids, errors = list(text.encode()), "replace" if lossy else "ignore"
    generation = ResumableGeneration(
        prompt_ids=[97, *prompt[:1]],
        sampling=SamplingParams(max_new_tokens=100),
        decode=lambda ids, skip_special_tokens=False: bytes(ids).decode(errors="replace"),
    )
    streamed = ""
    for start, end in pairwise(sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})):
        generation.next_request()
        read, text_of_part = generation.reader(), ""
        for n in (*range(start + step, end, step), end):
            text_of_part = bytes(ids[start:n]).decode(errors=errors)
            pairs = [[-0.5, token, None] for token in ids[start:n]]
            now = read({"text": text_of_part, "meta_info": {"output_token_logprobs": pairs}}).rstrip("\ufffd")
            assert text.startswith(now)
            assert now.startswith(streamed)
            streamed = now
        made = Generation(
            output_ids=tuple(ids[start:end]),
            log_probs=(-0.5,) * (end - start),
            text=text_of_part,
            finish_reason="abort",
        )
        generation.add(made)
    assert streamed == text


# -- cases that the properties do not draw --------------------------------------------------------------------------


def part(ids: list[int], text: str, reason: FinishReason = "abort", *, tokens: int = 0) -> Generation:
    return Generation(
        output_ids=tuple(ids),
        log_probs=tuple(-float(token) for token in ids),
        text=text,
        finish_reason=reason,
        prompt_tokens=tokens,
        cached_tokens=tokens,
    )


def resumed(*parts: Generation, **sampling: object) -> tuple[ResumableGeneration, list[int]]:
    """The generation after these parts, and the budget of each request."""
    generation = ResumableGeneration(prompt_ids=[7, 8], sampling=SamplingParams(**{"max_new_tokens": 10} | sampling))  # pyright: ignore[reportArgumentType]
    budgets = []
    for added in parts:
        budgets.append(generation.next_request().sampling.max_new_tokens)
        generation.add(added)
    return generation, budgets


def test_ignore_eos_ignores_stop_tokens_at_the_abort_too() -> None:
    for ignore_eos in (True, False):
        generation, _ = resumed(part([1, 5], "x"), stop_token_ids=(5,), extra={"ignore_eos": ignore_eos})
        assert generation.done != ignore_eos


def test_a_grammar_is_sampled_again_from_its_start() -> None:
    generation, budgets = resumed(part([1, 2], "aa", tokens=1), part([3], "a", "stop", tokens=1), extra={"regex": "a+"})
    assert budgets == [10, 10]
    result = generation.result(latency_s=0)
    assert (result.output_ids, result.log_probs, result.text, result.resumed) == ((3,), (-3.0,), "a", 1)


def test_min_new_tokens_shrinks() -> None:
    for parts, least in (([], 5), ([2], 3), ([2, 4], 0)):
        generation, _ = resumed(*(part([1] * n, "a" * n) for n in parts), extra={"min_new_tokens": 5})
        assert generation.next_request().sampling.extra["min_new_tokens"] == least
