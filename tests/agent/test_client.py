"""The client of an agent: the model's vocabulary and end tokens, and answers that an abort cuts."""

import json
from pathlib import Path
from typing import Any

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.buffer.batched.multi_turn import SGLangSampler
from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.errors import OutOfVocabularyError
from agl_slime.support.agl import LLM
from tests.harness.engine_faults import Abort, answering
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer

TOKENIZER: Any = small_tokenizer()


def client_for(engine: ScriptedEngine | None, model: Path | str) -> Any:
    endpoint = engine.url if engine is not None else "http://127.0.0.1:9"
    return SGLangLitAgent()._access.client(LLM(endpoint=endpoint, model=str(model)), TOKENIZER)


async def test_ids_outside_the_models_vocabulary_are_not_sent(tmp_path: Path) -> None:
    sizes = {'{"vocab_size": 300}': 300, '{"text_config": {"vocab_size": 41}}': 41}
    for config, size in {**sizes, **dict.fromkeys(("{}", "[", "[]"), 402)}.items():  # the tokenizer's
        (tmp_path / "config.json").write_text(config)
        async with client_for(None, tmp_path) as client:
            assert client.vocab_size == size
            with pytest.raises(OutOfVocabularyError, match=f"outside the model's vocabulary of {size} ids"):
                await client.generate([1, size], SamplingParams(max_new_tokens=1))


async def ask(engine: ScriptedEngine, model: Path, sampling: SamplingParams | None = None) -> Any:
    """One answer of ``engine`` through the client that an agent makes for ``model``."""
    async with client_for(engine, model) as client:
        return await client.generate([1, 2, 3], sampling or SamplingParams(max_new_tokens=50))


def encoded(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def saying(text: str, *, end: int = TOKENIZER.eos_token_id) -> ScriptedEngine:
    return ScriptedEngine(
        vocab_size=len(TOKENIZER),
        eos_id=end,
        next_id=answering(encoded(text), end_id=end),
        decode=lambda ids: TOKENIZER.decode(list(ids)),
    )


@pytest.mark.parametrize(
    ("text", "stop", "read"),
    [("caf\u00e9 cr\u00e8me", "", ""), ("\U0001f600!", "", ""), ("caf\u00e9 sol", "\u00e9 s", "caf")],
)
async def test_a_character_that_an_abort_splits_is_read_whole(text: str, stop: str, read: str, tmp_path: Path) -> None:
    """In the text, and in a stop string that begins with it."""
    sampling = SamplingParams(max_new_tokens=50, stop=(stop,) if stop else ())
    for n in range(1, len(encoded(text)) + (0 if stop else 2)):
        async with saying(text) as engine:
            whole = await ask(engine, tmp_path, sampling)
            engine.script("/generate", Abort(n_tokens=n))
            joined = await ask(engine, tmp_path, sampling)
        assert (joined.output_ids, joined.text) == (whole.output_ids, read or text)
        assert (joined.finish_reason, joined.matched_stop) == ("stop", stop or TOKENIZER.eos_token_id)


def test_nor_do_batched_rollouts_see_half_a_character() -> None:
    with in_thread(saying("caf\u00e9")) as engine:
        sampler = SGLangSampler(base_url=engine.url, tokenizer=TOKENIZER)
        n = len(encoded("caf\u00e9"))
        engine.script("/generate", Abort(n_tokens=n - 1), Abort(n_tokens=n))
        [answer] = sampler.sample([{"input_ids": [1, 2, 3]}], [SamplingParams(max_new_tokens=50)])
        assert isinstance(answer, Generation)
        assert (answer.text, answer.finish_reason, answer.resumed > 0) == ("caf\u00e9", "stop", True)


async def test_an_answer_aborted_at_any_of_the_models_end_tokens_has_ended(tmp_path: Path) -> None:
    several = ("generation_config.json", {"eos_token_id": [7, 9]})
    nested = ("config.json", {"text_config": {"eos_token_id": [9]}})
    for number, (name, content) in enumerate((several, ("config.json", {"eos_token_id": 9}), nested)):
        model = tmp_path / str(number)
        model.mkdir()
        (model / name).write_text(json.dumps(content))
        async with saying("hello", end=9) as engine:
            n = len(encoded("hello")) + 1
            engine.script("/generate", Abort(n_tokens=n))
            answer = await ask(engine, model)
            assert engine.calls["/generate"] == 1
        ended = (len(answer.output_ids), answer.finish_reason, answer.matched_stop, answer.text)
        assert ended == (n, "stop", 9, "hello")


async def test_a_stop_token_of_the_server_ends_answers_but_not_one_of_a_request() -> None:
    """The checkpoint is not on this machine, so its generation config cannot be read."""
    plain = SamplingParams(max_new_tokens=50)
    for sampling, reason in ((plain, "stop"), (SamplingParams(max_new_tokens=50, stop_token_ids=(9,)), "length")):
        async with saying("hello", end=9) as engine:
            if sampling is not plain:
                engine.eos_id = None
            async with client_for(engine, "org/model") as client:
                whole = await client.generate([1, 2, 3], sampling)
                engine.script("/generate", Abort(n_tokens=len(whole.output_ids)))
                answer = await client.generate([1, 2, 3], SamplingParams(max_new_tokens=8))
        assert (whole.finish_reason, whole.matched_stop, answer.finish_reason) == ("stop", 9, reason)
        assert reason == "length" or (answer.output_ids, answer.matched_stop) == (whole.output_ids, 9)


@pytest.mark.parametrize("suffix", ["/", "/v1/"])
async def test_an_address_with_v1_or_a_slash_is_understood(suffix: str, tmp_path: Path) -> None:
    async with saying("hello") as engine:
        llm = LLM(endpoint=engine.url + suffix, model=str(tmp_path))
        async with SGLangLitAgent()._access.client(llm, TOKENIZER) as client:
            assert (await client.probe()).base_url == engine.url
            assert (await client.generate([1, 2, 3], SamplingParams(max_new_tokens=50))).text == "hello"
