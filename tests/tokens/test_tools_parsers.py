"""Tool calls as models write them; text that is no call stays text and is counted. Rendered answers of each format are
read back."""

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from agl_slime.agent.session import RolloutStats
from agl_slime.engine.client.generation import Generation
from agl_slime.errors import ConfigError, PromptError
from agl_slime.gateway.calls import Call
from agl_slime.gateway.reading import Reading
from agl_slime.tokens.answer import AnswerParts
from agl_slime.tokens.formats import ToolParser, base, find_format, get_tool_parser, parser_for, register_tool_parser
from agl_slime.tokens.formats.base import BlockParser
from agl_slime.tokens.reader import AnswerReader, reader_for
from tests.harness.examples import examples
from tests.harness.tokenizers import small_tokenizer
from tests.harness.tool_formats import FORMATS, tokenizer_of, written

CALLS = {kind: written(kind, [("look", {"key": "kz", "n": 2})]).strip() for kind in FORMATS}
BLOCKS = [kind for kind in CALLS if isinstance(get_tool_parser(kind), BlockParser)]
# arguments in quotes may have all marks in them, others only the end mark
QUOTED = ["hermes", "kimi", "mistral", "mistral_args", "deepseek_v3", "deepseek_v31", "gemma4", "lfm2", "solar"]
MENTIONS = ("I write {} now. ", "{} ", "As {}, then:\n", "{}{}")
THOUGHTS = ("<think>hm {} hm</think>", "hm {} hm</think>", "<think>{}</think>")
# SGLang's readers of thinking with a ``tool_start_token``, and MiniMax's, which leaves thinking in the content
ENDS_THINKING = ["hermes", "qwen_xml", "glm", "hunyuan", "kimi", "cohere", "minimax"]
MARKED = ("<think>", "</think>", "a <think> b </think> c", "</think><think>")


def parse(kind: str, text: str) -> AnswerParts:
    return get_tool_parser(kind).parse(text)


def names_of(parts: AnswerParts) -> list[str]:
    return [call.name for call in parts.calls]


def keys_of(parts: AnswerParts) -> list[Any]:
    return [call.arguments["key"] for call in parts.calls]


@pytest.mark.parametrize("kind", CALLS)
def test_format_is_found_and_its_calls_are_read_in_order(kind: str) -> None:
    assert type(find_format(tokenizer_of(kind))) is type(get_tool_parser(kind))
    assert parse(kind, "Three, not 4.") == AnswerParts(content="Three, not 4.")
    (call,) = parse(kind, CALLS[kind]).calls
    assert call.id
    assert (call.name, call.arguments["key"], int(call.arguments["n"])) == ("look", "kz", 2)
    parsed = parse(kind, written(kind, [("look", {}), ("other", {}), ("look", {})]))
    assert (names_of(parsed), parsed.content.strip(), parsed.malformed) == (["look", "other", "look"], "", ())
    if kind != "solar":  # whose ids are the model's own
        assert len({call.id for call in parsed.calls}) == 3
    if kind in BLOCKS:
        parsed = parse(kind, f"First.{CALLS[kind]}Then.{CALLS[kind]}")
        assert (names_of(parsed), parsed.content) == (["look", "look"], "First.Then.")


def sampled(kind: str, tag: dict[str, Any]) -> str:
    """A call that the structural tag of the grammar allows."""
    style, inner = json.dumps(tag["content"]), '{"key": "kz"}'
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


@pytest.mark.parametrize("kind", CALLS)
def test_grammar_of_a_forced_call_is_parsed_as_that_call(kind: str) -> None:
    function = {"name": "look", "parameters": {"type": "object"}}
    parser = get_tool_parser(kind)
    form = parser.forced_grammar([function, {**function, "name": "other"}])
    if parser.call_grammar is None:
        assert form is None
        return
    assert form is not None
    opening, calls, closing = "", form, ""
    if form["type"] == "sequence":
        first, calls, last = form["elements"]
        opening, closing = first["value"], last["value"]
    single = form["type"] == "or"
    texts = [sampled(kind, tag) for tag in calls["elements" if single else "tags"]]
    assert len(texts) == 2
    parsed = parse(kind, texts[0] if single else opening + calls["separator"].join(texts) + closing)
    assert names_of(parsed) == (["look"] if single else ["look", "other"])
    assert {json.dumps(call.arguments) for call in parsed.calls} == {'{"key": "kz"}'}
    assert parsed.content.strip() == ""


