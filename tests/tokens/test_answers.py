"""What a format's template writes is read back, whatever texts stand in it and around it, whole and while sampled."""

from __future__ import annotations

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


def sayable(kind: str, listed: list[tuple[str, dict[str, Any]]]) -> bool:
    said = json.dumps([arguments for _, arguments in listed], ensure_ascii=False)
    said += "".join(value for _, each in listed for value in each.values() if isinstance(value, str))
    if kind == "lfm2" and "\\" in said.replace('\\"', ""):
        return False  # its template writes JSON's escapes where Python's are read
    if not FORMATS[kind].typed and any(
        isinstance(value, str) and value != value.strip() for _, each in listed for value in each.values()
    ):
        return False
    said += said.replace('\\"', '"')  # a mark with a quote, in a value within a value
    return not any(mark in said for mark in ENDS.get(kind, ()))


@pytest.mark.parametrize("kind", KINDS)
@given(listed=calls, content=plain, reasoning=st.none() | texts)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_rendered_answer_is_parsed_back(
    kind: str, listed: list[tuple[str, dict[str, Any]]], content: str, reasoning: str | None
) -> None:
    assume(sayable(kind, listed))
    opening, closing = FORMATS[kind].thinking
    content, thought = content.strip(), (reasoning or "").strip()
    assume(closing not in thought and opening not in thought and "<|" not in thought)
    if kind == "llama_json" and listed:
        content = ""
    parts = AnswerReader(get_tool_parser(kind), False, FORMATS[kind].thinking, channels=kind == "harmony").read(
        written(kind, listed, content, thought or None)
    )
    expected = [(name, as_written(kind, arguments)) for name, arguments in listed]
    assert [(call.name, dict(call.arguments)) for call in parts.calls] == expected
    assert (parts.reasoning or "", parts.content, parts.malformed) == (thought, content, ())


@pytest.mark.parametrize("kind", KINDS)
@example(listed=[], content="", thought='<|end|>"<|"|>')
@given(listed=calls, content=texts, thought=texts)
@settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
def test_visible_text_is_a_prefix_of_the_whole(
    kind: str, listed: list[tuple[str, dict[str, Any]]], content: str, thought: str
) -> None:
    assume(sayable(kind, listed))
    text = written(kind, listed, content, thought.strip() or None)
    reader = AnswerReader(get_tool_parser(kind), False, FORMATS[kind].thinking, channels=kind == "harmony")
    whole, last = reader.read(text), AnswerParts()
    for end in range(len(text) + 1):
        seen = reader.visible_parts(text[:end])
        assert (seen.reasoning or "").startswith(last.reasoning or "")
        assert seen.content.startswith(last.content)
        last = seen
    assert (whole.reasoning or "").startswith(last.reasoning or "")
    assert whole.content.startswith(last.content)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if FORMATS[kind].marks])
def test_a_mark_that_was_sampled_as_its_text_is_a_mention(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    call = written(kind, [("look", {"key": "kz"})]).strip()
    ids = tokenizer.encode(call, add_special_tokens=False)
    reader = reader_for(tokenizer, opened=False, offered=True)
    assert [one.name for one in reader.read(call, ids).calls] == ["look"]
    spelled = [token for letter in call for token in tokenizer.encode(letter, add_special_tokens=False)]
    assert tokenizer.decode(spelled) == call
    mentioned = reader.read(call, spelled)
    if kind not in ("llama_json", "harmony"):  # Llama's call needs no mark
        assert (mentioned.calls, mentioned.malformed, mentioned.content) == ((), (), call)
    between = tokenizer.encode(" and ", add_special_tokens=False)
    both = reader.read(f"{call} and {call}", [*spelled, *between, *ids])
    if kind not in ("llama_json", "harmony"):
        assert ([one.name for one in both.calls], both.content) == (["look"], f"{call} and")
        assert both.calls[0].arguments == {"key": "kz"}


@pytest.mark.parametrize("stream", [False, True])
def test_stream_parts_extend_the_shown_text(stream: bool) -> None:
    tokenizer = tokenizer_of("hermes", opens=True)
    reading = Reading(reader_for(tokenizer, opened=True, offered=True), ())
    spelled = [t for letter in "I write </think> then." for t in tokenizer.encode(letter, add_special_tokens=False)]
    text = "I write </think> then.</think>Yes."
    ids = (*spelled, *tokenizer.encode("</think>Yes.", add_special_tokens=False))
    generation = Generation(output_ids=ids, log_probs=(0.0,) * len(ids), text=text, finish_reason="stop")
    call: Any = Call(messages=[], stream=stream)
    session: Any = SimpleNamespace(stats=RolloutStats())
    choice, _ = reading.choice(generation, call, session)
    shown = reading.visible(text)
    if stream:
        assert (choice.reasoning, choice.content) == ("I write", "then.</think>Yes.")
        assert choice.reasoning.startswith(shown[0])
        assert choice.content.startswith(shown[1])
    else:
        assert (choice.reasoning, choice.content) == ("I write </think> then.", "Yes.")


def test_an_end_of_thinking_that_is_spelled_ends_no_thinking() -> None:
    tokenizer = tokenizer_of("hermes", opens=True)
    reader = reader_for(tokenizer, opened=True, offered=True)
    spelled = [t for letter in "I write </think> then." for t in tokenizer.encode(letter, add_special_tokens=False)]
    text = "I write </think> then.</think>Yes."
    parts = reader.read(text, [*spelled, *tokenizer.encode("</think>Yes.", add_special_tokens=False)])
    assert (parts.reasoning, parts.content) == ("I write </think> then.", "Yes.")
