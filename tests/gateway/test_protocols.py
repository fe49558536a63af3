"""Completions, responses and messages: the same core behind other words. What is answered is checked by the types of
the clients' own packages."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.harness.gateway import CALL, CALL_TWO, WEATHER, Case, serving, trained_once

FUNCTION = {"type": "function", **WEATHER["function"]}
THINKS = f"<think>\na b\n</think>\n\nSee. {CALL}\n{CALL_TWO}"


def client_of(case: Case) -> OpenAI:
    return OpenAI(base_url=case.llm.endpoint, api_key="any", max_retries=0)


# -- responses --------------------------------------------------------------------------------------------------------


def test_responses_continue_by_items_and_by_previous_id() -> None:
    with serving(THINKS, "Sunny.", "Bye.") as case:
        create = client_of(case).responses.create
        first = create(model="m", instructions="Be brief.", input="Weather?", tools=[FUNCTION])
        kinds = [item.type for item in first.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert first.output_text == "See."
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "fine"}
            for item in first.output
            if item.type == "function_call"
        ]
        asked = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
        items: Any = [*asked, *(item.model_dump() for item in first.output if item.type != "reasoning"), *results]
        second = create(model="m", instructions="Be brief.", input=items, tools=[FUNCTION])
        third = create(
            model="m", instructions="Be brief.", input="Thanks.", tools=[FUNCTION], previous_response_id=second.id
        )
        assert (second.output_text, third.output_text) == ("Sunny.", "Bye.")
        assert [turn.fork for turn in case.turns] == [None] * 3
        assert len(case.segments) == 1
        trained_once(case.turns, case.segments)


@pytest.mark.parametrize("says", ["Plain words.", THINKS])
def test_the_events_of_a_response_add_up_to_it(says: str) -> None:
    with serving(says) as case:
        body = {"model": "m", "input": "Weather?", "tools": [FUNCTION], "stream": True}
        read = TypeAdapter[Any](ResponseStreamEvent)
        url = f"{case.llm.endpoint}/responses"
        with httpx.stream("POST", url, json=body) as answer:
            events = [read.validate_json(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        final = Response.model_validate(events[-1].response.model_dump())
        with client_of(case).responses.stream(model="m", input="Weather?", tools=[FUNCTION]) as stream:
            built = stream.get_final_response()
        whole = client_of(case).responses.create(model="m", input="Weather?", tools=[FUNCTION])
        assert final.output_text == built.output_text == whole.output_text
        assert [item.type for item in built.output] == [item.type for item in whole.output]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.model_dump() for item in done] == [item.model_dump() for item in final.output]


def test_a_streamed_response_that_a_limit_cuts_is_an_answer_and_no_error() -> None:
    with (
        serving("One two three four five six.", sampling={"max_new_tokens": 4}) as case,
        client_of(case).responses.stream(model="m", input="Count.") as stream,
    ):
        assert [event.type for event in stream][-1] == "response.completed"
        final = stream.get_final_response()
    assert (final.status, final.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert final.output_text


def test_namespace_and_custom_tools_are_called_by_their_original_names() -> None:
    call = '<tool_call>\n{"name": "files__read", "arguments": {"path": "a"}}\n</tool_call>'
    patch = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
    tools: Any = [
        {"type": "namespace", "name": "files", "description": "", "tools": [{"type": "function", "name": "read"}]},
        {"type": "custom", "name": "patch", "description": "Free text."},
        {"type": "web_search"},
    ]
    with serving(f"{call}\n{patch}", "Done.") as case:
        body = {"model": "m", "input": "Go.", "tools": tools, "store": False}
        output = httpx.post(f"{case.llm.endpoint}/responses", json=body).json()["output"]
        assert [(item["type"], item["name"]) for item in output] == [
            ("function_call", "read"),
            ("custom_tool_call", "patch"),
        ]
        assert output[0]["namespace"] == "files"
        assert output[1]["input"] == "*** Begin"
        items = [{"role": "user", "content": "Go."}, *output]
        items.append({"type": "function_call_output", "call_id": output[0]["call_id"], "output": "text"})
        items.append({"type": "custom_tool_call_output", "call_id": output[1]["call_id"], "output": "ok"})
        httpx.post(f"{case.llm.endpoint}/responses", json={**body, "input": items}).raise_for_status()
        assert [turn.fork for turn in case.turns] == [None, None]


# -- messages ---------------------------------------------------------------------------------------------------------

TOOL = {"name": "weather", "description": "How the weather is.", "input_schema": WEATHER["function"]["parameters"]}


def test_messages_in_anthropics_words() -> None:
    anthropic = pytest.importorskip("anthropic", reason="the client of Anthropic: pip install anthropic")
    with serving(THINKS, "Sunny.") as case:
        client = anthropic.Anthropic(base_url=case.llm.endpoint.removesuffix("/v1"), api_key="any", max_retries=0)
        asked = [{"role": "user", "content": "Weather?"}]
        how = {"model": "m", "max_tokens": 200, "system": "Be brief.", "tools": [TOOL]}
        first = client.messages.create(messages=asked, **how)
        assert first.stop_reason == "tool_use"
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "fine"}]}
            for block in first.content
            if block.type == "tool_use"
        ]
        history = [*asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        count = client.messages.count_tokens(messages=asked, model="m", system="Be brief.", tools=[TOOL])
        assert count.input_tokens == len(case.turns[0].prompt_ids)
        with client.messages.stream(messages=history, **how) as stream:
            assert "".join(stream.text_stream) == "Sunny."
            assert stream.get_final_message().stop_reason == "end_turn"
        assert [turn.fork for turn in case.turns] == [None, None]
        trained_once(case.turns, case.segments)


def test_the_events_of_a_message_by_their_shape() -> None:
    with serving(THINKS) as case:
        body = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "Weather?"}], "tools": [TOOL]}
        url = f"{case.llm.endpoint}/messages"
        whole = httpx.post(url, json=body).json()
        with httpx.stream("POST", url, json={**body, "stream": True}) as answer:
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
        assert events[0]["type"] == "message_start"
        assert events[-1] == {"type": "message_stop"}
        blocks: dict[int, dict[str, Any]] = {}
        for event in events:
            if event["type"] == "content_block_start":
                blocks[event["index"]] = event["content_block"]
            elif event["type"] == "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                for key in ("text", "thinking"):
                    block[key] = block.get(key, "") + delta.get(key, "") if key in delta else block.get(key)
                if "partial_json" in delta:
                    block["input"] = json.loads(delta["partial_json"])
        made = [{key: value for key, value in block.items() if value is not None} for block in blocks.values()]
        assert [b["type"] for b in made] == [b["type"] for b in whole["content"]]
        assert [b.get("text") or b.get("thinking") or b["input"] for b in made] == [
            b.get("text") or b.get("thinking") or b["input"] for b in whole["content"]
        ]


def test_the_traffic_of_a_command_line_agent() -> None:
    """As recorded: HEAD first, then a stream of messages with system messages in the list, adaptive thinking, moving
    cache marks, and more tokens than the run gives; the key as bearer."""
    with serving(CALL, "Done.", context_length=10**6) as case:
        root = case.llm.endpoint.removesuffix("/v1")
        headers = {"Authorization": f"Bearer {case.llm.api_key}", "anthropic-version": "2023-06-01"}
        plain = root.replace(f"/k/{case.llm.api_key}", "")
        assert httpx.head(plain, headers=headers).status_code == 200
        tools = [{**TOOL, "name": f"tool_{n}", "description": "x" * 2500} for n in range(24)] + [TOOL]
        system = [{"type": "text", "text": "You are.", "cache_control": {"type": "ephemeral"}}]
        mark = {"cache_control": {"type": "ephemeral"}}
        asked: list[Any] = [
            {"role": "user", "content": [{"type": "text", "text": "Weather?", **mark}]},
            {"role": "system", "content": "A reminder."},
        ]
        body = {
            "model": "m",
            "max_tokens": 32_000,
            "stream": True,
            "system": system,
            "tools": tools,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": []},
            "output_config": {"effort": "high"},
            "metadata": {"user_id": "u"},
        }
        first = httpx.post(f"{plain}/v1/messages?beta=true", json={**body, "messages": asked}, headers=headers)
        assert first.status_code == 200, first.text
        assert "input_json_delta" in first.text
        events = [json.loads(line[6:]) for line in first.text.splitlines() if line.startswith("data: ")]
        use = next(
            event["content_block"] for event in events if event.get("content_block", {}).get("type") == "tool_use"
        )
        use["input"] = {"city": "Rome"}
        asked[0]["content"][0].pop("cache_control")
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "fine", **mark}
        asked += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        httpx.post(f"{plain}/v1/messages", json={**body, "messages": asked}, headers=headers).raise_for_status()
        assert [turn.fork for turn in case.turns] == [None, None]
        assert len(case.segments) == 1


def test_models_are_listed_and_a_wrong_path_names_the_known_ones() -> None:
    with serving("hello") as case:
        [model] = client_of(case).models.list()
        assert model.id == "scripted"
        assert abs(model.created - time.time()) < 60
        card = httpx.get(f"{case.llm.endpoint}/models").json()["data"][0]
        assert datetime.fromisoformat(card["created_at"]).timestamp() == model.created
        with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
            client_of(case).embeddings.create(model="m", input="x")
