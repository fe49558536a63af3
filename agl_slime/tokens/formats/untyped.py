"""Conversion of arguments from text to the types of the tool's JSON schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agl_slime.tokens.answer import ToolCall
from agl_slime.tokens.formats.base import BlockParser


class UntypedParser(BlockParser):
    """A format that writes all values as text."""

    def convert_types(self, call: ToolCall, parameters: Mapping[str, Any] | None) -> ToolCall:
        root = parameters or {}
        schemas = root.get("properties")
        schemas = schemas if isinstance(schemas, Mapping) else {}
        arguments = {}
        for name, value in call.arguments.items():
            schema = schemas.get(name)
            arguments[name] = _one_of(_typed(value, types_of(schema, root)), schema)
        return replace(call, arguments=arguments)


def _one_of(value: Any, schema: Any) -> Any:
    """The value without the blanks around it, where only so it is one that ``enum`` lists: grammars of XML allow
    blanks."""
    choices = _listed(schema.get("enum")) if isinstance(schema, Mapping) else []
    return value.strip() if isinstance(value, str) and value not in choices and value.strip() in choices else value


_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_EMPTY: dict[str, Any] = {"array": [], "object": {}, "integer": None, "number": None, "boolean": None, "null": None}
_JSON_TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"}
_JSON_TYPES |= {list: "array", dict: "object"}


def types_of(schema: Any, root: Mapping[str, Any], _seen: set[int] | None = None) -> tuple[str, ...]:
    """The JSON types that a schema allows, by ``type``, ``anyOf``, ``oneOf``, ``allOf``, ``$ref`` (within ``root``),
    ``enum`` and ``const``; empty without any of them."""
    visited = set() if _seen is None else _seen
    if not isinstance(schema, Mapping) or id(schema) in visited:
        return ()
    visited.add(id(schema))
    types = [kind for kind in _listed(schema.get("type")) if isinstance(kind, str)]
    values = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    if not types:
        types = [_JSON_TYPES[type(value)] for value in values if type(value) in _JSON_TYPES]
    types += ["null"] if schema.get("nullable") else []
    choices = [choice for name in ("anyOf", "oneOf", "allOf") for choice in _listed(schema.get(name))]
    if isinstance(reference := schema.get("$ref"), str):
        target: Any = root
        for key in reference.removeprefix("#/").split("/"):
            target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        choices.append(target)
    return tuple(dict.fromkeys([*types, *(kind for choice in choices for kind in types_of(choice, root, visited))]))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _typed(value: Any, types: tuple[str, ...]) -> Any:
    """A text as one of ``types`` if it parses as one and is no string."""
    if not isinstance(value, str) or not types:
        return value
    text = value.strip()
    if not text and "string" not in types:
        return _EMPTY.get(types[0], value)
    if text.lower() in _CONSTANTS and (text in ("true", "false", "null") or text != text.lower() or len(types) == 1):
        read = _CONSTANTS[text.lower()]
    elif "string" in types:
        return value
    else:
        try:
            read = _literal(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return value
    numbers = {"integer", "number"}
    kinds = numbers if (kind := _JSON_TYPES.get(type(read))) in numbers else {kind}
    return value if kinds.isdisjoint(types) else read


def _literal(text: str) -> Any:
    """A value in JSON, or in Python's syntax, which templates without ``tojson`` write."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))
