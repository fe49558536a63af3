"""The fields of an assistant message from which a chat template reads the parts of an answer.

A template reads a field if its rendering of a probe has the field's text. Candidates are transformers' names and the
names in the template's source. An answer whose parts have no field (ChatML has neither thinking nor calls) is content
as it was sampled.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agl_slime.tokens.answer import AnswerParts
from agl_slime.tokens.reader import AnswerReader, thinking_marks
from agl_slime.tokens.rendering import REASONING, rendered_or_none

Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]

_NAMES = re.compile(r"\w*(?:reason|think|thought)\w*")
_PROBE = "SENTINELthoughtSENTINEL"
_FUNCTION = "SENTINELcallSENTINEL"
_RESULT = "SENTINELresultSENTINEL"
_QUESTION: Message = {"role": "user", "content": "?"}


@dataclass(frozen=True, slots=True)
class TemplateAnswer:
    """The message of an answer in the template's fields. ``closed`` is off if the answer ended within its thinking.
    ``moved`` is its content where the template writes that behind the results of its calls."""

    message: Message
    closed: bool = True
    moved: str = ""


@dataclass(eq=False)
class AnswerFields:
    """The fields that one template reads. ``render`` is the template's, ``source`` its text or empty."""

    render: Render
    source: str

    @functools.cached_property
    def marks(self) -> tuple[str, str]:
        """The marks around the thinking."""
        return thinking_marks(self.source)

    @functools.cached_property
    def thinking(self) -> str | None:
        """The field of the thinking; ``None`` in a template that looks for it in the content."""
        names = dict.fromkeys((*REASONING, *_NAMES.findall(self.source)))
        return next((name for name in names if self._writes(_PROBE, {name: _PROBE})), None)

    @functools.cached_property
    def calls(self) -> int:
        """The number of calls of one answer that the template writes: 0, 1, or 2 for any number."""
        # Kimi's template writes the id (which names the function) and not the name; Mistral's ids have nine letters
        calls = [_call(f"{_FUNCTION}{number}", f"SENTcall{number}", {"x": 1}) for number in range(2)]
        return sum(
            any(self._writes(words, {"tool_calls": calls[: n + 1]}) for words in (f"{_FUNCTION}{n}", f"SENTcall{n}"))
            for n in range(2)
        )

    @functools.cached_property
    def content_beside(self) -> bool:
        """Whether the template writes content beside thinking and calls."""
        if self.thinking is None:
            return True
        fields = {self.thinking: _PROBE, "tool_calls": [_call(_FUNCTION, "SENTcall0", {"x": 1})]}
        return any(self._writes(words, fields) for words in (_FUNCTION, "SENTcall0"))

    @functools.cached_property
    def moves_content(self) -> bool:
        """Whether the template writes the content of an answer with calls behind their results (Gemma 4)."""
        texts = self._rendered({"content": _PROBE, "tool_calls": [_call("f", "call00000", {"x": 1})]})
        return any(0 <= text.find(_RESULT) < text.find(_PROBE) for text in texts)

    def convert(self, text: str, reader: AnswerReader, ids: Sequence[int] = ()) -> TemplateAnswer:
        """The message of an answer with this text, which is the content if the template has no other fields."""
        answer = reader.read(text, ids)
        if len(answer.calls) > self.calls and self.calls < 2:
            answer = replace(reader, parser=None, tokenizer=None).read(text)
        calls = [_call(call.name, call.id, call.arguments) for call in answer.calls]
        message: Message = {"role": "assistant", "content": text}
        if reader.around and answer.reasoning is None:
            message["content"] = answer.content
        elif self.thinking is not None and (answer.reasoning is not None or reader.channels):
            message["content"] = answer.content
            if answer.reasoning:
                message[self.thinking] = answer.reasoning
        elif self.thinking is None and answer.reasoning is not None and not answer.reasoning_closed and reader.opened:
            message["content"] = f"{text}\n{self.marks[1]}\n\n"  # else the thinking would be read as content
        elif calls:
            message["content"] = self._with_thinking(text, answer)
        if calls:
            message["tool_calls"] = calls
            if self.thinking in message and not self.content_beside:
                message["content"] = ""  # harmony writes the thinking in its place
        moved = message["content"] if calls and self.moves_content else ""
        return TemplateAnswer(message, answer.reasoning_closed, moved)

    def without_thinking(self, message: Message) -> Message:
        """``message`` without its thinking."""
        if message.get("role") != "assistant":
            return message
        if self.thinking is not None:
            return {name: value for name, value in message.items() if name not in (self.thinking, *REASONING)}
        content = message.get("content")
        if not isinstance(content, str) or self.marks[1] not in content:
            return message
        return {**message, "content": content.rpartition(self.marks[1])[2]}

    def with_thinking_field(self, message: Message) -> Message:
        """A message of a client's history, with the thinking in the field that the template reads."""
        name = self.thinking
        if name is None or name in message or message.get("role") != "assistant":
            return message
        thought = next((message[field] for field in REASONING if message.get(field)), None)
        return message if thought is None else {**message, name: thought}

    def _with_thinking(self, text: str, answer: AnswerParts) -> str:
        """The content of an answer whose thinking has no field: the sampled thinking, then the rest without calls."""
        if answer.reasoning is None:
            return answer.content
        thinking, mark, _ = text.partition(self.marks[1])
        if answer.reasoning and not thinking.rstrip().endswith(answer.reasoning):  # a call ended the thinking
            thinking, mark = text[: text.find(answer.reasoning) + len(answer.reasoning)], self.marks[1]
        return f"{thinking}{mark}\n\n{answer.content}" if mark else text

    def _writes(self, words: str, fields: Mapping[str, Any]) -> bool:
        """Whether the rendering of a probe with ``fields`` has ``words``."""
        return any(words in text for text in self._rendered(fields))

    def _rendered(self, fields: Mapping[str, Any]) -> Iterator[str]:
        answer: Message = {"role": "assistant", "content": "!", **fields}
        called = {"tool_calls": [_call("f", "call00000", {"x": 1})], **answer}
        ids = [f"call0000{n}" for n in range(len(called["tool_calls"]))]
        results = [{"role": "tool", "tool_call_id": identity, "name": "f", "content": _RESULT} for identity in ids]
        probes: list[list[Message]] = [[_QUESTION, called], [_QUESTION, called, *results]]
        for probe in probes if "tool_calls" in answer else [[_QUESTION, answer], *probes]:
            if (text := rendered_or_none(self.render, probe, False)) is not None:
                yield text


