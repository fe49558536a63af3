"""vLLM's addresses and fields for token ids, for clients that render prompts themselves."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.harness.gateway import CALL, HELLO, WEATHER, Case, one_sample, post, serving


def generate(case: Case, ids: Any, *, status: int = 200, sampling: Any = None, **fields: Any) -> Any:
    body = {"model": "m", "token_ids": ids, "sampling_params": sampling or {"logprobs": 1}, **fields}
    answer = httpx.post(f"{case.llm.endpoint.removesuffix('/v1')}/inference/v1/generate", json=body, timeout=30)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_ids_go_to_the_engine_and_come_back_as_sampled() -> None:
    with serving("Hi.", "More.") as case:
        prompt, end = case.tokenizer.encode("Hello?"), case.tokenizer.eos_token_id
        sampling = {"logprobs": 1, "stop_token_ids": [end], "skip_special_tokens": False}
        [choice] = generate(case, prompt, sampling=sampling)["choices"]
        longer = [*prompt, *choice["token_ids"], *case.tokenizer.encode(" And?")]
        generate(case, longer, sampling={"logprobs": 1, "max_tokens": 200})
        assert [payload["input_ids"] for payload in case.payloads] == [prompt, longer]
        assert case.payloads[0]["sampling_params"]["stop_token_ids"] == [end]
        assert case.payloads[0]["sampling_params"]["max_new_tokens"] == 256  # the run's, not the default of completions
        turn, tokens = case.turns[0], choice["logprobs"]["content"]
        assert choice["token_ids"] == turn.response_ids.tolist()
        assert turn.log_probs is not None
        assert [token["logprob"] for token in tokens] == pytest.approx(turn.log_probs.tolist())
        assert [token["token"] for token in tokens] == [f"token_id:{id}" for id in turn.response_ids]
        one_sample(case)


def test_a_refusal_names_the_field() -> None:
    with serving("Hi.") as case:

        def refusal(ids: Any = (1,), **fields: Any) -> str:
            return generate(case, list(ids), status=400, **fields)["error"]["message"]

        assert "token_ids" in refusal([])
        assert "token_ids" in refusal(["1"])
        assert "sampling_params" in refusal(sampling=1)
        assert "sampling_params.telepathy" in refusal(sampling={"telepathy": 1})
        assert "stop_token_ids" in refusal(sampling={"stop_token_ids": ["a"]})
        assert "features" in refusal(features={"image": 1})


def test_tokenize_has_the_prompt_that_the_engine_read() -> None:
    with serving(CALL, "It is warm.") as case:
        fields = {"tools": [WEATHER], "logprobs": True, "return_tokens_as_token_ids": True}
        asked_first = post(case, "tokenize", messages=HELLO, tools=[WEATHER])["tokens"]
        answer = post(case, "chat/completions", messages=HELLO, **fields, seed=2**62, return_prompt_token_ids=True)
        [choice] = answer["choices"]
        call = choice["message"]
        result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "30 degrees"}
        post(case, "chat/completions", messages=[*HELLO, call, result], **fields)
        first, second = (payload["input_ids"] for payload in case.payloads)
        assert asked_first == choice["prompt_token_ids"] == first
        asked_later = post(case, "tokenize", messages=HELLO, tools=[WEATHER])
        assert asked_later == {"count": len(first), "tokens": first}
        assert post(case, "tokenize", messages=[*HELLO, call, result], tools=[WEATHER])["tokens"] == second
        ids = [int(token["token"].removeprefix("token_id:")) for token in choice["logprobs"]["content"]]
        assert ids == case.turns[0].response_ids.tolist()
        one_sample(case)


def test_completions_name_tokens_by_id() -> None:
    with serving("Hi.") as case:
        [choice] = post(case, "completions", prompt="Hello?", logprobs=0, return_tokens_as_token_ids=True)["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in case.turns[0].response_ids]
