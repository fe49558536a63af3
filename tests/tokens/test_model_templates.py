"""Histories of every shape under the templates of current models: a prompt that extends the context or a classified
fork, or a typed error."""

from __future__ import annotations

import copy
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agl_slime.errors import PromptError
from agl_slime.tokens.blanks import squash
from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.fields import AnswerMessages
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.rendering import direct_renderer
from agl_slime.tokens.template import ChatTemplate
from tests.harness.conversations import answer
from tests.harness.examples import examples
from tests.harness.model_templates import MODELS, Ways, template_of
from tests.harness.tokenizers import Rendering, small_tokenizer

REAL = os.environ.get("AGL_SLIME_CHAT_TEMPLATES", "")
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
Messages = list[dict[str, Any]]

words = st.sampled_from(["ok", "", " x ", "\ud800 half", "Error: no file", "a </think> b"])
arguments = st.sampled_from([{"x": 1}, {}, {"x": {"y": [None]}}, {"x": "\udcff"}, '{"x": 1}', '{"x": ', "", None])


SYSTEMS = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["system", "developer"]), words)


def call(number: int, written: Any) -> dict[str, Any]:
    return {"id": f"call{number:05}", "type": "function", "function": {"name": "f", "arguments": written}}


def result(number: int, text: str = "r") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": "f", "content": text}


@st.composite
def histories(draw: st.DrawFn) -> Messages:
    """The first messages of a client: any system messages, then questions, answers, calls and results."""
    messages: Messages = draw(st.lists(SYSTEMS, max_size=2))
    messages.append({"role": "user", "content": draw(words)})
    for _ in range(draw(st.integers(0, 2))):
        message: dict[str, Any] = {"role": "assistant", "content": draw(words | st.none())}
        messages.append(message)
        if draw(st.booleans()):
            message["reasoning_content"] = draw(words)
        n = draw(st.sampled_from([0, 0, 1, 2]))
        if n:
            message["tool_calls"] = [call(i, draw(arguments)) for i in range(n)]
            messages += [result(i, draw(words)) for i in range(n)]
        messages += draw(st.lists(SYSTEMS, max_size=1))
        if not n or draw(st.booleans()):
            messages.append({"role": "user", "content": draw(words)})
    return messages


NEXT, REMINDER = {"role": "user", "content": "next"}, {"role": "system", "content": "Reminder."}
additions = st.sampled_from([[NEXT], [result(0)], [result(0), result(1)], [REMINDER, NEXT], [result(0), REMINDER]])
_CALLED = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
answered = st.sampled_from(
    [
        "Fine.",
        "t\n</think>\n\nFine.",
        "<think>\nt\n</think>\n\nFine.",
        "<think> t</think>Fine.",
        "<think>\n\n</think>\n\nFine.",
        "<think>\nt",
        _CALLED,
        f"I look.\n{_CALLED}\n{_CALLED}",
        '<tool_call>{"arguments":{"x":1,"y":"é"},"name":"f"}</tool_call>',
        '<tool_call>\n{"name": "f", ',
    ]
)


def tokenizer_with(source: str) -> Any:
    plain = small_tokenizer()
    tokenizer = copy.deepcopy(plain, {id(plain.backend_tokenizer): plain.backend_tokenizer})
    tokenizer.bos_token, tokenizer.chat_template = "<|endoftext|>", source
    return tokenizer


def drive(data: st.DataObject, tokenizer: Any) -> None:
    """A conversation of up to four turns, until the template refuses a prompt."""
    template = ChatTemplate(tokenizer=tokenizer, tools=data.draw(st.sampled_from([None, TOOLS])))
    context = ChatContext(template=template, messages=data.draw(histories()))
    history: History | None = None
    for _ in range(data.draw(st.integers(1, 4))):
        ids = context.token_ids.tolist()
        try:
            question = in_fields(template, context.messages)
            text = data.draw(answered)
            if template.opens_thinking and "</think>" not in text:
                text = "t\n</think>\n\n" + text
            prompt, _ = answer(context, tokenizer, text.removeprefix("<think>\n" if template.opens_thinking else ""))
            reasons = {None} if history is None else history.forks(template, question)
            history = History.written(template, question, in_fields(template, context.messages))
        except PromptError:
            return
        assert (prompt[: len(ids)] == ids) == (context.fork is None)
        assert context.fork in reasons
        context.add(*data.draw(additions))


def in_fields(template: ChatTemplate, messages: Messages) -> Messages:
    """The messages with the parts of answers in the fields that the template reads, but for content that it moves."""
    return AnswerMessages(template.fields, template.reader, all_raw=True).messages(
        messages, lambda: {*map(id, messages)}
    )


