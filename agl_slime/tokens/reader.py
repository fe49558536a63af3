"""How the text of an answer becomes its parts, whole and while it is sampled: one reader for agents and the gateway."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agl_slime.tokens.answer import AnswerParts, ToolCall
from agl_slime.tokens.formats import HarmonyParser, ToolParser, cut_at_marks, parser_for
from agl_slime.tokens.tokenizer import special_tokens

THINK = "<think>", "</think>"
# of templates whose reasoning stands between other marks
_MARKS = (("<think:opensource>", "</think:opensource>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))
_MARKS += (("<|channel>thought", "<channel|>"), ("<|START_THINKING|>", "<|END_THINKING|>"))
_MARKS += (("<mm:think>", "</mm:think>"),)
_PRIVATE = 0xF0000  # and the code of a mark's first character: a character of nobody's that hides the mark


def thinking_marks(source: Any) -> tuple[str, str]:
    """The marks that a chat template, given as its text, has around reasoning."""
    return next((marks for marks in _MARKS if isinstance(source, str) and marks[0] in source), THINK)


def opens_thinking(opening: str, marks: tuple[str, str]) -> bool:
    """Whether the opening of an answer ends within a block of thinking."""
    return opening.rfind(marks[0]) > opening.rfind(marks[1])


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """``parser`` is ``None`` where no tools are offered. ``opened``: the prompt ends within an open block of thinking;
    ``None`` where nobody knows the prompt. ``tokenizer`` tells a sampled mark from its text, and what is no text:
    special tokens are left out of answers in which no call may be written with them. ``channels``: the model writes
    in harmony's."""

    parser: ToolParser | None = None
    opened: bool | None = None
    thinking: tuple[str, str] = THINK
    tokenizer: Any = None
    channels: bool = False

    def read(self, text: str, ids: Sequence[int] = ()) -> AnswerParts:
        """The parts of a whole answer; ``ids`` are the sampled tokens, where they are known."""
        hidden = text
        if self.tokenizer is not None and len(ids):
            hidden = _hidden(self.tokenizer, self._marks(), text, ids)
        parts = self._parts(hidden)
        return parts if hidden is text else _shown_parts(parts)

    def visible_parts(self, text: str, stops: tuple[str, ...] = ()) -> AnswerParts:
        """Of an answer that is still sampled, the reasoning and the content that stand whatever follows."""
        text, opening = cut_at_marks(text.rstrip("\ufffd"), stops), self.thinking[0]
        if self.channels:
            parts = HarmonyParser().parts(text, sampling=True)
            return AnswerParts(parts.reasoning, parts.reasoning_closed, parts.content.strip())
        if not self.opened and opening.startswith(begun := text.lstrip()) and begun != opening:
            return AnswerParts()
        reasoning, content, closed = self._split(text)
        if reasoning is not None and not closed:
            return AnswerParts(cut_at_marks(reasoning, self.thinking[1:]).rstrip(), False)
        if self.parser is not None:
            content = cut_at_marks(content, self.parser.marks()).strip()
        return AnswerParts(reasoning, closed, content)

    def convert_types(self, call: ToolCall, parameters: Mapping[str, Any] | None) -> ToolCall:
        """``call`` with arguments of the types that the JSON schema ``parameters`` names."""
        return call if self.parser is None else self.parser.convert_types(call, parameters)

    def _marks(self) -> tuple[str, ...]:
        if self.channels:
            return HarmonyParser.tokens
        return *self.thinking, *(self.parser.tokens if self.parser is not None else ())

    def _parts(self, text: str) -> AnswerParts:
        if self.channels:
            parts = HarmonyParser().parts(text)
            parts = replace(parts, content=parts.content.strip())
            return parts if self.parser is not None else replace(parts, calls=(), malformed=())
        reasoning, content, closed = self._split(text)
        if self.parser is None or (reasoning is not None and not closed):
            return AnswerParts(reasoning, closed, content)
        parsed = self.parser.parse(content)
        return replace(parsed, reasoning=reasoning, reasoning_closed=closed, content=parsed.content.strip())

    def _split(self, text: str) -> tuple[str | None, str, bool]:
        """The reasoning, what follows it, and whether the reasoning is closed."""
        special = special_tokens(self.tokenizer) if self.tokenizer is not None and self.parser is None else None
        text = text if special is None else special.sub("", text)
        opening, closing = self.thinking
        begun = text.lstrip()
        if begun.startswith(opening):
            begun = begun[len(opening) :]
        elif not (self._seems_opened(text) if self.opened is None else self.opened):
            return None, text, True
        thought, mark, rest = begun.partition(closing)
        return thought.strip(), rest.lstrip("\n") if mark else "", bool(mark)

    def _seems_opened(self, text: str) -> bool:
        before, mark, _ = text.partition(self.thinking[1])
        calls = () if self.parser is None else self.parser.marks()
        return bool(mark) and not any(each in before for each in (self.thinking[0], *calls))


def reader_for(
    tokenizer: Any,
    *,
    opened: bool | None,
    offered: bool,
    parser: ToolParser | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> AnswerReader:
    """The reader of answers to prompts of a tokenizer's chat template. ``parser`` is by default that of the template;
    ``PromptError`` where tools are ``offered`` and nobody reads its calls."""
    source = (template_kwargs or {}).get("chat_template") or getattr(tokenizer, "chat_template", None)
    channels = isinstance(source, str) and "<|channel|>" in source and "<|message|>" in source
    if parser is not None:
        channels = channels and isinstance(parser, HarmonyParser)
    elif offered:
        parser = parser_for(tokenizer, template_kwargs)
    return AnswerReader(parser if offered else None, opened, thinking_marks(source), tokenizer, channels)


def _hidden(tokenizer: Any, marks: Sequence[str], text: str, ids: Sequence[int]) -> str:
    """``text`` in which marks that were sampled as other tokens are hidden from parsers: a mark that is a token of its
    own has one id, and what has its text and other ids is a mention."""
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
    hidden = "".join(pieces)[: len(text)]  # a stop token stands in the ids alone
    return hidden if _shown(hidden) == text else text


def _shown(text: str) -> str:
    return "".join(chr(ord(each) - _PRIVATE) if _PRIVATE <= ord(each) < _PRIVATE + 0x10000 else each for each in text)


def _shown_value(value: Any) -> Any:
    if isinstance(value, str):
        return _shown(value)
    if isinstance(value, Mapping):
        return {_shown(key): _shown_value(each) for key, each in value.items()}
    return [_shown_value(each) for each in value] if isinstance(value, (list, tuple)) else value


def _shown_parts(parts: AnswerParts) -> AnswerParts:
    calls = (
        ToolCall(name=_shown(call.name), arguments=_shown_value(call.arguments), id=_shown(call.id))
        for call in parts.calls
    )
    reasoning = None if parts.reasoning is None else _shown(parts.reasoning)
    malformed = tuple(map(_shown, parts.malformed))
    return AnswerParts(reasoning, parts.reasoning_closed, _shown(parts.content), tuple(calls), malformed)


@functools.lru_cache(maxsize=8)
def _added_vocabulary(tokenizer: Any) -> dict[str, int]:
    return getattr(tokenizer, "get_added_vocab", dict)()
