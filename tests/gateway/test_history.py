"""What a request goes on from: by the id of a response or of its items, by messages in parts; and answers that hold
what JSON cannot hold."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.harness.gateway import CALL, CALL_TWO, WEATHER, Case, calling, one_sample, prompts, serving, trained_once
from tests.harness.model_templates import MODELS, template_of

FUNCTION = {"type": "function", **WEATHER["function"]}
THINKS = f"<think>\na b\n</think>\n\nSee. {CALL}\n{CALL_TWO}"


def respond(case: Case, given: Any, *, status: int = 200, **more: Any) -> dict[str, Any]:
    answer = httpx.post(f"{case.llm.endpoint}/responses", json={"model": "m", "input": given, **more})
    assert answer.status_code == status, answer.text
    return answer.json()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# -- responses that go on by an id ------------------------------------------------------------------------------------


def test_previous_response_carries_inputs_but_not_instructions() -> None:
    with serving("One.", "Two.", "Three.") as case:
        rules = [{"role": "system", "content": "Rule."}, {"role": "developer", "content": "Order."}]
        first = respond(case, [*rules, user("A?")], instructions="Brief.")
        second = respond(
            case, [user("B?"), {"role": "developer", "content": "More."}], previous_response_id=first["id"]
        )
        respond(case, "C?", instructions="Brief.", previous_response_id=second["id"])
        told = "system\n{}<|im_end|>\n<|im_start|>".format
        rest = f"{told('Rule.')}{told('Order.')}user\nA?<|im_end|>\n<|im_start|>assistant\nOne.<|im_end|>\n<|im_start|>"
        rest += f"user\nB?<|im_end|>\n<|im_start|>{told('More.')}assistant\n"
        assert prompts(case)[1] == f"<|im_start|>{rest}"
        assert prompts(case)[2].startswith(f"<|im_start|>{told('Brief.')}{rest}Two.<|im_end|>\n<|im_start|>user\nC?")
        trained_once(case.turns, case.segments)


def test_the_same_instructions_each_time_are_one_sample() -> None:
    with serving("One.", "Two.", "Three.") as case:
        made = None
        for question in ("A?", "B?", "C?"):
            how = {"previous_response_id": made} if made else {}
            made = respond(case, [{"role": "developer", "content": "x"}, user(question)], instructions="Brief.", **how)[
                "id"
            ]
        assert [turn.fork for turn in case.turns] == [None] * 3
        assert len(case.segments) == 1


@pytest.mark.parametrize("kinds", [("reasoning", "message", "function_call"), ("message", "function_call")])
def test_items_of_an_earlier_response_are_known_by_their_ids(kinds: tuple[str, ...]) -> None:
    """As Vercel's AI SDK sends them by default."""
    with serving(THINKS, "Sunny.") as case:
        first = respond(case, [user("Weather?")], tools=[FUNCTION])["output"]
        assert {item["type"] for item in first} == {"reasoning", "message", "function_call"}
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "fine"}
            for item in first
            if item["type"] == "function_call"
        ]
        references = [{"type": "item_reference", "id": item["id"]} for item in first if item["type"] in kinds]
        respond(case, [user("Weather?"), *references, *results], tools=[FUNCTION])
        assert [turn.fork for turn in case.turns] == [None, None]
        assert len(case.segments) == 1
        trained_once(case.turns, case.segments)


@pytest.mark.parametrize("made", ["msg_x", "fc_x", "fc_", "_", "", None, 5, "rs_resp_1", "fc_{}_7", "fc_{}_", "xx_{}"])
def test_a_reference_to_no_item_is_refused_in_a_sentence(made: Any) -> None:
    with serving(CALL) as case:
        known = respond(case, "Weather?", tools=[FUNCTION])["id"]
        made = made.format(known) if isinstance(made, str) else made
        told = respond(case, [user("x"), {"type": "item_reference", "id": made}], status=400)
        assert "which is no item of this rollout" in told["error"]["message"]


def test_unstored_response_cannot_be_continued() -> None:
    with serving("One.") as case:
        made = respond(case, "A?", store=False)["id"]
        assert (
            "no answer of this rollout"
            in respond(case, "B?", previous_response_id=made, status=400)["error"]["message"]
        )
        assert "at least one item" in respond(case, [], status=400)["error"]["message"]


# -- contents in parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "between"), [("chat/completions", " "), ("messages", "\n"), ("responses", " ")])
def test_parts_of_a_content_are_joined_as_sglang_joins_them(path: str, between: str) -> None:
    kind = "input_text" if path == "responses" else "text"
    parts = [{"type": kind, "text": "one"}, {"type": kind, "text": "two"}]
    name = "input" if path == "responses" else "messages"
    with serving("ok") as case:
        body = {"model": "m", "max_tokens": 9, name: [{"role": "user", "content": parts}]}
        if path == "responses":
            body["max_output_tokens"] = body.pop("max_tokens")
        httpx.post(f"{case.llm.endpoint}/{path}", json=body).raise_for_status()
        assert f"user\none{between}two<|im_end|>" in prompts(case)[0]


def test_answer_sent_back_in_parts_is_no_fork() -> None:
    with serving("one two", "three") as case:
        url = f"{case.llm.endpoint}/chat/completions"
        httpx.post(url, json={"messages": [user("Count.")]}).raise_for_status()
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]
        history = [user("Count."), {"role": "assistant", "content": parts}, user("On.")]
        httpx.post(url, json={"messages": history}).raise_for_status()
        assert [turn.fork for turn in case.turns] == [None, None]


