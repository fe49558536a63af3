"""Tools that a model may call: Python functions, and objects that bring a JSON schema.

A function's schema is told from its signature and docstring::

    def lookup(key: str, limit: int = 3) -> str:
        '''Look a key up in the table.

        Args:
            key: The key, three letters.
            limit: Most results to return.
        '''

An object has ``schema`` (``{"name", "description", "parameters"}``, or OpenAI's form around it) and is called with the
arguments. A class is instantiated for each rollout, with the task when its constructor takes one parameter: that is how
a tool has a state. Functions and methods may be async; others run in threads.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from agl_slime.errors import ConfigError
from agl_slime.rollout.tool_parsers import ToolCall
from agl_slime.support.threads import run_user_code

ToolError = Literal["exception", "timeout", "unknown_tool", "bad_arguments"]

_JSON_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a call came to. ``content`` is what the model sees; ``error`` says that it is a failure and of which kind.
    ``duration_s`` in seconds."""

    call: ToolCall
    content: str
    error: ToolError | None = None
    duration_s: float = 0.0

    def to_message(self) -> dict[str, Any]:
        """As a chat message of the role ``tool``."""
        return {"role": "tool", "name": self.call.name, "tool_call_id": self.call.id, "content": self.content}


@dataclass(frozen=True, slots=True)
class _Tool:
    name: str
    schema: dict[str, Any]
    function: Callable[..., Any]


