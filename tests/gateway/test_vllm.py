"""vLLM's addresses and fields for token ids, for clients that render prompts themselves."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.harness.gateway import CALL, HELLO, WEATHER, Case, one_sample, post, serving


def generate(case: Case, ids: list[int], *, status: int = 200, **sampling: Any) -> Any:
    body = {"model": "m", "token_ids": ids, "sampling_params": {"logprobs": 1, **sampling}}
    answer = httpx.post(f"{case.llm.endpoint.removesuffix('/v1')}/inference/v1/generate", json=body, timeout=30)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_ids_go_to_the_engine_and_come_back_as_sampled() -> None:
    with serving("Hi.", "More.") as case:
        prompt = case.tokenizer.encode("Hello?")
        first = generate(case, prompt, stop_token_ids=[case.tokenizer.eos_token_id], skip_special_tokens=False)
        [choice] = first["choices"]
        more = [*prompt, *choice["token_ids"], *case.tokenizer.encode(" And?")]
        generate(case, more, max_tokens=200)
        assert [payload["input_ids"] for payload in case.payloads] == [prompt, more]
        assert case.payloads[0]["sampling_params"]["stop_token_ids"] == [case.tokenizer.eos_token_id]
        assert case.payloads[0]["sampling_params"]["max_new_tokens"] == 256  # the run's, not that of completions
        turn = case.turns[0]
        assert choice["token_ids"] == turn.response_ids.tolist()
        assert turn.log_probs is not None
        assert [one["logprob"] for one in choice["logprobs"]["content"]] == pytest.approx(turn.log_probs.tolist())
        assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{id}" for id in turn.response_ids]
        one_sample(case)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": ["1"]}, "token_ids"),
        ({"token_ids": [1], "sampling_params": 1}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"telepathy": 1}}, "sampling_params.telepathy"),
        ({"token_ids": [1], "sampling_params": {"stop_token_ids": ["a"]}}, "stop_token_ids"),
        ({"token_ids": [1], "features": {"image": 1}}, "features"),
    ],
)
def test_a_refusal_names_the_field(body: dict[str, Any], named: str) -> None:
    with serving("Hi.") as case:
        answer = httpx.post(f"{case.llm.endpoint.removesuffix('/v1')}/inference/v1/generate", json=body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


def test_tokenize_has_the_prompt_that_the_engine_read() -> None:
    with serving(CALL, "It is warm.") as case:
        more = {"tools": [WEATHER], "logprobs": True, "return_tokens_as_token_ids": True}
        before = post(case, "tokenize", messages=HELLO, tools=[WEATHER])["tokens"]
        answer = post(case, "chat/completions", messages=HELLO, **more, seed=2**62, return_prompt_token_ids=True)
        [choice] = answer["choices"]
        call = choice["message"]
        result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "30 degrees"}
        post(case, "chat/completions", messages=[*HELLO, call, result], **more)
        first, second = (payload["input_ids"] for payload in case.payloads)
        assert before == choice["prompt_token_ids"] == first
        after = post(case, "tokenize", messages=HELLO, tools=[WEATHER])
        assert after == {"count": len(first), "tokens": first}
        assert post(case, "tokenize", messages=[*HELLO, call, result], tools=[WEATHER])["tokens"] == second
        ids = [int(one["token"].removeprefix("token_id:")) for one in choice["logprobs"]["content"]]
        assert ids == case.turns[0].response_ids.tolist()
        one_sample(case)


def test_completions_name_tokens_by_id() -> None:
    with serving("Hi.") as case:
        [choice] = post(case, "completions", prompt="Hello?", logprobs=0, return_tokens_as_token_ids=True)["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in case.turns[0].response_ids]
