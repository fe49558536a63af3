"""Calls of tools in every format, whole and streamed, and tools that are declared by type, Anthropic's and OpenAI's;
the text of sampled tokens has no marks of calls, no end mark, no halves of characters."""

import copy
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from agl_slime.gateway.settings import GatewaySettings
from agl_slime.tokens.attributes import TOOLS as TOOL_COUNTS
from agl_slime.tokens.formats import get_tool_parser
from tests.gateway.protocols import (
    ANTHROPIC_TOOL,
    CHATS,
    FUNCTION,
    STREAMED,
    TOOLS,
    Talk,
    assistant,
    body_of,
    delta_of,
    events_of,
    openai_client,
    response_events,
    text_of,
    user,
)
from tests.harness.engine_faults import Abort
from tests.harness.gateway import (
    CALL,
    HELLO,
    WEATHER,
    Case,
    calling,
    gateway_counts,
    left_out,
    offered_tools,
    one_sample,
    post,
    prompts,
    serving,
    trained_once,
)
from tests.harness.tool_formats import FORMATS, tokenizer_of, written

CITIES = ["Rome", "Oslo\nand </think> <b>", "São Paulo"]
PARALLEL = [("weather", {"city": city}) for city in CITIES]
KINDS = pytest.mark.parametrize("kind", list(FORMATS))
Answer = tuple[str, list[tuple[str, Any]]]


def ask(case: Case, path: str, question: str, stream: bool) -> Answer:
    """The content and the calls of an answer."""
    body = body_of(path, [user(question)], tools=TOOLS[path], stream=stream)
    answer = httpx.post(f"{case.llm.endpoint}/{path}", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return streamed(path, events_of(answer)) if stream else whole(path, answer.json())


def whole(path: str, answer: dict[str, Any]) -> Answer:
    if path == "messages":
        calls = [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]
        return text_of(path, answer), calls
    if path == "responses":
        functions = [item for item in answer["output"] if item["type"] == "function_call"]
    else:
        functions = [call["function"] for call in answer["choices"][0]["message"].get("tool_calls") or ()]
    return text_of(path, answer), [(call["name"], json.loads(call["arguments"])) for call in functions]


def streamed(path: str, events: Sequence[dict[str, Any]]) -> Answer:
    text, names, pieces = "".join(map(delta_of, events)), {}, {}
    if path == "responses":
        last = whole(path, events[-1]["response"])
        assert text == last[0]
        return last
    for event in events:
        for choice in event.get("choices", ()):
            for call in choice["delta"].get("tool_calls") or ():
                names.setdefault(call["index"], call["function"].get("name"))
                pieces[call["index"]] = pieces.get(call["index"], "") + (call["function"].get("arguments") or "")
        if event.get("content_block", {}).get("type") == "tool_use":
            names[event["index"]], pieces[event["index"]] = event["content_block"]["name"], ""
        elif "partial_json" in event.get("delta", {}):
            pieces[event["index"]] += event["delta"]["partial_json"]
    return text, [(name, json.loads(pieces[index])) for index, name in names.items()]


def broken(kind: str) -> str:
    """A call that cannot be read."""
    call = written(kind, [("weather", {"city": "Rome"})]).strip()
    if kind in ("qwen_xml", "seed"):
        return call.replace("=weather", "")
    if kind in ("glm", "hunyuan"):
        return call.replace("Rome</arg_value", "Rome</arg_valu")
    if kind in ("minimax", "deepseek_v32"):
        return call.replace('="weather"', '=""')
    return call.replace("Rome", 'Ro"me') if kind not in ("lfm2", "gemma4") else call.replace("weather", "")


def mention(kind: str) -> str:
    """A sentence with the mark that calls begin with."""
    if kind == "harmony":
        return "<|channel|>commentary<|message|>I write to=functions.weather now.<|end|><|start|>assistant"
    return f"I write {get_tool_parser(kind).marks()[-1]} now." if kind != "llama_json" else ""


def single_call(kind: str) -> str:
    return written(kind, [("weather", {"city": "Rome"})]).lstrip()


@KINDS
def test_parallel_calls_are_returned_and_mentioned_or_broken_ones_are_not(kind: str) -> None:
    text = "" if kind == "llama_json" else "Let me see."
    answers = [written(kind, PARALLEL, text), written(kind, [], "It is 20 degrees."), broken(kind)]
    answers.append(mention(kind) + single_call(kind))
    requests = [(path, stream) for path in CHATS for stream in (False, True)]
    with serving(*(answers * len(requests)), tokenizer=tokenizer_of(kind), sampling={"max_new_tokens": 1024}) as case:
        for number, (path, stream) in enumerate(requests):
            parallel, plain, bad, mentioned = (ask(case, path, f"{number} {n}?", stream) for n in range(len(answers)))
            assert parallel == (text, PARALLEL), (path, stream)
            assert plain == ("It is 20 degrees.", []), (path, stream)
            assert bad[1] == [], (path, stream)
            assert mentioned[1] == [("weather", {"city": "Rome"})], (path, stream)
        trained_once(case.turns, case.segments)
        completion = post(case, "completions", prompt="As it is:", max_tokens=1024)
        assert completion["choices"][0]["text"] == answers[-1]  # no template, no tools


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if get_tool_parser(kind).ends_thinking])
def test_a_call_before_the_end_of_thinking_is_made_in_one_sample(kind: str) -> None:
    """The next prompt is the sampled tokens, without a mark that they lack, and the results."""
    opening, closing = FORMATS[kind].thinking
    call, tokenizer = single_call(kind), tokenizer_of(kind, opens=True)
    mark, last = get_tool_parser(kind).marks()[-1], f"{mention(kind)}{closing}It is 20 degrees."
    answers = [f"I look.{call}", f"I look again.{call}{closing}", last]
    with serving(*answers * 3, *answers * 3, tokenizer=tokenizer, sampling={"max_new_tokens": 1024}) as case:
        for number, path in enumerate(CHATS):
            talk = Talk(case, path, tools=TOOLS[path])
            talk.ask(user(f"{number}?"))
            for _ in answers[1:]:
                assert talk.text == "", path
                talk.ask(*talk.results())
            assert talk.text == "It is 20 degrees.", path
        trained_once(case.turns, case.segments)
        assert [len(segment.placements) for segment in case.segments] == [3, 3, 3]
        added = f"<|im_end|>\n<|im_start|>tool\nfine<|im_end|>\n<|im_start|>assistant\n{opening}\n"
        assert prompts(case)[2].endswith(f"{answers[0]}{added}{answers[1]}{added}")
        for path in CHATS:
            for expected in (*[("", [("weather", {"city": "Rome"})])] * 2, ("It is 20 degrees.", [])):
                assert ask(case, path, "How?", stream=True) == expected
        case.close()
        tools = json.loads(case.summary[TOOL_COUNTS])
        assert (tools["calls"], tools["malformed"], tools["example"]) == ({"weather": 12}, 6, last[last.index(mark) :])


