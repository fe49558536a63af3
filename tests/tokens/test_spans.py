"""Model calls in spans of other writers, as token lists and text."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from agl_slime.errors import TraceError
from agl_slime.support.agl import Span
from agl_slime.tokens import attributes as names
from agl_slime.tokens.span_codec import TurnEncoder
from agl_slime.tokens.spans import read_turns, spans_of_attempt
from agl_slime.tokens.turn import Turn
from tests.harness.tokenizers import PLAIN
from tests.harness.vocabularies import chat_tokenizer


def span(sequence: int, attributes: dict[str, Any], *, parent: str | None = None, **fields: Any) -> Span:
    defaults = {
        "name": "openai.chat.completion",
        "span_id": f"s{sequence}",
        "attempt_id": "at",
        "start_time": float(sequence),
        "end_time": sequence + 0.5,
    }
    return Span.from_attributes(
        attributes=attributes, rollout_id="ro", sequence_id=sequence, parent_id=parent, **{**defaults, **fields}
    )


def ids(prompt: list[int], response: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "response_token_ids": response, **more}


def text(prompt: str, answer: str, *, place: int = 0, **more: Any) -> dict[str, Any]:
    return {
        f"gen_ai.prompt.{place}.role": "user",
        f"gen_ai.prompt.{place}.content": prompt,
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": answer,
        **more,
    }


def read_text(*spans: Span) -> tuple[Turn, ...]:
    return read_turns(spans, chat_tokenizer("anthropic", PLAIN))


def prompts(turns: Iterable[Turn]) -> list[list[int]]:
    return [turn.prompt_ids.tolist() for turn in turns]


FLAT_CALL = {"id": "c1", "name": "look", "arguments": '{"at": "Rome"}'}
PACKED = TurnEncoder().encode(Turn(prompt_ids=[1], response_ids=[2], log_probs=[-1.0]))


# -- token lists -----------------------------------------------------------------------------------------------------


def test_token_lists_are_the_engines_ids():
    log_probs = json.dumps(
        [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -0.25, "bytes": None}]
    )
    more = {"logprobs.content": log_probs, "gen_ai.response.finish_reasons": ["length"], names.RESPONSE_ID: "r"}
    read = read_turns([span(1, ids([1, 2], [3, 4], **text("q", "ab"), **more))])
    expected = Turn(
        prompt_ids=[1, 2],
        response_ids=[3, 4],
        log_probs=[-0.5, -0.25],
        finish_reason="length",
        request_id="r",
        text="ab",
        messages=[{"role": "user", "content": "q"}],
        latency_s=0.5,
    )
    assert read == (expected,)


def test_token_lists_may_have_no_log_probs_but_not_another_number():
    [turn] = read_turns([span(1, ids([1], [2]))])
    assert (turn.log_probs, turn.token_source) == (None, "engine")
    with pytest.raises(TraceError, match="s1 carries 1 log-probs for 2"):
        read_turns([span(1, ids([1], [2, 3], **{"logprobs.content": '[{"logprob": -1.0}]'}))])


@pytest.mark.parametrize("as_text", [str, json.dumps])
def test_litellms_raw_requests_are_read(as_text: Any):
    choice = {
        "token_ids": [3, 4],
        "finish_reason": "length",
        "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
    }
    attributes = {
        "llm.hosted_vllm.id": "chatcmpl-1",
        "llm.hosted_vllm.prompt_token_ids": as_text([1, 2]),
        "llm.hosted_vllm.choices": as_text([choice]),
    }
    [turn] = read_turns([span(1, attributes, name="raw_gen_ai_request")])
    assert (turn.prompt_ids.tolist(), turn.response_ids.tolist()) == ([1, 2], [3, 4])
    assert (turn.finish_reason, turn.request_id) == ("length", "chatcmpl-1")
    assert turn.log_probs is not None
    assert turn.log_probs.tolist() == [-1.0, -2.0]
    first = {"llm.hosted_vllm.prompt_token_ids": "[1]", "llm.hosted_vllm.response_token_ids": "[[2, 3], [4]]"}
    assert read_turns([span(1, first)])[0].response_ids.tolist() == [2, 3]  # of the first choice


def test_turns_come_in_the_order_of_sequence_ids():
    spans = spans_of_attempt([span(3, ids([3], [3])), span(1, ids([1], [1])), span(2, ids([2], [2]))])
    assert prompts(read_turns(spans)) == [[1], [2], [3]]


# -- one call, several spans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("child_first", [True, False])
def test_nested_spans_of_one_call_are_one_turn(child_first: bool):
    client, proxy = (9, 1) if child_first else (1, 9)
    raw = {
        "llm.hosted_vllm.id": "r",
        "llm.hosted_vllm.prompt_token_ids": "[1]",
        "llm.hosted_vllm.response_token_ids": "[[2]]",
    }
    with_id = ids([1], [2], **{names.RESPONSE_ID: "r"})
    both = [span(client, with_id, span_id="client"), span(proxy, raw, parent="client")]
    assert len(read_turns(spans_of_attempt(both))) == 1
    nested = [
        span(client, ids([1], [2]), span_id="client"),
        span(5, {}, name="http", span_id="http", parent="client"),
        span(proxy, ids([1], [2]), parent="http"),
    ]
    assert len(read_turns(spans_of_attempt(nested))) == 1


def test_a_span_above_its_calls_is_no_call_and_hides_none():
    agent = span(1, {**text("q", "b"), names.OPERATION_NAME: "invoke_agent"}, span_id="agent")
    calls = [
        span(2, text("q", "a", **{names.OPERATION_NAME: "chat"}), parent="agent"),
        span(3, text("q", "b"), parent="agent"),
    ]
    assert [turn.text for turn in read_text(agent, *calls)] == ["a", "b"]
    chain = span(1, text("q", "b"), span_id="chain")
    read = read_turns([chain, span(2, ids([1], [2]), parent="chain"), span(3, ids([3], [4]), parent="chain")])
    assert prompts(read) == [[1], [3]]


def test_two_equal_calls_are_two_turns():
    spans = [
        span(1, ids([1], [2]), parent="agent"),
        span(2, ids([1], [2]), parent="agent"),
        span(3, {}, name="agent", span_id="agent"),
    ]
    assert len(read_turns(spans)) == 2


def test_a_judge_beneath_a_reward_span_is_no_turn():
    reward = {"agentlightning.operation.name": "agentlightning.reward"}
    spans = [
        span(1, ids([1], [2])),
        span(2, ids([7], [8]), parent="inner"),
        span(3, {}, name="inner", span_id="inner", parent="reward"),
        span(4, reward, name="agentlightning.operation", span_id="reward"),
    ]
    assert prompts(read_turns(spans)) == [[1]]


def test_a_span_that_is_its_own_ancestor_does_not_hang():
    assert len(read_turns([span(1, ids([1], [2]), span_id="a", parent="b"), span(2, {}, span_id="b", parent="a")])) == 1


def test_calls_of_other_models_can_be_left_out():
    calls = {"policy": ids([1], [2]), "helper": ids([3], [4])}
    spans = [span(n, {**call, names.REQUEST_MODEL: model}) for n, (model, call) in enumerate(calls.items())]
    read = read_turns(spans, is_policy_call=lambda call: call.attributes[names.REQUEST_MODEL] == "policy")
    assert prompts(read) == [[1]]


def test_packed_turns_win_over_lists_and_lists_over_text():
    packed, lists, words = span(1, PACKED, name=names.GENERATE_SPAN), span(2, ids([3], [4])), span(3, text("q", "a"))
    assert prompts(read_turns([packed, lists, words])) == [[1]]
    assert prompts(read_turns([lists, words])) == [[3]]
    assert read_turns([span(1, {"http.method": "GET"})]) == ()


# -- text ------------------------------------------------------------------------------------------------------------


def encoded(answer: str) -> list[int]:
    return chat_tokenizer("anthropic", PLAIN).encode(answer, add_special_tokens=False)


def rendered(prompt: list[dict[str, Any]]) -> list[int]:
    tokenizer = chat_tokenizer("anthropic", PLAIN)
    return encoded(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


def test_text_is_tokenised_again_through_the_template_and_marked():
    [turn] = read_text(span(1, text("What?", "That.")))
    assert (turn.token_source, turn.log_probs) == ("retokenized", None)
    assert turn.prompt_ids.tolist() == rendered([{"role": "user", "content": "What?"}])
    assert turn.response_ids.tolist() == encoded("That.<|im_end|>")
    assert (turn.text, turn.messages) == ("That.", ({"role": "user", "content": "What?"},))
    [cut] = read_text(span(1, text("What?", "Tha", **{"gen_ai.completion.0.finish_reason": "length"})))
    assert (cut.response_ids.tolist(), cut.finish_reason) == (encoded("Tha"), "length")  # no end of turn
    with pytest.raises(TraceError, match="a tokenizer is needed"):
        read_turns([span(1, text("What?", "That."))])


def in_json(inputs: list[dict[str, Any]], output: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        names.INPUT_MESSAGES: json.dumps(inputs),
        names.OUTPUT_MESSAGES: json.dumps([{"role": "assistant", **output}]),
        **{name: json.dumps(value) for name, value in more.items()},
    }


def parts(role: str, kind: str = "text", **fields: Any) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": kind, **fields}]}


OTEL_PARTS = in_json(
    [
        parts("user", content="Weather?"),
        parts("assistant", "tool_call", id="c1", name="look", arguments={"at": "Rome"}),
        parts("tool", "tool_call_response", id="c1", response="sun"),
    ],
    {**parts("assistant", content="Sunny."), "finish_reason": "stop"},
    **{names.SYSTEM_INSTRUCTIONS: [{"type": "text", "content": "Be short."}]},
)
TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Rome"}'}}
OTEL_PLAIN = in_json(
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
        {"role": "tool", "content": "sun", "tool_call_id": "c1"},
    ],
    {"content": "Sunny."},
)
FLATTENED = {
    **text('[{"type": "text", "text": "Weather?"}]', "Sunny.", place=1),
    "gen_ai.prompt.0.role": "system",
    "gen_ai.prompt.0.content": "Be short.",
    "gen_ai.prompt.2.role": "assistant",
    **{f"gen_ai.prompt.2.tool_calls.0.{name}": value for name, value in FLAT_CALL.items()},
    "gen_ai.prompt.3.role": "tool",
    "gen_ai.prompt.3.content": "sun",
    "gen_ai.prompt.3.tool_call_id": "c1",
}


@pytest.mark.parametrize("attributes", [OTEL_PARTS, OTEL_PLAIN, FLATTENED], ids=["parts", "chat messages", "flattened"])
def test_every_way_to_write_messages_gives_the_same_tokens(attributes: dict[str, Any]):
    [turn] = read_text(span(1, attributes))
    call = {"function": {"name": "look", "arguments": {"at": "Rome"}}}
    conversation = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sun"},
    ]
    assert turn.prompt_ids.tolist() == rendered(conversation)
    assert turn.response_ids.tolist() == encoded("Sunny.<|im_end|>")


def test_an_answer_that_is_a_tool_call_is_rendered_by_the_template():
    attributes = text("Weather?", "", **{"gen_ai.completion.0.finish_reason": "tool_calls"})
    del attributes["gen_ai.completion.0.content"]
    attributes |= {f"gen_ai.completion.0.tool_calls.0.{name}": value for name, value in FLAT_CALL.items()}
    [turn] = read_text(span(1, attributes))
    written = '<tool_call>\n{"name": "look", "arguments": {"at": "Rome"}}\n</tool_call><|im_end|>'
    assert (turn.response_ids.tolist(), turn.finish_reason) == (encoded(written), "tool_calls")


IMAGE = {
    names.INPUT_MESSAGES: '[{"role": "user", "parts": [{"type": "blob"}]}]',
    names.OUTPUT_MESSAGES: '[{"role": "assistant", "content": "a"}]',
}


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        (text('[{"type": "image_url", "image_url": {"url": "x"}}]', "a"), "part of type"),
        (IMAGE, "part of type"),
        ({names.INPUT_MESSAGES: "[", names.OUTPUT_MESSAGES: "[]"}, r"gen_ai\.input\.messages is not valid JSON"),
    ],
)
def test_text_that_cannot_be_read_is_refused(attributes: dict[str, Any], sentence: str):
    with pytest.raises(TraceError, match=sentence):
        read_text(span(1, attributes))


def test_where_ids_are_there_text_that_cannot_be_read_does_no_harm():
    [turn] = read_turns([span(1, ids([1], [2], **IMAGE))])
    assert (turn.response_ids.tolist(), turn.messages) == ([2], None)
    assert len(read_turns([span(1, PACKED), span(2, IMAGE)])) == 1


def test_a_conversation_without_messages_is_no_turn():
    empty = {names.INPUT_MESSAGES: "[]", names.OUTPUT_MESSAGES: "[]"}
    assert [turn.text for turn in read_text(span(1, empty), span(2, text("What?", "That.")))] == ["That."]


def test_attempts_without_start_times_must_be_named():
    spans = [span(1, {}, attempt_id="a", start_time=None), span(1, {}, attempt_id="b", span_id="other")]
    with pytest.raises(TraceError, match="name the attempt"):
        spans_of_attempt(spans)
    assert [each.attempt_id for each in spans_of_attempt(spans, "a")] == ["a"]
