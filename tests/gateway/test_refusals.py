"""Unsupported requests are refused before anything is sampled, in a sentence that names the field or its place, in the
form of the protocol."""

from __future__ import annotations

from typing import Any

from tests.gateway.protocols import user
from tests.harness.gateway import post, serving

HELLO = [user("x")]
IMAGE = [user([{"type": "image_url"}])]
FIELDS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("messages", {"messages": HELLO}, ("max_tokens",)),
    ("messages", {"max_tokens": 5, "messages": IMAGE}, ("an image must be a URI data:image/",)),
    ("chat/completions", {"messages": IMAGE}, ("an image must be a URI data:image/",)),
    ("chat/completions", {"messages": []}, ("messages",)),
    ("chat/completions", {"messages": HELLO, "audio": {"voice": "a"}}, ("audio",)),
    ("responses", {"input": "x", "previous_response_id": "resp_x"}, ("previous_response_id",)),
    ("responses", {"input": "x", "background": True}, ("background",)),
    ("responses", {"input": [{"type": "compaction_trigger"}, *HELLO]}, ("must be the last item",)),
    ("responses/compact", {}, ("input",)),
    ("completions", {"prompt": "a", "echo": True}, ("echo",)),
    *(("completions", {"prompt": prompt}, ("prompt",)) for prompt in ([-1], [2**31], [True], [[1], [2]], "", [], 1)),
]
ITEMS = ("telepathy", "image_generation_call", "computer_call")
BLOCKS = [
    ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}, "'base64'"),
    ({"type": "document", "source": {"type": "url", "url": "x"}}, "'url'"),
    ({"type": "container_upload", "file_id": "x"}, "container_upload"),
    ({"type": "telepathy"}, "telepathy"),
    ({"type": "telepathy_tool_result", "tool_use_id": "x"}, "telepathy_tool_result"),
]
OPENAIS_TOOLS = ("telepathy", "computer")
ANTHROPICS_TOOLS = [
    ({"type": "telepathy_20270101", "name": "telepathy"}, "telepathy_20270101"),
    ({"type": "computer_toolset_20260801"}, "computer_toolset_20260801"),
    ({"name": "no_schema"}, "input_schema"),
    ({"type": "custom", "name": "no_schema"}, "input_schema"),
    ({"input_schema": {"type": "object"}}, "name"),
]
REFUSED = [
    *FIELDS,
    *(("responses", {"input": [*HELLO, {"type": kind}]}, (kind,)) for kind in ITEMS),
    *(("messages", {"max_tokens": 9, "messages": [user([block])]}, (k, "messages.0.content")) for block, k in BLOCKS),
    *(("responses", {"input": "x", "tools": [{"type": kind}]}, (kind, "tools[0]")) for kind in OPENAIS_TOOLS),
    *(("chat/completions", {"messages": HELLO, "tools": [{"type": k}]}, (k, "tools[0]")) for k in OPENAIS_TOOLS),
    *(
        ("messages", {"max_tokens": 9, "messages": HELLO, "tools": [tool]}, (name, "tools.0"))
        for tool, name in ANTHROPICS_TOOLS
    ),
]


def test_unsupported_fields_tools_and_parts_are_refused_by_name() -> None:
    with serving("hello") as case:
        for path, body, words in REFUSED:
            answer = post(case, path, status=400, **body)
            assert all(word in answer["error"]["message"] for word in words), answer
            assert (answer.get("type") == "error") == (path == "messages")
        assert not case.payloads