@pytest.mark.parametrize("path", CHATS)
def test_marks_around_an_answer_are_no_content_and_once_in_a_prompt(path: str) -> None:
    """The generation prompt, which the template always writes, closes a thinking that the history does not have."""
    tokenizer = copy.deepcopy(tokenizer_of("cohere"))
    head, _, _ = tokenizer.chat_template.partition("{% if add_generation_prompt %}")
    tokenizer.chat_template = head + "<|im_start|>assistant\n" + "".join(FORMATS["cohere"].thinking)
    said = written("cohere", [], "It is 20 degrees.")
    call = '<|START_ACTION|>[{"tool_name": "weather", "parameters": {"city": "Rome"}}]<|END_ACTION|>'
    for tools in (TOOLS[path], None):
        with serving(said, *[call] * (tools is not None), said, tokenizer=tokenizer) as case:
            talk = Talk(case, path, tools=tools)
            talk.ask(user("Go."))
            assert talk.text == "It is 20 degrees."
            talk.ask(user("Again."))
            talk.ask(*(talk.results() or [user("And?")]))
            assert talk.text == "It is 20 degrees."
            assert prompts(case)[-1].count("<|START_RESPONSE|>") == prompts(case)[-1].count("<|END_RESPONSE|>")
            one_sample(case, 3)


def stream_chat(case: Case, messages: list[Any] = HELLO, **fields: Any) -> tuple[Any, list[str]]:
    """The choice and the pieces of its content."""
    with openai_client(case).chat.completions.stream(model="m", messages=messages, **fields) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        choice = stream.current_completion_snapshot.choices[0]
    assert choice.message.content == "".join(pieces)
    return choice, pieces


