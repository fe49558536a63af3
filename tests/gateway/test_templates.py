"""Requests as harnesses send them to models whose chat template takes one system message, or raises an error."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.protocols import ANTHROPIC_TOOL, CHATS, FUNCTION, assistant, body_of, user
from tests.harness.chat_templates import SYSTEM_FIRST, TAKES_TURNS
from tests.harness.gateway import WEATHER, one_sample, post, serving

XML_CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
USER = user("Weather?")


def test_instructions_beside_a_developers_message_are_one_system_message() -> None:
    """As Codex sends them."""
    with serving(XML_CALL, "Sunny.", template=SYSTEM_FIRST) as case:
        developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]}
        items: list[Any] = [developer, {"type": "message", **USER}]
        fields: Any = {"instructions": "You code.", "tools": [FUNCTION], "store": False}
        (call,) = post(case, "responses", input=items, **fields)["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "fine"}
        (message,) = post(case, "responses", input=[*items, call, result], **fields)["output"]
        assert message["content"][0]["text"] == "Sunny."
        assert "You code.\n\nSandboxed.<|im_end|>" in case.tokenizer.decode(case.turns[0].prompt_ids)
        one_sample(case)


def test_later_system_messages_become_user_messages_in_place() -> None:
    """As Claude Code sends them."""
    with serving(XML_CALL, "Sunny.", template=SYSTEM_FIRST) as case:
        messages: list[Any] = [USER, {"role": "system", "content": "It is Monday."}]
        fields: Any = {"system": [{"type": "text", "text": "You code."}], "tools": [ANTHROPIC_TOOL], "max_tokens": 200}
        (call,) = post(case, "messages", messages=messages, **fields)["content"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "fine"}]
        history = [*messages, assistant([call]), user(results)]
        assert post(case, "messages", messages=history, **fields)["content"][0]["text"] == "Sunny."
        assert "<|im_start|>user\nIt is Monday.<|im_end|>" in case.tokenizer.decode(case.turns[1].prompt_ids)
        one_sample(case)
        count = post(case, "messages/count_tokens", messages=messages, **fields)["input_tokens"]
        assert count == len(case.turns[0].prompt_ids)


@pytest.mark.parametrize("path", CHATS)
def test_template_error_is_a_400_with_the_templates_message(path: str) -> None:
    with serving("Hello.", template=TAKES_TURNS) as case:
        for stream in (False, True):
            error = post(case, path, status=400, **body_of(path, [USER, USER], stream=stream))["error"]
            assert error["type"] == "invalid_request_error"
            assert "Conversation roles must alternate" in error["message"]
        post(case, path, **body_of(path, [USER]))
        assert len(case.turns) == 1


def test_non_object_arguments_are_a_400_when_the_template_needs_a_mapping() -> None:
    with serving("Hello.", template=SYSTEM_FIRST) as case:
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}}
        history = [USER, assistant(None, tool_calls=[call]), USER]
        refused = post(case, "chat/completions", status=400, messages=history)
        assert "Can only get item pairs from a mapping" in refused["error"]["message"]


def test_tools_with_an_unknown_call_format_are_a_400_and_plain_chat_works() -> None:
    with serving("Hello.", template=TAKES_TURNS) as case:
        refused = post(case, "chat/completions", status=400, messages=[USER], tools=[WEATHER])
        assert "asks for tool calls in a format without a parser" in refused["error"]["message"]
        post(case, "chat/completions", messages=[USER])
