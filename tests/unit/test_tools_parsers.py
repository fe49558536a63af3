"""Tool calls as models write them; what is no call stays text and is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.errors import ConfigError, PromptError
from agl_slime.tokens.answer import AnswerParts
from agl_slime.tokens.formats import ToolParser, base, get_tool_parser, parser_for_template, register_tool_parser
from tests.chat_templates import TEMPLATES
from tests.examples import examples

ONE = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"key": "kz", "n": 2}}\n</tool_call>',
    "qwen_xml": (
        "<tool_call>\n<function=look>\n<parameter=key>\nkz\n</parameter>\n"
        "<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm": (
        "<tool_call>look\n<arg_key>key</arg_key>\n<arg_value>kz</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        '{"key": "kz", "n": 2}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "llama_json": '{"name": "look", "parameters": {"key": "kz", "n": 2}}',
}


def parse(kind: str, text: str) -> AnswerParts:
    return get_tool_parser(kind).parse(text)


@pytest.mark.parametrize("kind", list(ONE))
def test_a_call_is_read(kind: str) -> None:
    parsed = parse(kind, ONE[kind])
    (call,) = parsed.calls
    assert call.name == "look"
    assert call.arguments["key"] == "kz"
    assert int(call.arguments["n"]) == 2
    assert call.id
    assert parsed.content == ""
    assert not parsed.malformed


@pytest.mark.parametrize("kind", list(ONE))
def test_the_grammar_of_a_forced_call_has_what_is_read_as_one(kind: str) -> None:
    function = {"name": "look", "parameters": {"type": "object"}}
    form = get_tool_parser(kind).forced([function, {**function, "name": "other"}])
    assert form is not None
    calls = form["elements"][1] if kind == "kimi" else form
    assert [len(calls["tags"]), calls["at_least_one"]] == [2, True]
    head, _, arguments = ONE[kind].partition(calls["tags"][0]["begin"])
    assert arguments.partition(calls["tags"][0]["end"])[1]
    assert not head or kind == "kimi"
    text = calls["separator"].join([ONE[kind]] * 2)
    assert [call.name for call in parse(kind, text).calls] == ["look", "look"]


def test_a_parser_that_says_nothing_of_it_forces_no_call() -> None:
    class Own(ToolParser):
        def parse(self, text: str) -> AnswerParts:
            return AnswerParts(content=text)

    assert Own().forced([{"name": "look", "parameters": {}}]) is None


@pytest.mark.parametrize("kind", ["hermes", "qwen_xml", "glm", "kimi"])
def test_an_end_mark_in_an_argument_is_an_argument(kind: str) -> None:
    parser: Any = get_tool_parser(kind)
    marked = f"k{parser.end}z"
    parsed = parse(kind, f"{ONE[kind].replace('kz', marked)}After.{ONE[kind]}")
    assert [call.arguments["key"] for call in parsed.calls] == [marked, "kz"]
    assert parsed.content == "After."
    if parser.quoted:
        within = ONE[kind].replace("kz", f"k{parser.begin}{parser.end}z")
        assert [call.arguments["key"] for call in parse(kind, within).calls] == [f"k{parser.begin}{parser.end}z"]


@pytest.mark.parametrize("kind", ["qwen_xml", "glm"])
def test_a_call_that_is_cut_off_does_not_swallow_the_next(kind: str) -> None:
    cut = ONE[kind].partition("kz")[0] + "kz</tool_call>\n"
    parsed = parse(kind, cut + ONE[kind])
    assert [call.arguments["key"] for call in parsed.calls] == ["kz"]
    assert len(parsed.malformed) == 1


@pytest.mark.parametrize("kind", ["hermes", "qwen_xml", "glm", "kimi"])
def test_text_around_calls_stays(kind: str) -> None:
    parsed = parse(kind, f"First.{ONE[kind]}Then.{ONE[kind]}")
    assert [call.name for call in parsed.calls] == ["look", "look"]
    assert len({call.id for call in parsed.calls}) == (1 if kind == "kimi" else 2)  # Kimi's ids are the model's own
    assert parsed.content == "First.Then."


def test_llama_separates_calls_by_semicolons_and_may_tag_them() -> None:
    parsed = parse("llama_json", f"Let me see.<|python_tag|>{ONE['llama_json']}; {ONE['llama_json']}")
    assert len(parsed.calls) == 2
    assert parsed.content == "Let me see."
    assert parse("llama_json", '{"answer": 3}') == AnswerParts(content='{"answer": 3}')
    assert parse("llama_json", "Three.") == AnswerParts(content="Three.")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hermes", '<tool_call>{"name": "look", "arguments": {"key": </tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "arguments": 3}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look"'),
        ("hermes", "<tool_call>[1]</tool_call>"),
        ("hermes", "<tool_call>" + "[" * 5000 + "</tool_call>"),
        ("qwen_xml", "<tool_call><function=look>text<parameter=key>kz</parameter></function></tool_call>"),
        ("qwen_xml", "<tool_call><parameter=key>kz</parameter></tool_call>"),
        ("glm", "<tool_call><arg_key>key</arg_key><arg_value>kz</arg_value></tool_call>"),
        ("glm", "<tool_call>look<arg_key>key</arg_key></tool_call>"),
        ("kimi", '<|tool_call_begin|>functions.look:0{"key": "kz"}<|tool_call_end|>'),
        ("kimi", "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>3<|tool_call_end|>"),
        ("llama_json", '{"name": "look", "parameters": {'),
    ],
)
def test_malformed_calls_stay_text_and_say_why(kind: str, text: str) -> None:
    parsed = parse(kind, "Well. " * (kind != "llama_json") + text)
    assert not parsed.calls
    (malformed,) = parsed.malformed
    assert malformed == text
    assert parsed.content.endswith(text)


@pytest.mark.parametrize("kind", ["hermes", "qwen_xml", "glm", "kimi"])
def test_a_good_call_beside_a_malformed_one_is_a_call(kind: str) -> None:
    broken = ONE[kind].replace("look", "", 1)
    parsed = parse(kind, broken + ONE[kind])
    assert [call.name for call in parsed.calls] == ["look"]
    assert len(parsed.malformed) == 1


def test_calls_in_thoughts_are_not_made() -> None:
    assert parse("hermes", f"<think>Maybe {ONE['hermes']}?</think>No.").calls == ()
    assert parse("hermes", f"<think>Maybe {ONE['hermes']}").calls == ()
    assert len(parse("hermes", f"Maybe?</think>{ONE['hermes']}").calls) == 1


THOUGHTS = ["<think>hm {} hm</think>", "hm {} hm</think>", "<think>{}</think>"]


@pytest.mark.parametrize("kind", ["hermes", "qwen_xml", "glm", "kimi"])
@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize("said", ["<think>", "</think>", "a <think> b </think> c", "</think><think>"])
def test_marks_of_thinking_in_arguments_are_arguments(kind: str, thought: str, said: str) -> None:
    """For fault 22: such a call vanished, and was not counted."""
    call = ONE[kind].replace("kz", said)
    parsed = parse(kind, call)
    assert [one.arguments["key"] for one in parsed.calls] == [said]
    # after thinking that has a call like it, before more of it, and twice
    parsed = parse(kind, thought.format(call) + call + "<think>" + call + "</think>" + call)
    assert [one.arguments["key"] for one in parsed.calls] == [said, said]
    assert not parsed.malformed
    broken = call.replace("look", "", 1)
    assert len(parse(kind, broken).malformed) == 1
    assert len(parse(kind, call + broken).malformed) == 1


@pytest.mark.parametrize("said", ["<think>", "</think>", "a <think> b </think> c", "</think><think>"])
def test_marks_of_thinking_in_arguments_of_llama_are_arguments(said: str) -> None:
    """For fault 22."""
    call = ONE["llama_json"].replace("kz", said)
    for before in ("", "hm</think>", "<think>hm</think>", "<think>hm</think>So.<|python_tag|>"):
        parsed = parse("llama_json", before + call)
        assert [one.arguments["key"] for one in parsed.calls] == [said], before
    assert len(parse("llama_json", call[:-1]).malformed) == 1
    for thought in (f"<think>{call}</think>No.", f"<think><|python_tag|>{call}", f"hm <|python_tag|>{call}</think>No."):
        assert parse("llama_json", thought) == AnswerParts(content=thought)


def test_a_call_that_thinking_only_mentions_hides_none_after_it() -> None:
    for before in ("I write <tool_call> now.</think>", "<think>I write <tool_call> now.</think>"):
        parsed = parse("hermes", before + ONE["hermes"])
        assert ([call.name for call in parsed.calls], parsed.malformed) == (["look"], ())


PIECES = (
    *("<tool_call>", "</tool_call>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("{", "}", '"name"', ":", "x", "\n", "<", ">", "<function=f>", "<think>", "</think>"),
    *(text.replace("kz", said) for text in ONE.values() for said in ("kz", "<think>", "</think>")),
)


@given(text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@settings(max_examples=examples(100), deadline=None)
def test_no_text_breaks_a_parser_or_is_lost(text: str) -> None:
    for kind in base._parsers:
        parsed = parse(kind, text)
        if not parsed.calls and kind not in ("kimi", "kimi_k2"):
            assert parsed.content == text
        assert all(malformed in text for malformed in parsed.malformed)


names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
# what a value cannot hold is what ends it: the formats have no way to write that
written = st.sampled_from(["<", ">", "<think>", "</think>", "<tool_call>", "<|tool_call_begin|>", "</", "{", '"', "; "])
letters = st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=6)
values = st.lists(written | letters, max_size=4).map("".join)


@given(name=names, arguments=st.dictionaries(names, values, max_size=3), thought=st.sampled_from(["", *THOUGHTS]))
@settings(max_examples=examples(100), deadline=None)
def test_what_a_template_would_write_is_read_back(name: str, arguments: dict[str, Any], thought: str) -> None:
    as_json = json.dumps(arguments, ensure_ascii=False)
    pairs = arguments.items()
    written = {
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {as_json}}}\n</tool_call>',
        "qwen_xml": f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
        + "</function>\n</tool_call>",
        "glm": f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
        + "</tool_call>",
        "kimi": f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{as_json}<|tool_call_end|>",
        "llama_json": f'{{"name": "{name}", "parameters": {as_json}}}',
    }
    for kind, text in written.items():
        parsed = parse(kind, thought.replace("{}", "so") + text)
        assert [(call.name, dict(call.arguments)) for call in parsed.calls] == [(name, arguments)], kind
        assert not parsed.malformed


def test_the_format_is_told_from_the_chat_template() -> None:
    assert parser_for_template(TEMPLATES["groups_tools"].source) == "hermes"
    assert parser_for_template("… <tool_call>\n<function=example> …") == "qwen_xml"
    assert parser_for_template("… <tool_call>{name}\n<arg_key> …") == "glm"
    assert parser_for_template("… <|tool_call_begin|><|tool_call_argument_begin|> …") == "kimi"
    assert parser_for_template(None) == "hermes"


@pytest.mark.parametrize(
    ("template", "model"),
    [
        ("<|start|>assistant<|channel|>commentary to=functions.f", "gpt-oss"),
        ('<minimax:tool_call>\n<invoke name="f">', "MiniMax"),
        ("[TOOL_CALLS][{{ calls }}]", "Mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function", "DeepSeek"),
    ],
)
def test_a_format_that_cannot_be_read_is_not_taken_for_another(template: str, model: str) -> None:
    with pytest.raises(PromptError, match=f"tool calls in {model}'s format, which is not parsed here"):
        parser_for_template(template)
    assert parser_for_template(template, offered=False) == "hermes"


def test_a_custom_parser_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base._parsers, "mine", list)  # taken out again at the end
    del base._parsers["mine"]

    @register_tool_parser("mine")
    class Mine(ToolParser):
        def parse(self, text: str) -> AnswerParts:
            return AnswerParts(content=text)

    assert isinstance(get_tool_parser("mine"), Mine)
    with pytest.raises(ConfigError, match="'mine'"):
        register_tool_parser("mine")(Mine)
    with pytest.raises(ConfigError, match=r"'other'.*hermes"):
        get_tool_parser("other")


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
        "loop": {"$ref": "#/properties/loop", "anyOf": 3, "type": {}},
    },
    "$defs": {"Place": {"allOf": [{"$ref": "#/$defs/Point"}]}, "Point": {"type": "object"}},
}


@pytest.mark.parametrize("kind", ["qwen_xml", "glm"])
@pytest.mark.parametrize(
    ("name", "written", "read"),
    [
        ("many", '["a"]', ["a"]),
        ("many", "null", None),
        ("many", "a", "a"),
        ("place", '{"x": 1}', {"x": 1}),
        ("size", "3", 3),
        ("size", "True", True),
        ("level", "2", 2),
        ("on", "false", False),
        ("on", "None", None),
        ("name", "3", "3"),
        ("name", "null", None),
        ("text", "null", "null"),
        ("loop", "3", "3"),
    ],
)
def test_values_are_of_the_types_that_the_schema_names_in_whatever_words(
    kind: str, name: str, written: str, read: Any
) -> None:
    parser = get_tool_parser(kind)
    text = {
        "qwen_xml": f"<tool_call><function=f><parameter={name}>\n{written}\n</parameter></function></tool_call>",
        "glm": f"<tool_call>f<arg_key>{name}</arg_key><arg_value>{written}</arg_value></tool_call>",
    }[kind]
    (call,) = parser.parse(text).calls
    assert parser.typed(call, SCHEMA).arguments == {name: read}
