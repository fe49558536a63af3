"""Model calls in spans that others wrote: token lists and text, as Agent Lightning's instrumentation leaves them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agl_slime.errors import TraceError
from agl_slime.support.agl import Span
from agl_slime.tokens import attributes as names
from agl_slime.tokens.span_codec import TurnEncoder
from agl_slime.tokens.spans import read_turns, spans_of_attempt
from agl_slime.tokens.turn import Turn
from tests.harness.tokenizers import PLAIN, chat_tokenizer


def span(
    sequence: int, attributes: dict[str, Any], *, span_id: str = "", parent: str | None = None, **fields: Any
) -> Span:
    return Span.from_attributes(
        attributes=attributes,
        rollout_id="ro",
        sequence_id=sequence,
        span_id=span_id or f"s{sequence}",
        parent_id=parent,
        **{
            "name": "openai.chat.completion",
            "attempt_id": "at",
            "start_time": float(sequence),
            "end_time": sequence + 0.5,
            **fields,
        },
    )


def ids(prompt: list[int], response: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "response_token_ids": response, **more}


def text(prompt: str, answer: str, **more: Any) -> dict[str, Any]:
    return {
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": prompt,
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": answer,
        **more,
    }


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


def test_token_lists_without_log_probs_have_none():
    [turn] = read_turns([span(1, ids([1], [2]))])
    assert turn.log_probs is None
    assert turn.token_source == "engine"


def test_log_probs_of_another_number_are_an_error():
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
    assert (turn.prompt_ids.tolist(), turn.response_ids.tolist(), turn.finish_reason, turn.request_id) == (
        [1, 2],
        [3, 4],
        "length",
        "chatcmpl-1",
    )
    assert turn.log_probs is not None
    assert turn.log_probs.tolist() == [-1.0, -2.0]


def test_the_ids_of_vllms_first_choice_count():
    attributes = {"llm.hosted_vllm.prompt_token_ids": "[1]", "llm.hosted_vllm.response_token_ids": "[[2, 3], [4]]"}
    [turn] = read_turns([span(1, attributes)])
    assert turn.response_ids.tolist() == [2, 3]


def test_turns_come_in_the_order_of_sequence_ids():
    spans = spans_of_attempt([span(3, ids([3], [3])), span(1, ids([1], [1])), span(2, ids([2], [2]))])
    assert [turn.prompt_ids.tolist() for turn in read_turns(spans)] == [[1], [2], [3]]


# -- one call, several spans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("child_first", [True, False])
def test_a_call_that_client_and_proxy_both_recorded_is_one_turn(child_first: bool):
    client, proxy = (2, 1) if child_first else (1, 2)
    raw = {
        "llm.hosted_vllm.id": "r",
        "llm.hosted_vllm.prompt_token_ids": "[1]",
        "llm.hosted_vllm.response_token_ids": "[[2]]",
    }
    spans = [
        span(client, ids([1], [2], **{names.RESPONSE_ID: "r"}), span_id="client"),
        span(proxy, raw, parent="client"),
    ]
    assert len(read_turns(spans_of_attempt(spans))) == 1


@pytest.mark.parametrize("child_first", [True, False])
def test_nested_spans_of_a_call_without_response_ids_are_one_turn(child_first: bool):
    client, proxy = (9, 1) if child_first else (1, 9)
    spans = [
        span(client, ids([1], [2]), span_id="client"),
        span(5, {}, name="http", span_id="http", parent="client"),
        span(proxy, ids([1], [2]), parent="http"),
    ]
    assert len(read_turns(spans_of_attempt(spans))) == 1


def test_an_agents_span_with_the_messages_of_its_calls_is_no_call_itself():
    agent = span(1, {**text("q", "b"), names.OPERATION_NAME: "invoke_agent"}, span_id="agent")
    calls = [
        span(2, text("q", "a", **{names.OPERATION_NAME: "chat"}), parent="agent"),
        span(3, text("q", "b"), parent="agent"),
    ]
    assert [turn.text for turn in read_turns([agent, *calls], chat_tokenizer("anthropic", PLAIN))] == ["a", "b"]


def test_a_span_with_text_above_spans_with_ids_does_not_hide_them():
    spans = [
        span(1, text("q", "b"), span_id="chain"),
        span(2, ids([1], [2]), parent="chain"),
        span(3, ids([3], [4]), parent="chain"),
    ]
    read = read_turns(spans)
    assert [turn.prompt_ids.tolist() for turn in read] == [[1], [3]]


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
    assert [turn.prompt_ids.tolist() for turn in read_turns(spans)] == [[1]]


def test_a_span_that_is_its_own_ancestor_does_not_hang():
    assert len(read_turns([span(1, ids([1], [2]), span_id="a", parent="b"), span(2, {}, span_id="b", parent="a")])) == 1


def test_calls_of_other_models_can_be_left_out():
    spans = [
        span(1, ids([1], [2], **{names.REQUEST_MODEL: "policy"})),
        span(2, ids([3], [4], **{names.REQUEST_MODEL: "helper"})),
    ]
    read = read_turns(spans, is_policy_call=lambda call: call.attributes[names.REQUEST_MODEL] == "policy")
    assert [turn.prompt_ids.tolist() for turn in read] == [[1]]


def test_packed_turns_win_over_lists_and_lists_over_text():
    packed = span(
        1, TurnEncoder().encode(Turn(prompt_ids=[1], response_ids=[2], log_probs=[-1.0])), name=names.GENERATE_SPAN
    )
    lists, words = span(2, ids([3], [4])), span(3, text("q", "a"))
    first = read_turns([packed, lists, words])
    assert [turn.prompt_ids.tolist() for turn in first] == [[1]]
    second = read_turns([lists, words])
    assert [turn.prompt_ids.tolist() for turn in second] == [[3]]


def test_no_model_call_is_no_turn():
    read = read_turns([span(1, {"http.method": "GET"})])
    assert read == ()


# -- text ------------------------------------------------------------------------------------------------------------


def rendered(prompt: list[dict[str, Any]], **options: Any) -> list[int]:
    tokenizer = chat_tokenizer("anthropic", PLAIN)
    return tokenizer.encode(
        tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **options),
        add_special_tokens=False,
    )


def encoded(answer: str) -> list[int]:
    return chat_tokenizer("anthropic", PLAIN).encode(answer, add_special_tokens=False)


def test_text_is_tokenised_again_through_the_template_and_marked():
    read = read_turns([span(1, text("What?", "That."))], chat_tokenizer("anthropic", PLAIN))
    [turn] = read
    assert turn.token_source == "retokenized"
    assert turn.log_probs is None
    assert turn.prompt_ids.tolist() == rendered([{"role": "user", "content": "What?"}])
    assert turn.response_ids.tolist() == encoded("That.<|im_end|>")
    assert (turn.text, turn.messages) == ("That.", ({"role": "user", "content": "What?"},))


def test_text_needs_a_tokenizer():
    with pytest.raises(TraceError, match="a tokenizer is needed"):
        read_turns([span(1, text("What?", "That."))])


def test_an_answer_that_was_cut_off_has_no_end_of_turn():
    attributes = text("What?", "Tha", **{"gen_ai.completion.0.finish_reason": "length"})
    [turn] = read_turns([span(1, attributes)], chat_tokenizer("anthropic", PLAIN))
    assert turn.response_ids.tolist() == encoded("Tha")
    assert turn.finish_reason == "length"


OTEL_PARTS = {
    names.SYSTEM_INSTRUCTIONS: json.dumps([{"type": "text", "content": "Be short."}]),
    names.INPUT_MESSAGES: json.dumps(
        [
            {"role": "user", "parts": [{"type": "text", "content": "Weather?"}]},
            {
                "role": "assistant",
                "parts": [{"type": "tool_call", "id": "c1", "name": "look", "arguments": {"at": "Rome"}}],
            },
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "sun"}]},
        ]
    ),
    names.OUTPUT_MESSAGES: json.dumps(
        [{"role": "assistant", "parts": [{"type": "text", "content": "Sunny."}], "finish_reason": "stop"}]
    ),
}
TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Rome"}'}}
OTEL_PLAIN = {
    names.INPUT_MESSAGES: json.dumps(
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
            {"role": "tool", "content": "sun", "tool_call_id": "c1"},
        ]
    ),
    names.OUTPUT_MESSAGES: json.dumps([{"role": "assistant", "content": "Sunny."}]),
}
FLATTENED = {
    "gen_ai.prompt.0.role": "system",
    "gen_ai.prompt.0.content": "Be short.",
    "gen_ai.prompt.1.role": "user",
    "gen_ai.prompt.1.content": '[{"type": "text", "text": "Weather?"}]',
    "gen_ai.prompt.2.role": "assistant",
    "gen_ai.prompt.2.tool_calls.0.id": "c1",
    "gen_ai.prompt.2.tool_calls.0.name": "look",
    "gen_ai.prompt.2.tool_calls.0.arguments": '{"at": "Rome"}',
    "gen_ai.prompt.3.role": "tool",
    "gen_ai.prompt.3.content": "sun",
    "gen_ai.prompt.3.tool_call_id": "c1",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "Sunny.",
}


@pytest.mark.parametrize("attributes", [OTEL_PARTS, OTEL_PLAIN, FLATTENED], ids=["parts", "chat messages", "flattened"])
def test_every_way_to_write_messages_gives_the_same_tokens(attributes: dict[str, Any]):
    [turn] = read_turns([span(1, attributes)], chat_tokenizer("anthropic", PLAIN))
    conversation = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "look", "arguments": {"at": "Rome"}}}],
        },
        {"role": "tool", "content": "sun"},
    ]
    assert turn.prompt_ids.tolist() == rendered(conversation)
    assert turn.response_ids.tolist() == encoded("Sunny.<|im_end|>")


def test_an_answer_that_is_a_tool_call_is_rendered_by_the_template():
    attributes = {
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": "Weather?",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.tool_calls.0.id": "c1",
        "gen_ai.completion.0.tool_calls.0.name": "look",
        "gen_ai.completion.0.tool_calls.0.arguments": '{"at": "Rome"}',
        "gen_ai.completion.0.finish_reason": "tool_calls",
    }
    [turn] = read_turns([span(1, attributes)], chat_tokenizer("anthropic", PLAIN))
    assert turn.response_ids.tolist() == encoded(
        '<tool_call>\n{"name": "look", "arguments": {"at": "Rome"}}\n</tool_call><|im_end|>'
    )
    assert turn.finish_reason == "tool_calls"


IMAGE = {
    names.INPUT_MESSAGES: '[{"role": "user", "parts": [{"type": "blob"}]}]',
    names.OUTPUT_MESSAGES: '[{"role": "assistant", "content": "a"}]',
}


@pytest.mark.parametrize(
    "attributes",
    [
        {**text("", "a"), "gen_ai.prompt.0.content": '[{"type": "image_url", "image_url": {"url": "x"}}]'},
        IMAGE,
    ],
)
def test_non_text_part_is_refused(attributes: dict[str, Any]):
    with pytest.raises(TraceError, match="part of type"):
        read_turns([span(1, attributes)], chat_tokenizer("anthropic", PLAIN))


def test_where_ids_are_there_text_that_cannot_be_read_does_no_harm():
    [turn] = read_turns([span(1, ids([1], [2], **IMAGE))])
    assert (turn.response_ids.tolist(), turn.messages) == ([2], None)
    packed = span(1, TurnEncoder().encode(Turn(prompt_ids=[1], response_ids=[2], log_probs=[-1.0])))
    assert len(read_turns([packed, span(2, IMAGE)])) == 1


def test_a_conversation_without_messages_is_no_turn():
    empty = {names.INPUT_MESSAGES: "[]", names.OUTPUT_MESSAGES: "[]"}
    read = read_turns([span(1, empty), span(2, text("What?", "That."))], chat_tokenizer("anthropic", PLAIN))
    assert [turn.text for turn in read] == ["That."]


def test_messages_that_are_no_json_are_refused():
    with pytest.raises(TraceError, match=r"gen_ai\.input\.messages is not valid JSON"):
        read_turns(
            [span(1, {names.INPUT_MESSAGES: "[", names.OUTPUT_MESSAGES: "[]"})], chat_tokenizer("anthropic", PLAIN)
        )


# -- attempts --------------------------------------------------------------------------------------------------------


def test_attempts_without_start_times_must_be_named():
    spans = [span(1, {}, attempt_id="a", start_time=None), span(1, {}, attempt_id="b", span_id="other")]
    with pytest.raises(TraceError, match="name the attempt"):
        spans_of_attempt(spans)
    assert [each.attempt_id for each in spans_of_attempt(spans, "a")] == ["a"]
