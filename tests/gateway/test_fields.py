"""No field of a request is dropped in silence: each field in the clients' packages is honoured, listed in
docs/any-agent.md as ignored, or refused by name, before anything is sampled and in the form of the protocol. Whatever a
field holds, the answer is a served one or a typed error."""

import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.calls import IMPOSED, Call
from agl_slime.gateway.protocol import Protocol
from tests.gateway.protocols import PROTOCOLS, STREAMED, TOOLS, assistant, body_of, events_of, user
from tests.harness.examples import examples
from tests.harness.gateway import CALL, post, serving

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
    protocol.read({**body, "telepathy": None, **{field: {"type": "enabled"} for field in protocol.ignored}})


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


def test_each_tool_type_of_the_vendors_is_offered_left_out_or_refused() -> None:
    from openai.types.responses import ToolParam

    beta = pytest.importorskip("anthropic.types.beta", reason="the client of Anthropic: pip install anthropic")
    for path, union in (("responses", ToolParam), ("messages", beta.BetaToolUnionParam)):
        kinds = {*types_of(union)} - ({"custom"} if path == "messages" else set())
        assert len(kinds) > 15
        for kind in sorted(kinds):
            functions = {"tools": [{"type": "function", "name": "g"}]} if path == "responses" else {}
            body = {**BODIES[path], "tools": [{"type": kind, "name": "f", **functions}]}
            call = read_or_refused(PROTOCOLS[path], body, kind)
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


HELLO = [user("x")]
OLD_CALL = assistant(None, function_call={"name": "f", "arguments": "{}"})
IMAGE = [user([{"type": "image_url"}])]
FIELDS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("messages", {"messages": HELLO}, ("max_tokens",)),
    ("messages", {"max_tokens": 5, "messages": IMAGE}, ("an image must be a URI data:image/",)),
    ("chat/completions", {"messages": IMAGE}, ("an image must be a URI data:image/",)),
    ("chat/completions", {"messages": []}, ("messages",)),
    ("chat/completions", {"messages": [*HELLO, OLD_CALL]}, ("messages[1].function_call is OpenAI's old form",)),
    ("chat/completions", {"messages": HELLO, "audio": {"voice": "a"}}, ("audio",)),
    ("responses", {"input": "x", "previous_response_id": "resp_x"}, ("previous_response_id",)),
    ("responses", {"input": "x", "background": True}, ("background",)),
    ("responses", {"input": [{"type": "compaction_trigger"}, *HELLO]}, ("must be the last item",)),
    ("responses/compact", {}, ("input",)),
    ("completions", {"prompt": "a", "echo": True}, ("echo",)),
    *(("completions", {"prompt": prompt}, ("prompt",)) for prompt in ([-1], [2**31], [True], [[1], [2]], "", [], 1)),
]
FILES: list[tuple[dict[str, Any], str]] = [
    ({"file_data": "data:application/pdf;base64,eA=="}, "'application/pdf'"),
    ({"file_data": "eA==", "filename": "a.pdf"}, "'application/pdf'"),
    ({"file_data": "eA=="}, "'unknown'"),
    ({"file_data": "data:text/plain;charset=latin1;base64,eA=="}, "charset=latin1"),
    ({"file_data": "data:text/plain;base64,e"}, "not text in UTF-8"),
    ({"file_data": "data:text/plain;base64,/w=="}, "not text in UTF-8"),
    *(({name: "x"}, "without file_data: send data:text/plain;base64") for name in ("file_id", "file_url")),
]
ITEMS = ("telepathy", "image_generation_call", "computer_call")
BLOCKS = [
    (
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}},
        "application/pdf",
    ),
    ({"type": "document", "source": {"type": "url", "url": "http://x"}}, "'url'"),
    ({"type": "container_upload", "file_id": "x"}, "container_upload"),
    ({"type": "telepathy"}, "telepathy"),
    ({"type": "telepathy_tool_result", "tool_use_id": "x"}, "telepathy_tool_result"),
]
OPENAIS_TOOLS = ("telepathy", "computer")
ANTHROPICS_TOOLS = [
    ({"type": "telepathy_20270101", "name": "telepathy"}, "telepathy_20270101"),
    ({"type": "computer_toolset_20260801"}, "computer_toolset_20260801"),
    ({"name": "no_schema"}, "input_schema"),
    ({"input_schema": {"type": "object"}}, "name"),
]
UNSUPPORTED = [
    *FIELDS,
    *(("responses", {"input": [*HELLO, {"type": kind}]}, (kind,)) for kind in ITEMS),
    *(("messages", {"max_tokens": 9, "messages": [user([block])]}, (k, "messages.0.content")) for block, k in BLOCKS),
    *(("responses", {"input": [user([{"type": "input_file", **file}])]}, (word,)) for file, word in FILES),
    *(("chat/completions", {"messages": [user([{"type": "file", "file": file}])]}, (word,)) for file, word in FILES),
    *(("responses", {"input": "x", "tools": [{"type": kind}]}, (kind, "tools[0]")) for kind in OPENAIS_TOOLS),
    *(("chat/completions", {"messages": HELLO, "tools": [{"type": k}]}, (k, "tools[0]")) for k in OPENAIS_TOOLS),
    *(
        ("messages", {"max_tokens": 9, "messages": HELLO, "tools": [tool]}, (name, "tools.0"))
        for tool, name in ANTHROPICS_TOOLS
    ),
]