@pytest.mark.parametrize("n_tokens", range(1, 12))
def test_an_update_within_a_character_is_not_seen_in_a_stream(n_tokens: int) -> None:
    text = "日本語のテキスト。😀 Ende"
    with serving(text, "Yes.", token_s=0.002) as case:
        case.engine.script("/generate", Abort(n_tokens=n_tokens), Abort(n_tokens=1), Abort(n_tokens=2))
        choice, pieces = stream_chat(case)
        assert choice.message.content == text
        assert len(pieces) > 3
        stream_chat(case, [*HELLO, assistant(text), user("Hello?")])
        one_sample(case)


def test_an_end_mark_that_is_sampled_at_the_limit_is_no_text() -> None:
    with serving("Forty two", "Forty two", "Yes.") as case:
        limit = len(case.tokenizer.encode("Forty two")) + 1
        choice, _ = stream_chat(case, max_tokens=limit)
        whole = post(case, "chat/completions", messages=HELLO, max_tokens=limit)["choices"][0]
        assert (choice.message.content, choice.finish_reason) == ("Forty two", "length")
        assert (whole["message"]["content"], whole["finish_reason"]) == ("Forty two", "length")
        post(case, "chat/completions", messages=[*HELLO, assistant("Forty two"), user("Hello?")])
        first, _, third = case.turns
        assert first.response_ids[-1] == case.tokenizer.eos_token_id
        assert case.tokenizer.decode(third.prompt_ids[first.length :]).startswith("\n<|im_start|>user")
        assert third.fork is None


def test_special_token_in_an_answer_is_hidden_and_kept_in_next_prompt() -> None:
    with serving("Forty<|im_start|> two", "Yes.") as case:
        assert stream_chat(case)[0].message.content == "Forty two"
        stream_chat(case, [*HELLO, assistant("Forty two"), user("Hello?")])
        one_sample(case)


_EDITS = {"command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range"}
ANTHROPIC_TYPES: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "bash_20250124": ({"name": "bash"}, {"command": "ls"}, {"command", "restart"}),
    "text_editor_20250728": (
        {"name": "str_replace_based_edit_tool", "max_characters": 900},
        {"command": "insert", "path": "/a", "insert_line": 1, "insert_text": "x"},
        {*_EDITS, "insert_text"},
    ),
    "memory_20250818": (
        {"name": "memory"},
        {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"},
        {*_EDITS, "insert_text", "old_path", "new_path"},
    ),
    "computer_20251124": (
        {"name": "computer", "display_width_px": 1024, "display_height_px": 768, "enable_zoom": True},
        {"action": "left_click", "coordinate": [10, 20]},
        {"action", "coordinate", "start_coordinate", "text", "duration", "scroll_direction", "scroll_amount", "region"},
    ),
}


@pytest.mark.parametrize("kind", ANTHROPIC_TYPES)
def test_anthropics_tools_by_type_are_in_the_prompt_and_called(kind: str) -> None:
    settings, arguments, fields = ANTHROPIC_TYPES[kind]
    with serving(calling(settings["name"], **arguments), "Done.") as case:
        talk = Talk(case, "messages", tools=[{"type": kind, **settings}])
        (use,) = talk.ask(user("Go."))
        assert set(offered_tools(case)[settings["name"]]["parameters"]["properties"]) == fields
        assert (use["type"], use["name"], use["input"]) == ("tool_use", settings["name"], arguments)
        talk.ask(*talk.results())
        assert talk.text == "Done."
        one_sample(case)