@pytest.mark.parametrize("kind", BLOCKS)
def test_marks_in_an_argument_are_an_argument(kind: str) -> None:
    parser: Any = get_tool_parser(kind)
    if parser.end:
        value = f"k{parser.end}z"
        parsed = parse(kind, f"{CALLS[kind].replace('kz', value)}After.{CALLS[kind]}")
        assert (keys_of(parsed), parsed.content.strip()) == ([value, "kz"], "After.")
    if kind in QUOTED:
        value = f"k{parser.begin}{parser.end}z"
        assert keys_of(parse(kind, CALLS[kind].replace("kz", value))) == [value]
    if FORMATS[kind].thinking[0] != "<think>":
        return
    for value, thought in itertools.product(MARKED, THOUGHTS):
        call = CALLS[kind].replace("kz", value)
        for opened in (None, False):
            assert keys_of(AnswerReader(parser, opened).read("So: " + call)) == [value]
        text = thought.format(CALLS[kind]) + call + "so" + call
        parsed = AnswerReader(parser, not thought.startswith("<")).read(text)
        assert (keys_of(parsed), parsed.malformed) == (["kz"] * (kind in ENDS_THINKING) + [value, value], ())


@pytest.mark.parametrize("kind", [*BLOCKS, "harmony"])
def test_a_mention_or_a_malformed_call_hides_no_call_after_it(kind: str) -> None:
    parser: Any = get_tool_parser(kind)
    broken = CALLS[kind].replace("look", "", 1) if kind != "harmony" else CALLS[kind].replace("kz", 'k"z')
    parsed = parse(kind, broken + "<|start|>assistant" * (kind == "harmony") + CALLS[kind])
    assert (names_of(parsed), len(parsed.malformed)) == (["look"], 1)
    if kind == "harmony":
        return
    for mark, mention in itertools.product(parser.marks(), MENTIONS):
        if kind not in ("glm", "hermes") or mention != "{}{}":
            parsed = parse(kind, mention.replace("{}", mark) + CALLS[kind])
            assert (names_of(parsed), keys_of(parsed)) == (["look"], ["kz"]), (mark, mention)
    assert names_of(parse(kind, parser.marks()[-1] + "\n" + CALLS[kind])) == ["look"]
    parts = AnswerReader(parser, opened=False).read(f"{CALLS[kind]} I had no <think> and no </think> here.")
    assert (names_of(parts), parts.reasoning) == (["look"], None)


@pytest.mark.parametrize("kind", ["qwen_xml", "glm", "seed", "hunyuan", "minimax", "deepseek_v32"])
def test_a_call_that_is_cut_off_does_not_swallow_the_next(kind: str) -> None:
    parser: Any = get_tool_parser(kind)
    parsed = parse(kind, CALLS[kind].partition("kz")[0] + "kz" + parser.end + "\n" + CALLS[kind])
    assert keys_of(parsed) in (["kz"], ["kz", "kz"])  # its value may end there
    assert len(parsed.calls) + len(parsed.malformed) == 2