def test_unsupported_fields_tools_and_parts_are_refused_by_name() -> None:
    with serving("hello") as case:
        for path, body, words in UNSUPPORTED:
            answer = post(case, path, status=400, **body)
            assert all(word in answer["error"]["message"] for word in words), answer
            assert (answer.get("type") == "error") == (path == "messages")
        assert not case.payloads


NAMES = {
    path: sorted({*protocol.honoured, *protocol.ignored, *IMPOSED, "thread", "telepathy"})
    for path, protocol in PROTOCOLS.items()
}
NUMBERS = [0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**30, 10**310, 0.5, -0.0, 1e308, 5e-324]
TEXTS = ["", "x", "\ud800", "a\udc00b", "\x00", "auto", "none", "required", "json_schema", "assistant", "</think>"]
FIELD_NAMES = """
    role content type text name id arguments function tool_calls tool_call_id input output call_id schema format
    json_schema parameters input_schema strict tools thinking source summary refusal reasoning_content effort key value
    encrypted_content
"""
TYPES = """
    text input_text output_text refusal image_url tool_use tool_result thinking redacted_thinking function custom
    namespace function_call function_call_output custom_tool_call reasoning item_reference agent_message json_object
    json_schema message auto any none user assistant system developer tool
"""
WORDS, KINDS = FIELD_NAMES.split(), TYPES.split()


def hostile() -> st.SearchStrategy[Any]:
    plain = st.sampled_from([None, True, False, *NUMBERS, *TEXTS, *KINDS])

    def nested(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        kinds = st.sampled_from(KINDS)
        objects = st.dictionaries(st.sampled_from(WORDS), values, max_size=4)
        typed = st.builds(lambda kind, fields: {**fields, "type": kind}, kinds, objects)
        messages = st.builds(lambda role, fields: {**fields, "role": role}, kinds, objects)
        return st.lists(values, max_size=3) | objects | typed | messages

    return st.recursive(plain, nested, max_leaves=12)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patched, serving(CALL, "ok") as case:
        patched.setattr("agl_slime.gateway.attempt.MAX_REQUESTS", 10**6)
        with httpx.Client(timeout=20, base_url=case.llm.endpoint) as http:
            yield http


@pytest.mark.parametrize("path", PROTOCOLS)
@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_value_of_any_field_gets_an_answer_or_a_typed_error(path: str, data: st.DataObject, client: httpx.Client):
    changed = data.draw(st.dictionaries(st.sampled_from(NAMES[path]), hostile(), min_size=1, max_size=2))
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    body = body_of(path, [user("Weather?")], **{limit: 9}, stream=data.draw(st.booleans()))
    body |= {"tools": TOOLS[path]} if path in TOOLS else {}
    content, headers = json.dumps({**body, **changed}), {"Content-Type": "application/json"}
    answer = client.post(path, content=content, headers=headers)
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.json()["error"]["message"]
    elif answer.headers["Content-Type"].startswith("text/event-stream"):
        events = events_of(answer)
        assert "HTTP/1.1" not in answer.text
        assert not [event for event in events if "gateway failed" in json.dumps(event)]
        ended = events[-1].get("type") in ("message_stop", "response.completed", "response.incomplete")
        assert ended or "data: [DONE]" in answer.text
    else:
        assert isinstance(answer.json(), dict)


@STREAMED
@pytest.mark.parametrize("path", ["messages", "messages/count_tokens"])
def test_threads_that_only_a_header_announces_are_refused(path: str, streamed: bool) -> None:
    """As behind LiteLLM's proxy, which drops the field."""
    with serving("Sunny.") as case:
        body = body_of("messages", [user("And then?")], stream=streamed)
        for beta, status in (("pdfs-2024-09-25, message-threads-2026-08-12", 400), ("pdfs-2024-09-25", 200)):
            answer = httpx.post(f"{case.llm.endpoint}/{path}", json=body, headers={"anthropic-beta": beta})
            assert answer.status_code == status
            details = answer.json()["error"]["details"] if status == 400 else None
            assert details in (None, {"error_code": "thread_unsupported_request", "unsupported": ["thread"]})
        assert len(case.turns) == (path == "messages")
