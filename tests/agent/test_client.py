"""What an agent's client knows of the model, before it asks the server and when it takes up an aborted answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.agent.batched.multi_turn import SGLangSampler
from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.errors import OutOfVocabularyError
from agl_slime.support.agl import LLM
from tests.harness.engine_faults import Abort, answering
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer

TOKENIZER: Any = small_tokenizer()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"vocab_size": 300}', 300),
        ('{"text_config": {"vocab_size": 41}}', 41),
        ('{"model_type": "qwen3"}', None),
        ("not json", None),
        ("[]", None),
        (None, None),
    ],
)
def test_the_vocabulary_is_read_from_the_checkpoint_of_this_machine(
    config: str | None, expected: int | None, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    client = SGLangLitAgent()._client_for(LLM(endpoint="http://127.0.0.1:9", model=str(tmp_path)), TOKENIZER)
    assert client.vocab_size == expected


async def test_an_id_outside_of_it_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    client = SGLangLitAgent()._client_for(LLM(endpoint="http://127.0.0.1:9", model=str(tmp_path)), TOKENIZER)
    async with client:
        with pytest.raises(OutOfVocabularyError, match="outside the model's vocabulary of 300 ids"):
            await client.generate([1, 300], SamplingParams(max_new_tokens=1))


async def ask(engine: ScriptedEngine, model: Path, sampling: SamplingParams | None = None) -> Any:
    """One answer of ``engine`` through the client that an agent makes for ``model``."""
    async with SGLangLitAgent()._client_for(LLM(endpoint=engine.url, model=str(model)), TOKENIZER) as client:
        return await client.generate([1, 2, 3], sampling or SamplingParams(max_new_tokens=50))


def saying(text: str, *, end: int | None = None) -> ScriptedEngine:
    return ScriptedEngine(
        vocab_size=len(TOKENIZER),
        eos_id=TOKENIZER.eos_token_id if end is None else end,
        next_id=answering(
            TOKENIZER.encode(text, add_special_tokens=False), end_id=TOKENIZER.eos_token_id if end is None else end
        ),
        decode=lambda ids: TOKENIZER.decode(list(ids)),
    )


@pytest.mark.parametrize("text", ["caf\u00e9 cr\u00e8me", "\U0001f600!", "\u6c34\u706b"])
async def test_a_character_that_an_abort_splits_is_whole_in_the_text(text: str, tmp_path: Path) -> None:
    n = len(TOKENIZER.encode(text, add_special_tokens=False))
    for after in range(1, n + 2):
        async with saying(text) as engine:
            whole = await ask(engine, tmp_path)
            engine.script("/generate", Abort(after=after))
            joined = await ask(engine, tmp_path)
        assert (joined.output_ids, joined.text) == (whole.output_ids, text)
        assert (joined.finish_reason, joined.matched_stop) == ("stop", TOKENIZER.eos_token_id)


def test_nor_do_batched_rollouts_see_half_a_character() -> None:
    with in_thread(saying("caf\u00e9")) as engine:
        sampler = SGLangSampler(base_url=engine.url, tokenizer=TOKENIZER)
        n = len(TOKENIZER.encode("caf\u00e9", add_special_tokens=False))
        engine.script("/generate", *[Abort(after=after) for after in range(1, n + 1)][-2:])
        [got] = sampler.sample([{"input_ids": [1, 2, 3]}], [SamplingParams(max_new_tokens=50)])
        assert isinstance(got, Generation)
        assert (got.text, got.finish_reason, got.resumed > 0) == ("caf\u00e9", "stop", True)


async def test_a_stop_string_that_begins_in_a_split_character_is_found(tmp_path: Path) -> None:
    sampling = SamplingParams(max_new_tokens=50, stop=("\u00e9 s",))
    n = len(TOKENIZER.encode("caf\u00e9 sol", add_special_tokens=False))
    for after in range(1, n):
        async with saying("caf\u00e9 sol") as engine:
            whole = await ask(engine, tmp_path, sampling)
            engine.script("/generate", Abort(after=after))
            joined = await ask(engine, tmp_path, sampling)
        assert joined.output_ids == whole.output_ids
        assert (joined.text, joined.finish_reason, joined.matched_stop) == ("caf", "stop", "\u00e9 s")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config.json", {"eos_token_id": [7, 9]}),
        ("config.json", {"eos_token_id": 9}),
        ("config.json", {"text_config": {"eos_token_id": [9]}}),
    ],
)
async def test_an_answer_aborted_at_any_of_the_models_end_tokens_has_ended(
    name: str, content: Any, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    async with saying("hello", end=9) as engine:
        n = len(TOKENIZER.encode("hello", add_special_tokens=False)) + 1
        engine.script("/generate", Abort(after=n))
        got = await ask(engine, tmp_path)
        assert engine.calls["/generate"] == 1
    assert (len(got.output_ids), got.finish_reason, got.matched_stop, got.text) == (n, "stop", 9, "hello")


async def test_an_end_token_that_the_server_stopped_at_is_known_from_then_on(tmp_path: Path) -> None:
    """The checkpoint is not on this machine, so its generation config cannot be read."""
    llm = LLM(endpoint="", model="org/model")
    async with saying("hello", end=9) as engine:
        llm.endpoint = engine.url
        client = SGLangLitAgent()._client_for(llm, TOKENIZER)
        whole = await client.generate([1, 2, 3], SamplingParams(max_new_tokens=50))
        engine.script("/generate", Abort(after=len(whole.output_ids)))
        got = await client.generate([1, 2, 3], SamplingParams(max_new_tokens=50))
        await client.aclose()
    assert (got.output_ids, got.finish_reason, got.matched_stop) == (whole.output_ids, "stop", 9)


async def test_a_requests_own_stop_token_is_not_taken_for_the_models(tmp_path: Path) -> None:
    async with saying("hello", end=9) as engine:
        own = SamplingParams(max_new_tokens=50, stop_token_ids=(9,))
        engine.eos_id = None
        async with SGLangLitAgent()._client_for(LLM(endpoint=engine.url, model=str(tmp_path)), TOKENIZER) as client:
            whole = await client.generate([1, 2, 3], own)
            engine.script("/generate", Abort(after=len(whole.output_ids)))
            got = await client.generate([1, 2, 3], SamplingParams(max_new_tokens=8))
    assert got.finish_reason == "length"


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_an_address_with_v1_or_a_slash_is_understood(suffix: str, tmp_path: Path) -> None:
    async with saying("hello") as engine:
        llm = LLM(endpoint=engine.url + suffix, model=str(tmp_path))
        async with SGLangLitAgent()._client_for(llm, TOKENIZER) as client:
            assert (await client.probe()).base_url == engine.url
            assert (await client.generate([1, 2, 3], SamplingParams(max_new_tokens=50))).text == "hello"
