"""The text that sampled tokens are to a client: no marks of calls, no end mark, no halves of characters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.protocols import assistant, openai_client, user
from tests.harness.engine_faults import Abort
from tests.harness.gateway import HELLO, WEATHER, Case, one_sample, post, serving
from tests.harness.tool_formats import template_of

KIMI_CALL = (
    "Let me see.\n<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>'
)


def stream_chat(case: Case, messages: list[Any] = HELLO, **fields: Any) -> tuple[Any, list[str]]:
    """The choice and the pieces of its content."""
    with openai_client(case).chat.completions.stream(model="m", messages=messages, **fields) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        choice = stream.current_completion_snapshot.choices[0]
    assert choice.message.content == "".join(pieces)
    return choice, pieces


def test_the_marks_of_a_section_of_calls_are_no_text_of_a_streamed_answer() -> None:
    with serving(KIMI_CALL, "Sunny.", template=template_of("kimi"), token_s=0.002) as case:
        choice, pieces = stream_chat(case, tools=[WEATHER])
        assert "".join(pieces) == "Let me see."
        (call,) = choice.message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "fine"}
        stream_chat(case, [*HELLO, choice.message.model_dump(exclude_none=True), result], tools=[WEATHER])
        one_sample(case)


@pytest.mark.parametrize("n_tokens", range(1, 12))
def test_an_update_within_a_character_is_not_seen_in_a_stream(n_tokens: int) -> None:
    text = "日本語のテキスト。😀 Ende"
    with serving(text, "Yes.", token_s=0.002) as case:
        case.engine.script("/generate", Abort(n_tokens=n_tokens), Abort(n_tokens=1), Abort(n_tokens=2))
        choice, pieces = stream_chat(case)
        assert choice.message.content == text
        assert len(pieces) > 3
        stream_chat(case, [*HELLO, assistant(text), user("Hello?")])
        one_sample(case)


def test_an_end_mark_that_is_sampled_at_the_limit_is_no_text() -> None:
    with serving("Forty two", "Forty two", "Yes.") as case:
        limit = len(case.tokenizer.encode("Forty two")) + 1
        choice, _ = stream_chat(case, max_tokens=limit)
        whole = post(case, "chat/completions", messages=HELLO, max_tokens=limit)["choices"][0]
        assert (choice.message.content, choice.finish_reason) == ("Forty two", "length")
        assert (whole["message"]["content"], whole["finish_reason"]) == ("Forty two", "length")
        post(case, "chat/completions", messages=[*HELLO, assistant("Forty two"), user("Hello?")])
        first, _, third = case.turns
        assert first.response_ids[-1] == case.tokenizer.eos_token_id
        assert case.tokenizer.decode(third.prompt_ids[first.length :]).startswith("\n<|im_start|>user")
        assert third.fork is None


def test_special_token_in_an_answer_is_hidden_and_kept_in_next_prompt() -> None:
    with serving("Forty<|im_start|> two", "Yes.") as case:
        assert stream_chat(case)[0].message.content == "Forty two"
        stream_chat(case, [*HELLO, assistant("Forty two"), user("Hello?")])
        one_sample(case)
