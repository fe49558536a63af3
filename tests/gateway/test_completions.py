"""Completions: the engine is asked for the client's text in tokens, and the client receives the samples as text. vLLM's
addresses and fields for token ids, for clients that render prompts themselves."""

from typing import Any

import httpx
import pytest

from agl_slime.tokens.attributes import MESSAGES_NEW
from agl_slime.tokens.forks import ForkReason
from tests.gateway.protocols import Talk, delta_of, events_of
from tests.harness.gateway import CALL, HELLO, WEATHER, Case, one_sample, post, serving, trained_once

END = "<|im_end|>"


def complete(case: Case, prompt: Any, **fields: Any) -> dict[str, Any]:
    return post(case, "completions", **{"prompt": prompt, "max_tokens": 50, **fields})["choices"][0]


def prompt_ids(case: Case) -> list[list[int]]:
    return [payload["input_ids"] for payload in case.payloads]


def test_prompt_that_extends_the_whole_answer_is_one_sample() -> None:
    with serving("one two", "three") as case:
        first = complete(case, "Count: ", logprobs=1)
        assert first["text"] == "one two"
        tokens = first["logprobs"]["tokens"]
        text = "".join(tokens)
        assert text == f"one two{END}"
        for token, offset in zip(tokens, first["logprobs"]["text_offset"], strict=True):
            assert text[offset:].startswith(token)
        assert complete(case, f"Count: one two{END} and ")["text"] == "three"
        first_ids = case.turns[0].token_ids.tolist()
        assert prompt_ids(case)[1][: len(first_ids)] == first_ids
        assert case.tokenizer.decode(prompt_ids(case)[1]) == f"Count: one two{END} and "
        one_sample(case)


def test_stop_token_omitted_by_the_client_is_not_sent_to_the_engine() -> None:
    with serving("one two", "three") as case:
        complete(case, "Count: ")
        complete(case, "Count: one two and ")
        without_stop = case.turns[0].token_ids.tolist()[:-1]
        assert prompt_ids(case)[1][: len(without_stop)] == without_stop
        assert case.tokenizer.decode(prompt_ids(case)[1]) == "Count: one two and "
        assert [turn.fork for turn in case.turns] == [None, ForkReason.TEMPLATE]
        trained_once(case.turns, case.segments)


def test_growing_prompts_share_one_buffer_and_spans_hold_only_new_text() -> None:
    count, prompts = 40, ["Count: "]
    with serving("one two") as case:
        for _ in range(count):
            prompts.append(prompts[-1] + complete(case, prompts[-1])["text"] + f"{END} and three ")
        written = sum(len(span.attributes.get(MESSAGES_NEW, "")) for span in case.spans)
        assert written < 6 * len(prompts[-1])  # a span with its whole prompt would make it twenty times as much
        for turn, prompt in zip(case.turns, prompts, strict=False):
            assert turn.messages is not None
            assert "".join(message["content"] for message in turn.messages) == prompt
        assert case.attempt._first_session is not None
        buffers = {id(turn.prompt_ids.base) for turn in case.attempt._first_session.turns[count // 2 :]}
        assert len(buffers) == 1
        trained_once(case.turns, case.segments)


def test_answer_cut_by_max_tokens_is_continued_in_one_sample() -> None:
    with serving("one two three four") as case:
        text = "Count: "
        for _ in range(3):
            text += complete(case, text, max_tokens=3)["text"]
        one_sample(case, 3)


def test_text_after_a_stop_sequence_continues_the_conversation() -> None:
    for between in ("\nObservation: 4\n", " = 4\n"):
        with serving("Action: 2 + 2\nObservation: made up", "Done.") as case:
            first = complete(case, "Q\n", stop=["\nObs"])
            assert first["text"] == "Action: 2 + 2"
            prompt = f"Q\n{first['text']}{between}"
            complete(case, prompt)
            assert case.tokenizer.decode(prompt_ids(case)[1]) == prompt
            trained_once(case.turns, case.segments)


def test_second_answer_to_one_prompt_is_continued_with_its_tokens() -> None:
    with serving("one", "two", "three") as case:
        for prompt in ("Say: ", "Say: ", f"Say: two{END}!"):
            complete(case, prompt)
        assert prompt_ids(case)[2][: case.turns[1].length] == case.turns[1].token_ids.tolist()
        assert len(case.segments) == 2
        trained_once(case.turns, case.segments)


def test_raw_text_stays_raw() -> None:
    for text in ("<think>a</think>\n\nFour.", "  <think>a b c", " Four. \n"):
        with serving(text, token_s=0.002) as case:
            assert complete(case, "2+2=")["text"] == text
            body = {"model": "m", "prompt": "2+2=", "max_tokens": 50, "stream": True}
            pieces = [*map(delta_of, events_of(httpx.post(f"{case.llm.endpoint}/completions", json=body)))]
            assert "".join(pieces) == text
            assert len(pieces) > 2


def test_prompt_ids_are_sent_as_they_are() -> None:
    """Ids that no tokenizer would give for their text."""
    with serving("one", "two") as case:
        ids = [i for character in "Count to two" for i in case.tokenizer.encode(character, add_special_tokens=False)]
        assert ids != case.tokenizer.encode("Count to two", add_special_tokens=False)
        complete(case, ids)
        longer = [*case.turns[0].token_ids.tolist(), *ids]
        complete(case, longer)
        assert prompt_ids(case) == [ids, longer]
        one_sample(case)


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
        talk = Talk(case, "chat/completions", tools=[WEATHER], logprobs=True, return_tokens_as_token_ids=True)
        early = post(case, "tokenize", messages=HELLO, tools=[WEATHER])["tokens"]
        fields = {**talk.fields, "seed": 2**62, "return_prompt_token_ids": True}
        [choice] = post(case, "chat/completions", messages=HELLO, **fields)["choices"]
        talk.history, talk.answer = [*HELLO, choice["message"]], choice["message"]
        talk.ask(*talk.results("30 degrees"))
        first, second = (payload["input_ids"] for payload in case.payloads)
        assert early == choice["prompt_token_ids"] == first
        assert post(case, "tokenize", messages=HELLO, tools=[WEATHER]) == {"count": len(first), "tokens": first}
        assert post(case, "tokenize", messages=talk.history[:-1], tools=[WEATHER])["tokens"] == second
        ids = [int(token["token"].removeprefix("token_id:")) for token in choice["logprobs"]["content"]]
        assert ids == case.turns[0].response_ids.tolist()
        one_sample(case)


def test_completions_name_tokens_by_id() -> None:
    with serving("Hi.") as case:
        [choice] = post(case, "completions", prompt="Hello?", logprobs=0, return_tokens_as_token_ids=True)["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in case.turns[0].response_ids]
