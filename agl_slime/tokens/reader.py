"""The reader that splits an answer into its parts, whole or streamed, for agents and the gateway."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agl_slime.tokens.answer import AnswerParts, ToolCall
from agl_slime.tokens.formats import HarmonyParser, ToolParser, cut_at_marks
from agl_slime.tokens.tokenizer import special_tokens, template_source

THINK = "<think>", "</think>"
# other marks of reasoning
_MARKS = (("<think:opensource>", "</think:opensource>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))
_MARKS += (("<|channel>thought", "<channel|>"), ("<|START_THINKING|>", "<|END_THINKING|>"))
_MARKS += (("<mm:think>", "</mm:think>"),)
_AROUND = "<|START_RESPONSE|>", "<|END_RESPONSE|>"  # Cohere's marks around content, which its template writes
_PRIVATE = 0xF0000  # plus the code of a mark's first character: a private-use character that hides the mark


def thinking_marks(source: str) -> tuple[str, str]:
    """The marks around reasoning in a chat template, from its source."""
    return next((marks for marks in _MARKS if marks[0] in source), THINK)


def opens_thinking(prompt: str, marks: tuple[str, str]) -> bool:
    """Whether a prompt ends within a block of thinking."""
    return prompt.rfind(marks[0]) > prompt.rfind(marks[1])


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """A reader of a model's answers. ``parser`` is ``None`` without tools. ``opened``: the prompt ends within a block
    of thinking; ``None`` if the prompt is unknown. ``tokenizer`` distinguishes sampled marks from their text, and
    special tokens from text: answers without calls omit them. ``channels``: the model writes harmony's channels.
    ``around`` are the marks around content, which are no part of it."""

    parser: ToolParser | None = None
    opened: bool | None = None
    thinking: tuple[str, str] = THINK
    tokenizer: Any = None
    channels: bool = False
    around: tuple[str, ...] = ()

    def read(self, text: str, ids: Sequence[int] = ()) -> AnswerParts:
        """The parts of a whole answer; ``ids`` are its sampled tokens, if there are any."""
        hidden = text
        if self.tokenizer is not None and len(ids):
            hidden = _hide_mentions(self.tokenizer, self._marks(), text, ids)
        answer = self._parts(hidden)
        return answer if hidden is text else _unhide_parts(answer)

    def visible_parts(self, text: str, stops: tuple[str, ...] = ()) -> AnswerParts:
        """The reasoning and content of a partial answer that no further text can change."""
        text, opening = cut_at_marks(text.rstrip("\ufffd"), stops), self.thinking[0]
        text = cut_at_marks(self._without_around(text), self.around)
        if self.channels:
            answer = HarmonyParser().parse(text, sampling=True)
            return AnswerParts(answer.reasoning, answer.reasoning_closed, answer.content.strip())
        if not self.opened and opening.startswith(stripped := text.lstrip()) and stripped != opening:
            return AnswerParts()
        reasoning, content, closed = self._split(text)
        marks = self._ending_marks()
        if reasoning is not None and (not closed or any(mark in reasoning for mark in marks)):
            return AnswerParts(cut_at_marks(reasoning, (*self.thinking[1:], *marks)).rstrip(), False)
        if self.parser is not None:
            content = cut_at_marks(content, self.parser.marks()).strip()
        return AnswerParts(reasoning, closed, content)

    def convert_types(self, call: ToolCall, parameters: Mapping[str, Any] | None) -> ToolCall:
        """``call`` with its arguments in the types of the JSON schema ``parameters``."""
        return call if self.parser is None else self.parser.convert_types(call, parameters)

    def _marks(self) -> tuple[str, ...]:
        if self.channels:
            return HarmonyParser.tokens
        return *self.thinking, *self.around, *(self.parser.signs() if self.parser is not None else ())

    def _without_around(self, text: str) -> str:
        for mark in self.around:
            text = text.replace(mark, "", 1)
        return text

    def _parts(self, text: str) -> AnswerParts:
        if self.channels:
            answer = HarmonyParser().parse(text)
            answer = replace(answer, content=answer.content.strip())
            return answer if self.parser is not None else replace(answer, calls=(), malformed=())
        text = self._without_around(text)
        reasoning, content, closed = self._split(text)
        if self.parser is None:
            return AnswerParts(reasoning, closed, content)
        may_call, closing = any(mark in (reasoning or "") for mark in self._ending_marks()), self.thinking[1]
        thinking = (self._thinking_in(text) if may_call else None) or ""
        call_start = self.parser.first_call(thinking)
        if call_start is not None and closing not in thinking[:call_start]:
            reasoning, closed, parsed = thinking[:call_start].strip(), True, self.parser.parse(thinking[call_start:])
            parsed = replace(parsed, content=parsed.content.replace(closing, "", 1))
        else:
            parsed = self.parser.parse(content)
        malformed = parsed.malformed
        if not (parsed.calls or malformed):
            signs = [sign for sign in self.parser.signs() if sign in text]
            malformed = (text[min(map(text.index, signs)) :],) if signs else ()
        return AnswerParts(reasoning, closed, parsed.content.strip(), parsed.calls, malformed)

    def _ending_marks(self) -> tuple[str, ...]:
        """The marks of calls that may end the thinking."""
        return self.parser.marks() if self.parser is not None and self.parser.ends_thinking else ()

    def _split(self, text: str) -> tuple[str | None, str, bool]:
        """The reasoning up to its mark, the text after it, and whether the reasoning is closed."""
        special = special_tokens(self.tokenizer) if self.tokenizer is not None and self.parser is None else None
        text = text if special is None else special.sub("", text)
        thinking = self._thinking_in(text)
        if thinking is None:
            return None, text, True
        thought, mark, rest = thinking.partition(self.thinking[1])
        return thought.strip(), rest.lstrip("\n"), bool(mark)

    def _thinking_in(self, text: str) -> str | None:
        """An answer from the beginning of its reasoning on; ``None`` without reasoning."""
        answer, opening = text.lstrip(), self.thinking[0]
        if answer.startswith(opening):
            return answer[len(opening) :]
        return answer if (self._seems_opened(text) if self.opened is None else self.opened) else None

    def _seems_opened(self, text: str) -> bool:
        head, mark, _ = text.partition(self.thinking[1])
        calls = () if self.parser is None else self.parser.marks()
        return bool(mark) and not any(opening in head for opening in (self.thinking[0], *calls))


def reader_for(
    tokenizer: Any,
    *,
    opened: bool | None,
    parser: ToolParser | None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> AnswerReader:
    """The reader of answers to prompts of a tokenizer's chat template; ``parser`` is ``None`` without tools."""
    source = template_source(tokenizer, template_kwargs)
    channels = "<|channel|>" in source and "<|message|>" in source and isinstance(parser, HarmonyParser | None)
    around = tuple(mark for mark in _AROUND if mark in source)
    return AnswerReader(parser, opened, thinking_marks(source), tokenizer, channels, around)


