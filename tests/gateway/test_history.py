"""Histories that requests continue: by the id of a response, of its items or of a conversation, from a summary, as
messages in parts, with tools that a server ran, with arguments that JSON cannot represent."""

import json
import re
from typing import Any

import httpx
import pytest

from agl_slime.gateway.items import COMPACTION
from agl_slime.tokens.forks import ForkReason
from tests.gateway.protocols import (
    CHATS,
    FUNCTION,
    STREAMED,
    TOOLS,
    Talk,
    assistant,
    body_of,
    called,
    events_of,
    openai_client,
    response_events,
    user,
)
from tests.harness.gateway import (
    CALL,
    CALL_TWO,
    WEATHER,
    Case,
    calling,
    one_sample,
    post,
    prompts,
    serving,
    trained_once,
)
from tests.harness.model_templates import MODELS, template_of

TEXT = {"type": "text", "text": "words"}
LITELLM = "[System: Empty message content sanitised to satisfy protocol]"
BLOCKS: list[tuple[dict[str, Any], str]] = [
    ({"type": "search_result", "source": "a.txt", "title": "A", "content": [TEXT]}, "A\na.txt\nwords"),
    ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}, "words"),
    (
        {"type": "document", "title": "T", "context": "C", "source": {"type": "content", "content": [TEXT]}},
        "T\nC\nwords",
    ),
    ({"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": "d29yZHM="}}, "words"),
]
FILES = [
    ({"file_data": "data:text/plain;base64,d29yZHM=", "filename": "a.txt"}, "a.txt\nwords"),
    ({"file_data": "data:text/csv;charset=UTF-8;base64,d29yZHM="}, "words"),
    ({"file_data": "data:text/plain,two%20words"}, "two words"),
    ({"file_data": "d29yZHM=", "filename": "a.csv"}, "a.csv\nwords"),
]
HAVE_TEXT = [
    *(("messages", block, text) for block, text in BLOCKS),
    *(("responses", {"type": "input_file", **file}, text) for file, text in FILES),
    *(("chat/completions", {"type": "file", "file": file}, text) for file, text in FILES),
]


def test_blocks_and_files_that_have_text_are_read_as_it() -> None:
    with serving("ok") as case:
        for path, block, text in HAVE_TEXT:
            messages = [user([block, {"type": "text", "text": "?"}]), *called(path, "read", [block], arguments={})]
            post(case, path, **body_of(path, messages))
            assert f"<|im_start|>user\n{text}{chr(10) if path == 'messages' else ' '}?<|im_end|>" in prompts(case)[-1]
            assert f"<|im_start|>tool\n{text}<|im_end|>" in prompts(case)[-1]


def test_anthropic_server_tool_results_are_in_the_prompt() -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "Rome"}}
    page = {"type": "web_search_result", "title": "Rome", "url": "r.org"}
    secret = {"encrypted_content": "0xSECRET", "page_age": None}
    results = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{**page, **secret}]}
    shell = {"type": "server_tool_use", "id": "b", "name": "bash_code_execution", "input": {"command": "ls"}}
    output = {"type": "bash_code_execution_result", "stdout": "a.txt", "stderr": "", "return_code": 0, "content": []}
    printed = {"type": "bash_code_execution_tool_result", "tool_use_id": "b", "content": output}
    content = [{"type": "text", "text": "I look."}, search, results, {"type": "text", "text": "It is."}, shell, printed]
    with serving("ok") as case:
        post(case, "messages", **body_of("messages", [user("x"), assistant(content), user("y")]))
        turns = [turn.partition("<|im_end|>")[0] for turn in prompts(case)[0].split("<|im_start|>")[1:]]
        roles = ["user", "assistant", "tool", "assistant", "tool", "user", "assistant"]
        assert [turn.partition("\n")[0] for turn in turns] == roles
        assert turns[1].startswith("assistant\nI look.<tool_call>")
        assert '{"query": "Rome"}' in turns[1]
        assert json.loads(turns[2].partition("\n")[2]) == [page]
        assert '"stdout": "a.txt"' in turns[4]