@dataclass(frozen=True)
class History:
    """A conversation up to an answer as the template itself writes it: ``text`` without the end of the answer's turn,
    ``bare`` the same without all thinking, and without the answer's, where there is some in a field that the template
    reads. ``stands``: the question did not change with the answer, whose thinking is in the text."""

    text: str
    bare: tuple[str, ...]
    stands: bool

    @classmethod
    def written(cls, template: ChatTemplate, question: Messages, messages: Messages) -> History:
        bare = [*map(template.fields.without_thinking, messages)]
        versions = messages, bare, [*messages[:-1], bare[-1]]
        text, without, last = (template.render(each, generation_prompt=False) for each in versions)
        prompt = template.render_prompt(question).text
        stands = squash(text).startswith(squash(prompt)) and (bare[-1] == messages[-1] or last != text)
        end = template.closing.strip()
        text, without, last = (each.strip().removesuffix(end) for each in (text, without, last))
        changed = zip((without, last), (bare != messages, bare[-1] != messages[-1]), strict=True)
        return cls(text, tuple(each for each, differs in changed if differs), stands)

    def forks(self, template: ChatTemplate, messages: Messages) -> set[ForkReason | None]:
        """The possible reasons of a fork at a prompt with these messages."""
        written = squash(template.render(messages, generation_prompt=True))
        if self.stands and written.startswith(squash(self.text)):
            return {None}
        marks = re.compile("|".join(map(re.escape, template.fields.marks)))  # some stay where thinking is dropped
        unmarked = squash(marks.sub("", template.render(messages, generation_prompt=True)))
        dropped = unmarked.startswith(tuple(squash(marks.sub("", each)) for each in self.bare))
        return {ForkReason.DROPPED_THINKING if dropped else ForkReason.TEMPLATE}


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_history_under_the_templates_of_current_models(model: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_with(template_of(MODELS[model]))
    assert callable(direct_renderer(tokenizer, TOOLS, {}))
    drive(data, tokenizer)
    same_ids(data, tokenizer)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    ways=st.builds(
        Ways,
        system=st.sampled_from(["written", "refused", "dropped", "collected", "never"]),
        developer=st.sampled_from(["written", "refused", "dropped"]),
        alternate=st.booleans(),
        calls=st.sampled_from(["json", "items", "text", "one", "either"]),
        results=st.sampled_from(["role", "grouped", "after_a_call", "in_the_answer"]),
        thinking=st.sampled_from(["kept", "last", "steps", "none"]),
        reads=st.sampled_from(["field", "both"]),
        opening=st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"]),
        needs_question=st.booleans(),
    ),
)
def test_any_history_under_any_generated_template(data: st.DataObject, ways: Ways) -> None:
    drive(data, tokenizer_with(template_of(ways)))


def same_ids(data: st.DataObject, tokenizer: Any) -> None:
    """A conversation with forks and edits, by the short way and by the long one."""
    tools = data.draw(st.sampled_from([None, TOOLS]))
    first = data.draw(histories())
    contexts = [
        ChatContext(template=ChatTemplate(tokenizer=cast("Any", each), tools=tools), messages=copy.deepcopy(first))
        for each in (tokenizer, Rendering(tokenizer, tokenizer.chat_template))
    ]
    earlier = [contexts]
    for _ in range(data.draw(st.integers(1, 5))):
        results: list[Any] = []
        text, addition = data.draw(answered), data.draw(additions)
        for context in contexts:
            try:
                results.append((answer(context, tokenizer, text)[0], context.fork))
            except PromptError as error:
                results.append(str(error))
        assert results[0] == results[1]
        if isinstance(results[0], str):
            return
        earlier.append(contexts)
        change = data.draw(st.sampled_from(["on", "on", "fork", "edit"]))
        if change == "fork":  # from an earlier point, of this or of an earlier branch
            branch = data.draw(st.sampled_from(earlier))
            length = data.draw(st.integers(1, len(branch[0].messages)))
            contexts = [context.branch(context.messages[:length]) for context in branch]
        place, content = data.draw(st.integers(0, len(contexts[0].messages) - 1)), data.draw(words)
        for context in contexts:
            if change == "edit":
                context.messages[place] = {**context.messages[place], "content": content}
            context.add(*addition)


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="AGL_SLIME_CHAT_TEMPLATES names no directory of models' own *.jinja files")
@pytest.mark.parametrize("file", sorted(Path(REAL).glob("*.jinja")) if REAL else [], ids=lambda file: file.stem)
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_history_under_templates_as_they_are_published(file: Path, data: st.DataObject) -> None:
    source = file.read_text(encoding="utf-8")
    tokenizer = copy.deepcopy(tokenizer_with(source))
    tokenizer.add_tokens(sorted({*re.findall(r"<\|\w+\|>", source)}), special_tokens=True)
    drive(data, tokenizer)
    same_ids(data, tokenizer)