def test_llama_separates_calls_by_semicolons_and_may_tag_them() -> None:
    parsed = parse("llama_json", f"Let me see.<|python_tag|>{CALLS['llama_json']}; {CALLS['llama_json']}")
    assert (len(parsed.calls), parsed.content) == (2, "Let me see.")
    assert parse("llama_json", '{"answer": 3}') == AnswerParts(content='{"answer": 3}')
    mentioned = parse("llama_json", f"I write <|python_tag|> first.<|python_tag|>{CALLS['llama_json']}")
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
        ("qwen_xml", "<tool_call>\n<function=look>\n<parameter=key>\nkz"),
        ("glm", "<tool_call><arg_key>key</arg_key><arg_value>kz</arg_value></tool_call>"),
        ("glm", "<tool_call>look<arg_key>key</arg_key></tool_call>"),
        ("kimi", '<|tool_call_begin|>functions.look:0{"key": "kz"}<|tool_call_end|>'),
        ("kimi", "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>3<|tool_call_end|>"),
        ("llama_json", '{"name": "look", "parameters": {'),
        ("lfm2", "<|tool_call_start|>[look('kz')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[look(key=open('x'))]<|tool_call_end|>"),
        ("gemma4", '<|tool_call>call:look{key:<|"|>kz}<tool_call|>'),
        ("mistral", '[TOOL_CALLS][{"name": "look", "arguments": {"key": '),
        ("mistral_args", '[TOOL_CALLS]look[ARGS]{"key": '),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{\n```<｜tool▁call▁end｜>"),
        ("deepseek_v32", '<｜DSML｜invoke name="look">\nkz</｜DSML｜invoke>'),
        ("harmony", "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"),
        ("harmony", "<|channel|>commentary to=functions.look <|constrain|>json"),
    ],
)
def test_malformed_calls_stay_text_and_are_listed(kind: str, text: str) -> None:
    prefix = {"llama_json": "", "harmony": "<|channel|>final<|message|>Well.<|end|>"}.get(kind, "Well. ")
    parsed = parse(kind, prefix + text)
    assert (parsed.calls, parsed.malformed) == ((), (text,))
    assert parsed.content.endswith(text)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_complete_call_ends_the_thinking_where_it_does_in_sglang(kind: str) -> None:
    parser, (opening, closing) = get_tool_parser(kind), FORMATS[kind].thinking
    values = ("kz", opening, closing, f"{closing}{opening}")
    for opened, value, after in itertools.product((True, False), values, ("", closing, f"\n{closing}\n\nNo.")):
        reader, begun = AnswerReader(parser, opened, (opening, closing)), "" if opened else opening
        call = CALLS[kind].replace("kz", value)
        parts = reader.read(f"{begun}Maybe {call}{after}")
        rest = after.removeprefix("\n").removeprefix(closing).strip()
        if kind in ENDS_THINKING:
            assert (parts.reasoning, keys_of(parts), parts.content, parts.malformed) == ("Maybe", [value], rest, ())
            assert parts.reasoning_closed
        else:
            assert (parts.calls, len(parts.malformed), parts.reasoning_closed) == ((), 1, closing in call + after)
        for no_call in (*parser.marks(), CALLS[kind].partition("kz")[0]):
            parts = reader.read(f"{begun}Maybe {no_call} then.{after}")
            assert (parts.calls, len(parts.malformed), parts.content) == ((), no_call != "call:", rest)
            assert (parts.reasoning, parts.reasoning_closed) == (f"Maybe {no_call} then.", bool(after))
        assert len(AnswerReader(parser, None, (opening, closing)).read(f"Maybe?{closing}{call}").calls) == 1


UNMARKED = {
    "qwen_xml": ("{}<function=look>\n<parameter=key>\n{}\n</parameter>\n</function>{}", "</tool_call>"),
    "seed": ("{}<function=look>\n<parameter=key>{}</parameter>\n</function>{}", "</seed:tool_call>"),
    "gemma4": ('{}call:look{{key:<|"|>{}<|"|>}}{}', "<tool_call|>"),
}


@pytest.mark.parametrize("kind", UNMARKED)
def test_a_call_without_its_first_mark_is_a_call_and_alone_is_counted(kind: str) -> None:
    (form, end), (opening, closing) = UNMARKED[kind], FORMATS[kind].thinking
    reader = AnswerReader(get_tool_parser(kind), opened=True, thinking=(opening, closing))
    for value, before in itertools.product(("kz", closing, "</function> <tool_call>", "{}"), ("", "I look.\n")):
        parts = reader.read(f"hm{closing}\n" + form.format(before, value, f"\n{end}"))
        assert (keys_of(parts), parts.content, parts.malformed) == ([value], before.strip(), ())
    mentioned = form.format("", "kz", "")
    parts = reader.read(f"hm{closing}I write {mentioned} then.")
    assert (parts.calls, parts.content, len(parts.malformed)) == ((), f"I write {mentioned} then.", 1)
    assert keys_of(reader.read(f"hm{closing}{mentioned}")) == ["kz"] * (kind == "gemma4")


@pytest.mark.parametrize("kind", CALLS)
def test_an_answer_with_marks_and_without_calls_is_counted_once(kind: str) -> None:
    parser = get_tool_parser(kind)
    reader = AnswerReader(parser, opened=False, channels=kind == "harmony")
    call = CALLS[kind]
    for sign in parser.signs():
        text = f"I write {sign} so."
        assert reader.read(text) == AnswerParts(content=text, malformed=(text[text.index(sign) :],))
        assert reader.read(text.replace(sign, sign.lower().strip("<>[]|｜"))).malformed == ()
    for end in range(3, len(call)):  # cut anywhere, at most one is counted
        parts = reader.read(call[:end])
        assert len(parts.calls) + len(parts.malformed) <= 1
    assert len(reader.read(call[: call.index("kz")]).malformed) == 1


PIECES = (
    *("{", "}", '"name"', ":", "x", "\n", "<", ">", "<think>", "</think>", "<|channel|>", "<|message|>", "[", "]"),
    *(mark for form in FORMATS.values() for mark in form.marks),
    *(text.replace("kz", value) for text in CALLS.values() for value in ("kz", "<think>", "</think>")),
)


@given(text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@settings(max_examples=examples(100), deadline=None)
def test_no_text_breaks_a_parser_or_is_lost(text: str) -> None:
    for kind in base._parsers:
        parsed = parse(kind, text)
        if not parsed.calls and kind not in ("harmony", "gpt_oss"):
            assert parsed.content == text
        assert all(malformed in text for malformed in parsed.malformed)


UNREAD = [
    "{{ m.content }}",  # no sign of calls at all: Hermes' is not assumed
    "{% for c in m.tool_calls or [] %}<tool_call>CALL {{ c.function.name }} {{ c.function.arguments }}{% endfor %}",
    "{% for c in m.tool_calls or [] %}>>>{{ c.function.name }}\n{{ c.function.arguments | tojson }}{% endfor %}",
]


def test_format_of_a_template_without_calls_is_its_markers_or_refused() -> None:
    tokenizer = small_tokenizer("{# <|tool_list_start|> #}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert type(find_format(tokenizer)) is type(get_tool_parser("lfm2"))
    for calls in UNREAD:
        source = "{% for m in messages %}<|im_start|>" + calls + "<|im_end|>{% endfor %}"
        with pytest.raises(PromptError, match="asks for tool calls in a format without a parser: set tool_parser"):
            parser_for(small_tokenizer(source))


def test_a_custom_parser_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base._parsers, "mine", list)  # so that the end of the test removes it
    del base._parsers["mine"]

    @register_tool_parser("mine")
    class Mine(ToolParser):
        def parse(self, text: str) -> AnswerParts:
            return AnswerParts(content=text)

    assert isinstance(get_tool_parser("mine"), Mine)
    assert Mine().forced_grammar([{"name": "look", "parameters": {}}]) is None
    with pytest.raises(ConfigError, match="'mine'"):
        register_tool_parser("mine")(Mine)
    with pytest.raises(ConfigError, match=r"'other'.*hermes"):
        get_tool_parser("other")


# -- values and names in each format's notation -----------------------------------------------------------------------


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


VALUES: dict[str, dict[str, Any]] = {
    "many": {'["a"]': ["a"], "null": None, "a": "a", "['x', None]": ["x", None], "": []},
    "city": {" \n Rome\n ": "Rome", " Oslo": " Oslo", " Paris ": " Paris "},
    "place": {'{"x": 1}': {"x": 1}, "": {}, "{'a': (1, 2)}": {"a": [1, 2]}, "__import__('os')": "__import__('os')"},
    "size": {"3": 3, "True": True, "TRUE": True, "": None},
    "level": {"2": 2},
    "on": {"false": False, "None": None},
    "name": {"3": "3", "null": None},
    "text": {"null": "null", "": "", "TRUE": "TRUE"},
    "loop": {"3": "3"},
}


@pytest.mark.parametrize("kind", ["qwen_xml", "glm"])
def test_values_are_of_the_types_that_the_schema_names_in_whatever_words(kind: str) -> None:
    parser = get_tool_parser(kind)
    form = {
        "qwen_xml": "<tool_call><function=f><parameter={}>\n{}\n</parameter></function></tool_call>",
        "glm": "<tool_call>f<arg_key>{}</arg_key><arg_value>{}</arg_value></tool_call>",
    }[kind]
    for name, text, value in [(name, *item) for name, values in VALUES.items() for item in values.items()]:
        (call,) = parser.parse(form.format(name, text)).calls
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
    reader, call = AnswerReader(get_tool_parser("harmony"), False, channels=True), text.rpartition("assistant")[2]
    assert {reader.visible_parts(call[:end]).content for end in range(len(call))} == {""}
    assert reader.visible_parts(" to Rome").content == "to Rome"
    written = '<|channel|>{} <|constrain|>json<|message|>{{"key": "kz"}}'.format
    counted = {channel: parse("harmony", written(channel)).malformed for channel in ("commentary", "analysis", "final")}
    assert counted == {"commentary": (written("commentary"),), "analysis": (written("analysis"),), "final": ()}


KINDS = list(FORMATS)
# formats whose values end at marks have no way to write those in a value
ENDS = {
    "qwen_xml": ("<tool_call>",),
    "seed": ("<seed:tool_call>",),
    "glm": ("<arg_key>", "<tool_call>"),
    "hunyuan": ("<arg_key:opensource>", "<tool_call:opensource>"),
    "minimax": ("minimax:tool_call>",),
    "deepseek_v32": ("｜DSML｜",),
    "gemma4": ('<|"|>',),
    "harmony": ("<|end|>", "<|call|>", "<|start|>", "<|return|>"),
}
KEYWORDS = ("if", "in", "is", "as")  # of Python, in which LFM2 writes
names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: name not in KEYWORDS)
ANSWER_PIECES = {mark for form in FORMATS.values() for mark in (*form.marks, *form.thinking)}
ANSWER_PIECES |= {"</parameter>", "</function>", "</invoke>", "</arg_value:opensource>", "</tool_call:opensource>"}
ANSWER_PIECES |= {"<", ">", "</", "{", '"', "; ", "\n", "]", "}}", "'", "\\", "```", "NaN", "é😀"}
marks = st.sampled_from(sorted(ANSWER_PIECES))
letters = st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc", "Co"]), max_size=6)
texts = st.lists(marks | letters, max_size=4).map("".join)
plain = st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc", "Co"], exclude_characters="<[{｜"), max_size=12)
values = st.recursive(
    texts | st.integers(-9, 9) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)
calls = st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), max_size=3)


def as_written(kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if FORMATS[kind].typed:
        return arguments
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in arguments.items()
    }


def writable(kind: str, listed: list[tuple[str, dict[str, Any]]]) -> bool:
    strings = [value for _, arguments in listed for value in arguments.values() if isinstance(value, str)]
    text = json.dumps([arguments for _, arguments in listed], ensure_ascii=False) + "".join(strings)
    if kind == "lfm2" and "\\" in text.replace('\\"', ""):
        return False  # its template writes JSON's escapes where Python's are read
    if not FORMATS[kind].typed and any(value != value.strip() for value in strings):
        return False
    text += text.replace('\\"', '"')  # a mark with a quote, in a value within a value
    return not any(mark in text for mark in ENDS.get(kind, ()))


@pytest.mark.parametrize("kind", KINDS)
@given(listed=calls, content=plain, reasoning=st.none() | texts)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_rendered_answer_is_parsed_back(kind, listed, content, reasoning):
    assume(writable(kind, listed))
    opening, closing = FORMATS[kind].thinking
    content, thought = content.strip(), (reasoning or "").strip()
    assume(closing not in thought and opening not in thought and "<|" not in thought)
    if kind == "llama_json" and listed:
        content = ""
    parser, text = get_tool_parser(kind), written(kind, listed, content, thought or None)
    tokenizer = tokenizer_of(kind)
    reader = reader_for(tokenizer, opened=False, parser=parser_for(tokenizer))
    parts = reader.read(text)
    expected = [(name, as_written(kind, arguments)) for name, arguments in listed]
    assert [(call.name, dict(call.arguments)) for call in parts.calls] == expected
    assert (parts.reasoning or "", parts.content) == (thought, content)
    assert len(parts.malformed) == (not listed and any(sign in text for sign in parser.signs()))
    if thought and listed and parser.ends_thinking and not any(mark in thought for mark in parser.marks()):
        ended = reader.read(text.replace(closing, "", 1))  # by the first call, with the content in the thinking
        assert (ended.calls, ended.content, ended.malformed) == (parts.calls, "", ())
        assert (ended.reasoning or "").split() == f"{thought} {content}".split()


@pytest.mark.parametrize("kind", KINDS)
@example(listed=[], content="", thought='<|end|>"<|"|>', closed=True)
@given(listed=calls, content=texts, thought=texts, closed=st.booleans())
@settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
def test_visible_text_is_a_prefix_of_the_whole(kind, listed, content, thought, closed):
    assume(writable(kind, listed))
    text = written(kind, listed, content, thought.strip() or None)
    text = text if closed else text.replace(FORMATS[kind].thinking[1], "", 1)
    tokenizer = tokenizer_of(kind)
    reader = reader_for(tokenizer, opened=False, parser=parser_for(tokenizer))
    whole, last = reader.read(text), AnswerParts()
    for end in range(len(text) + 1):
        visible = reader.visible_parts(text[:end])
        assert (visible.reasoning or "").startswith(last.reasoning or "")
        assert visible.content.startswith(last.content)
        last = visible
    assert (whole.reasoning or "").startswith(last.reasoning or "")
    assert whole.content.startswith(last.content)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if FORMATS[kind].marks])
