"""Anthropic's tools that are declared by type: tools that clients run are in the prompt and called, tools that a server
runs are left out and counted, and all others refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.protocols import ANTHROPIC_TOOL, assistant, user
from tests.harness.gateway import CALL, calling, left_out, offered_tools, one_sample, post, prompts, serving

_EDITS = {"command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range"}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "bash_20250124": ({"name": "bash"}, {"command": "ls"}, {"command", "restart"}),
    "text_editor_20250728": (
        {"name": "str_replace_based_edit_tool", "max_characters": 900},
        {"command": "insert", "path": "/a", "insert_line": 1, "insert_text": "x"},
        {*_EDITS, "insert_text"},
    ),
    "text_editor_20250124": ({"name": "str_replace_editor"}, {"command": "undo_edit", "path": "/a"}, _EDITS),
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
    "computer_20241022": (
        {"name": "computer", "display_width_px": 800, "display_height_px": 600},
        {"action": "key", "text": "Return"},
        {"action", "coordinate", "text"},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_anthropics_tools_by_type_are_in_the_prompt_and_called(kind: str) -> None:
    settings, arguments, fields = KINDS[kind]
    tools = [{"type": kind, **settings}]
    with serving(calling(settings["name"], **arguments), "Done.") as case:
        (use,) = post(case, "messages", max_tokens=200, messages=[user("Go.")], tools=tools)["content"]
        assert set(offered_tools(case)[settings["name"]]["parameters"]["properties"]) == fields
        assert (use["type"], use["name"], use["input"]) == ("tool_use", settings["name"], arguments)
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "ok"}
        messages = [user("Go."), assistant([use]), user([result])]
        assert post(case, "messages", max_tokens=200, messages=messages, tools=tools)["content"][0]["text"] == "Done."
        one_sample(case)


SERVERS = ["web_search_20250305", "web_fetch_20260318", "code_execution_20250825", "advisor_20260301"]


def test_tools_that_anthropics_servers_run_are_left_out_and_counted() -> None:
    tools: list[dict[str, Any]] = [{"type": kind, "name": kind.rpartition("_")[0]} for kind in SERVERS]
    tools += [{"type": "mcp_toolset", "mcp_server_name": "x"}, {"type": "bash_20250124", "name": "bash"}]
    with serving("ok") as case:
        post(case, "messages", max_tokens=9, messages=[user("x")], tools=tools)
        assert set(offered_tools(case)) == {"bash"}
        assert left_out(case) == {*(kind.rpartition("_")[0] for kind in SERVERS), "mcp_toolset"}


# -- tools that a search returns --------------------------------------------------------------------------------------

SEARCH = {"name": "ToolSearch", "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}}}
DEFERRED = {**ANTHROPIC_TOOL, "defer_loading": True}


def test_a_tool_that_the_clients_search_found_is_called_and_is_no_fork() -> None:
    """As Claude Code does with ENABLE_TOOL_SEARCH: each request after the search declares the tool, deferred."""
    with serving(calling("ToolSearch", query="weather"), CALL, "Sunny.") as case:
        messages: list[Any] = [user("Weather?")]
        tools: list[Any] = [SEARCH]
        for result in ([{"type": "tool_reference", "tool_name": "weather"}], "fine"):
            (use,) = post(case, "messages", max_tokens=200, messages=messages, tools=tools)["content"]
            block = {"type": "tool_result", "tool_use_id": use["id"], "content": result}
            messages += [assistant([use]), user([block])]
            tools = [SEARCH, DEFERRED]
        last = post(case, "messages", max_tokens=200, messages=messages, tools=tools)
        assert last["content"][0]["text"] == "Sunny."
        assert set(offered_tools(case)) == {"ToolSearch"}
        assert f'"{DEFERRED["description"]}"' in prompts(case)[1].partition("<|im_start|>tool")[2]
        assert json.loads(case.summary["agl_slime.tools"])["unknown"] == 0
        one_sample(case, 3)


def test_deferred_tools_are_shown_where_only_a_server_would_search() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    with serving("ok") as case:
        post(case, "messages", max_tokens=9, messages=[user("x")], tools=[search, DEFERRED])
        assert set(offered_tools(case)) == {"weather"}


def test_a_reference_to_no_tool_is_refused_in_anthropics_words() -> None:
    use = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "gone"}]}
    with serving("ok") as case:
        messages = [assistant([use]), user([result])]
        error = post(case, "messages", status=400, max_tokens=9, tools=[SEARCH], messages=messages)["error"]
        assert "'gone' not found in available tools" in error["message"]
        assert error["details"]["error_code"] == "tool_reference_unresolved"
