"""Tools that clients declare, in any protocol: functions, and tools with a type instead of parameters.

A tool that the client runs becomes a function with the parameters that the type's publisher documents; its calls go
back in the client's form. Tools of the provider's servers are listed in ``server_tools`` alone, others are refused.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agl_slime.errors import GatewayRequestError

logger = logging.getLogger(__name__)

Arguments = Mapping[str, Any]
_DATE = re.compile(r"_20\d{6}$|_20\d\d_\d\d_\d\d$")  # the version of a type
_TEXT: dict[str, Any] = {"type": "string"}
_WHOLE: dict[str, Any] = {"type": "integer"}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT}
_PLACE: dict[str, Any] = {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 2}


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The tools of a request: ``listed`` at the beginning of the prompt, ``loaded`` by a search for tools;
    ``server_tools`` are the types of tools that the provider's server would run."""

    listed: tuple[dict[str, Any], ...] = ()
    loaded: tuple[dict[str, Any], ...] = ()
    server_tools: tuple[str, ...] = ()


def kind_of(tool: Mapping[str, Any]) -> str:
    """The type of a tool without its version."""
    return _DATE.sub("", str(tool.get("type") or ""))


def unknown_tool(param: str, kind: Any, *, schema: str) -> GatewayRequestError:
    message = f"{param} is a tool of type {kind!r:.80}, which is not served here: declare a function with its {schema}"
    return GatewayRequestError(message, code="unsupported_tool", param="tools")


@functools.cache
def explain_once(kind: str) -> None:
    """Warn about the first server tool of a type in this process."""
    text = "Agents declare tools of type %s, which a server would run: no prompt has them, and the answers are trained."
    logger.warning(f"{text} Further requests are counted as gateway/left_out/%s.", kind, kind)


def read_choice(
    value: Any, allowing: Any, tools: Tools, name_of: Callable[[Any], str], *, form: str
) -> tuple[str, frozenset[str] | None]:
    """OpenAI's choice, and the names of the only tools that may be called, without server tools (``None``: all), which
    the object ``allowing`` lists. ``form`` describes a named tool in errors."""
    if value in (None, "auto", "none", "required"):
        return (value or "auto") if tools.listed or tools.loaded else "none", None
    if not isinstance(allowing, Mapping):
        if name := name_of(value):
            return name, None
        message = f"tool_choice must be auto, none, required, allowed_tools, or {form}, got {value!r:.80}"
        raise GatewayRequestError(message, param="tool_choice")
    mode, listed = allowing.get("mode"), allowing.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        message = f"tool_choice.mode must be auto or required, and tools a list of tools, got {allowing!r:.80}"
        raise GatewayRequestError(message, param="tool_choice")
    offered = {tool["function"]["name"] for tool in (*tools.listed, *tools.loaded)}
    allowed = frozenset(filter(None, map(name_of, listed)))
    if unknown := sorted(allowed - offered):
        raise GatewayRequestError(f"tool_choice allows {unknown[0]!r:.80}, which tools has not", param="tool_choice")
    return ("none" if not allowed else mode), allowed