def test_anthropic_thread_field_is_refused_with_its_error_code() -> None:
    with serving("ok") as case:
        body = {"model": "m", "max_tokens": 9, "messages": [user("x")], "thread": {"type": "new"}}
        answer = httpx.post(f"{case.llm.endpoint}/messages", json=body)
        assert answer.status_code == 400
        details = answer.json()["error"]["details"]
        assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


# -- what JSON, or its readers, cannot hold ---------------------------------------------------------------------------

HOSTILE = ['"\\ud800"', '{"a": ["\\udc00 x"]}', "123456789012345678901234567890", "-98765432109876543210", "NaN"]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_arguments_that_json_cannot_hold_are_served_and_come_back(path: str, streamed: bool, value: str) -> None:
    says = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": {value}}}}}\n</tool_call>'
    schema = {"type": "object", "properties": {"city": {}}}
    tool: dict[str, Any] = {"name": "weather", "description": "x"}
    body: dict[str, Any] = {"model": "m", "messages": [user("x")], "stream": streamed}
    if path == "messages":
        body |= {"max_tokens": 200, "tools": [{**tool, "input_schema": schema}]}
    elif path == "responses":
        body |= {"input": body.pop("messages"), "tools": [{"type": "function", **tool, "parameters": schema}]}
    else:
        body |= {"tools": [{"type": "function", "function": {**tool, "parameters": schema}}]}
    with serving(says, "ok") as case:
        answer = httpx.post(f"{case.llm.endpoint}/{path}", json=body)
        assert answer.status_code == 200, answer.text
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        for text in events if streamed else [answer.text]:
            json.dumps(json.loads(text, parse_constant=lambda name: pytest.fail(name)), ensure_ascii=False).encode()
        assert streamed or "weather" in answer.text
        if path == "chat/completions" and not streamed:
            said = answer.json()["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "fine"}
            again = httpx.post(
                f"{case.llm.endpoint}/{path}", json={**body, "messages": [*body["messages"], said, result]}
            )
            assert again.status_code == 200, again.text
            assert [turn.fork for turn in case.turns] == [None, None]


NO_ARGUMENTS: list[Any] = [{"arguments": ""}, {"arguments": " \n"}, {"arguments": "null"}, {"arguments": None}, {}]


def without_arguments(path: str, given: dict[str, Any]) -> dict[str, Any]:
    """A history with a call whose arguments are ``given``, in the words of each protocol."""
    if path == "messages":
        use = {"type": "tool_use", "id": "c", "name": "now", **({"input": given["arguments"]} if given else {})}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "noon"}
        return {"messages": [user("x"), {"role": "assistant", "content": [use]}, user([result])], "max_tokens": 9}
    if path == "responses":
        call = {"type": "function_call", "call_id": "c", "name": "now", **given}
        return {"input": [user("x"), call, {"type": "function_call_output", "call_id": "c", "output": "noon"}]}
    calls = [{"id": "c", "type": "function", "function": {"name": "now", **given}}]
    result = {"role": "tool", "tool_call_id": "c", "content": "noon"}
    return {"messages": [user("x"), {"role": "assistant", "tool_calls": calls}, result]}


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize(
    "model", ["Qwen2.5", "Qwen3", "Qwen3.5", "GLM-4.5", "Nemotron 3 Nano", "Kimi K2", "DeepSeek-V3"]
)
def test_a_call_without_arguments_is_one_with_an_empty_object(model: str, path: str) -> None:
    with serving("ok", template=template_of(MODELS[model]), context_length=9_000) as case:
        for given in [{"arguments": "{}" if path != "messages" else {}}, *NO_ARGUMENTS]:
            answer = httpx.post(f"{case.llm.endpoint}/{path}", json={"model": "m", **without_arguments(path, given)})
            assert answer.status_code == 200, answer.text
        assert len(set(prompts(case))) == 1


@pytest.mark.parametrize("given", NO_ARGUMENTS)
def test_an_answers_call_that_comes_back_without_arguments_is_no_fork(given: dict[str, Any]) -> None:
    url, now = "{}/chat/completions".format, {"type": "function", "function": {"name": "now"}}
    with serving(calling("now"), "Noon.") as case:
        body = {"messages": [user("x")], "tools": [now]}
        said = httpx.post(url(case.llm.endpoint), json=body).json()["choices"][0]["message"]
        (call,) = said["tool_calls"]
        assert call["function"].pop("arguments") == "{}"
        call["function"] |= given
        result = {"role": "tool", "tool_call_id": call["id"], "content": "noon"}
        httpx.post(url(case.llm.endpoint), json={**body, "messages": [user("x"), said, result]}).raise_for_status()
        one_sample(case)


@pytest.mark.parametrize("arguments", ['{"city": "\\ud800"}', '{"city": NaN}', "[" * 200 + "]" * 200])
def test_arguments_of_a_given_history_that_json_cannot_hold_are_read(arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    history = [
        user("x"),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "y"},
    ]
    with serving("ok") as case:
        answer = httpx.post(f"{case.llm.endpoint}/chat/completions", json={"messages": history, "tools": [WEATHER]})
        assert answer.status_code == 200, answer.text