SERVERS_CALLS: list[tuple[dict[str, Any], list[str]]] = [
    ({"type": "web_search_call", "action": {"type": "search", "query": "Rome"}, "status": "completed"}, ["Rome"]),
    ({"type": "file_search_call", "queries": ["Rome"], "results": [{"text": "sunny"}]}, ["Rome", "sunny"]),
    ({"type": "code_interpreter_call", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]}, ["1+1", '"2"']),
    ({"type": "mcp_call", "name": "ask", "arguments": '{"q": "Rome"}', "output": "sunny"}, ["ask", "Rome", "sunny"]),
]


def test_openai_server_tool_calls_are_in_the_prompt() -> None:
    answer = {"type": "message", **assistant([{"type": "output_text", "text": "So."}])}
    with serving("ok") as case:
        for item, texts in SERVERS_CALLS:
            post(case, "responses", input=[user("x"), {"id": "ws_1", **item}, answer, user("y")])
            prompt = prompts(case)[-1]
            assert all(text in prompt for text in texts), item
            assert prompt.count("<|im_start|>tool\n") == 1
            assert "<|im_start|>assistant\nSo.<|im_end|>" in prompt


def test_input_tokens_endpoint_counts_the_prompts_tokens() -> None:
    with serving("ok") as case:
        body: dict[str, Any] = {"input": [user("How many?")], "instructions": "Brief.", "tools": [FUNCTION]}
        count = openai_client(case).responses.input_tokens.count(model="m", **body)
        post(case, "responses", **body)
        assert (count.object, count.input_tokens) == ("response.input_tokens", len(case.turns[0].prompt_ids))
        assert len(case.payloads) == 1


@STREAMED
def test_conversation_collects_its_inputs_and_outputs(streamed: bool) -> None:
    with serving(CALL, "Sunny.", "Bye.") as case:
        client = openai_client(case)
        rule = {"type": "message", "role": "developer", "content": "Rule."}
        conversation = client.conversations.create(items=[rule])
        assert conversation.object == "conversation"

        def ask(items: Any, name: Any) -> Any:
            request: Any = {"model": "m", "input": items, "tools": [FUNCTION], "conversation": name}
            if not streamed:
                return client.responses.create(**request)
            *_, last = client.responses.create(**request, stream=True)
            return last.response

        first = ask("Weather?", conversation.id)
        assert first.conversation.id == conversation.id
        (call,) = first.output
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "fine"}
        assert ask([output], {"id": conversation.id})
        assert ask("Thanks.", conversation.id).output_text == "Bye."
        assert "system\nRule.<|im_end|>" in prompts(case)[2]
        one_sample(case, 3)


def test_unknown_conversation_is_not_found_in_openais_words() -> None:
    with serving("ok") as case:
        refused = post(case, "responses", status=404, input="x", conversation="conv_x")
        assert "Conversation with id 'conv_x' not found" in refused["error"]["message"]
        name = post(case, "conversations")["id"]
        first = post(case, "responses", input="x", conversation=name)
        both = {"conversation": name, "previous_response_id": first["id"]}
        refused = post(case, "responses", status=400, input="x", **both)
        assert "cannot be used in conjunction" in refused["error"]["message"]


BRIEF: dict[str, Any] = {"instructions": "Brief.", "tools": [FUNCTION]}


def worked(case: Case) -> list[Any]:
    """A conversation of two answers, with a tool, as items."""
    talk = Talk(case, "responses", **BRIEF)
    talk.ask(user("Weather?"))
    talk.ask(*talk.results())
    return talk.history


def continues_compacted(case: Case, compacted: list[Any]) -> None:
    """The next questions begin with the summary, which is a fork of its kind, once."""
    talk = Talk(case, "responses", **BRIEF)
    talk.ask(*compacted, user("And now?"))
    talk.ask(user("Sure?"))
    assert [turn.fork for turn in case.turns] == [None, None, None, ForkReason.COMPACTION, None]
    assert "It was sunny." in prompts(case)[3]
    assert COMPACTION not in prompts(case)[3]
    assert len(case.segments) == 2
    trained_once(case.turns, case.segments)