def function_tool(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool in the form of prompts, from any protocol."""
    schema = parameters if isinstance(parameters, Mapping) else {"type": "object", "properties": {}}
    function = {"name": name, "description": str(description or ""), "parameters": dict(schema)}
    return {"type": "function", "function": function}


def definitions(tools: Iterable[Mapping[str, Any]]) -> str:
    """Tools as text for the model, one on each line."""
    return "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split()}


# -- Anthropic --------------------------------------------------------------------------------------------------------

_ANTHROPIC_SERVER_TOOLS = ("web_search", "web_fetch", "code_execution", "advisor", "mcp_toolset")
_ANTHROPIC_SERVER_TOOLS += ("tool_search_tool_bm25", "tool_search_tool_regex")
_EDITS = "view create str_replace insert"
_FIRST_ACTIONS = "key type mouse_move left_click left_click_drag right_click middle_click double_click screenshot"
_FIRST_ACTIONS += " cursor_position"
_ACTIONS = f"{_FIRST_ACTIONS} triple_click left_mouse_down left_mouse_up scroll hold_key wait"


def anthropic_tool(tool: Mapping[str, Any], param: str) -> dict[str, Any] | None:
    """A tool of Anthropic's messages as a function; ``None`` for a server tool."""
    kind, name = kind_of(tool), tool.get("name")
    if tool.get("input_schema") is not None and isinstance(name, str):
        return function_tool(name, tool.get("description"), tool["input_schema"])
    if kind in _ANTHROPIC_SERVER_TOOLS:
        return None
    if kind in ("", "custom"):
        missing = "input_schema" if isinstance(name, str) else "name"
        raise GatewayRequestError(f"{param}.{missing}: Field required", param="tools")
    describe = _ANTHROPIC_TOOLS.get(kind)
    if describe is None:
        raise unknown_tool(param, tool["type"], schema="input_schema")
    description, parameters = describe(tool)
    return function_tool(str(name or kind), tool.get("description") or description, parameters)


def _bash(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    described = "Run a command in a bash shell, which lasts between calls; restart begins a new one."
    return described, _object("", command=_TEXT, restart={"type": "boolean"})


def _text_editor(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    old = str(tool["type"]).endswith(("20241022", "20250124"))
    commands = f"{_EDITS} undo_edit" if old else _EDITS
    inserted = "new_str" if old else "insert_text"
    described = "View, create and edit text files. insert puts " + inserted + " after line insert_line."
    if isinstance(limit := tool.get("max_characters"), int):
        described += f" view shows at most {limit} characters."
    fields = _editing(commands) | ({} if old else {"insert_text": _TEXT})
    return described, _object("command path", **fields)


def _editing(commands: str) -> dict[str, Any]:
    command = {"type": "string", "enum": commands.split()}
    texts: dict[str, Any] = dict.fromkeys(("path", "file_text", "old_str", "new_str"), _TEXT)
    return {"command": command, **texts, "insert_line": _WHOLE, "view_range": _PLACE}


def _memory(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    described = "View, create, edit, delete and rename files of your memory, which is the directory /memories."
    texts = dict.fromkeys(("insert_text", "old_path", "new_path"), _TEXT)
    return described, _object("command", **_editing(f"{_EDITS} delete rename"), **texts)


def _computer(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    wide, high = tool.get("display_width_px"), tool.get("display_height_px")
    described = f"Use a computer with mouse and keyboard; its screen is {wide} x {high} pixels."
    first = str(tool["type"]).endswith("20241022")
    actions = (_FIRST_ACTIONS if first else _ACTIONS).split()
    fields = {"coordinate": _PLACE, "text": _TEXT}
    if not first:
        directions = {"type": "string", "enum": ["up", "down", "left", "right"]}
        fields |= {"start_coordinate": _PLACE, "scroll_direction": directions, "scroll_amount": _WHOLE}
        fields["duration"] = {"type": "number"}
    if tool.get("enable_zoom"):
        actions.append("zoom")
        fields["region"] = {"type": "array", "items": _WHOLE, "minItems": 4, "maxItems": 4}
    return described, _object("action", action={"type": "string", "enum": actions}, **fields)


_ANTHROPIC_TOOLS: dict[str, Callable[[Mapping[str, Any]], tuple[str, dict[str, Any]]]] = {
    "bash": _bash,
    "text_editor": _text_editor,
    "memory": _memory,
    "computer": _computer,
}


# -- OpenAI -----------------------------------------------------------------------------------------------------------

_OPENAI_SERVER_TOOLS = ("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation")
_OPENAI_SERVER_TOOLS += ("mcp", "programmatic_tool_calling")


@dataclass(frozen=True)
class ToolKind:
    """A type of tool of OpenAI's responses that the client runs. ``fields`` writes a call's arguments as fields of its
    item (``None`` if they do not fit), ``arguments`` reads them back."""

    description: str
    parameters: Mapping[str, Any]
    fields: Callable[[Arguments], dict[str, Any] | None]
    arguments: Callable[[Mapping[str, Any]], Any]


def _without_nulls(value: Any) -> Any:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else value


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _are_wholes(arguments: Arguments, *names: str) -> bool:
    return all(type(arguments.get(name)) in (int, type(None)) for name in names)


def _local_shell(arguments: Arguments) -> dict[str, Any] | None:
    names = {"command", "env", "timeout_ms", "working_directory"}
    env, directory = arguments.get("env") or {}, arguments.get("working_directory")
    fits = _are_texts(arguments.get("command")) and _are_wholes(arguments, "timeout_ms") and arguments.keys() <= names
    if not (fits and isinstance(env, Mapping) and isinstance(directory, str | None)):
        return None
    action = {"type": "exec", "timeout_ms": None, "user": None, "working_directory": None, **arguments}
    return {"action": {**action, "env": env}}


def _local_shell_arguments(item: Mapping[str, Any]) -> Any:
    action = _without_nulls(item.get("action"))
    if not isinstance(action, dict):
        return {}
    return {key: value for key, value in action.items() if key != "type" and (key != "env" or value)}


def _shell(arguments: Arguments) -> dict[str, Any] | None:
    numbers = ("timeout_ms", "max_output_length")
    fits = _are_texts(arguments.get("commands")) and _are_wholes(arguments, *numbers)
    if not fits or not arguments.keys() <= {"commands", *numbers}:
        return None
    return {"action": {"timeout_ms": None, "max_output_length": None, **arguments}, "environment": {"type": "local"}}


def _apply_patch(arguments: Arguments) -> dict[str, Any] | None:
    names = {"type", "path"} | ({"diff"} if arguments.get("type") in ("create_file", "update_file") else set())
    fits = arguments.get("type") in _OPERATIONS and arguments.keys() == names
    return {"operation": dict(arguments)} if fits and all(isinstance(arguments[name], str) for name in names) else None


_OPERATIONS = ("create_file", "update_file", "delete_file")
_PATCH = _object("type path", type={"type": "string", "enum": [*_OPERATIONS]}, path=_TEXT, diff=_TEXT)
_SHELL = _object("commands", commands=_TEXTS, timeout_ms=_WHOLE, max_output_length=_WHOLE)
_ENV = {"type": "object", "additionalProperties": _TEXT}
_LOCAL_SHELL = _object("command", command=_TEXTS, working_directory=_TEXT, timeout_ms=_WHOLE, env=_ENV)
_SEARCH = _object("query", query=_TEXT)

OPENAI_TOOLS: dict[str, ToolKind] = {
    "local_shell": ToolKind(
        "Run a command, given as a list of its words, on the user's machine.",
        _LOCAL_SHELL,
        _local_shell,
        _local_shell_arguments,
    ),
    "shell": ToolKind(
        "Run shell commands, one after the other, on the user's machine.",
        _SHELL,
        _shell,
        lambda item: _without_nulls(item.get("action")),
    ),
    "apply_patch": ToolKind(
        "Create, update or delete a file; diff is a V4A diff of the file, and is needed unless it is deleted.",
        _PATCH,
        _apply_patch,
        lambda item: _without_nulls(item.get("operation")),
    ),
    "tool_search": ToolKind(
        "Find further tools by what they do.",
        _SEARCH,
        lambda arguments: {"arguments": dict(arguments), "execution": "client"},
        lambda item: item.get("arguments"),
    ),
}
KIND_OF_ITEM = {f"{kind}_call": kind for kind in OPENAI_TOOLS}
KIND_OF_OUTPUT = {f"{kind}_call_output".replace("search_call", "search"): kind for kind in OPENAI_TOOLS}


def openai_tool(tool: Mapping[str, Any], param: str) -> dict[str, Any] | None:
    """A tool of a kind in ``OPENAI_TOOLS`` as a function; ``None`` for a server tool."""
    kind = kind_of(tool)
    environment = tool.get("environment")
    place = environment.get("type") if isinstance(environment, Mapping) else None
    on_server = tool.get("execution") != "client" if kind == "tool_search" else place not in (None, "local")
    if kind in _OPENAI_SERVER_TOOLS or (kind in OPENAI_TOOLS and on_server):
        return None
    if (local := OPENAI_TOOLS.get(kind)) is None:
        raise unknown_tool(param, tool.get("type"), schema="parameters")
    described = str(tool.get("description") or local.description)
    skills = environment.get("skills") if isinstance(environment, Mapping) else None
    for skill in skills if isinstance(skills, list) else ():
        if isinstance(skill, Mapping):
            described += f"\nSkill {skill.get('name')} in {skill.get('path')}: {skill.get('description')}"
    return function_tool(kind, described, tool.get("parameters") or local.parameters)


# -- custom tools -----------------------------------------------------------------------------------------------------

_INPUT = _object("input", input=_TEXT)


def openai_function(name: str, tool: Mapping[str, Any], *, custom: bool) -> dict[str, Any]:
    """OpenAI's function, or its custom tool as one, whose description has the grammar of its text, if any."""
    if not custom:
        return function_tool(name, tool.get("description"), tool.get("parameters"))
    described, form = str(tool.get("description") or ""), tool.get("format")
    if isinstance(form, Mapping) and form.get("type") == "grammar":
        inner = form.get("grammar")
        grammar = inner if isinstance(inner, Mapping) else form
        rules = f"input follows this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
        described = f"{described}\n\n{rules}" if described else rules
    return function_tool(name, described, _INPUT)


def custom_input(arguments: Arguments) -> str:
    """The text of a custom tool's call; all arguments as JSON if the model wrote others."""
    text = arguments.get("input")
    fits = isinstance(text, str) and len(arguments) == 1
    return str(text) if fits else json.dumps(dict(arguments), ensure_ascii=False)


def custom_arguments(text: Any) -> dict[str, Any]:
    return {"input": text}
