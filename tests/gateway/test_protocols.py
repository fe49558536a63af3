"""Responses and messages: one core behind other words. Answers are checked by the types of the clients' packages."""

import time
from datetime import datetime
from typing import Any

import httpx
import pytest

from agl_slime.tokens.forks import ForkReason
from tests.gateway import protocols
from tests.harness.gateway import CALL, CALL_TWO, calling, one_sample, post, prompts, serving

THINKS = f"<think>\na b\n</think>\n\nSee. {CALL}\n{CALL_TWO}"


def test_responses_continue_by_items_and_by_previous_id() -> None:
    with serving(THINKS, "Sunny.", "Bye.") as case:
        create, brief = (
            protocols.openai_client(case).responses.create,
            {"instructions": "Be brief.", "tools": [protocols.FUNCTION]},
        )
        first = create(model="m", input="Weather?", **brief)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert first.output_text == "See."
        calls = [item.call_id for item in first.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": call, "output": "fine"} for call in calls]
        question = protocols.user([{"type": "input_text", "text": "Weather?"}])
        items = [question, *(item.model_dump() for item in first.output if item.type != "reasoning"), *results]
        second = create(model="m", input=items, **brief)
        third = create(model="m", input="Thanks.", previous_response_id=second.id, **brief)
        assert (second.output_text, third.output_text) == ("Sunny.", "Bye.")
        one_sample(case, 3)


@pytest.mark.parametrize(
    ("says", "fields"),
    [("Plain words.", {}), (THINKS, {}), (THINKS, {"reasoning": {"effort": "medium", "summary": "auto"}})],
    ids=["text", "thinking", "summary"],
)
def test_the_events_of_a_response_add_up_to_it(says: str, fields: dict[str, Any]) -> None:
    from openai.types.responses import Response

    with serving(says) as case:
        fields = {"tools": [protocols.FUNCTION], **fields}
        body = protocols.body_of("responses", [protocols.user("Weather?")], stream=True, **fields)
        events = protocols.response_events(httpx.post(f"{case.llm.endpoint}/responses", json=body))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        final = Response.model_validate(events[-1].response.model_dump())
        client = protocols.openai_client(case).responses
        with client.stream(model="m", input="Weather?", **fields) as stream:
            built = stream.get_final_response()
        whole = client.create(model="m", input="Weather?", **fields)
        assert final.output_text == built.output_text == whole.output_text
        assert [item.type for item in built.output] == [item.type for item in whole.output]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.model_dump() for item in done] == [item.model_dump() for item in final.output]
        for response in (final, built, whole) if says == THINKS else ():
            texts = {name: getattr(response.output[0], name) for name in ("summary", "content")}
            [(place, [part])] = [(name, parts) for name, parts in texts.items() if parts]
            assert (place, part.text) == ("summary" if "reasoning" in fields else "content", "a b")


@pytest.mark.parametrize("same_id", [True, False])
def test_a_message_that_repeats_the_thinking_is_the_answer_of_its_calls(same_id: bool) -> None:
    """As Copilot CLI sends an answer without text, where its thinking came as content."""
    with serving(f"<think>\na b\n</think>\n\n{CALL}", "Sunny.") as case:
        talk = protocols.Talk(case, "responses", tools=[protocols.FUNCTION], store=False)
        _, call = talk.ask(protocols.user("Weather?"))
        call["call_id"] = call["call_id"] if same_id else "call_x"
        talk.history.insert(-1, {"type": "message", **protocols.assistant([{"type": "output_text", "text": "a b"}])})
        talk.ask(*talk.results())
        assert [turn.fork for turn in case.turns] == [None, None if same_id else ForkReason.EDITED_HISTORY]


def test_a_streamed_response_that_a_limit_cuts_is_an_answer_and_no_error() -> None:
    with (
        serving("One two three four five six.", sampling={"max_new_tokens": 4}) as case,
        protocols.openai_client(case).responses.stream(model="m", input="Count.") as stream,
    ):
        assert [event.type for event in stream][-1] == "response.completed"
        final = stream.get_final_response()
    assert (final.status, final.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert final.output_text


def test_namespace_and_custom_tools_are_called_by_their_original_names() -> None:
    says = f"{calling('files__read', path='a')}\n{calling('patch', input='*** Begin')}"
    tools: Any = [
        {"type": "namespace", "name": "files", "description": "", "tools": [{"type": "function", "name": "read"}]},
        {"type": "custom", "name": "patch", "description": "Free text."},
        {"type": "web_search"},
    ]
    with serving(says, "Done.") as case:
        talk = protocols.Talk(case, "responses", tools=tools, store=False)
        read, patch = talk.ask(protocols.user("Go."))
        assert (read["type"], read["name"], read["namespace"]) == ("function_call", "read", "files")
        assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "*** Begin")
        talk.ask(*talk.results(), {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "ok"})
        one_sample(case)