@pytest.mark.parametrize("by_id", [False, True])
def test_compaction_is_sampled_on_the_prefix_and_can_be_continued(by_id: bool) -> None:
    """Without its tools, which the request has no field for."""
    from openai.types.responses import ResponseCompactionItem

    with serving(CALL, "Sunny.", "<think>\nSo.\n</think>\n\nIt was sunny.", "Still.", "Yes.") as case:
        history: Any = {"input": worked(case)}
        if by_id:
            history = {"previous_response_id": case.spans[-1].attributes["gen_ai.response.id"]}
        done = openai_client(case).responses.compact(model="m", instructions="Brief.", **history)
        assert isinstance(done.output[-1], ResponseCompactionItem)
        assert done.object == "response.compaction"
        assert [item.type for item in done.output] == ["message", "compaction"]
        assert done.output[0].content[0].text == "Weather?"
        assert done.usage.output_tokens == len(case.turns[2].response_ids)
        continues_compacted(case, [item.model_dump(exclude_unset=True, warnings=False) for item in done.output])


@STREAMED
def test_a_compaction_trigger_is_answered_with_a_summary(streamed: bool) -> None:
    with serving(CALL, "Sunny.", "It was sunny.", "Still.", "Yes.") as case:
        items = [*worked(case), {"type": "compaction_trigger"}]
        body = body_of("responses", items, stream=streamed, **BRIEF)
        answer = httpx.post(f"{case.llm.endpoint}/responses", json=body)
        if streamed:
            events = response_events(answer)
            kinds = [event.type.removeprefix("response.") for event in events]
            assert kinds == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
            output = events[-1].response.model_dump(exclude_unset=True)["output"]
        else:
            output = answer.json()["output"]
        assert [item["type"] for item in output] == ["compaction"]
        continues_compacted(case, [user("Weather?"), *output])


def test_a_summary_of_a_summary_leaves_the_first_out() -> None:
    with serving(CALL, "Sunny.", "It was sunny.", "Rain.", "Sun, then rain.") as case:
        talk = Talk(case, "responses")
        talk.ask(*post(case, "responses/compact", input=worked(case))["output"], user("And now?"))
        second = post(case, "responses/compact", input=talk.history)["output"]
        assert [item["type"] for item in second] == ["message", "message", "compaction"]
        assert [item["content"][0]["text"] for item in second[:-1]] == ["Weather?", "And now?"]
        trained_once(case.turns, case.segments)


def agent_message(*content: Any) -> dict[str, Any]:
    return {"type": "agent_message", "author": "/root", "recipient": "/root/work", "content": [*content]}


@STREAMED
def test_messages_between_agents_are_read_as_a_users(streamed: bool) -> None:
    """Codex has the text that the policy gave a tool as encrypted content."""
    task, more = {"type": "input_text", "text": "Count."}, {"type": "encrypted_content", "encrypted_content": "Again."}
    with serving("One.", "Two.") as case:
        talk = Talk(case, "responses")
        talk.ask(agent_message(task, {"type": "input_text", "text": "To one."}))
        body = body_of("responses", [*talk.history, agent_message(more)], stream=streamed)
        assert "Two." in httpx.post(f"{case.llm.endpoint}/responses", json=body).text
        for text in ("Count.\nTo one.", "Again."):
            assert f"user\nMessage from /root to /root/work:\n\n{text}<|im_end|>" in prompts(case)[1]
        for odd in (None, 5, {"a": 1}, {"type": "encrypted_content", "encrypted_content": 5}):
            assert "content" in post(case, "responses", status=400, input=[agent_message(odd)])["error"]["message"]
        one_sample(case)


def test_what_another_server_encrypted_is_refused() -> None:
    with serving("ok") as case:
        contents = ("gAAAAB", "agl-slime:%%%", "x agl-slime:eA==", None, 5)
        summaries = [{"type": "compaction", "encrypted_content": content} for content in contents]
        for item in (*summaries, agent_message({"type": "encrypted_content", "encrypted_content": "gAAAAAB"})):
            error = post(case, "responses", status=400, input=[item, user("x")])["error"]
            assert "could not be verified" in error["message"]
            assert error["code"] == "invalid_encrypted_content"


SWITCHED = "{% if quiet %}quiet {% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
SWITCHED += "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize("path", [*CHATS, "messages/count_tokens", "responses/input_tokens"])
def test_arguments_of_the_template_are_a_clients_in_each_protocol(path: str) -> None:
    with serving("ok", template=SWITCHED) as case:
        body = body_of(path.partition("/count")[0].partition("/input")[0], [user("x")])
        answer = post(case, path, **body, chat_template_kwargs={"quiet": True})
        if "_tokens" in path:
            assert answer["input_tokens"] > post(case, path, **body)["input_tokens"]
        else:
            assert prompts(case)[0].startswith("quiet ")
        refused = post(case, path, status=400, **body, chat_template_kwargs={"chat_template": "x"})
        assert "chat_template_kwargs.chat_template is not a client's to set" in refused["error"]["message"]


