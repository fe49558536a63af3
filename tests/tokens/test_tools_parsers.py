"""Tool calls as models write them; what is no call stays text and is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.errors import ConfigError, PromptError
from agl_slime.tokens.answer import AnswerParts
from agl_slime.tokens.formats import (
    ToolParser,
    base,
    find_format,
    get_tool_parser,
    parser_for,
    register_tool_parser,
)
from agl_slime.tokens.formats.base import BlockParser
from agl_slime.tokens.reader import AnswerReader
from tests.harness.examples import examples
from tests.harness.tokenizers import small_tokenizer
from tests.harness.tool_formats import FORMATS, tokenizer_of, written

ONE = {kind: written(kind, [("look", {"key": "kz", "n": 2})]).strip() for kind in FORMATS}
BLOCKS = [kind for kind in ONE if isinstance(get_tool_parser(kind), BlockParser)]
CLOSED = [kind for kind in BLOCKS if getattr(get_tool_parser(kind), "end", "")]


def parse(kind: str, text: str) -> AnswerParts:
    return get_tool_parser(kind).parse(text)


def names_of(parts: AnswerParts) -> list[str]:
    return [call.name for call in parts.calls]


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
def test_calls_in_parallel_are_read_in_their_order(kind: str) -> None:
    text = written(kind, [("look", {"key": "a"}), ("other", {}), ("look", {"key": "b"})])
    parsed = parse(kind, text)
    assert [(call.name, dict(call.arguments)) for call in parsed.calls] == [
        ("look", {"key": "a"}),
        ("other", {}),
        ("look", {"key": "b"}),
    ]
    assert (parsed.content.strip(), parsed.malformed) == ("", ())
    if kind != "solar":  # whose ids are the model's own
        assert len({call.id for call in parsed.calls}) == 3


@pytest.mark.parametrize("kind", list(ONE))
def test_an_answer_without_calls_is_text(kind: str) -> None:
    assert parse(kind, "Three, not 4.") == AnswerParts(content="Three, not 4.")


@pytest.mark.parametrize("kind", list(ONE))
def test_grammar_of_a_forced_call_is_parsed_as_that_call(kind: str) -> None:
    function = {"name": "look", "parameters": {"type": "object"}}
    parser = get_tool_parser(kind)
    form = parser.forced_grammar([function, {**function, "name": "other"}])
    if parser.call_grammar is None:
        assert form is None
        return
    assert form is not None
    before, calls, after = "", form, ""
    if form["type"] == "sequence":
        opening, calls, closing = form["elements"]
        before, after = opening["value"], closing["value"]
    tags = calls["elements" if form["type"] == "or" else "tags"]
    assert len(tags) == 2

    def said(tag: dict[str, Any]) -> str:
        arguments: Any = {"key": "kz"}
        style = json.dumps(tag["content"])
        inner = json.dumps(arguments)
        if "qwen_xml" in style or "minimax_xml" in style:
            name = "=key" if "qwen" in style else ' name="key"'
            inner = f"<parameter{name}>kz</parameter>"
        elif "glm_xml" in style:
            inner = "<arg_key>key</arg_key><arg_value>kz</arg_value>"
        elif "deepseek_xml" in style:
            inner = '<｜DSML｜parameter name="key" string="true">kz</｜DSML｜parameter>'
        if kind == "kimi":
            inner = "0<|tool_call_argument_begin|>" + inner
        return tag["begin"] + inner + tag["end"]

    text = said(tags[0]) if form["type"] == "or" else before + calls["separator"].join(map(said, tags)) + after
    parsed = parse(kind, text)
    assert [(call.name, dict(call.arguments)) for call in parsed.calls] == [
        (name, {"key": "kz"}) for name in (["look"] if form["type"] == "or" else ["look", "other"])
    ]
    assert parsed.content.strip() == ""


def test_a_parser_that_says_nothing_of_it_forces_no_call() -> None:
    class Own(ToolParser):
        def parse(self, text: str) -> AnswerParts:
            return AnswerParts(content=text)

    assert Own().forced_grammar([{"name": "look", "parameters": {}}]) is None


@pytest.mark.parametrize("kind", CLOSED)
def test_an_end_mark_in_an_argument_is_an_argument(kind: str) -> None:
    parser: Any = get_tool_parser(kind)
    marked = f"k{parser.end}z"
    parsed = parse(kind, f"{ONE[kind].replace('kz', marked)}After.{ONE[kind]}")
    assert [call.arguments["key"] for call in parsed.calls] == [marked, "kz"]
    assert parsed.content.strip() == "After."


QUOTED = ["hermes", "kimi", "mistral", "mistral_args", "deepseek_v3", "deepseek_v31", "gemma4", "lfm2", "solar"]


@pytest.mark.parametrize("kind", QUOTED)
def test_all_marks_of_a_call_in_a_quoted_argument_are_an_argument(kind: str) -> None:
    parser: Any = get_tool_parser(kind)
    marked = f"k{parser.begin}{parser.end}z"
    parsed = parse(kind, ONE[kind].replace("kz", marked))
    assert [call.arguments["key"] for call in parsed.calls] == [marked]


@pytest.mark.parametrize("kind", ["qwen_xml", "glm", "seed", "hunyuan", "minimax", "deepseek_v32"])
def test_a_call_that_is_cut_off_does_not_swallow_the_next(kind: str) -> None:
    parser: Any = get_tool_parser(kind)
    cut = ONE[kind].partition("kz")[0] + "kz" + parser.end + "\n"
    parsed = parse(kind, cut + ONE[kind])
    assert [call.arguments["key"] for call in parsed.calls] in (["kz"], ["kz", "kz"])  # its value may end there
    assert len(parsed.calls) + len(parsed.malformed) == 2


@pytest.mark.parametrize("kind", BLOCKS)
def test_text_around_calls_stays(kind: str) -> None:
    parsed = parse(kind, f"First.{ONE[kind]}Then.{ONE[kind]}")
    assert names_of(parsed) == ["look", "look"]
    assert parsed.content == "First.Then."


def test_llama_separates_calls_by_semicolons_and_may_tag_them() -> None:
    parsed = parse("llama_json", f"Let me see.<|python_tag|>{ONE['llama_json']}; {ONE['llama_json']}")
    assert len(parsed.calls) == 2
    assert parsed.content == "Let me see."
    assert parse("llama_json", '{"answer": 3}') == AnswerParts(content='{"answer": 3}')
    mentioned = parse("llama_json", f"I write <|python_tag|> first.<|python_tag|>{ONE['llama_json']}")
    assert (names_of(mentioned), mentioned.content) == (["look"], "I write <|python_tag|> first.")


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
        ("qwen_xml", "<tool_call>\n<function=look>\n<parameter=key>\nkz"),
        ("glm", "<tool_call><arg_key>key</arg_key><arg_value>kz</arg_value></tool_call>"),
        ("glm", "<tool_call>look<arg_key>key</arg_key></tool_call>"),
        ("kimi", '<|tool_call_begin|>functions.look:0{"key": "kz"}<|tool_call_end|>'),
        ("kimi", "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>3<|tool_call_end|>"),
        ("llama_json", '{"name": "look", "parameters": {'),
        ("lfm2", "<|tool_call_start|>[look(key=]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[look('kz')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[look(key=open('x'))]<|tool_call_end|>"),
        ("gemma4", '<|tool_call>call:look{key:<|"|>kz}<tool_call|>'),
        ("mistral", '[TOOL_CALLS][{"name": "look", "arguments": {"key": '),
        ("mistral_args", '[TOOL_CALLS]look[ARGS]{"key": '),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{\n```<｜tool▁call▁end｜>"),
        ("deepseek_v32", '<｜DSML｜invoke name="look">\nkz</｜DSML｜invoke>'),
        ("harmony", "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"),
    ],
)
def test_malformed_calls_stay_text_and_say_why(kind: str, text: str) -> None:
    prefix = (
        "" if kind == "llama_json" else "<|channel|>final<|message|>Well.<|end|>" if kind == "harmony" else "Well. "
    )
    parsed = parse(kind, prefix + text)
    assert not parsed.calls
    (malformed,) = parsed.malformed
    assert malformed == text
    assert parsed.content.endswith(text)


@pytest.mark.parametrize("kind", [*BLOCKS, "harmony"])
def test_a_good_call_beside_a_malformed_one_is_a_call(kind: str) -> None:
    broken = ONE[kind].replace("look", "", 1) if kind != "harmony" else ONE[kind].replace("kz", 'k"z')
    between = "<|start|>assistant" * (kind == "harmony")
    parsed = parse(kind, broken + between + ONE[kind])
    assert names_of(parsed) == ["look"]
    assert len(parsed.malformed) == 1


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("mention", ["I write {} now. ", "{} ", "As {}, then:\n", "{}{}"])
def test_a_mark_that_is_mentioned_hides_no_call_after_it(kind: str, mention: str) -> None:
    parser: Any = get_tool_parser(kind)
    for mark in parser.marks():
        if kind in ("glm", "hermes") and mention == "{}{}":
            continue
        parsed = parse(kind, mention.replace("{}", mark) + ONE[kind])
        assert names_of(parsed) == ["look"], (mark, parsed)
        assert parsed.calls[0].arguments["key"] == "kz"


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_doubled_opening_mark_hides_no_call(kind: str) -> None:
    parser: Any = get_tool_parser(kind)
    first = parser.marks()[-1]
    assert names_of(parse(kind, first + "\n" + ONE[kind])) == ["look"]


def test_calls_in_thoughts_are_not_made() -> None:
    reader, opened = AnswerReader(get_tool_parser("hermes")), AnswerReader(get_tool_parser("hermes"), opened=True)
    assert reader.read(f"<think>Maybe {ONE['hermes']}?</think>No.").calls == ()
    assert reader.read(f"<think>Maybe {ONE['hermes']}").calls == ()
    assert opened.read(f"Maybe {ONE['hermes']}</think>No.").calls == ()
    assert opened.read(f"Maybe {ONE['hermes']}") == AnswerParts(f"Maybe {ONE['hermes']}", False)
    assert len(reader.read(f"Maybe?</think>{ONE['hermes']}").calls) == 1


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_end_of_thinking_in_prose_after_a_call_unmakes_none(kind: str) -> None:
    reader = AnswerReader(get_tool_parser(kind), opened=False)
    parts = reader.read(f"{ONE[kind]} I had no <think> and no </think> here.")
    assert (names_of(parts), parts.reasoning) == (["look"], None)


THOUGHTS = ["<think>hm {} hm</think>", "hm {} hm</think>", "<think>{}</think>"]


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if FORMATS[kind].thinking[0] == "<think>"])
@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize("said", ["<think>", "</think>", "a <think> b </think> c", "</think><think>"])
def test_marks_of_thinking_in_arguments_are_arguments(kind: str, thought: str, said: str) -> None:
    call = ONE[kind].replace("kz", said)
    for opened in (None, False):
        parsed = AnswerReader(get_tool_parser(kind), opened).read("So: " + call)
        assert [one.arguments["key"] for one in parsed.calls] == [said]
    parsed = AnswerReader(get_tool_parser(kind), not thought.startswith("<")).read(
        thought.format(ONE[kind]) + call + "so" + call
    )
    assert [one.arguments["key"] for one in parsed.calls] == [said, said]
    assert not parsed.malformed


PIECES = (
    *("{", "}", '"name"', ":", "x", "\n", "<", ">", "<think>", "</think>", "<|channel|>", "<|message|>", "[", "]"),
    *(mark for form in FORMATS.values() for mark in form.marks),
    *(text.replace("kz", said) for text in ONE.values() for said in ("kz", "<think>", "</think>")),
)


@given(text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@settings(max_examples=examples(100), deadline=None)
def test_no_text_breaks_a_parser_or_is_lost(text: str) -> None:
    for kind in base._parsers:
        parsed = parse(kind, text)
        if not parsed.calls and kind not in ("harmony", "gpt_oss"):
            assert parsed.content == text
        assert all(malformed in text for malformed in parsed.malformed)


@pytest.mark.parametrize("kind", list(FORMATS))
def test_format_is_found_from_the_templates_calls(kind: str) -> None:
    assert type(find_format(tokenizer_of(kind))) is type(get_tool_parser(kind))


def test_template_without_calls_selects_the_format_of_its_markers() -> None:
    tokenizer = small_tokenizer("{# <|tool_list_start|> #}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert type(find_format(tokenizer)) is type(get_tool_parser("lfm2"))


UNREAD = [
    "{{ m.content }}",  # no sign of calls at all: Hermes' is not assumed
    "{% for c in m.tool_calls or [] %}<tool_call>CALL {{ c.function.name }} {{ c.function.arguments }}{% endfor %}",
    "{% for c in m.tool_calls or [] %}>>>{{ c.function.name }}\n{{ c.function.arguments | tojson }}{% endfor %}",
]


@pytest.mark.parametrize("writes", UNREAD)
def test_unknown_format_is_refused_in_a_sentence(writes: str) -> None:
    source = "{% for m in messages %}<|im_start|>" + writes + "<|im_end|>{% endfor %}"
    with pytest.raises(PromptError, match="asks for tool calls in a format without a parser: set tool_parser"):
        parser_for(small_tokenizer(source))


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
