"""Scores of given tokens by an engine: the embedded one, and a real SGLang under the marker ``sglang``."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from agl_slime import errors
from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.engine.client.transport import ClientSettings
from agl_slime.engine.scoring import ScoreRequest, ScoreResult, ScoringClient, vocabulary_digest
from agl_slime.support.http import listening
from tests.harness.engine_client import PROMPTS, TOLERANCE, log_softmax
from tests.harness.engine_servers import Server

QUICK = ClientSettings(max_attempts=2, backoff_base_s=0.001, total_timeout_s=10.0)


@pytest.fixture
async def scoring(server: Server) -> AsyncIterator[ScoringClient]:
    async with ScoringClient(base_url=server.url, in_flight=2, batch_tokens=48) as client:
        yield client


def expected(model: Any, ids: list[int], start: int) -> list[float]:
    """Of one forward pass in float32."""
    table = log_softmax(model, ids)
    return [float(table[place - 1, ids[place]]) for place in range(start, len(ids))]


async def test_scores_are_the_models_log_probs_in_batches_and_alone(server: Server, scoring: ScoringClient, model: Any):
    sequences = [ScoreRequest(ids, start) for ids in PROMPTS for start in (1, 3, len(ids) - 1)]
    async with SGLangClient(base_url=server.url) as client:
        version = await client.weight_version()
        sampled = await client.generate(PROMPTS[0], SamplingParams(temperature=1.0, max_new_tokens=24))
    together = await scoring.score(sequences)
    for sequence, scored in zip(sequences, together, strict=True):
        assert isinstance(scored, ScoreResult)
        alone = await scoring.score_one(sequence.ids, sequence.start)
        values = expected(model, [*sequence.ids], sequence.start)
        assert len(scored.log_probs) == len(values)
        assert np.abs(scored.log_probs - values).max() < TOLERANCE
        assert np.abs(alone.log_probs - values).max() < TOLERANCE
        assert scored.version == version
    # as sampling reported them at temperature one
    scored = await scoring.score_one([*PROMPTS[0], *sampled.output_ids], len(PROMPTS[0]))
    assert np.abs(scored.log_probs - np.array(sampled.log_probs)).max() < TOLERANCE


async def test_a_sequence_that_is_refused_does_not_fail_its_batch(scoring: ScoringClient, model: Any):
    too_long = [5] * 100_000
    scoring.batch_tokens = 10**6
    bad_start = ScoreRequest(PROMPTS[0], len(PROMPTS[0]))
    good, long, start = await scoring.score([ScoreRequest(PROMPTS[0]), ScoreRequest(too_long), bad_start])
    assert isinstance(good, ScoreResult)
    assert np.abs(good.log_probs - expected(model, PROMPTS[0], 1)).max() < TOLERANCE
    assert isinstance(long, errors.ContextOverflowError)
    assert isinstance(start, errors.EngineRequestError)
    with pytest.raises(errors.EngineRequestError, match="start is 0 with 5 tokens"):
        await scoring.score_one(PROMPTS[0], 0)


async def test_an_id_outside_the_vocabulary_is_never_sent(server: Server):
    async with ScoringClient(base_url=server.url, vocab_size=300) as client:
        ok, outside = await client.score([ScoreRequest([5, 6, 7]), ScoreRequest([5, 6, 300])])
    assert isinstance(ok, ScoreResult)
    assert isinstance(outside, errors.OutOfVocabularyError)


async def test_the_digest_of_the_servers_vocabulary_is_the_tokenizers(scoring: ScoringClient, tokenizer: Any):
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(len(tokenizer))]
    assert await scoring.vocabulary_digest(len(tokenizer)) == vocabulary_digest(texts)
    assert vocabulary_digest([*texts[:-1], "x"]) != vocabulary_digest(texts)
    assert vocabulary_digest(["a", "b"]) != vocabulary_digest(["ab", ""])


async def answered(answers: list[Any], *, in_flight: int = 4) -> tuple[list[ScoreResult | errors.EngineError], int]:
    """The result of five sequences, two per request, with an engine of scripted answers; and its most requests at
    once."""
    running = most = 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        body = await request.json()
        running -= 1
        status, answer = answers.pop(0) if answers else (200, None)
        if answer is None:
            answer = [{"meta_info": meta(ids)} for ids in body["input_ids"]]
        return web.Response(status=status, text=json.dumps(answer), content_type="application/json")

    app = web.Application()
    app.router.add_post("/generate", generate)
    async with listening(app, host="127.0.0.1", port=0, backlog=8) as url:
        client = ScoringClient(base_url=url, settings=QUICK, in_flight=in_flight, batch_tokens=6)
        async with client:
            return await client.score([ScoreRequest([1, 2, 3])] * 5), most


def meta(ids: list[int], **changes: Any) -> dict[str, Any]:
    pairs = [[None if place == 0 else -0.5, token, None] for place, token in enumerate(ids)]
    return {"finish_reason": {"type": "length"}, "input_token_logprobs": pairs, **changes}


async def test_requests_are_batched_and_bounded_and_retried():
    results, most = await answered([(503, {}), (200, None)], in_flight=1)
    assert most == 1
    assert [scored.log_probs.tolist() for scored in results if isinstance(scored, ScoreResult)] == [[-0.5, -0.5]] * 5


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((500, {}), errors.EngineServerError),
        ((200, [{"meta_info": meta([1, 2, 3], finish_reason={"type": "abort", "message": "paused"})}] * 2),
         errors.EngineServerError),
        ((200, [{"meta_info": meta([1, 2, 4])}] * 2), errors.EngineProtocolError),
        ((200, [{"meta_info": meta([1, 2, 3])}]), errors.EngineProtocolError),
        ((200, [{"meta_info": {"input_token_logprobs": [[None, 1], [float("nan"), 2], [-1.0, 3]]}}] * 2),
         errors.EngineProtocolError),
    ],
)  # fmt: skip
async def test_a_wrong_answer_is_an_error_of_its_batch_only(answer: Any, error: type[errors.EngineError]):
    results, _ = await answered([answer] * 2, in_flight=1)
    assert [type(result) for result in results] == [error] * 2 + [ScoreResult] * 3


async def test_an_engine_that_is_gone_is_an_error_of_every_sequence():
    async with ScoringClient(base_url="http://127.0.0.1:9", settings=QUICK) as client:
        (only,) = await client.score([ScoreRequest([1, 2])])
    assert isinstance(only, errors.EngineUnreachableError)
