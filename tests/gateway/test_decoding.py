"""What of the sampled tokens is text to a client: no marks of calls, no end mark, no halves of characters."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from tests.harness.engine_faults import Abort
from tests.harness.gateway import WEATHER, Case, serving, trained_once
from tests.harness.tool_formats import template_of

KIMI = template_of("kimi")
KIMI_CALL = (
    "Let me see.\n<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>'
)
HELLO: list[Any] = [{"role": "user", "content": "Hello?"}]


def streamed(case: Case, messages: list[Any] = HELLO, **how: Any) -> Any:
    client = OpenAI(base_url=case.llm.endpoint, api_key="any", max_retries=0)
    with client.chat.completions.stream(model="m", messages=messages, **how) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        return stream.current_completion_snapshot.choices[0], pieces


def test_the_marks_of_a_section_of_calls_are_no_text_of_a_streamed_answer() -> None:
    with serving(KIMI_CALL, "Sunny.", template=KIMI, token_s=0.002) as case:
        said, pieces = streamed(case, tools=[WEATHER])
        assert "".join(pieces) == "Let me see."
        (call,) = said.message.tool_calls
        answered = {"role": "tool", "tool_call_id": call.id, "content": "fine"}
        streamed(case, [*HELLO, said.message.model_dump(exclude_none=True), answered], tools=[WEATHER])
        assert len(case.segments) == 1
        trained_once(case.turns, case.segments)


@pytest.mark.parametrize("after", range(1, 12))
def test_an_update_within_a_character_is_not_seen_in_a_stream(after: int) -> None:
    text = "日本語のテキスト。😀 Ende"
    with serving(text, "Yes.", token_s=0.002) as case:
        case.engine.script("/generate", Abort(n_tokens=after), Abort(n_tokens=1), Abort(n_tokens=2))
        said, pieces = streamed(case)
        assert said.message.content == "".join(pieces) == text
        assert len(pieces) > 3
        streamed(case, [*HELLO, {"role": "assistant", "content": "".join(pieces)}, *HELLO])
        assert len(case.segments) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_end_mark_that_is_sampled_at_the_limit_is_no_text(stream: bool) -> None:
    with serving("Forty two", "Yes.") as case:
        limit = len(case.tokenizer.encode("Forty two")) + 1
        client = OpenAI(base_url=case.llm.endpoint, api_key="any", max_retries=0)
        if stream:
            said, pieces = streamed(case, max_tokens=limit)
            assert "".join(pieces) == "Forty two"
        else:
            said = client.chat.completions.create(model="m", messages=HELLO, max_tokens=limit).choices[0]
        assert (said.message.content, said.finish_reason) == ("Forty two", "length")
        messages = [*HELLO, {"role": "assistant", "content": said.message.content}, *HELLO]
        client.chat.completions.create(model="m", messages=messages)
        first, second = case.turns
        assert first.response_ids[-1] == case.tokenizer.eos_token_id
        assert case.tokenizer.decode(second.prompt_ids[first.length :]).startswith("\n<|im_start|>user")
        assert len(case.segments) == 1


def test_special_token_in_an_answer_is_hidden_and_kept_in_next_prompt() -> None:
    with serving("Forty<|im_start|> two", "Yes.") as case:
        said, pieces = streamed(case)
        assert said.message.content == "".join(pieces) == "Forty two"
        streamed(case, [*HELLO, {"role": "assistant", "content": "Forty two"}, *HELLO])
        assert len(case.segments) == 1
        trained_once(case.turns, case.segments)
