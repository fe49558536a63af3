"""Whatever a field of a request holds, the answer is a served one or a typed error: never a 500, never an event stream
that ends without saying why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agl_slime.gateway.calls import IMPOSED
from tests.gateway.protocols import PROTOCOLS, TOOLS, body_of, events_of, user
from tests.harness.examples import examples
from tests.harness.gateway import CALL, serving

FIELDS = {
    path: sorted({*protocol.honoured, *protocol.ignored, *IMPOSED, "thread", "telepathy"})
    for path, protocol in PROTOCOLS.items()
}
NUMBERS = [0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**30, 0.5, -0.0, 1e308, 5e-324]
TEXTS = ["", "x", "\ud800", "a\udc00b", "\x00", "auto", "none", "required", "json_schema", "assistant", "</think>"]
FIELD_NAMES = """
    role content type text name id arguments function tool_calls tool_call_id input output call_id schema format
    json_schema parameters input_schema strict tools thinking source summary refusal reasoning_content effort key value
"""
TYPES = """
    text input_text output_text refusal image_url tool_use tool_result thinking redacted_thinking function custom
    namespace function_call function_call_output custom_tool_call reasoning item_reference message json_object
    json_schema auto any none user assistant system developer tool
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
def test_any_value_of_any_field_gets_an_answer_or_a_typed_error(
    path: str, data: st.DataObject, client: httpx.Client
) -> None:
    changed = data.draw(st.dictionaries(st.sampled_from(FIELDS[path]), hostile(), min_size=1, max_size=2))
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
