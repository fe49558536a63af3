"""Tools that a model may call: Python functions, and objects with a JSON schema.

A function's schema comes from its signature and docstring (``Args:``) by pydantic, which also validates the model's
arguments: numbers, strings, lists, ``Literal``, ``Optional``, enums, dataclasses, pydantic models. An object has
``schema`` (``{"name", "description", "parameters"}``, or OpenAI's form around it) and is called with the arguments; an
object with ``tool_info()`` instead is called with its name and a dict of them. A class is instantiated for each
rollout, with the task when its constructor takes one parameter: such a tool can have state, and resources that its
``aclose`` frees. Functions and methods may be async; sync ones run in threads. To show an image a tool returns it
(PIL's), or a list of texts and images.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NotRequired, Union, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from typing_extensions import TypedDict

from agl_slime.agent.images import parts_with_images
from agl_slime.errors import ConfigError, RolloutError
from agl_slime.support.ranges import makes_callables, takes
from agl_slime.support.threads import call_user_code, run_blocking
from agl_slime.tokens.answer import ToolCall
from agl_slime.tokens.formats import types_of

logger = logging.getLogger(__name__)

ToolError = Literal["exception", "timeout", "unknown_tool", "bad_arguments"]
_Arguments = TypeAdapter[dict[str, Any]]

_PYTHON_TYPES: dict[str, Any] = {"string": str, "integer": int, "boolean": bool, "null": None}
_PYTHON_TYPES |= {"number": Union[int, float], "array": list[Any], "object": dict[str, Any]}  # noqa: UP007


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a call: ``content`` for the model, a text or parts with images; ``error``, the kind of failure."""

    call: ToolCall
    content: str | list[Any]
    error: ToolError | None = None

    def to_message(self) -> dict[str, Any]:
        """The result as a chat message of the role ``tool``."""
        return {"role": "tool", "name": self.call.name, "tool_call_id": self.call.id, "content": self.content}


@dataclass(frozen=True, slots=True)
class _Tool:
    schema: dict[str, Any]
    function: Callable[..., Any]
    arguments: _Arguments
    registered: Any = None


