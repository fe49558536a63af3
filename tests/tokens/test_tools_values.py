"""Values and names in calls, in each format's notation."""

from __future__ import annotations

from typing import Any

import pytest

from agl_slime.tokens.answer import AnswerParts
from agl_slime.tokens.formats import get_tool_parser


def parse(kind: str, text: str) -> AnswerParts:
    return get_tool_parser(kind).parse(text)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "many": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/Place"},
        "size": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
        "level": {"enum": [1, 2]},
        "on": {"type": ["boolean", "null"]},
        "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "text": {"type": "string"},
        "city": {"enum": ["Rome", " Oslo"]},
        "loop": {"$ref": "#/properties/loop", "anyOf": 3, "type": {}},
    },
    "$defs": {"Place": {"allOf": [{"$ref": "#/$defs/Point"}]}, "Point": {"type": "object"}},
}


VALUES: list[tuple[str, str, Any]] = [
    ("many", '["a"]', ["a"]),
    ("many", "null", None),
    ("many", "a", "a"),
    ("many", "['x', None]", ["x", None]),
    ("many", "", []),
    ("city", " \n Rome\n ", "Rome"),
    ("city", " Oslo", " Oslo"),
    ("city", " Paris ", " Paris "),
    ("place", '{"x": 1}', {"x": 1}),
    ("place", "", {}),
    ("place", "{'a': (1, 2)}", {"a": [1, 2]}),
    ("place", "__import__('os')", "__import__('os')"),
    ("size", "3", 3),
    ("size", "True", True),
    ("size", "TRUE", True),
    ("size", "", None),
    ("level", "2", 2),
    ("on", "false", False),
    ("on", "None", None),
    ("name", "3", "3"),
    ("name", "null", None),
    ("text", "null", "null"),
    ("text", "", ""),
    ("text", "TRUE", "TRUE"),
    ("loop", "3", "3"),
]


@pytest.mark.parametrize("kind", ["qwen_xml", "glm"])
def test_values_are_of_the_types_that_the_schema_names_in_whatever_words(kind: str) -> None:
    parser = get_tool_parser(kind)
    for name, text, value in VALUES:
        call_text = {
            "qwen_xml": f"<tool_call><function=f><parameter={name}>\n{text}\n</parameter></function></tool_call>",
            "glm": f"<tool_call>f<arg_key>{name}</arg_key><arg_value>{text}</arg_value></tool_call>",
        }[kind]
        (call,) = parser.parse(call_text).calls
        arguments = parser.convert_types(call, SCHEMA).arguments
        assert (arguments, type(arguments[name])) == ({name: value}, type(value)), text


CUT = "<function=f>\n<parameter=a>\n1\n"


@pytest.mark.parametrize(
    ("kind", "text", "arguments"),
    [
        ("qwen_xml", f"{CUT}<parameter=b>\n2\n</parameter>\n</function>\n", {"a": "1", "b": "2"}),
        ("qwen_xml", f"{CUT}</function>\n", {"a": "1"}),
        ("qwen_xml", "<function=f><parameter=a>x</parameter>y</parameter></function>", {"a": "x</parameter>y"}),
        ("qwen_xml", "<function=f><parameter=a>x</function>y</parameter></function>", {"a": "x</function>y"}),
        ("glm", "f<arg_key>a</arg_key><arg_value>x</arg_value>y</arg_value>", {"a": "x</arg_value>y"}),
        ("glm", "f<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</arg_value>", {"a": "1", "b": "2"}),
    ],
)
def test_a_value_ends_at_its_end_mark_or_at_the_next_key(kind: str, text: str, arguments: dict[str, str]) -> None:
    parsed = parse(kind, f"<tool_call>{text}</tool_call>")
    assert [dict(call.arguments) for call in parsed.calls] == [arguments]


@pytest.mark.parametrize("section", ["tool_calls_section", "tool_call_section"])
def test_kimi_names_may_have_dots_and_sections_both_names(section: str) -> None:
    text = '<|tool_call_begin|>functions.files.read-all:12<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    parsed = parse("kimi", f"So.<|{section}_begin|>{text}{text}<|{section}_end|>")
    assert [(call.name, call.id) for call in parsed.calls] == [("files.read-all", "functions.files.read-all:12")] * 2
    assert parsed.content == "So."


def test_lfm2_reads_json_in_its_marks_line_breaks_and_dots() -> None:
    as_json = '<|tool_call_start|>[{"name": "f", "arguments": {"x": 1}}]<|tool_call_end|>'
    assert [dict(call.arguments) for call in parse("lfm2", as_json).calls] == [{"x": 1}]
    parsed = parse("lfm2", "<|tool_call_start|>[a.f(x='1\n2', y=-1.5, z={\"k\": [true, null]}), g()]<|tool_call_end|>")
    assert [(call.name, dict(call.arguments)) for call in parsed.calls] == [
        ("a.f", {"x": "1\n2", "y": -1.5, "z": {"k": [True, None]}}),
        ("g", {}),
    ]


def test_harmony_channels_are_reasoning_content_and_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"key": "kz"}<|call|>'
    )
    parts = parse("harmony", text)
    assert (parts.reasoning, parts.content, [call.name for call in parts.calls]) == ("Hm.", "I look.", ["look"])
    assert parts.reasoning_closed
    assert not parse("harmony", "<|channel|>analysis<|message|>Hm").reasoning_closed
    assert parse("harmony", "<|channel|>final<|message|>Three.").content == "Three."