SEARCH = {"name": "ToolSearch", "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}}}
DEFERRED = {**ANTHROPIC_TOOL, "defer_loading": True}
ANTHROPIC_SERVERS = ["web_search_20250305", "web_fetch_20260318", "code_execution_20250825", "advisor_20260301"]


def test_tools_that_anthropics_servers_run_are_left_out_and_counted() -> None:
    tools: list[dict[str, Any]] = [{"type": kind, "name": kind.rpartition("_")[0]} for kind in ANTHROPIC_SERVERS]
    tools += [{"type": "mcp_toolset", "mcp_server_name": "x"}, {"type": "bash_20250124", "name": "bash"}]
    # a deferred tool is offered where only a server would search for it
    tools += [{"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}, DEFERRED]
    with serving("ok") as case:
        post(case, "messages", max_tokens=9, messages=[user("x")], tools=tools)
        assert set(offered_tools(case)) == {"bash", "weather"}
        assert left_out(case) == {tool.get("name", "mcp_toolset") for tool in tools} - {"bash", "weather"}


def test_a_tool_that_the_clients_search_found_is_called_and_is_no_fork() -> None:
    """As Claude Code does with ENABLE_TOOL_SEARCH: each request after the search declares the tool, deferred."""
    with serving(calling("ToolSearch", query="weather"), CALL, "Sunny.") as case:
        talk = Talk(case, "messages")
        (search,) = talk.ask(user("Weather?"), tools=[SEARCH])
        reference = [{"type": "tool_reference", "tool_name": "weather"}]
        talk.ask(
            user([{"type": "tool_result", "tool_use_id": search["id"], "content": reference}]), tools=[SEARCH, DEFERRED]
        )
        talk.ask(*talk.results(), tools=[SEARCH, DEFERRED])
        assert talk.text == "Sunny."
        assert set(offered_tools(case)) == {"ToolSearch"}
        assert f'"{DEFERRED["description"]}"' in prompts(case)[1].partition("<|im_start|>tool")[2]
        assert json.loads(case.summary["agl_slime.tools"])["unknown"] == 0
        one_sample(case, 3)


def test_a_reference_to_no_tool_is_refused_in_anthropics_words() -> None:
    use = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "gone"}]}
    with serving("ok") as case:
        messages = [assistant([use]), user([result])]
        error = post(case, "messages", status=400, max_tokens=9, tools=[SEARCH], messages=messages)["error"]
        assert "'gone' not found in available tools" in error["message"]
        assert error["details"]["error_code"] == "tool_reference_unresolved"


LOCAL = {"command": ["ls", "-l"], "timeout_ms": 500}
PATCH = {"type": "update_file", "path": "a", "diff": "@@\n-x\n+y"}
OPENAI_TYPES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], Any]] = {
    "local_shell": (
        LOCAL,
        {"type": "local_shell_call", "action": {**LOCAL, "type": "exec", "env": {}}},
        {"type": "local_shell_call_output", "output": '{"stdout": "a"}'},
        '{"stdout": "a"}',
    ),
    "shell": (
        {"commands": ["ls", "pwd"]},
        {"type": "shell_call", "action": {"commands": ["ls", "pwd"]}},
        {
            "type": "shell_call_output",
            "output": [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        },
        '"exit_code": 0',
    ),
    "apply_patch": (
        PATCH,
        {"type": "apply_patch_call", "operation": PATCH},
        {"type": "apply_patch_call_output", "status": "failed", "output": "no such line"},
        "failed\nno such line",
    ),
}


def respond(case: Case, streamed: bool, **body: Any) -> list[dict[str, Any]]:
    """The items of a response, as OpenAI's package reads them and sends them back."""
    if not streamed:
        return openai_client(case).responses.create(model="m", **body).model_dump(exclude_unset=True)["output"]
    answer = httpx.post(f"{case.llm.endpoint}/responses", json={"model": "m", **body, "stream": True}, timeout=30)
    events = response_events(answer)
    done = [event.item.model_dump(exclude_unset=True) for event in events if event.type == "response.output_item.done"]
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert done == events[-1].response.model_dump(exclude_unset=True)["output"]
    assert added == [item["type"] for item in done]
    return done


@STREAMED
@pytest.mark.parametrize("kind", OPENAI_TYPES)
def test_openais_tools_by_type_are_called_in_items_of_their_own(kind: str, streamed: bool) -> None:
    arguments, item, output, text = OPENAI_TYPES[kind]
    tool = {"type": kind}
    with serving(calling(kind, **arguments), "Done.") as case:
        (call,) = respond(case, streamed, input=[user("Go.")], tools=[tool], store=False)
        assert set(arguments) <= set(offered_tools(case)[kind]["parameters"]["properties"])
        assert call["type"] == item["type"]
        for name, expected in item.items():
            value = call[name]
            if isinstance(value, dict):
                value = {key: field for key, field in value.items() if field is not None}
            assert value == expected
        items = [user("Go."), call, {"call_id": call["call_id"], **output}]
        (last,) = respond(case, streamed, input=items, tools=[tool], store=False)
        assert last["content"][0]["text"] == "Done."
        assert text in prompts(case)[1].partition("<|im_start|>tool")[2]
        one_sample(case)


@pytest.mark.parametrize(
    ("by_id", "output"), [("previous_response_id", "call_id"), ("item_reference", "id"), ("item", "id")]
)
def test_typed_tool_calls_continue_by_id(by_id: str, output: str) -> None:
    """An output names the id of its call, or of the item, as OpenAI's local shell does."""
    tools = [{"type": "local_shell"}]
    with serving(calling("local_shell", **LOCAL, env={}), "Done.") as case:
        first = post(case, "responses", input=[user("Go.")], tools=tools)
        (call,) = first["output"]
        items: list[Any] = [{"type": "local_shell_call_output", output: call[output], "output": "a"}]
        if by_id == "previous_response_id":
            post(case, "responses", input=items, previous_response_id=first["id"], tools=tools)
        else:
            item = {"type": "item_reference", "id": call["id"]} if by_id == "item_reference" else call
            post(case, "responses", input=[user("Go."), item, *items], tools=tools)
        assert "<|im_start|>tool\na<|im_end|>" in prompts(case)[1]
        one_sample(case)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("shell", {"commands": "ls"}),
        ("shell", {"commands": ["ls"], "loudly": True}),
        ("local_shell", {"command": "ls"}),
        ("apply_patch", {"type": "update_file", "path": "a"}),
    ],
)
def test_a_call_whose_arguments_fit_no_item_is_a_functions(kind: str, arguments: dict[str, Any]) -> None:
    with serving(calling(kind, **arguments), "Sorry.") as case:
        talk = Talk(case, "responses", tools=[{"type": kind}])
        (call,) = talk.ask(user("Go."))
        assert (call["type"], call["name"]) == ("function_call", kind)
        assert json.loads(call["arguments"]) == arguments
        talk.ask(*talk.results("no such function"))
        one_sample(case)


