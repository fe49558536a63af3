"""The message in which a template gets an answer with content beside thinking and several calls."""

from __future__ import annotations

import pytest

from agl_slime.tokens.template import ChatTemplate
from tests.gateway_cases import WEATHER
from tests.trace_tokenizers import small_tokenizer

# as Kimi's: a call is written by its id, which names the function
BY_ID = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def written(number: int) -> str:
    return (
        f'<|tool_call_begin|>functions.weather:{number}<|tool_call_argument_begin|>{{"city": "Rome"}}<|tool_call_end|>'
    )


@pytest.mark.parametrize("calls", [1, 2, 3, 5])
def test_content_stands_beside_thinking_and_any_number_of_calls(calls: int) -> None:
    template = ChatTemplate(tokenizer=small_tokenizer(BY_ID), tools=[WEATHER])
    text = f"So Rome.</think>Let me see.{''.join(map(written, range(calls)))}"
    message = template.fields.given(text, template.reader).message
    assert (message["content"], message["reasoning_content"]) == ("Let me see.", "So Rome.")
    assert [call["id"] for call in message["tool_calls"]] == [f"functions.weather:{n}" for n in range(calls)]


@pytest.mark.parametrize("calls", [0, 2])
def test_the_end_of_empty_thinking_is_no_content(calls: int) -> None:
    template = ChatTemplate(tokenizer=small_tokenizer(BY_ID), tools=[WEATHER])
    text = f"\n</think>\n\nLet me see.{''.join(map(written, range(calls)))}"
    message = template.fields.given(text, template.reader).message
    assert message["content"].strip() == "Let me see."
    assert "reasoning_content" not in message
    assert len(message.get("tool_calls", ())) == calls