class ToolManager:
    """The tools of one rollout. Calls of an answer run concurrently; a failed one is an observation for the model.

    Args:
        tools: Functions, objects with a ``schema``, or classes; see the module's docstring.
        timeout_s: Time limit of a call; a thread that takes longer is abandoned.
        max_result_chars: Longer results are cut, with a note.
        task: Passed to tool classes whose constructor takes a parameter.
    """

    def __init__(
        self,
        tools: Iterable[Any] | Mapping[str, Any] | None = (),
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
        self._open: list[Any] = []
        self._closed = False
        for tool in tools.values() if isinstance(tools, Mapping) else tools or ():
            self.register(tool)

    def register(self, tool: Any) -> None:
        """Add a tool. Raises ``ConfigError`` when it has no usable schema or its name is taken."""
        if isinstance(tool, type):
            tool = tool(*_arguments_of_class(tool, self._task))
        if hasattr(tool, "aclose"):
            self._open.append(tool)
        if self._closed:  # the rollout ended while the tool's constructor ran
            run_blocking(self.aclose())
            raise RolloutError(f"tool {tool!r:.100} was made after its rollout had ended")
        entry = _tool_of(tool)
        if entry.schema["name"] in self._tools:
            raise ConfigError(f"there are two tools named {entry.schema['name']!r}; names must differ")
        self._tools[entry.schema["name"]] = replace(entry, registered=tool)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    @property
    def objects(self) -> dict[str, Any]:
        """The tools by name: functions and objects as they were registered, instances of classes."""
        return {name: tool.registered for name, tool in self._tools.items()}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The schemas in the form of chat templates and OpenAI's API."""
        return [{"type": "function", "function": tool.schema} for tool in self._tools.values()]

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls of one answer concurrently; results in the order of the calls."""
        return list(await asyncio.gather(*map(self.call, calls)))

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call. Raises ``RolloutError`` only when too many threads hang to start another call."""
        content, error = await self._call(call)
        return ToolResult(call=call, content=content, error=error)

    async def _call(self, call: ToolCall) -> tuple[str | list[Any], ToolError | None]:
        tool = self._tools.get(call.name)
        if tool is None:
            names = ", ".join(self._tools) or "none"
            return f"Error: there is no tool named {call.name!r}; there are {names}.", "unknown_tool"
        try:
            arguments = _validated(call.arguments, tool)
        except ValueError as error:
            return f"Error: {error}.", "bad_arguments"
        try:
            value = await asyncio.wait_for(call_user_code(tool.function, **arguments), self._timeout_s)
            if (content_parts := parts_with_images(value)) is not None:
                return content_parts, None
            content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except TimeoutError:
            return f"Error: {call.name} did not answer within {self._timeout_s:g} seconds.", "timeout"
        except Exception as error:  # the model can react to any error of a tool
            if isinstance(error, RolloutError) and error.reason == "threads_hung":
                raise
            return f"Error: {type(error).__name__}: {error}", "exception"
        limit = self._max_result_chars
        if limit is not None and len(content) > limit:
            content = f"{content[:limit]}\n[cut: {len(content) - limit} more characters]"
        return content, None

    async def aclose(self, *, keep: Iterable[Any] = ()) -> None:
        """Call ``aclose`` of each tool that has one, except tools to ``keep``; a failure is logged. A tool whose
        constructor returns only later is closed at once."""
        self._closed = True
        kept_ids = {id(tool) for tool in keep}
        tools, self._open = [tool for tool in self._open if id(tool) not in kept_ids], []
        await asyncio.gather(*map(self._close, tools))

    async def _close(self, tool: Any) -> None:
        try:
            await asyncio.wait_for(call_user_code(tool.aclose), self._timeout_s)
        except Exception as error:
            logger.warning("Tool %.100r could not be closed: %s: %s", tool, type(error).__name__, error)


def check_tools(tools: Iterable[Any]) -> None:
    """Raise ``ConfigError`` for tools that no rollout could register. Classes, which take a task, are not called."""
    manager = ToolManager()
    for tool in tools:
        if not isinstance(tool, type):
            manager.register(tool)
        elif not makes_callables(tool):
            raise ConfigError(f"tool {tool.__name__} cannot be called; give its class a __call__")
        elif not takes(tool, len(_arguments_of_class(tool, {}))):
            raise ConfigError(f"the constructor of tool {tool.__name__} must take the task or nothing")
        elif isinstance(getattr(tool, "schema", None), Mapping):
            _tool_of(tool)


def _arguments_of_class(tool: type, task: Any) -> tuple[Any, ...]:
    parameters = inspect.signature(tool).parameters.values()
    return (task,) if any(parameter.kind <= parameter.POSITIONAL_OR_KEYWORD for parameter in parameters) else ()


def _tool_of(tool: Any) -> _Tool:
    declared, function = getattr(tool, "schema", None), tool
    if by_name := declared is None and hasattr(tool, "tool_info"):  # twinkle's interface
        declared = tool.tool_info
    if declared is not None:
        declared = declared() if callable(declared) else declared
        schema = declared.get("function", declared) if isinstance(declared, Mapping) else {}
        parameters = schema.get("parameters") or {"type": "object", "properties": {}}
        objects = isinstance(parameters, Mapping) and isinstance(parameters.get("properties", {}), Mapping)
        if not isinstance(schema.get("name"), str) or not objects:
            raise ConfigError(f"the schema of a tool must have name, description and parameters, got {declared!r:.200}")
        if not callable(tool):
            raise ConfigError(f"tool {schema['name']!r} cannot be called; give its class a __call__")
        schema = {**schema, "parameters": parameters}
        if by_name:  # a schema without properties takes any arguments, such as an environment's action
            function = lambda **arguments: tool(schema["name"], arguments)  # noqa: E731
            parameters = {"additionalProperties": not parameters.get("properties"), **parameters}
        arguments = _arguments_of_schema(parameters)
    elif callable(tool) and hasattr(tool, "__name__"):
        schema, arguments = _inspected(tool)
    else:
        raise ConfigError(f"a tool must be a function, a class or a callable object with a schema, got {tool!r:.200}")
    return _Tool(schema, function, arguments)


_inspections: WeakKeyDictionary[Any, tuple[dict[str, Any], _Arguments]] = WeakKeyDictionary()


def _inspected(function: Callable[..., Any]) -> tuple[dict[str, Any], _Arguments]:
    key = getattr(function, "__func__", function)  # methods of a rollout's object are new for each rollout
    if (cached := _inspections.get(key)) is not None:
        return cached
    if not (name := function.__name__).isidentifier():
        raise ConfigError(f"a tool must be a function with a name, got {function!r:.200}")
    description, described = _read_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    try:
        hints = get_type_hints(function, include_extras=True)
        for parameter in inspect.signature(function).parameters.values():
            label = f"parameter {parameter.name!r} of tool {name!r}"
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise ConfigError(f"{label} cannot be given by name; a model calls tools with named arguments")
            if parameter.name not in hints:
                raise ConfigError(f"{label} has no type; annotate it: the model's schema needs it")
            hint = Annotated[hints[parameter.name], Field(description=described.get(parameter.name))]
            fields[parameter.name] = hint if parameter.default is parameter.empty else NotRequired[hint]
        arguments = _adapter(fields)
        parameters = arguments.json_schema()
    except (PydanticUserError, NameError) as error:  # a type without JSON form, or an unresolved name
        raise ConfigError(f"tool {name!r} has a parameter whose type cannot be used: {error}") from error
    for titled in (parameters, *parameters["properties"].values()):
        titled.pop("title", None)  # repeats the name
    parameters.pop("additionalProperties", None)
    _inspections[key] = {"name": name, "description": description, "parameters": parameters}, arguments
    return _inspections[key]


def _adapter(fields: dict[str, Any], *, extra: Literal["allow", "forbid"] = "forbid") -> _Arguments:
    arguments: Any = TypedDict("Arguments", fields)  # type: ignore[operator]  # unlike a model it allows any field name
    arguments.__pydantic_config__ = ConfigDict(extra=extra)
    return TypeAdapter(arguments)


def _arguments_of_schema(parameters: Mapping[str, Any]) -> _Arguments:
    """Checks the names of arguments and the types of the outermost level; deeper levels are the tool's business."""

    def type_of(schema: Mapping[str, Any]) -> Any:
        values = schema.get("enum") or ()
        if values and all(value is None or isinstance(value, (str, int)) for value in values):
            return Literal[tuple(values)]
        types = types_of(schema, parameters)
        return Union[tuple(_PYTHON_TYPES.get(kind, Any) for kind in types)] if types else Any  # noqa: UP007

    hints = {name: type_of(schema) for name, schema in parameters.get("properties", {}).items()}
    required = parameters.get("required", ())
    fields = {name: hint if name in required else NotRequired[hint] for name, hint in hints.items()}
    return _adapter(fields, extra="allow" if parameters.get("additionalProperties") else "forbid")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text before the first section, and the description of each parameter in the section ``Args``."""
    titles = r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):[ \t]*$\n?"
    head, *sections = re.split(titles, text, flags=re.MULTILINE)
    args = "".join(body for title, body in zip(sections[::2], sections[1::2], strict=True) if title[0] in "AP")
    indent = args[: len(args) - len(args.lstrip(" \t"))]
    entry = rf"^{indent}(\w+)[ \t]*(?:\([^)\n]*\))?:(.*(?:\n{indent}[ \t]+.*)*)"
    return head.strip(), {name: " ".join(body.split()) for name, body in re.findall(entry, args, re.MULTILINE)}


def _validated(arguments: Mapping[str, Any], tool: _Tool) -> dict[str, Any]:
    """The arguments in the tool's types. Formats without types write lists, objects and null as strings; these are
    parsed. Raises ``ValueError`` naming each argument that does not fit."""
    try:
        return tool.arguments.validate_python(dict(arguments))
    except ValidationError as error:
        problems = error.errors(include_url=False)
    parsed = dict(arguments)
    for key in {str(problem["loc"][0]) for problem in problems}:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            parsed[key] = json.loads(parsed[key])
    try:
        return tool.arguments.validate_python(parsed)
    except ValidationError:
        name = tool.schema["name"]
        text = "; ".join(
            f"argument {'.'.join(map(str, problem['loc']))!r} of {name}: {problem['msg']}, got {problem['input']!r:.80}"
            for problem in problems
        )
        raise ValueError(text) from None