OPENAI_SERVERS: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "shell", "environment": {"type": "container_auto"}},
    {"type": "tool_search"},
]


def test_tools_that_openais_servers_run_are_left_out_and_counted() -> None:
    with serving("ok") as case:
        post(case, "responses", input="x", tools=[*OPENAI_SERVERS, {**FUNCTION, "defer_loading": True}])
        assert set(offered_tools(case)) == {"weather"}
        assert left_out(case) == {tool["type"].removesuffix("_2025_03_11") for tool in OPENAI_SERVERS}


def test_tools_that_a_search_of_the_clients_found_keep_the_prefix() -> None:
    """As Codex does: the tools of an output are called by their namespace's names."""
    namespace = {"type": "namespace", "name": "sky", "tools": [FUNCTION]}
    search = {"type": "tool_search", "execution": "client", "description": "Find.", "parameters": {"type": "object"}}
    call = calling("sky__weather", city="Rome")
    with serving(calling("tool_search", query="x"), call, "Sunny.") as case:
        items: list[Any] = [user("Weather?")]
        (searched,) = respond(case, True, input=items, tools=[search])
        output = {"type": "tool_search_output", "call_id": searched["call_id"], "execution": "client"}
        items += [searched, {**output, "status": "completed", "tools": [namespace]}]
        (made,) = respond(case, True, input=items, tools=[search])
        assert (made["type"], made["name"], made["namespace"]) == ("function_call", "weather", "sky")
        items += [made, {"type": "function_call_output", "call_id": made["call_id"], "output": "fine"}]
        respond(case, True, input=items, tools=[search])
        assert set(offered_tools(case)) == {"tool_search"}
        assert '"sky__weather"' in prompts(case)[1].partition("<|im_start|>tool")[2]
        one_sample(case, 3)


def test_additional_tools_apply_from_their_place_in_the_history() -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [{"type": "shell"}]}
    with serving("ok", calling("shell", commands=["ls"])) as case:
        talk = Talk(case, "responses")
        talk.ask(user("x"))
        assert [item["type"] for item in talk.ask(added, user("y"))] == ["shell_call"]
        assert '"commands"' in prompts(case)[1]
        one_sample(case)
        unknown = {**added, "tools": [{"type": "shel"}]}
        assert "shel" in post(case, "responses", status=400, input=[unknown, user("x")])["error"]["message"]


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}