class ToolManager:
    """The tools of one rollout. Calls of one answer run at the same time; a call that fails is an observation for the
    model, never an exception.

    Args:
        tools: Functions, objects with a ``schema``, or classes; see the module's text.
        timeout_s: Seconds that a call may take. A function that runs in a thread then is abandoned, since a thread
            cannot be stopped.
        max_result_chars: Longer results are cut, with a note that they were.
        task: Given to classes that want it.
    """

    def __init__(
        self,
        tools: Iterable[Any] = (),
        *,
        timeout_s: float = 60.0,
        max_result_chars: int | None = None,
        task: Mapping[str, Any] | None = None,
    ) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s of tools must be above 0 seconds, got {timeout_s}")
        self._timeout_s = timeout_s
        self._max_result_chars = max_result_chars
        self._task = task
        self._tools: dict[str, _Tool] = {}
        for tool in tools:
            self.register(tool)

    def register(self, tool: Any, *, name: str | None = None) -> None:
        """Add a tool. ``ConfigError`` when it has no usable schema or the name is taken."""
        if isinstance(tool, type):
            tool = _instance(tool, self._task)
        made = _tool_of(tool, name)
        if made.name in self._tools:
            raise ConfigError(f"there are two tools named {made.name!r}; names must differ")
        self._tools[made.name] = made

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates and OpenAI's API take them."""
        return [{"type": "function", "function": tool.schema} for tool in self._tools.values()]

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls of one answer at the same time; results in the order of the calls."""
        return list(await asyncio.gather(*(self.call(call) for call in calls)))

    async def call(self, call: ToolCall) -> ToolResult:
        started = time.monotonic()

        def result(content: str, error: ToolError | None = None) -> ToolResult:
            return ToolResult(call=call, content=content, error=error, duration_s=time.monotonic() - started)

        tool = self._tools.get(call.name)
        if tool is None:
            return result(
                f"Error: there is no tool named {call.name!r}; there are {', '.join(self._tools) or 'none'}.",
                "unknown_tool",
            )
        try:
            arguments = _fit_arguments(call.arguments, tool.schema)
        except ValueError as error:
            return result(f"Error: {error}.", "bad_arguments")
        try:
            value = await asyncio.wait_for(_invoke(tool.function, arguments), self._timeout_s)
            content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except asyncio.TimeoutError:
            return result(f"Error: {call.name} did not answer within {self._timeout_s:g} seconds.", "timeout")
        except Exception as error:  # whatever a tool raises is something the model can react to
            return result(f"Error: {type(error).__name__}: {error}", "exception")
        return result(self._cut(content))

    def _cut(self, content: str) -> str:
        limit = self._max_result_chars
        if limit is None or len(content) <= limit:
            return content
        return f"{content[:limit]}\n[cut: {len(content) - limit} more characters]"


async def _invoke(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004  an object with an async __call__
        return await function(**arguments)
    value = await run_user_code(function, **arguments)
    return await value if inspect.isawaitable(value) else value


def _instance(tool_class: type, task: Mapping[str, Any] | None) -> Any:
    wanted = [
        p
        for p in inspect.signature(tool_class).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return tool_class(task) if wanted else tool_class()


# -- schemas ---------------------------------------------------------------------------------------------------------


def _tool_of(tool: Any, name: str | None) -> _Tool:
    given = getattr(tool, "schema", None)
    if given is not None:
        given = given() if callable(given) else given
        schema = given.get("function", given) if isinstance(given, Mapping) else None
        if (
            not isinstance(schema, Mapping)
            or not isinstance(schema.get("name"), str)
            or not isinstance(schema.get("parameters", {}), Mapping)
        ):
            raise ConfigError(
                f"the schema of tool {tool!r} must be an object with name, description and parameters, got {given!r:.200}"
            )
        if not callable(tool):
            raise ConfigError(
                f"tool {schema['name']!r} has a schema but cannot be called; give its class a __call__ with the schema's parameters"
            )
        schema = {"parameters": {"type": "object", "properties": {}}, **schema}
        return _Tool(name or schema["name"], {**schema, "name": name or schema["name"]}, tool)
    if not callable(tool) or not hasattr(tool, "__name__"):
        raise ConfigError(f"a tool must be a function, a class or a callable object with a schema, got {tool!r:.200}")
    schema = schema_of(tool)
    return _Tool(name or schema["name"], {**schema, "name": name or schema["name"]}, tool)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """``{"name", "description", "parameters"}`` of a function, from its annotations and its docstring (Google style).

    Types may be ``str``, ``int``, ``float``, ``bool``, lists and dicts of those, ``Literal`` and ``Optional``. Raises
    ``ConfigError`` for a parameter without a type, or of another.
    """
    name = function.__name__
    description, described = _read_docstring(inspect.getdoc(function) or "")
    hints = get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        where = f"parameter {parameter.name!r} of tool {name!r}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{where} cannot be given by name; a model calls tools with named arguments")
        if parameter.name not in hints:
            raise ConfigError(f"{where} has no type; annotate it, so that the model is told what to give")
        properties[parameter.name] = _schema_of_type(hints[parameter.name], where)
        if parameter.name in described:
            properties[parameter.name]["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"name": name, "description": description, "parameters": parameters}


def _schema_of_type(hint: Any, where: str) -> dict[str, Any]:
    if hint is Any:
        return {}
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        kinds = {type(value) for value in arguments}
        return {
            "enum": list(arguments),
            **({"type": _JSON_TYPES[kinds.pop()]} if len(kinds) == 1 and kinds <= set(_JSON_TYPES) else {}),
        }
    if origin in (Union, types.UnionType):
        options = [option for option in arguments if option is not type(None)]
        schemas = [_schema_of_type(option, where) for option in options]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    if origin is list:
        return {"type": "array", "items": _schema_of_type(arguments[0], where)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of_type(arguments[1], where)}
    raise ConfigError(
        f"{where} has the type {hint!r}, which has no JSON form; use str, int, float, bool, list, dict or Literal, or an object with a schema"
    )


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text before the first section, and what the section ``Args`` says of each parameter."""
    head, _, rest = re.sub(r"^(Args|Arguments|Parameters):\s*$", "\0", text, count=1, flags=re.MULTILINE).partition(
        "\0"
    )
    description = re.split(r"^(?:Returns?|Raises|Yields|Examples?|Notes?):\s*$", head, flags=re.MULTILINE)[0].strip()
    described: dict[str, str] = {}
    current, first_indent = "", 0
    for line in rest.splitlines():
        if line and not line[0].isspace():  # the next section
            break
        entry = re.match(r"\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
        indent = len(line) - len(line.lstrip())
        if entry and (not described or indent <= first_indent):
            first_indent = indent
            current, described[current] = entry[1], entry[2].strip()
        elif current and line.strip():
            described[current] += " " + line.strip()
    return description, described


# -- arguments -------------------------------------------------------------------------------------------------------


def _fit_arguments(given: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as the schema wants them: strings become numbers and the like where they read as such.
    ``ValueError`` says what does not fit."""
    parameters = schema.get("parameters", {})
    properties: Mapping[str, Any] = parameters.get("properties", {})
    name = schema["name"]
    missing = [key for key in parameters.get("required", ()) if key not in given]
    if missing:
        raise ValueError(f"{name} needs the argument {', '.join(map(repr, missing))}")
    if parameters.get("additionalProperties", False) is False:
        unknown = [key for key in given if key not in properties]
        if unknown:
            raise ValueError(
                f"{name} has no argument {', '.join(map(repr, unknown))}, only {', '.join(map(repr, properties)) or 'none'}"
            )
    return {key: _fit(value, properties.get(key, {}), f"argument {key!r} of {name}") for key, value in given.items()}


def _fit(value: Any, schema: Mapping[str, Any], where: str) -> Any:
    wanted = schema.get("type")
    if isinstance(value, str) and wanted in ("integer", "number", "boolean", "array", "object"):
        try:
            value = json.loads(value.lower() if wanted == "boolean" else value)
        except ValueError as error:
            raise ValueError(f"{where} must be of type {wanted}, got {value!r:.80}") from error
    fits = {
        "string": isinstance(value, str),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, (int, float)) and not isinstance(value, bool),
        "boolean": isinstance(value, bool),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }
    if wanted == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(wanted, str) and not fits.get(wanted, True):
        raise ValueError(f"{where} must be of type {wanted}, got {value!r:.80}")
    if "enum" in schema and value not in schema["enum"]:
        raise ValueError(f"{where} must be one of {schema['enum']!r}, got {value!r:.80}")
    return value
