"""The history that a request continues, by the id of a response or of its items, or as messages in parts; and answers
whose arguments JSON cannot represent."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.gateway.protocols import CHATS, FUNCTION, TOOLS, Talk, body_of, called, events_of, user
from tests.harness.gateway import (
    CALL,
    CALL_TWO,
    Case,
    calling,
    one_sample,
    post,
    prompts,
    serving,
    trained_once,
)
from tests.harness.model_templates import MODELS, template_of

THINKS = f"<think>\na b\n</think>\n\nSee. {CALL}\n{CALL_TWO}"


def respond(case: Case, items: Any, **fields: Any) -> dict[str, Any]:
    return post(case, "responses", input=items, **fields)


def test_previous_response_carries_inputs_but_not_instructions() -> None:
    with serving("One.", "Two.", "Three.") as case:
        rules = [{"role": "system", "content": "Rule."}, {"role": "developer", "content": "Order."}]
        first = respond(case, [*rules, user("A?")], instructions="Brief.")
        late = {"role": "developer", "content": "More."}
        second = respond(case, [user("B?"), late], previous_response_id=first["id"])
        respond(case, "C?", instructions="Brief.", previous_response_id=second["id"])
        rule = "system\n{}<|im_end|>\n<|im_start|>".format
        rest = f"{rule('Rule.')}{rule('Order.')}user\nA?<|im_end|>\n<|im_start|>assistant\nOne.<|im_end|>\n<|im_start|>"
        rest += f"user\nB?<|im_end|>\n<|im_start|>{rule('More.')}assistant\n"
        assert prompts(case)[1] == f"<|im_start|>{rest}"
        assert prompts(case)[2].startswith(f"<|im_start|>{rule('Brief.')}{rest}Two.<|im_end|>\n<|im_start|>user\nC?")
        trained_once(case.turns, case.segments)


@pytest.mark.parametrize("kinds", [("reasoning", "message", "function_call"), ("message", "function_call")])
def test_items_of_an_earlier_response_are_known_by_their_ids(kinds: tuple[str, ...]) -> None:
    """As Vercel's AI SDK sends them by default."""
    with serving(THINKS, "Sunny.") as case:
        talk = Talk(case, "responses", tools=[FUNCTION])
        first = talk.ask(user("Weather?"))
        assert {item["type"] for item in first} == {"reasoning", "message", "function_call"}
        references = [{"type": "item_reference", "id": item["id"]} for item in first if item["type"] in kinds]
        respond(case, [user("Weather?"), *references, *talk.results()], tools=[FUNCTION])
        one_sample(case)


def test_a_reference_to_no_item_is_refused_in_a_sentence() -> None:
    with serving(CALL) as case:
        response = respond(case, "Weather?", tools=[FUNCTION])["id"]
        for name in ("msg_x", "fc_", "", None, 5, "rs_resp_1", f"fc_{response}_7", f"fc_{response}_", f"xx_{response}"):
            refused = respond(case, [user("x"), {"type": "item_reference", "id": name}], status=400)
            assert "which is no item of this rollout" in refused["error"]["message"]


def test_unstored_response_cannot_be_continued() -> None:
    with serving("One.") as case:
        response = respond(case, "A?", store=False)["id"]
        refused = respond(case, "B?", previous_response_id=response, status=400)
        assert "no answer of this rollout" in refused["error"]["message"]
        assert "at least one item" in respond(case, [], status=400)["error"]["message"]


@pytest.mark.parametrize(("path", "between"), [("chat/completions", " "), ("messages", "\n"), ("responses", " ")])
def test_parts_of_a_content_are_joined_as_sglang_joins_them(path: str, between: str) -> None:
    kind = "input_text" if path == "responses" else "text"
    with serving("ok") as case:
        post(case, path, **body_of(path, [user([{"type": kind, "text": "one"}, {"type": kind, "text": "two"}])]))
        assert f"user\none{between}two<|im_end|>" in prompts(case)[0]


HOSTILE = ['"\\ud800"', '{"a": ["\\udc00 x"]}', "123456789012345678901234567890", "-98765432109876543210", "NaN"]


@pytest.mark.parametrize("path", CHATS)
def test_arguments_that_json_cannot_hold_are_served_and_come_back(path: str) -> None:
    calls = [f'<tool_call>\n{{"name": "weather", "arguments": {{"city": {value}}}}}\n</tool_call>' for value in HOSTILE]
    with serving(*(text for call in calls for text in (call, "ok", call))) as case:
        for number, value in enumerate(HOSTILE):
            talk = Talk(case, path, tools=TOOLS[path])
            assert "weather" in json.dumps(talk.ask(user(f"{number}?"))), value
            talk.ask(*talk.results())
            if path != "messages" or not value.lstrip("-").isdigit():  # large integers come back as floats
                assert case.turns[-1].fork is None
            body = body_of(path, talk.history[:1], tools=TOOLS[path], stream=True)
            streamed = httpx.post(f"{case.llm.endpoint}/{path}", json=body)
            assert streamed.status_code == 200
            for text in map(json.dumps, (talk.history, *events_of(streamed))):
                parsed = json.loads(text, parse_constant=lambda name: pytest.fail(name))
                json.dumps(parsed, ensure_ascii=False).encode()


NO_ARGUMENTS: list[Any] = [{"arguments": ""}, {"arguments": " \n"}, {"arguments": "null"}, {"arguments": None}, {}]


@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize("model", ["Qwen3", "Qwen3.5", "GLM-4.5", "Kimi K2", "DeepSeek-V3"])
def test_a_call_without_arguments_is_one_with_an_empty_object(model: str, path: str) -> None:
    with serving("ok", template=template_of(MODELS[model]), context_length=9_000) as case:
        for call in [{"arguments": "{}" if path != "messages" else {}}, *NO_ARGUMENTS]:
            post(case, path, **body_of(path, [user("x"), *called(path, "now", "noon", **call)]))
        assert len(set(prompts(case))) == 1


@pytest.mark.parametrize("arguments", [{"arguments": ""}, {"arguments": None}, {}])
def test_an_answers_call_that_comes_back_without_arguments_is_no_fork(arguments: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    with serving(calling("now"), "Noon.") as case:
        talk = Talk(case, "chat/completions", tools=tools)
        (call,) = talk.ask(user("x"))["tool_calls"]
        assert call["function"].pop("arguments") == "{}"
        call["function"] |= arguments
        talk.ask(*talk.results("noon"))
        one_sample(case)