def _hide_mentions(tokenizer: Any, marks: Sequence[str], text: str, ids: Sequence[int]) -> str:
    """``text`` with mentions of marks hidden from parsers: a mark that is a special token has one id, and the same text
    sampled as other ids is a mention."""
    vocabulary = _added_vocabulary(tokenizer)
    sampled = {vocabulary[mark]: mark for mark in marks if mark in vocabulary and mark in text}
    counts = Counter(token for token in ids if token in sampled)
    if all(text.count(mark) == counts[token] for token, mark in sampled.items()):
        return text
    pieces: list[str] = []
    between: list[int] = []
    for token in [*ids, None]:
        if token is not None and token not in sampled:
            between.append(token)
            continue
        piece = tokenizer.decode(between, skip_special_tokens=False) if between else ""
        for mark in sampled.values():
            piece = piece.replace(mark, chr(_PRIVATE + ord(mark[0])) + mark[1:])
        pieces += [piece, "" if token is None else sampled[token]]
        between = []
    hidden = "".join(pieces)[: len(text)]  # a stop token is in the ids only
    return hidden if _unhide(hidden) == text else text


def _unhide(text: str) -> str:
    return "".join(chr(ord(c) - _PRIVATE) if _PRIVATE <= ord(c) < _PRIVATE + 0x10000 else c for c in text)


def _unhide_value(value: Any) -> Any:
    if isinstance(value, str):
        return _unhide(value)
    if isinstance(value, Mapping):
        return {_unhide(key): _unhide_value(element) for key, element in value.items()}
    return [_unhide_value(element) for element in value] if isinstance(value, (list, tuple)) else value


def _unhide_parts(answer: AnswerParts) -> AnswerParts:
    calls = (
        ToolCall(name=_unhide(call.name), arguments=_unhide_value(call.arguments), id=_unhide(call.id))
        for call in answer.calls
    )
    reasoning = None if answer.reasoning is None else _unhide(answer.reasoning)
    malformed = tuple(map(_unhide, answer.malformed))
    return AnswerParts(reasoning, answer.reasoning_closed, _unhide(answer.content), tuple(calls), malformed)


@functools.lru_cache(maxsize=8)
def _added_vocabulary(tokenizer: Any) -> dict[str, int]:
    return getattr(tokenizer, "get_added_vocab", dict)()