ORPHANS = {
    "chat/completions": "must be a response to a preceding message with 'tool_calls'",
    "messages": "unexpected `tool_use_id` found in `tool_result` blocks: gone",
    "responses": "No tool call found for function call output with call_id gone",
}


@pytest.mark.parametrize("path", CHATS)
def test_a_result_whose_call_is_not_in_the_history_is_refused(path: str) -> None:
    call, _ = called(path, "f", "fine")
    late_call, result = json.loads(json.dumps(called(path, "f", "fine")).replace('"c"', '"gone"'))
    tools = {"tools": [WEATHER]} if path == "chat/completions" else {}
    with serving("ok") as case:
        for messages in ([user("x"), result], [user("q"), call, result], [user("x"), result, late_call]):
            error = post(case, path, status=400, **body_of(path, messages), **tools)["error"]
            assert ORPHANS[path] in error["message"]
        assert not case.payloads
        assert httpx.get(f"{case.llm.endpoint}/seen").json()["refused/400"] == 3  # for the agent's reward


def test_results_of_calls_that_an_agent_reads_from_the_text_are_taken() -> None:
    """Agents that declare no tools make up the ids; after a call that was served as one they may not."""
    with serving("<look>a</look>", "Seen.", CALL) as case:
        results = [{"role": "tool", "tool_call_id": name, "content": "fine"} for name in ("1", "2")]
        talk = Talk(case, "chat/completions")
        talk.ask(user("x"))
        talk.ask(*results)
        one_sample(case)
        talk = Talk(case, "chat/completions", tools=[WEATHER])
        talk.ask(user("y"))
        post(case, "chat/completions", status=400, messages=[*talk.history, *results])


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


def thinking_of(path: str, text: str) -> list[dict[str, Any]]:
    """Blocks or items of thinking."""
    if path == "messages":
        return [{"type": "thinking", "thinking": text, "signature": ""}] if text else []
    return [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}] if text else []


def given_call(path: str, thinking: str, text: str) -> list[Any]:
    """A call, always with the same id, with thinking and text before it, and its result."""
    call, result = called(path, "weather", "fine", arguments={"city": "Rome"})
    if path == "chat/completions":
        return [{**call, "content": text, **({"reasoning_content": thinking} if thinking else {})}, result]
    if path == "messages":
        return [assistant([*thinking_of(path, thinking), {**TEXT, "text": text}, *call["content"]]), result]
    return [*thinking_of(path, thinking), {"type": "message", **assistant(text)}, call, result]


@STREAMED
@pytest.mark.parametrize("path", CHATS)
def test_thinking_and_text_of_a_given_call_are_as_given(path: str, streamed: bool) -> None:
    """In each request, whichever came first."""
    given = [
        ("RAW", "See."),
        ("", "See."),
        ("OTHER", "See."),
        ("", "<think>IN</think>See."),
        ("RAW", ""),
        ("RAW", "See."),
    ]
    with serving("ok", template=template_of(MODELS["Qwen3.8"])) as case:
        for number, (thinking, text) in enumerate(given):
            messages = [user("Weather?"), *given_call(path, thinking, text), *[user("?")] * number]
            httpx.post(f"{case.llm.endpoint}/{path}", json=body_of(path, messages, stream=streamed)).raise_for_status()
            block = f"<think>\n{thinking}\n</think>\n\n" if thinking else ""
            assert f"assistant\n{block}{text}<tool_call>" in prompts(case)[-1]
        assert [turn.fork for turn in case.turns[1:5]] == [ForkReason.EDITED_HISTORY] * 4


