"""OpenAI's tools that are declared by type: calls of those that the client runs come back in the items that its package
reads, a server's are left out and counted, all others refused by name; custom tools, and the only tools to be
called."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agl_slime.gateway.settings import GatewaySettings
from tests.harness.gateway import (
    CALL,
    WEATHER,
    Case,
    calling,
    left_out,
    offered_tools,
    one_sample,
    post,
    prompts,
    serving,
)

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


# -- OpenAI's responses -----------------------------------------------------------------------------------------------

LOCAL = {"command": ["ls", "-l"], "timeout_ms": 500}
OPENAIS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], Any]] = {
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
        {"type": "update_file", "path": "a", "diff": "@@\n-x\n+y"},
        {"type": "apply_patch_call", "operation": {"type": "update_file", "path": "a", "diff": "@@\n-x\n+y"}},
        {"type": "apply_patch_call_output", "status": "failed", "output": "no such line"},
        "failed\nno such line",
    ),
    "tool_search": (
        {"query": "weather"},
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "weather"}},
        {"type": "tool_search_output", "execution": "client", "status": "completed", "tools": []},
        "no tools found",
    ),
}


def respond(case: Case, streamed: bool, **body: Any) -> list[dict[str, Any]]:
    """The items of a response, as OpenAI's package reads them and sends them back."""
    client = OpenAI(base_url=case.llm.endpoint, api_key="any", max_retries=0)
    if not streamed:
        return client.responses.create(model="m", **body).model_dump(exclude_unset=True)["output"]
    read, url = TypeAdapter[Any](ResponseStreamEvent), f"{case.llm.endpoint}/responses"
    with httpx.stream("POST", url, json={"model": "m", **body, "stream": True}) as answer:
        events = [read.validate_json(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    final = Response.model_validate(events[-1].response.model_dump(exclude_unset=True))
    done = [event.item.model_dump(exclude_unset=True) for event in events if event.type == "response.output_item.done"]
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert done == final.model_dump(exclude_unset=True)["output"]
    assert added == [item["type"] for item in done]
    return done


@STREAMED
@pytest.mark.parametrize("kind", OPENAIS)
def test_openais_tools_by_type_are_called_in_items_of_their_own(kind: str, streamed: bool) -> None:
    arguments, item, output, text = OPENAIS[kind]
    tool = {"type": kind, **({"execution": "client"} if kind == "tool_search" else {})}
    with serving(calling(kind, **arguments), "Done.") as case:
        asked = [{"role": "user", "content": "Go."}]
        (call,) = respond(case, streamed, input=asked, tools=[tool], store=False)
        assert set(arguments) <= set(offered_tools(case)[kind]["parameters"]["properties"])
        assert call["type"] == item["type"]
        for name, value in item.items():
            got = call[name]
            assert (got if not isinstance(got, dict) else {k: v for k, v in got.items() if v is not None}) == value
        items = [*asked, call, {"call_id": call["call_id"], **output}]
        (last,) = respond(case, streamed, input=items, tools=[tool], store=False)
        assert last["content"][0]["text"] == "Done."
        assert text in prompts(case)[1].partition("<|im_start|>tool")[2]
        one_sample(case)


@pytest.mark.parametrize("output", ["call_id", "id"])
@pytest.mark.parametrize("by_id", ["previous_response_id", "item_reference", "item"])
def test_typed_tool_calls_continue_by_id(by_id: str, output: str) -> None:
    """An output names the id of its call, or that of the item, as OpenAI's local shell has it."""
    with serving(calling("local_shell", **LOCAL, env={}), "Done.") as case:
        asked: list[Any] = [{"role": "user", "content": "Go."}]
        first = post(case, "responses", input=asked, tools=[{"type": "local_shell"}])
        (call,) = first["output"]
        result = {"type": "local_shell_call_output", output: call[output], "output": "a"}
        again = {"type": "item_reference", "id": call["id"]} if by_id == "item_reference" else call
        body: dict[str, Any] = {"input": [*asked, again, result]}
        if by_id == "previous_response_id":
            body = {"input": [result], "previous_response_id": first["id"]}
        post(case, "responses", **body, tools=[{"type": "local_shell"}])
        assert "<|im_start|>tool\na<|im_end|>" in prompts(case)[1]
        one_sample(case)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("shell", {"commands": "ls"}),
        ("shell", {"commands": ["ls"], "loudly": True}),
        ("local_shell", {"command": "ls"}),
        ("apply_patch", {"path": "a", "diff": "x"}),
        ("apply_patch", {"type": "update_file", "path": "a"}),
    ],
)
def test_a_call_whose_arguments_fit_no_item_is_a_functions(kind: str, arguments: dict[str, Any]) -> None:
    with serving(calling(kind, **arguments), "Sorry.") as case:
        asked = [{"role": "user", "content": "Go."}]
        (call,) = post(case, "responses", input=asked, tools=[{"type": kind}])["output"]
        assert (call["type"], call["name"]) == ("function_call", kind)
        assert json.loads(call["arguments"]) == arguments
        told = {"type": "function_call_output", "call_id": call["call_id"], "output": "no such function"}
        post(case, "responses", input=[*asked, call, told], tools=[{"type": kind}])
        one_sample(case)


