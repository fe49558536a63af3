"""Tools that a model may call: Python functions, and objects that bring a JSON schema.

A function's schema is told from its signature and docstring (``Args:``) by pydantic, which also checks what the model
gives: numbers, strings, lists, ``Literal``, ``Optional``, enums, dataclasses, pydantic models. An object has ``schema``
(``{"name", "description", "parameters"}``, or OpenAI's form around it) and is called with the arguments; one that has
``tool_info()`` in its place is called with its name and a dict of them. A class is instantiated for each rollout, with
the task when its constructor takes one parameter: that is how a tool has a state, and a sandbox that its ``aclose``
closes. Functions and methods may be async; others run in threads. A tool that shows a picture returns it (PIL's), or a
list of texts and pictures.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Union, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from typing_extensions import TypedDict

from agl_slime.errors import ConfigError, RolloutError
from agl_slime.rollout.images import parts_with_images
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
    """What a call came to. ``content`` is what the model sees, a text or parts with images; ``error`` says that it
    failed, and how."""

    call: ToolCall
    content: str | list[Any]
    error: ToolError | None = None

    def to_message(self) -> dict[str, Any]:
        """As a chat message of the role ``tool``."""
        return {"role": "tool", "name": self.call.name, "tool_call_id": self.call.id, "content": self.content}


@dataclass(frozen=True, slots=True)
class _Tool:
    schema: dict[str, Any]
    function: Callable[..., Any]
    arguments: _Arguments


class ToolManager:
    """The tools of one rollout. Calls of one answer run at the same time; a call that fails is an observation for the
    model, never an exception.

    Args:
        tools: Functions, objects with a ``schema``, or classes; see the module's text.
        timeout_s: Seconds that a call may take; a thread that takes longer is abandoned.
        max_result_chars: Longer results are cut, with a note that they were.
        task: Given to classes that want it.
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
        """Add a tool. ``ConfigError`` when it has no usable schema or the name is taken."""
        if isinstance(tool, type):
            parameters = inspect.signature(tool).parameters.values()
            wants_task = any(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
            tool = tool(self._task) if wants_task else tool()
        if hasattr(tool, "aclose"):
            self._open.append(tool)
        if self._closed:  # its rollout ended while it was being made
            run_blocking(self.aclose())
            raise RolloutError(f"tool {tool!r:.100} came after its rollout had ended")
        made = _tool_of(tool)
        if made.schema["name"] in self._tools:
            raise ConfigError(f"there are two tools named {made.schema['name']!r}; names must differ")
        self._tools[made.schema["name"]] = made

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates and OpenAI's API take them."""
        return [{"type": "function", "function": tool.schema} for tool in self._tools.values()]

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls of one answer at the same time; results in the order of the calls."""
        return list(await asyncio.gather(*map(self.call, calls)))

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call. Raises ``RolloutError`` only when so many calls hang that none is made any more."""
        content, error = await self._call(call)
        return ToolResult(call=call, content=content, error=error)

    async def _call(self, call: ToolCall) -> tuple[str | list[Any], ToolError | None]:
        tool = self._tools.get(call.name)
        if tool is None:
            there = ", ".join(self._tools) or "none"
            return f"Error: there is no tool named {call.name!r}; there are {there}.", "unknown_tool"
        try:
            arguments = _fit(call.arguments, tool)
        except ValueError as error:
            return f"Error: {error}.", "bad_arguments"
        try:
            value = await asyncio.wait_for(call_user_code(tool.function, **arguments), self._timeout_s)
            if (parts := parts_with_images(value)) is not None:
                return parts, None
            content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except TimeoutError:
            return f"Error: {call.name} did not answer within {self._timeout_s:g} seconds.", "timeout"
        except Exception as error:  # whatever a tool raises is something the model can react to
            if isinstance(error, RolloutError) and error.reason == "threads_hung":
                raise
            return f"Error: {type(error).__name__}: {error}", "exception"
        limit = self._max_result_chars
        if limit is not None and len(content) > limit:
            content = f"{content[:limit]}\n[cut: {len(content) - limit} more characters]"
        return content, None

    async def aclose(self, *, keep: Iterable[Any] = ()) -> None:
        """Call ``aclose`` of each tool that has one, but of those to ``keep``; a failure is logged. A tool that a
        hanging constructor makes later is closed at once."""
        self._closed = True
        kept = {id(tool) for tool in keep}
        tools, self._open = [tool for tool in self._open if id(tool) not in kept], []
        await asyncio.gather(*map(self._close, tools))

    async def _close(self, tool: Any) -> None:
        try:
            await asyncio.wait_for(call_user_code(tool.aclose), self._timeout_s)
        except Exception as error:
            logger.warning("Tool %.100r could not be closed: %s: %s", tool, type(error).__name__, error)


def _tool_of(tool: Any) -> _Tool:
    given, function = getattr(tool, "schema", None), tool
    if by_name := given is None and hasattr(tool, "tool_info"):  # as twinkle has them
        given = tool.tool_info
    if given is not None:
        given = given() if callable(given) else given
        schema = given.get("function", given) if isinstance(given, Mapping) else {}
        if not isinstance(schema.get("name"), str) or not isinstance(schema.get("parameters", {}), Mapping):
            raise ConfigError(f"the schema of a tool must have name, description and parameters, got {given!r:.200}")
        if not callable(tool):
            raise ConfigError(f"tool {schema['name']!r} cannot be called; give its class a __call__")
        nothing = {"type": "object", "properties": {}, **({"additionalProperties": True} if by_name else {})}
        schema = {**schema, "parameters": schema.get("parameters") or nothing}
        if by_name:
            function = lambda **arguments: tool(schema["name"], arguments)  # noqa: E731
        arguments = _arguments_of_schema(schema["parameters"])
    elif callable(tool) and hasattr(tool, "__name__"):
        schema, arguments = _inspected(tool)
    else:
        raise ConfigError(f"a tool must be a function, a class or a callable object with a schema, got {tool!r:.200}")
    return _Tool(schema, function, arguments)


_inspections: WeakKeyDictionary[Any, tuple[dict[str, Any], _Arguments]] = WeakKeyDictionary()


def _inspected(function: Callable[..., Any]) -> tuple[dict[str, Any], _Arguments]:
    if (known := _inspections.get(function)) is not None:
        return known
    name = function.__name__
    description, described = _read_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    try:
        hints = get_type_hints(function, include_extras=True)
        for parameter in inspect.signature(function).parameters.values():
            where = f"parameter {parameter.name!r} of tool {name!r}"
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise ConfigError(f"{where} cannot be given by name; a model calls tools with named arguments")
            if parameter.name not in hints:
                raise ConfigError(f"{where} has no type; annotate it, so that the model is told what to give")
            hint = Annotated[hints[parameter.name], Field(description=described.get(parameter.name))]
            fields[parameter.name] = hint if parameter.default is parameter.empty else NotRequired[hint]
        arguments = _adapter(fields)
        parameters = arguments.json_schema()
    except (PydanticUserError, NameError) as error:  # a type without JSON form, or one that cannot be looked up
        raise ConfigError(f"tool {name!r} has a parameter whose type cannot be used: {error}") from error
    for titled in (parameters, *parameters["properties"].values()):
        titled.pop("title", None)  # the name once more
    parameters.pop("additionalProperties", None)
    _inspections[function] = {"name": name, "description": description, "parameters": parameters}, arguments
    return _inspections[function]


def _adapter(fields: dict[str, Any], *, extra: Literal["allow", "forbid"] = "forbid") -> _Arguments:
    made: Any = TypedDict("Arguments", fields)  # type: ignore[operator]  # not a model: a parameter may have any name
    made.__pydantic_config__ = ConfigDict(extra=extra)
    return TypeAdapter(made)


def _arguments_of_schema(parameters: Mapping[str, Any]) -> _Arguments:
    """Checks which arguments there are, and the types of the outermost level; the tool itself checks the rest."""

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
    """The text before the first section, and what the section ``Args`` says of each parameter."""
    titles = r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):[ \t]*$\n?"
    head, *sections = re.split(titles, text, flags=re.MULTILINE)
    said = "".join(body for title, body in zip(sections[::2], sections[1::2], strict=True) if title[0] in "AP")
    indent = said[: len(said) - len(said.lstrip(" \t"))]
    entry = rf"^{indent}(\w+)[ \t]*(?:\([^)\n]*\))?:(.*(?:\n{indent}[ \t]+.*)*)"
    return head.strip(), {name: " ".join(body.split()) for name, body in re.findall(entry, said, re.MULTILINE)}


def _fit(given: Mapping[str, Any], tool: _Tool) -> dict[str, Any]:
    """The arguments as the tool wants them: strings become lists, objects and null where they read as such, for formats
    without types write them so. ``ValueError`` says what does not fit."""
    try:
        return tool.arguments.validate_python(dict(given))
    except ValidationError as error:
        problems = error.errors(include_url=False)
    read = dict(given)
    for key in {str(problem["loc"][0]) for problem in problems}:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            read[key] = json.loads(read[key])
    try:
        return tool.arguments.validate_python(read)
    except ValidationError:
        told = [(".".join(map(str, each["loc"])), each["msg"], each["input"]) for each in problems]
        name = tool.schema["name"]
        text = "; ".join(f"argument {at!r} of {name}: {msg}, got {it!r:.80}" for at, msg, it in told)
        raise ValueError(text) from None