@STREAMED
@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize(
    ("old", "new"), [("Rome", "Bern"), ("See.", ""), ("See.", "(no content)"), ("See.", "Look."), ("hm", "other")]
)
def test_an_answer_that_its_client_changed_is_an_edit(old: str, new: str, path: str, streamed: bool) -> None:
    with serving(f"<think>\nhm\n</think>\n\nSee. {CALL}", "ok", template=template_of(MODELS["Qwen3"])) as case:
        talk = Talk(case, path, tools=TOOLS[path])
        talk.ask(user("Weather?"))
        results = talk.results()
        history = json.loads(json.dumps(talk.history).replace(old, new))
        body = body_of(path, [*history, *results], tools=TOOLS[path], stream=streamed)
        httpx.post(f"{case.llm.endpoint}/{path}", json=body).raise_for_status()
        assert case.turns[1].fork is ForkReason.EDITED_HISTORY
        answer = prompts(case)[1].rpartition("<|im_start|>user\nWeather?")[2]
        assert old not in answer
        assert new in answer
        trained_once(case.turns, case.segments)


@STREAMED
@pytest.mark.parametrize("path", CHATS)
def test_a_clients_placeholder_for_an_empty_text_is_no_edit(path: str, streamed: bool) -> None:
    for text in ("(no content)", "[No message content]", "(empty content)", LITELLM):
        with serving("", "ok") as case:
            post(case, path, **body_of(path, [user("x")]))
            body = body_of(path, [user("x"), assistant(text), user("y")], stream=streamed)
            httpx.post(f"{case.llm.endpoint}/{path}", json=body).raise_for_status()
            one_sample(case)


HOSTILE = ['"\\ud800"', '{"a": ["\\udc00 x"]}', "123456789012345678901234567890", "-98765432109876543210", "NaN"]
HOSTILE += ["9007199254740993", "[1e22, 1e-7, 1e300]", "1" + "0" * 309]


@pytest.mark.parametrize("doubles", [False, True], ids=["exact", "doubles"])
@pytest.mark.parametrize("path", CHATS)
def test_arguments_that_json_cannot_hold_are_served_and_come_back(path: str, doubles: bool) -> None:
    def number(text: str) -> float:  # as a client in JavaScript reads integers
        return int(float(text)) if doubles and len(text) < 308 else int(text)

    calls = [f'<tool_call>\n{{"name": "weather", "arguments": {{"city": {value}}}}}\n</tool_call>' for value in HOSTILE]
    with serving(*(text for call in calls for text in (call, "ok", call))) as case:
        for place, value in enumerate(HOSTILE):
            talk = Talk(case, path, tools=TOOLS[path])
            assert "weather" in json.dumps(talk.ask(user(f"{place}?"))), value
            talk.history = json.loads(json.dumps(talk.history), parse_int=number)
            talk.ask(*talk.results())
            assert case.turns[-1].fork is None, value
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


# as Kimi's: a call is its id, which names the function
IDS_ARE_NAMES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '## ' ~ m.tool_call_id ~ ': ' if m.role == 'tool' }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@STREAMED
@pytest.mark.parametrize("path", CHATS)
def test_ids_of_calls_are_the_clients_to_it_and_the_templates_in_prompts(path: str, streamed: bool) -> None:
    """Of calls that were not sampled here, and of one whose id the client replaces."""
    call = '<|tool_call_begin|>functions.weather:7<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|>'
    with serving(call + call.replace(":7", ":8"), "Sunny.", template=IDS_ARE_NAMES) as case:
        talk = Talk(case, path, tools=TOOLS[path])
        talk.ask(user("x"), *(item for name in ("now", "weather") for item in called(path, name, name, arguments={})))
        for number, served in enumerate(dict.fromkeys(re.findall(r"call_\w{16}", json.dumps(talk.answer)))):
            talk.answer = json.loads(json.dumps(talk.answer).replace(served, f"call_{number}"))
            talk.history = json.loads(json.dumps(talk.history).replace(served, f"call_{number}"))
        assert [*map(str, range(2))] == re.findall(r"call_(\d)\b", json.dumps(talk.results()))
        body = body_of(path, [*talk.history, *talk.results()], tools=TOOLS[path], stream=streamed)
        httpx.post(f"{case.llm.endpoint}/{path}", json=body).raise_for_status()
        written = [
            re.findall(r"(?:call_begin\|>|## )(?:functions\.)?(.+?)(?:<|: )", prompt) for prompt in prompts(case)
        ]
        given, sampled = ["now:0"] * 2 + ["weather:1"] * 2, ["weather:7", "weather:8"] * 2
        assert written == [given, given + sampled]
        one_sample(case)
