"""Rendered answers of each format are read back, with any texts in them and around them, whole and while sampled."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from agl_slime.agent.session import RolloutStats
from agl_slime.engine.client.generation import Generation
from agl_slime.gateway.calls import Call
from agl_slime.gateway.reading import Reading
from agl_slime.tokens.answer import AnswerParts
from agl_slime.tokens.formats import get_tool_parser
from agl_slime.tokens.reader import AnswerReader, reader_for
from tests.harness.examples import examples
from tests.harness.tool_formats import FORMATS, tokenizer_of, written

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
PIECES = {mark for form in FORMATS.values() for mark in (*form.marks, *form.thinking)}
PIECES |= {"</parameter>", "</function>", "</invoke>", "</arg_value:opensource>", "</tool_call:opensource>"}
PIECES |= {"<", ">", "</", "{", '"', "; ", "\n", "]", "}}", "'", "\\", "```", "NaN", "é😀"}
marks = st.sampled_from(sorted(PIECES))
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
    reader = AnswerReader(parser, False, FORMATS[kind].thinking, channels=kind == "harmony")
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
    reader = AnswerReader(get_tool_parser(kind), False, FORMATS[kind].thinking, channels=kind == "harmony")
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
    reader, parser = reader_for(tokenizer, opened=False, offered=True), get_tool_parser(kind)
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
    reading = Reading(reader_for(tokenizer, opened=True, offered=True), ())
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