OPENAI_SERVERS: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "file_search", "vector_store_ids": []},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation"},
    {"type": "mcp", "server_label": "x"},
    {"type": "shell", "environment": {"type": "container_auto"}},
    {"type": "tool_search"},
    {"type": "programmatic_tool_calling"},
]


def test_tools_that_openais_servers_run_are_left_out_and_counted() -> None:
    with serving("ok") as case:
        tools = [*OPENAI_SERVERS, {"type": "function", "defer_loading": True, **WEATHER["function"]}]
        post(case, "responses", input="x", tools=tools)
        assert set(offered_tools(case)) == {"weather"}
        assert left_out(case) == {tool["type"].removesuffix("_2025_03_11") for tool in OPENAI_SERVERS}


@STREAMED
def test_tools_that_a_search_of_the_clients_found_keep_the_prefix(streamed: bool) -> None:
    """As Codex does: the tools of an output are called by their namespace's names."""
    found = {"type": "namespace", "name": "sky", "tools": [{"type": "function", **WEATHER["function"]}]}
    search = {"type": "tool_search", "execution": "client", "description": "Find.", "parameters": {"type": "object"}}
    call = calling("sky__weather", city="Rome")
    with serving(calling("tool_search", query="x"), call, "Sunny.") as case:
        items: list[Any] = [{"role": "user", "content": "Weather?"}]
        (searched,) = respond(case, streamed, input=items, tools=[search])
        output = {"type": "tool_search_output", "call_id": searched["call_id"], "execution": "client"}
        items += [searched, {**output, "status": "completed", "tools": [found]}]
        (made,) = respond(case, streamed, input=items, tools=[search])
        assert (made["type"], made["name"], made["namespace"]) == ("function_call", "weather", "sky")
        items += [made, {"type": "function_call_output", "call_id": made["call_id"], "output": "fine"}]
        respond(case, streamed, input=items, tools=[search])
        assert set(offered_tools(case)) == {"tool_search"}
        assert '"sky__weather"' in prompts(case)[1].partition("<|im_start|>tool")[2]
        one_sample(case, 3)


def test_additional_tools_apply_from_their_place_in_the_history() -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [{"type": "shell"}]}
    with serving("ok", calling("shell", commands=["ls"])) as case:
        items: list[Any] = [{"role": "user", "content": "x"}]
        first = post(case, "responses", input=items)["output"]
        second = post(case, "responses", input=[*items, *first, added, {"role": "user", "content": "y"}])["output"]
        assert [item["type"] for item in second] == ["shell_call"]
        assert '"commands"' in prompts(case)[1]
        one_sample(case)


# -- custom tools, and the only tools that may be called --------------------------------------------------------------

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}