def test_messages_in_anthropics_words() -> None:
    with serving(THINKS, "Sunny.") as case:
        client = protocols.anthropic_client(case)
        prompt = {"model": "m", "system": "Be brief.", "tools": [protocols.ANTHROPIC_TOOL]}
        first = client.messages.create(messages=[protocols.user("Weather?")], max_tokens=200, **prompt)
        assert first.stop_reason == "tool_use"
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        uses = [block.id for block in first.content if block.type == "tool_use"]
        text = [{"type": "text", "text": "fine"}]
        results = [{"type": "tool_result", "tool_use_id": use, "content": text} for use in uses]
        history = [protocols.user("Weather?"), protocols.assistant(first.content), protocols.user(results)]
        count = client.messages.count_tokens(messages=[protocols.user("Weather?")], **prompt)
        assert count.input_tokens == len(case.turns[0].prompt_ids)
        with client.messages.stream(messages=history, max_tokens=200, **prompt) as stream:
            assert "".join(stream.text_stream) == "Sunny."
            assert stream.get_final_message().stop_reason == "end_turn"
        one_sample(case)


def test_the_events_of_a_message_by_their_shape() -> None:
    with serving(THINKS) as case:
        body = protocols.body_of("messages", [protocols.user("Weather?")], tools=[protocols.ANTHROPIC_TOOL])
        whole = post(case, "messages", **body)["content"]
        events = protocols.events_of(httpx.post(f"{case.llm.endpoint}/messages", json={**body, "stream": True}))
        assert events[0]["type"] == "message_start"
        assert events[-1] == {"type": "message_stop"}
        streamed = protocols.blocks_of(events)
        assert [block["type"] for block in streamed] == ["thinking", "text", "tool_use", "tool_use"]
        for block, expected in zip(streamed, whole, strict=True):
            for key in ("type", "text", "thinking", "input"):
                assert block.get(key) == expected.get(key)


def test_the_traffic_of_a_command_line_agent() -> None:
    """As recorded: HEAD first, then a stream of messages with system messages in the list, adaptive thinking, moving
    cache marks, and more tokens than the run gives; the key as bearer."""
    with serving(CALL, "Done.", context_length=10**6) as case:
        headers = {"Authorization": f"Bearer {case.llm.api_key}", "anthropic-version": "2023-06-01"}
        plain = case.llm.endpoint.removesuffix("/v1").replace(f"/k/{case.llm.api_key}", "")
        assert httpx.head(plain, headers=headers).status_code == 200
        mark = {"cache_control": {"type": "ephemeral"}}
        messages: list[Any] = [
            protocols.user([{"type": "text", "text": "Weather?", **mark}]),
            {"role": "system", "content": "A reminder."},
        ]
        body: dict[str, Any] = {"model": "m", "max_tokens": 32_000, "stream": True}
        body |= {"system": [{"type": "text", "text": "You are.", **mark}], "tools": [protocols.ANTHROPIC_TOOL]}
        body |= {"thinking": {"type": "adaptive"}, "context_management": {"edits": []}}
        body |= {"output_config": {"effort": "high"}, "metadata": {"user_id": "u"}}
        first = httpx.post(f"{plain}/v1/messages?beta=true", json={**body, "messages": messages}, headers=headers)
        assert first.status_code == 200, first.text
        (use,) = [block for block in protocols.blocks_of(protocols.events_of(first)) if block["type"] == "tool_use"]
        assert use["input"] == {"city": "Rome"}
        messages[0]["content"][0].pop("cache_control")
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "fine", **mark}
        messages += [protocols.assistant([use]), protocols.user([result])]
        httpx.post(f"{plain}/v1/messages", json={**body, "messages": messages}, headers=headers).raise_for_status()
        one_sample(case)


def billed(path: str, request_hash: str) -> tuple[list[Any], dict[str, Any]]:
    """First messages and fields of a request of Claude Code 2.1.117, direct or through a proxy to another protocol."""
    header = f"x-anthropic-billing-header: cc_version=2.1.117.48e; cc_entrypoint=sdk-cli; cch={request_hash};"
    parts = [{"type": "text", "text": text} for text in (header, "You are.")]
    if path == "chat/completions":
        return [{"role": "system", "content": parts}], {}
    return [], {"system": parts} if path == "messages" else {"instructions": f"{header}\nYou are."}


@pytest.mark.parametrize("path", protocols.CHATS)
def test_a_billing_header_in_the_system_text_is_no_part_of_the_prompt(path: str) -> None:
    with serving(CALL, "Done.") as case:
        talk = protocols.Talk(case, path, tools=protocols.TOOLS[path])
        for turn, request_hash in enumerate(("42224", "22e43")):
            system, fields = billed(path, request_hash)
            talk.history[: turn * len(system)] = system
            talk.ask(*(talk.results() if turn else [protocols.user("Weather?")]), **fields)
        one_sample(case)
        assert "billing" not in prompts(case)[0]
        assert "system\nYou are." in prompts(case)[0]


def test_models_are_listed_and_a_wrong_path_names_the_known_ones() -> None:
    import openai

    with serving("hello") as case:
        [model] = protocols.openai_client(case).models.list()
        assert model.id == "scripted"
        assert abs(model.created - time.time()) < 60
        card = httpx.get(f"{case.llm.endpoint}/models").json()["data"][0]
        assert datetime.fromisoformat(card["created_at"]).timestamp() == model.created
        with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
            protocols.openai_client(case).embeddings.create(model="m", input="x")