def test_a_mark_that_was_sampled_as_its_text_is_a_mention(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    call = written(kind, [("look", {"key": "kz"})]).strip()
    ids = tokenizer.encode(call, add_special_tokens=False)
    reader, parser = reader_for(tokenizer, opened=False, parser=parser_for(tokenizer)), get_tool_parser(kind)
    assert [each.name for each in reader.read(call, ids).calls] == ["look"]
    spelled = spell(tokenizer, call)
    assert tokenizer.decode(spelled) == call
    mentioned = reader.read(call, spelled)
    both = reader.read(f"{call} and {call}", [*spelled, *tokenizer.encode(" and ", add_special_tokens=False), *ids])
    if kind not in ("llama_json", "harmony"):  # Llama's call needs no mark
        words = ["call:look{", *parser.signs()]
        in_words = any(sign in call and not any(mark in sign for mark in FORMATS[kind].marks) for sign in words)
        assert (mentioned.calls, len(mentioned.malformed), mentioned.content) == ((), in_words, call)
        assert ([each.name for each in both.calls], both.content) == (["look"], f"{call} and")
        assert both.calls[0].arguments == {"key": "kz"}


@pytest.mark.parametrize("stream", [False, True])
def test_stream_parts_extend_the_visible_text(stream: bool) -> None:
    """A spelled end of thinking ends it only in a stream, which has sent the text after it as content."""
    tokenizer = tokenizer_of("hermes", opens=True)
    reading = Reading(reader_for(tokenizer, opened=True, parser=parser_for(tokenizer)), ())
    text = "I write </think> then.</think>Yes."
    ids = (*spell(tokenizer, "I write </think> then."), *tokenizer.encode("</think>Yes.", add_special_tokens=False))
    generation = Generation(output_ids=ids, log_probs=(0.0,) * len(ids), text=text, finish_reason="stop")
    call: Any = Call(messages=[], stream=stream)
    session: Any = SimpleNamespace(stats=RolloutStats())
    choice, _ = reading.choice(generation, call, session)
    reasoning, content = reading.visible(text)
    if stream:
        assert (choice.reasoning, choice.content) == ("I write", "then.</think>Yes.")
        assert choice.reasoning.startswith(reasoning)
        assert choice.content.startswith(content)
    else:
        assert (choice.reasoning, choice.content) == ("I write </think> then.", "Yes.")


def spell(tokenizer: Any, text: str) -> list[int]:
    """The ids of the text's letters, without tokens of marks."""
    return [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]
