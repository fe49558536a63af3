"""Requests as harnesses send them to models whose chat template wants one system message, or refuses more than that."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.harness.chat_templates import SYSTEM_FIRST, TAKES_TURNS
from tests.harness.gateway import WEATHER, Case, serving, trained_once

XML_CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
USER = {"role": "user", "content": "Weather?"}
ANTHROPIC_TOOL = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
RESPONSES_TOOL = {"type": "function", **WEATHER["function"]}


def post(case: Case, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{case.llm.endpoint}{path}", json={"model": "m", "max_tokens": 200, **body}, timeout=30)


def test_instructions_beside_a_developers_message_are_one_system_message() -> None:
    """As Codex sends them."""
    with serving(XML_CALL, "Sunny.", template=SYSTEM_FIRST) as case:
        developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]}
        items: list[Any] = [developer, {"type": "message", **USER}]
        how: Any = {"instructions": "You code.", "tools": [RESPONSES_TOOL], "store": False, "max_tokens": None}
        first = post(case, "/responses", input=items, **how)
        assert first.status_code == 200, first.text
        (call,) = first.json()["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "fine"}
        second = post(case, "/responses", input=[*items, call, result], **how)
        assert second.json()["output"][0]["content"][0]["text"] == "Sunny."
        assert "You code.\n\nSandboxed.<|im_end|>" in case.tokenizer.decode(case.turns[0].prompt_ids)
        trained_once(case.turns, case.segments)
        assert len(case.segments) == 1


def test_later_system_messages_become_user_messages_in_place() -> None:
    """As Claude Code sends them."""
    with serving(XML_CALL, "Sunny.", template=SYSTEM_FIRST) as case:
        asked: list[Any] = [USER, {"role": "system", "content": "It is Monday."}]
        how: Any = {"system": [{"type": "text", "text": "You code."}], "tools": [ANTHROPIC_TOOL]}
        first = post(case, "/messages", messages=asked, **how)
        assert first.status_code == 200, first.text
        (call,) = first.json()["content"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "fine"}]
        history = [*asked, {"role": "assistant", "content": [call]}, {"role": "user", "content": results}]
        assert post(case, "/messages", messages=history, **how).json()["content"][0]["text"] == "Sunny."
        assert "<|im_start|>user\nIt is Monday.<|im_end|>" in case.tokenizer.decode(case.turns[1].prompt_ids)
        assert len(case.segments) == 1
        counted = post(case, "/messages/count_tokens", messages=asked, **how)
        assert counted.json()["input_tokens"] == len(case.turns[0].prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [USER, USER]}),
        ("/responses", {"input": [USER, USER], "max_tokens": None}),
        ("/messages", {"messages": [USER, USER]}),
    ],
)
def test_template_error_is_a_400_with_the_templates_message(path: str, body: dict[str, Any], stream: bool) -> None:
    with serving("Hello.", template=TAKES_TURNS) as case:
        refused = post(case, path, **body, stream=stream)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert "Conversation roles must alternate" in error["message"]
        fine = {name: value[:1] if isinstance(value, list) else value for name, value in body.items()}
        assert post(case, path, **fine).status_code == 200
        assert len(case.turns) == 1


def test_non_object_arguments_are_a_400_when_the_template_needs_a_mapping() -> None:
    with serving("Hello.", template=SYSTEM_FIRST) as case:
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}}
        history = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]
        refused = post(case, "/chat/completions", messages=history)
        assert refused.status_code == 400
        assert "Can only get item pairs from a mapping" in refused.json()["error"]["message"]


def test_tools_with_an_unknown_call_format_are_a_400_and_plain_chat_works() -> None:
    with serving("Hello.", template=TAKES_TURNS) as case:
        refused = post(case, "/chat/completions", messages=[USER], tools=[WEATHER])
        assert refused.status_code == 400
        assert "asks for tool calls in a format without a parser" in refused.json()["error"]["message"]
        assert post(case, "/chat/completions", messages=[USER]).status_code == 200
