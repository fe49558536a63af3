"""No field of a request is dropped in silence: each that the clients' own packages know is honoured, listed in
docs/any-agent.md as ignored, or refused by name."""

from __future__ import annotations

import itertools
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.calls import Call, CallResult, Choice
from agl_slime.gateway.protocol import Protocol
from tests.gateway.protocols import PROTOCOLS, assistant, user

PAGE = (Path(__file__).parents[2] / "docs" / "any-agent.md").read_text()
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [user("x")]},
    "completions": {"prompt": "x"},
    "responses": {"input": "x"},
    "messages": {"messages": [user("x")], "max_tokens": 5},
}


def fields_of(path: str) -> set[str]:
    if path == "messages":
        anthropic = pytest.importorskip("anthropic", reason="the client of Anthropic: pip install anthropic")
        return {*anthropic.types.message_create_params.MessageCreateParamsBase.__annotations__, "stream"}
    from openai.types import chat, completion_create_params, responses

    types: dict[str, Any] = {
        "chat/completions": chat.completion_create_params.CompletionCreateParamsBase,
        "completions": completion_create_params.CompletionCreateParamsBase,
        "responses": responses.response_create_params.ResponseCreateParamsBase,
    }
    return {*types[path].__annotations__, "stream"}


@pytest.mark.parametrize("path", BODIES)
def test_each_field_is_honoured_or_listed_as_ignored_or_refused_by_name(path: str) -> None:
    protocol, body = PROTOCOLS[path], BODIES[path]
    listed = re.search(r"- \*\*Ignored\*\*: (.*?)\n- ", PAGE, re.DOTALL)
    assert listed is not None
    assert protocol.ignored <= set(re.findall(r"`(\w+)`", listed[1]))
    assert not protocol.ignored & protocol.honoured
    fields = fields_of(path)
    assert len(fields) > 12
    for field in (*sorted(fields - protocol.honoured - protocol.ignored), "telepathy"):
        with pytest.raises(GatewayRequestError, match=field):
            protocol.read({**body, field: "x"})
    protocol.read({**body, "telepathy": None})


def types_of(union: Any) -> Iterator[str]:
    """The types that the members of a union may have."""
    for member in typing.get_args(union):
        declared = typing.get_type_hints(member).get("type") if isinstance(member, type) else None
        yield from (kind for kind in literals(declared) if kind)


def literals(declared: Any) -> Iterator[str]:
    for argument in typing.get_args(declared):
        yield from [argument] if isinstance(argument, str) else literals(argument)


def read_or_refused(protocol: Protocol, body: dict[str, Any], kind: str) -> Call | None:
    """The call, or ``None`` where it is refused by the name of ``kind``."""
    try:
        return protocol.read(body)
    except GatewayRequestError as error:
        refused = str(error)
    assert re.search(rf"\b{kind}\b", refused)
    return None


def test_each_openai_tool_type_is_offered_left_out_or_refused() -> None:
    from openai.types.responses import ToolParam

    kinds = {*types_of(ToolParam)}
    assert len(kinds) > 15
    for kind in sorted(kinds):
        tool = {"type": kind, "name": "f", "tools": [{"type": "function", "name": "g"}]}
        call = read_or_refused(PROTOCOLS["responses"], {"input": "x", "tools": [tool]}, kind)
        assert call is None or len(call.tools) + len(call.server_tools) == 1, kind


def test_each_anthropic_tool_type_is_offered_left_out_or_refused() -> None:
    beta = pytest.importorskip("anthropic.types.beta", reason="the client of Anthropic: pip install anthropic")
    kinds = {*types_of(beta.BetaToolUnionParam)} - {"custom"}
    assert len(kinds) > 20
    for kind in sorted(kinds):
        body = {**BODIES["messages"], "tools": [{"type": kind, "name": "f"}]}
        call = read_or_refused(PROTOCOLS["messages"], body, kind)
        assert call is None or len(call.tools) + len(call.server_tools) == 1, kind


def test_each_type_of_openais_items_is_read_or_refused_by_name() -> None:
    from openai.types.responses import ResponseInputItemParam

    kinds = {*types_of(ResponseInputItemParam)} - {"item_reference", "compaction", "message"}
    assert len(kinds) > 25
    for kind in sorted(kinds):
        first = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        item = {"type": kind, "id": "i", "call_id": "c", "name": "f", "output": "fine", "tools": [{"type": "shell"}]}
        items = [first, {**item, "summary": [{"text": "so"}]}]
        if call := read_or_refused(PROTOCOLS["responses"], {"input": items}, kind):
            fields = ("content", "reasoning_content")
            texts = [message.get(name) for message in call.messages for name in fields]
            calls = [tool_call for message in call.messages for tool_call in message.get("tool_calls", ())]
            assert len([*filter(None, texts), *calls]) > 1, kind


def test_each_type_of_anthropics_blocks_is_read_or_refused_by_name() -> None:
    beta = pytest.importorskip("anthropic.types.beta", reason="the client of Anthropic: pip install anthropic")
    kinds = {*types_of(beta.BetaContentBlockParam)} - {"thinking", "redacted_thinking", "text"}
    assert len(kinds) > 15
    for kind in sorted(kinds):
        block = {"type": kind, "id": "i", "tool_use_id": "i", "name": "f", "content": "words", "title": "words"}
        call = read_or_refused(PROTOCOLS["messages"], {"messages": [assistant([block])], "max_tokens": 5}, kind)
        assert call is None or any(message["content"] or message.get("tool_calls") for message in call.messages), kind


def test_deprecated_function_call_message_is_refused() -> None:
    old = assistant(None, function_call={"name": "f", "arguments": "{}"})
    with pytest.raises(GatewayRequestError, match=r"messages\[1\]\.function_call is OpenAI's old form"):
        PROTOCOLS["chat/completions"].read({"messages": [user("x"), old]})


SHAPES: list[Any] = [1, 1.5, True, "x", ["x"], [None], [[]], [{}], {"a": 1}, {"type": {}}, {"format": 1}]
SHAPES += [[{"type": "namespace", "tools": 5}], [{"type": "namespace", "tools": [5]}], [{"type": []}]]
SHAPES += [[{"type": "reasoning", "content": 5}], [{"role": "assistant", "tool_calls": [1]}], [{"role": "user"}]]


@pytest.mark.parametrize("path", BODIES)
def test_malformed_field_is_refused_in_a_sentence_and_never_breaks_answers(path: str) -> None:
    protocol, body = PROTOCOLS[path], BODIES[path]
    head = CallResult(id="1", created=1, model="m", choices=(Choice(),))
    refused = 0
    for field, value, stream in itertools.product(sorted(protocol.honoured), SHAPES, (False, True)):
        request = {**body, "stream": stream, field: value}
        try:
            call = protocol.read(request)
        except GatewayRequestError:
            refused += 1
            continue
        if call.stream:
            events = protocol.stream(request, head, str)
            assert b"".join([*events.begin(), events.finish(head)])
        else:
            assert protocol.answer(request, head, str)
    assert refused > 100
