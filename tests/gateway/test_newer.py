"""Newer parts of the protocols: blocks and items with text, histories in which a server ran tools, conversations and
summaries that the server keeps."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import ResponseCompactionItem, ResponseStreamEvent
from pydantic import TypeAdapter

from agl_slime.gateway.items import COMPACTION
from agl_slime.gateway.protocol import IGNORED
from agl_slime.tokens.forks import ForkReason
from tests.harness.gateway import (
    CALL,
    WEATHER,
    Case,
    calling,
    gateway_counts,
    one_sample,
    post,
    prompts,
    serving,
    trained_once,
)

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
FUNCTION = {"type": "function", **WEATHER["function"]}


def client_of(case: Case) -> OpenAI:
    return OpenAI(base_url=case.llm.endpoint, api_key="any", max_retries=0)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


# -- blocks of messages -----------------------------------------------------------------------------------------------

TEXT = {"type": "text", "text": "words"}
BLOCKS: list[tuple[dict[str, Any], str]] = [
    ({"type": "search_result", "source": "a.txt", "title": "A", "content": [TEXT]}, "A\na.txt\nwords"),
    ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}, "words"),
    (
        {"type": "document", "title": "T", "context": "C", "source": {"type": "content", "content": [TEXT]}},
        "T\nC\nwords",
    ),
    ({"type": "document", "title": None, "source": {"type": "content", "content": "words"}}, "words"),
]


@pytest.mark.parametrize(("block", "text"), BLOCKS)
@pytest.mark.parametrize("place", ["user", "tool_result"])
def test_blocks_that_have_text_are_read_as_it(place: str, block: dict[str, Any], text: str) -> None:
    with serving("ok") as case:
        messages: list[Any] = [user([block, {"type": "text", "text": "?"}])]
        if place == "tool_result":
            use = {"type": "tool_use", "id": "t", "name": "read", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
            messages = [user("x"), {"role": "assistant", "content": [use]}, user([result])]
        post(case, "messages", max_tokens=9, messages=messages)
        ends = "\n?" if place == "user" else ""
        role = "user" if place == "user" else "tool"
        assert f"<|im_start|>{role}\n{text}{ends}<|im_end|>" in prompts(case)[0]


def test_anthropic_server_tool_results_are_in_the_prompt() -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "Rome"}}
    page = {
        "type": "web_search_result",
        "title": "Rome",
        "url": "r.org",
        "encrypted_content": "0xSECRET",
        "page_age": None,
    }
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [page]}
    ran = {"type": "server_tool_use", "id": "b", "name": "bash_code_execution", "input": {"command": "ls"}}
    out = {"type": "bash_code_execution_result", "stdout": "a.txt", "stderr": "", "return_code": 0, "content": []}
    printed = {"type": "bash_code_execution_tool_result", "tool_use_id": "b", "content": out}
    said = [{"type": "text", "text": "I look."}, search, found, {"type": "text", "text": "It is."}, ran, printed]
    with serving("ok") as case:
        messages = [user("x"), {"role": "assistant", "content": said}, user("y")]
        post(case, "messages", max_tokens=9, messages=messages)
        (prompt,) = prompts(case)
        turns = [turn.partition("<|im_end|>")[0] for turn in prompt.split("<|im_start|>")[1:]]
        assert [turn.partition("\n")[0] for turn in turns] == [
            *("user", "assistant", "tool", "assistant", "tool", "user", "assistant")
        ]
        assert turns[1].startswith("assistant\nI look.<tool_call>")
        assert '{"query": "Rome"}' in turns[1]
        assert json.loads(turns[2].partition("\n")[2]) == [{"type": page["type"], "title": "Rome", "url": "r.org"}]
        assert '"stdout": "a.txt"' in turns[4]


# -- items of responses -----------------------------------------------------------------------------------------------

SERVERS_CALLS: list[tuple[dict[str, Any], list[str]]] = [
    ({"type": "web_search_call", "action": {"type": "search", "query": "Rome"}, "status": "completed"}, ["Rome"]),
    ({"type": "file_search_call", "queries": ["Rome"], "results": [{"text": "sunny"}]}, ["Rome", "sunny"]),
    ({"type": "code_interpreter_call", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]}, ["1+1", '"2"']),
    ({"type": "mcp_call", "name": "ask", "arguments": '{"q": "Rome"}', "output": "sunny"}, ["ask", "Rome", "sunny"]),
]


@pytest.mark.parametrize(("item", "texts"), SERVERS_CALLS)
def test_openai_server_tool_calls_are_in_the_prompt(item: dict[str, Any], texts: list[str]) -> None:
    with serving("ok") as case:
        answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]}
        post(case, "responses", input=[user("x"), {"id": "ws_1", **item}, answer, user("y")])
        (prompt,) = prompts(case)
        assert all(text in prompt for text in texts)
        assert prompt.count("<|im_start|>tool\n") == 1
        assert "<|im_start|>assistant\nSo.<|im_end|>" in prompt


def test_input_tokens_endpoint_counts_the_prompts_tokens() -> None:
    with serving("ok") as case:
        body: dict[str, Any] = {"input": [user("How many?")], "instructions": "Brief.", "tools": [FUNCTION]}
        count = client_of(case).responses.input_tokens.count(model="m", **body)
        client_of(case).responses.create(model="m", **body)
        assert count.object == "response.input_tokens"
        assert count.input_tokens == len(case.turns[0].prompt_ids)
        assert len(case.payloads) == 1


# -- conversations ----------------------------------------------------------------------------------------------------


@STREAMED
def test_conversation_collects_its_inputs_and_outputs(streamed: bool) -> None:
    with serving(CALL, "Sunny.", "Bye.") as case:
        client = client_of(case)
        made = client.conversations.create(items=[{"type": "message", "role": "developer", "content": "Rule."}])
        assert made.object == "conversation"

        def ask(given: Any, conversation: Any) -> Any:
            how: Any = {"model": "m", "input": given, "tools": [FUNCTION], "conversation": conversation}
            if not streamed:
                return client.responses.create(**how)
            *_, last = client.responses.create(**how, stream=True)
            return last.response

        first = ask("Weather?", made.id)
        assert first.conversation.id == made.id
        (call,) = first.output
        assert ask([{"type": "function_call_output", "call_id": call.call_id, "output": "fine"}], {"id": made.id})
        assert ask("Thanks.", made.id).output_text == "Bye."
        assert "system\nRule.<|im_end|>" in prompts(case)[2]
        one_sample(case, 3)


def test_unknown_conversation_is_not_found_in_openais_words() -> None:
    with serving("ok") as case:
        with pytest.raises(openai.NotFoundError, match="Conversation with id 'conv_x' not found"):
            client_of(case).responses.create(model="m", input="x", conversation="conv_x")
        made = client_of(case).conversations.create()
        first = client_of(case).responses.create(model="m", input="x", conversation=made.id)
        with pytest.raises(openai.BadRequestError, match="cannot be used in conjunction"):
            client_of(case).responses.create(model="m", input="x", conversation=made.id, previous_response_id=first.id)


# -- summaries --------------------------------------------------------------------------------------------------------


def worked(case: Case) -> list[Any]:
    """A conversation of two answers, with a tool, as items."""
    items: list[Any] = [user("Weather?")]
    (call,) = post(case, "responses", input=items, instructions="Brief.", tools=[FUNCTION])["output"]
    items += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "fine"}]
    return items + post(case, "responses", input=items, instructions="Brief.", tools=[FUNCTION])["output"]


def goes_on_compacted(case: Case, compacted: list[Any]) -> None:
    """The next questions begin with the summary, which is a fork of its own kind, once."""
    asked: list[Any] = [*compacted, user("And now?")]
    said = post(case, "responses", input=asked, instructions="Brief.", tools=[FUNCTION])["output"]
    post(case, "responses", input=[*asked, *said, user("Sure?")], instructions="Brief.", tools=[FUNCTION])
    assert [turn.fork for turn in case.turns] == [None, None, None, ForkReason.COMPACTION, None]
    assert "It was sunny." in prompts(case)[3]
    assert COMPACTION not in prompts(case)[3]
    assert len(case.segments) == 2
    trained_once(case.turns, case.segments)


@pytest.mark.parametrize("by_id", [False, True])
def test_compaction_is_sampled_on_the_prefix_and_can_be_continued(by_id: bool) -> None:
    """Without its tools, which the request has no field for."""
    with serving(CALL, "Sunny.", "<think>\nSo.\n</think>\n\nIt was sunny.", "Still.", "Yes.") as case:
        items = worked(case)
        given: Any = (
            {"previous_response_id": case.spans[-1].attributes["gen_ai.response.id"]} if by_id else {"input": items}
        )
        done = client_of(case).responses.compact(model="m", instructions="Brief.", **given)
        assert isinstance(done.output[-1], ResponseCompactionItem)
        assert done.object == "response.compaction"
        assert [item.type for item in done.output] == ["message", "compaction"]
        assert done.output[0].content[0].text == "Weather?"  # type: ignore[union-attr]
        assert done.usage.output_tokens == len(case.turns[2].response_ids)
        goes_on_compacted(case, [item.model_dump(exclude_unset=True, warnings=False) for item in done.output])


@STREAMED
def test_a_compaction_trigger_is_answered_with_a_summary(streamed: bool) -> None:
    with serving(CALL, "Sunny.", "It was sunny.", "Still.", "Yes.") as case:
        body = {"model": "m", "input": [*worked(case), {"type": "compaction_trigger"}], "stream": streamed}
        answer = httpx.post(
            f"{case.llm.endpoint}/responses", json={**body, "instructions": "Brief.", "tools": [FUNCTION]}
        )
        output = answer.json()["output"] if not streamed else None
        if streamed:
            read = TypeAdapter[Any](ResponseStreamEvent)
            events = [read.validate_json(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
            kinds = [event.type.removeprefix("response.") for event in events]
            assert kinds == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
            output = events[-1].response.model_dump(exclude_unset=True)["output"]
        assert output is not None
        assert [item["type"] for item in output] == ["compaction"]
        goes_on_compacted(case, [user("Weather?"), *output])


def test_a_summary_of_a_summary_leaves_the_first_out() -> None:
    with serving(CALL, "Sunny.", "It was sunny.", "Rain.", "Sun, then rain.") as case:
        first = post(case, "responses/compact", input=worked(case))["output"]
        asked = [*first, user("And now?")]
        said = post(case, "responses", input=asked)["output"]
        second = post(case, "responses/compact", input=[*asked, *said])["output"]
        assert [item["type"] for item in second] == ["message", "message", "compaction"]
        assert [item["content"][0]["text"] for item in second[:-1]] == ["Weather?", "And now?"]
        trained_once(case.turns, case.segments)


@pytest.mark.parametrize("content", ["gAAAAB", "agl-slime:%%%", "x agl-slime:eA==", None, 5])
def test_a_summary_that_another_server_made_is_refused(content: Any) -> None:
    with serving("ok") as case:
        item = {"type": "compaction", "encrypted_content": content}
        error = post(case, "responses", status=400, input=[item, user("x")])["error"]
        assert "could not be verified" in error["message"]
        assert error["code"] == "invalid_encrypted_content"


# -- what clients set, and what they get wrong ------------------------------------------------------------------------

SWITCHED = "{% if quiet %}quiet {% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
SWITCHED += "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PATHS = ["chat/completions", "messages", "responses"]


def asking(path: str, *messages: dict[str, Any]) -> dict[str, Any]:
    return {"input": [*messages]} if path == "responses" else {"messages": [*messages], "max_tokens": 64}


@pytest.mark.parametrize("path", [*PATHS, "messages/count_tokens", "responses/input_tokens"])
def test_arguments_of_the_template_are_a_clients_in_each_protocol(path: str) -> None:
    with serving("ok", template=SWITCHED) as case:
        body = asking(path.partition("/count")[0].partition("/input")[0], user("x"))
        answer = post(case, path, **body, chat_template_kwargs={"quiet": True})
        if "_tokens" in path:
            assert answer["input_tokens"] > post(case, path, **body)["input_tokens"]
        else:
            assert prompts(case)[0].startswith("quiet ")
        told = post(case, path, status=400, **body, chat_template_kwargs={"chat_template": "x"})
        assert "chat_template_kwargs.chat_template is not a client's to set" in told["error"]["message"]


@pytest.mark.parametrize("path", [*PATHS, "completions"])
def test_documented_ignored_fields_are_ignored_in_each_protocol(path: str) -> None:
    with serving("ok") as case:
        body = {"prompt": "x"} if path == "completions" else asking(path, user("x"))
        post(case, path, **body, **{name: {"type": "enabled"} for name in IGNORED})


ORPHANS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "chat/completions": (
        [user("x"), {"role": "tool", "tool_call_id": "gone", "content": "fine"}],
        "must be a response to a preceding message with 'tool_calls'",
    ),
    "messages": (
        [user([{"type": "tool_result", "tool_use_id": "gone", "content": "fine"}])],
        "unexpected `tool_use_id` found in `tool_result` blocks: gone",
    ),
    "responses": (
        [user("x"), {"type": "function_call_output", "call_id": "gone", "output": "fine"}],
        "No tool call found for function call output with call_id gone",
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("known", ["nothing", "another call", "a later call"])
def test_a_result_whose_call_is_not_in_the_history_is_refused(path: str, known: str) -> None:
    messages, words = ORPHANS[path]
    call: dict[str, Any] = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
    if path == "messages":
        call = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    elif path == "responses":
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    if known == "another call":
        messages = [user("q"), call, *messages]
    elif known == "a later call":
        messages = [*messages, json.loads(json.dumps(call).replace('"c"', '"gone"'))]
    with serving("ok") as case:
        tools = {"tools": [WEATHER]} if path == "chat/completions" else {}
        error = post(case, path, status=400, **asking(path, *messages), **tools)["error"]
        assert words in error["message"]
        assert not case.payloads
        assert case.attempt.seen["refused/400"] == 1


def test_tool_result_without_a_call_is_a_400_on_incremental_requests() -> None:
    with serving("a", "b", "c") as case:
        messages = [user("x")]
        for _ in range(3):
            answer = post(case, "chat/completions", messages=messages, tools=[WEATHER])
            messages += [answer["choices"][0]["message"], user("y")]
        orphan = {"role": "tool", "tool_call_id": "gone", "content": "fine"}
        post(case, "chat/completions", status=400, messages=[*messages, orphan], tools=[WEATHER])
        assert post(case, "chat/completions", messages=messages, tools=[WEATHER])
        assert gateway_counts(case)["answers"] == 4


def test_results_of_calls_that_an_agent_reads_from_the_text_are_taken() -> None:
    """Agents that declare no tools make up the ids; after a call that was served as one they may not."""
    with serving("<look>a</look>", "Seen.", CALL) as case:
        messages = [user("x"), post(case, "chat/completions", messages=[user("x")])["choices"][0]["message"]]
        results = [{"role": "tool", "tool_call_id": made, "content": "fine"} for made in ("1", "2")]
        post(case, "chat/completions", messages=[*messages, *results])
        one_sample(case)
        said = post(case, "chat/completions", messages=[user("y")], tools=[WEATHER])["choices"][0]["message"]
        post(case, "chat/completions", status=400, messages=[user("y"), said, *results])


def test_client_continues_after_an_unknown_tool_was_refused() -> None:
    with serving(calling("weather", city="Rome"), "Sunny.") as case:
        with pytest.raises(openai.BadRequestError, match="telepathy"):
            client_of(case).responses.create(model="m", input="x", tools=[{"type": "telepathy"}])  # type: ignore[list-item]
        items = worked(case)
        assert items[-1]["content"][0]["text"] == "Sunny."
        assert gateway_counts(case)["refused/400"] == 1
        assert httpx.get(f"{case.llm.endpoint}/seen").json()["refused/400"] == 1  # for the agent's own reward
        one_sample(case)