class AnswerMessages:
    """The answers of one conversation in its template's fields. With ``all_raw`` every answer's content is raw sampled
    text; without, only the content of answers sampled here, as a client sends the others in parts."""

    def __init__(self, fields: AnswerFields, reader: AnswerReader, *, all_raw: bool) -> None:
        self._fields, self._reader, self._all_raw = fields, reader, all_raw
        self._converted: dict[str, TemplateAnswer] = {}  # by text

    def add_sampled(self, text: str, ids: Sequence[int] = ()) -> None:
        """Note a sampled answer; ``ids`` are the ids of the whole text, if there are any."""
        if text not in self._converted:
            self._converted[text] = self._fields.convert(text, self._reader, ids)

    def convert(self, message: Message) -> TemplateAnswer:
        if message.get("role") != "assistant":
            return TemplateAnswer(message)
        content, in_fields = message.get("content"), message.keys() & {"tool_calls", self._fields.thinking, *REASONING}
        if not isinstance(content, str) or in_fields:
            return TemplateAnswer(self._fields.with_thinking_field(message))
        if self._all_raw:
            self.add_sampled(content)
        if (answer := self._converted.get(content)) is None:
            return TemplateAnswer(message)
        bare = message.keys() == {"role", "content"}
        return answer if bare else replace(answer, message={**message, **answer.message})

    def messages(self, messages: Sequence[Message], sampled: Callable[[], Collection[int]] = tuple) -> list[Message]:
        """``messages`` in the template's fields. ``sampled`` gives the ids of messages that stand as they were sampled:
        content that the template would move is not given to it again."""
        answers = [*map(self.convert, messages)]
        placed = sampled() if any(answer.moved for answer in answers) else ()
        return [
            {**answer.message, "content": ""} if id(message) in placed and answer.moved else answer.message
            for message, answer in zip(messages, answers, strict=True)
        ]


def _call(name: str, identity: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