@STREAMED
def test_custom_tools_of_chats_are_called_with_one_text(streamed: bool) -> None:
    tool: Any = {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": GRAMMAR}}}
    with serving(calling("patch", input="*** Begin"), "Done.") as case:
        create = OpenAI(base_url=case.llm.endpoint, api_key="any", max_retries=0).chat.completions.create
        messages: list[Any] = [{"role": "user", "content": "Go."}]
        if streamed:
            chunks = [
                chunk for chunk in create(model="m", messages=messages, tools=[tool], stream=True) if chunk.choices
            ]
            (call,) = [c.model_dump() for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
            call.pop("index")
        else:
            message = create(model="m", messages=messages, tools=[tool]).choices[0].message
            (call,) = [call.model_dump() for call in message.tool_calls or ()]
        assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": "*** Begin"})
        assert 'start: "x"' in offered_tools(case)["patch"]["description"]
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})
        assert create(model="m", messages=messages, tools=[tool]).choices[0].message.content == "Done."
        one_sample(case)


@pytest.mark.parametrize("path", ["responses", "chat/completions"])
def test_a_call_of_a_custom_tool_with_other_arguments_shows_them(path: str) -> None:
    tool = {"name": "patch"}
    with serving(calling("patch", patch="x"), "Done.") as case:
        asked: list[Any] = [{"role": "user", "content": "Go."}]
        if path == "responses":
            tools = [{"type": "custom", **tool}]
            (call,) = post(case, path, input=asked, tools=tools)["output"]
            assert call["input"] == '{"patch": "x"}'
            output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "bad"}
            post(case, path, input=[*asked, call, output], tools=tools)
        else:
            tools = [{"type": "custom", "custom": tool}]
            said = post(case, path, messages=asked, tools=tools)["choices"][0]["message"]
            (call,) = said["tool_calls"]
            assert call["custom"]["input"] == '{"patch": "x"}'
            output = {"role": "tool", "tool_call_id": call["id"], "content": "bad"}
            post(case, path, messages=[*asked, said, output], tools=tools)
        one_sample(case)


def allowed(path: str, mode: str, *names: str) -> dict[str, Any]:
    if path == "responses":
        return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def two_tools(path: str) -> dict[str, Any]:
    two = [WEATHER["function"], {**WEATHER["function"], "name": "other"}]
    asked = [{"role": "user", "content": "x"}]
    if path == "responses":
        return {"input": asked, "tools": [{"type": "function", **tool} for tool in two]}
    return {"messages": asked, "tools": [{"type": "function", "function": tool} for tool in two]}


@pytest.mark.parametrize("path", ["responses", "chat/completions"])
def test_allowed_tools_keep_the_prompt_and_are_counted_if_not_enforced(path: str) -> None:
    with serving("ok", "ok") as case:
        post(case, path, **two_tools(path))
        post(case, path, **two_tools(path), tool_choice=allowed(path, "auto", "weather"))
        post(case, path, **two_tools(path), tool_choice=allowed(path, "required", "weather"))
        assert len(set(prompts(case))) == 1
        seen = json.loads(case.summary["agl_slime.gateway.seen"])
        assert (seen["overridden/allowed_tools"], seen["overridden/tool_choice"]) == (1, 1)
        told = post(case, path, status=400, **two_tools(path), tool_choice=allowed(path, "auto", "gone"))
        assert "'gone'" in told["error"]["message"]


@pytest.mark.parametrize("path", ["responses", "chat/completions"])
def test_required_allowed_tools_force_one_of_them(path: str) -> None:
    with serving(CALL, settings=GatewaySettings(constraints="mask")) as case:
        post(case, path, **two_tools(path), tool_choice=allowed(path, "required", "weather"))
        held = case.payloads[0]["sampling_params"]["structural_tag"]
        assert "weather" in held
        assert "other" not in held
        told = post(case, path, status=400, **two_tools(path), tool_choice=allowed(path, "auto", "weather"))
        assert "cannot be enforced" in told["error"]["message"]


def test_a_choice_of_a_typed_tool_is_one_of_its_name() -> None:
    with serving(calling("shell", commands=["ls"]), settings=GatewaySettings(constraints="mask")) as case:
        tools = [{"type": "shell"}, {"type": "apply_patch"}]
        post(case, "responses", input="x", tools=tools, tool_choice={"type": "shell"})
        assert "apply_patch" not in case.payloads[0]["sampling_params"]["structural_tag"]
        client = OpenAI(base_url=case.llm.endpoint, api_key="any", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="tool_choice must be"):
            client.responses.create(model="m", input="x", tools=[{"type": "shell"}], tool_choice={"type": "web_search"})  # type: ignore[arg-type]
