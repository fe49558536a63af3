"""Tools of Anthropic's messages that are declared by type: those that the client runs are in the prompt and are called,
a server's are left out and counted, all others refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.harness.gateway import CALL, WEATHER, calling, left_out, offered_tools, one_sample, post, prompts, serving

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


# -- Anthropic's ------------------------------------------------------------------------------------------------------

ANTHROPICS: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "bash_20250124": ({"name": "bash"}, {"command": "ls"}, {"command", "restart"}),
    "bash_20241022": ({"name": "bash"}, {"restart": True}, {"command", "restart"}),
    "text_editor_20250728": (
        {"name": "str_replace_based_edit_tool", "max_characters": 900},
        {"command": "insert", "path": "/a", "insert_line": 1, "insert_text": "x"},
        {"command", "path", "file_text", "old_str", "new_str", "insert_line", "insert_text", "view_range"},
    ),
    "text_editor_20250124": (
        {"name": "str_replace_editor"},
        {"command": "undo_edit", "path": "/a"},
        {"command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range"},
    ),
    "memory_20250818": (
        {"name": "memory"},
        {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"},
        {"command", "path", "file_text", "old_str", "new_str", "insert_line", "insert_text", "view_range"}
        | {"old_path", "new_path"},
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


@STREAMED
@pytest.mark.parametrize("kind", ANTHROPICS)
def test_anthropics_tools_by_type_are_in_the_prompt_and_called(kind: str, streamed: bool) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the client of Anthropic: pip install anthropic")
    given, arguments, fields = ANTHROPICS[kind]
    with serving(calling(given["name"], **arguments), "Done.") as case:
        client = anthropic.Anthropic(base_url=case.llm.endpoint.removesuffix("/v1"), api_key="any", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "Go."}]
        how: dict[str, Any] = {"model": "m", "max_tokens": 200, "tools": [{"type": kind, **given}]}

        def ask() -> Any:
            if not streamed:
                return client.beta.messages.create(messages=messages, **how)
            with client.beta.messages.stream(messages=messages, **how) as stream:
                return stream.get_final_message()

        said = ask()
        tool = offered_tools(case)[given["name"]]
        assert set(tool["parameters"]["properties"]) == fields
        assert set(arguments) <= fields
        (use,) = said.content
        assert (use.type, use.name, use.input) == ("tool_use", given["name"], arguments)
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "ok"}
        messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
        assert ask().content[0].text == "Done."
        one_sample(case)


SERVERS = ["web_search_20250305", "web_fetch_20260318", "code_execution_20250825", "advisor_20260301"]


def test_tools_that_anthropics_servers_run_are_left_out_and_counted() -> None:
    tools: list[dict[str, Any]] = [{"type": kind, "name": kind.rpartition("_")[0]} for kind in SERVERS]
    tools += [{"type": "mcp_toolset", "mcp_server_name": "x"}, {"type": "bash_20250124", "name": "bash"}]
    with serving("ok") as case:
        post(case, "messages", max_tokens=9, messages=[{"role": "user", "content": "x"}], tools=tools)
        assert set(offered_tools(case)) == {"bash"}
        assert left_out(case) == {*(kind.rpartition("_")[0] for kind in SERVERS), "mcp_toolset"}


# -- tools that a search finds ----------------------------------------------------------------------------------------

SEARCH = {"name": "ToolSearch", "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}}}
FOUND = {"name": "weather", "description": "How it is.", "input_schema": WEATHER["function"]["parameters"]}


@STREAMED
def test_a_tool_that_the_clients_search_found_is_called_and_is_no_fork(streamed: bool) -> None:
    """As Claude Code does with ENABLE_TOOL_SEARCH: a found tool is declared from then on, deferred."""
    with serving(calling("ToolSearch", query="weather"), CALL, "Sunny.") as case:
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        tools: list[Any] = [SEARCH]

        def ask() -> list[dict[str, Any]]:
            body = {"max_tokens": 200, "messages": messages, "tools": tools}
            if not streamed:
                return post(case, "messages", **body)["content"]
            anthropic = pytest.importorskip("anthropic", reason="the client of Anthropic: pip install anthropic")
            client = anthropic.Anthropic(base_url=case.llm.endpoint.removesuffix("/v1"), api_key="x", max_retries=0)
            with client.beta.messages.stream(model="m", **body) as stream:
                return stream.get_final_message().model_dump()["content"]

        for result in ([{"type": "tool_reference", "tool_name": "weather"}], "fine"):
            (use,) = ask()
            block = {"type": "tool_result", "tool_use_id": use["id"], "content": result}
            messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [block]}]
            tools = [SEARCH, {**FOUND, "defer_loading": True}]
        assert ask()[0]["text"] == "Sunny."
        assert set(offered_tools(case)) == {"ToolSearch"}
        assert '"How it is."' in prompts(case)[1].partition("<|im_start|>tool")[2]
        assert json.loads(case.summary["agl_slime.tools"])["unknown"] == 0
        one_sample(case, 3)


def test_deferred_tools_are_shown_where_only_a_server_would_search() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    with serving("ok") as case:
        tools = [search, {**FOUND, "defer_loading": True}]
        post(case, "messages", max_tokens=9, messages=[{"role": "user", "content": "x"}], tools=tools)
        assert set(offered_tools(case)) == {"weather"}


def test_a_reference_to_no_tool_is_refused_in_anthropics_words() -> None:
    anthropic = pytest.importorskip("anthropic", reason="the client of Anthropic: pip install anthropic")
    use = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "gone"}]}
    history: Any = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    with serving("ok") as case:
        client = anthropic.Anthropic(base_url=case.llm.endpoint.removesuffix("/v1"), api_key="any", max_retries=0)
        with pytest.raises(anthropic.BadRequestError, match="'gone' not found in available tools") as raised:
            client.messages.create(model="m", max_tokens=9, tools=[SEARCH], messages=history)
        assert raised.value.error_code == "tool_reference_unresolved"