@STREAMED
def test_custom_tools_of_chats_are_called_with_one_text(streamed: bool) -> None:
    tool: Any = {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": GRAMMAR}}}
    with serving(calling("patch", input="*** Begin"), "Done.") as case:
        create, messages = openai_client(case).chat.completions.create, [user("Go.")]
        if streamed:
            chunks = create(model="m", messages=messages, tools=[tool], stream=True)
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
            (call,) = [call.model_dump() for delta in deltas for call in delta.tool_calls or ()]
            call.pop("index")
        else:
            (call,) = create(model="m", messages=messages, tools=[tool]).choices[0].message.model_dump()["tool_calls"]
        assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": "*** Begin"})
        assert 'start: "x"' in offered_tools(case)["patch"]["description"]
        messages.append(assistant(None, tool_calls=[call]))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})
        assert create(model="m", messages=messages, tools=[tool]).choices[0].message.content == "Done."
        one_sample(case)


def test_a_call_of_a_custom_tool_with_other_arguments_shows_them() -> None:
    custom = {"name": "patch"}
    for path, tool in (
        ("responses", {"type": "custom", **custom}),
        ("chat/completions", {"type": "custom", "custom": custom}),
    ):
        with serving(calling("patch", patch="x"), "Done.") as case:
            talk = Talk(case, path, tools=[tool])
            answer = talk.ask(user("Go."))
            call = answer[0] if path == "responses" else answer["tool_calls"][0]["custom"]
            assert call["input"] == '{"patch": "x"}'
            bad = {"type": "custom_tool_call_output", "call_id": call.get("call_id"), "output": "bad"}
            talk.ask(*([bad] if path == "responses" else talk.results("bad")))
            one_sample(case)


def allowed(path: str, mode: str, *names: str) -> dict[str, Any]:
    if path == "responses":
        return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def two_tools(path: str) -> dict[str, Any]:
    functions = [WEATHER["function"], {**WEATHER["function"], "name": "tides"}]
    flat = path == "responses"
    tools = [{"type": "function", **(each if flat else {"function": each})} for each in functions]
    return body_of(path, [user("x")], tools=tools)


@pytest.mark.parametrize("path", ["responses", "chat/completions"])
def test_allowed_tools_keep_the_prompt_and_are_counted_or_enforced(path: str) -> None:
    with serving("ok", "ok") as case:
        post(case, path, **two_tools(path))
        post(case, path, **two_tools(path), tool_choice=allowed(path, "auto", "weather"))
        post(case, path, **two_tools(path), tool_choice=allowed(path, "required", "weather"))
        assert len(set(prompts(case))) == 1
        counts = gateway_counts(case)
        assert (counts["overridden/allowed_tools"], counts["overridden/tool_choice"]) == (1, 1)
        refused = post(case, path, status=400, **two_tools(path), tool_choice=allowed(path, "auto", "gone"))
        assert "'gone'" in refused["error"]["message"]
    with serving(CALL, settings=GatewaySettings(constraints="mask")) as case:
        post(case, path, **two_tools(path), tool_choice=allowed(path, "required", "weather"))
        grammar = case.payloads[0]["sampling_params"]["structural_tag"]
        assert "weather" in grammar
        assert "tides" not in grammar
        refused = post(case, path, status=400, **two_tools(path), tool_choice=allowed(path, "auto", "weather"))
        assert "cannot be enforced" in refused["error"]["message"]


def test_a_choice_of_a_typed_tool_is_one_of_its_name() -> None:
    with serving(calling("shell", commands=["ls"]), settings=GatewaySettings(constraints="mask")) as case:
        tools = [{"type": "shell"}, {"type": "apply_patch"}]
        post(case, "responses", input="x", tools=tools, tool_choice={"type": "shell"})
        assert "apply_patch" not in case.payloads[0]["sampling_params"]["structural_tag"]
        refused = post(case, "responses", status=400, input="x", tools=tools[:1], tool_choice={"type": "web_search"})
        assert "tool_choice must be" in refused["error"]["message"]
