"""Harmony, the format of gpt-oss: an answer is messages in channels, some of which are calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agl_slime.tokens.answer import AnswerParts, ToolCall
from agl_slime.tokens.formats.base import ToolParser, number_calls, read_object, register_tool_parser

_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
_MESSAGE = "<|message|>"
_PARTIAL_MARK = re.compile(r"<(?:\|\w*\|?)?\Z")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


@register_tool_parser("harmony", "gpt_oss")
class HarmonyParser(ToolParser):
    """``<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>``: gpt-oss. The channel
    ``analysis`` is reasoning; ``commentary`` without a recipient and ``final`` are content."""

    template_marks = ("<|channel|>",)
    tokens = "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
    call_grammar = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "<|call|>", "json"
    between = "<|start|>assistant"

    def marks(self) -> tuple[str, ...]:
        return ("<|",)

    def signs(self) -> tuple[str, ...]:
        return ()  # all messages have its marks

    def forced_grammar(self, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        form = super().forced_grammar(functions)
        assert form is not None
        # the engine stops at the first call's end
        return {"type": "or", "elements": form["tags"]} if len(functions) > 1 else form["tags"][0]

    def parse(self, text: str, *, sampling: bool = False) -> AnswerParts:
        """The parts of an answer; while ``sampling``, only the parts that no further text can change."""
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[ToolCall] = []
        malformed: list[str] = []
        closed = True
        for part, ended in _messages(_PARTIAL_MARK.sub("", text) if sampling else text):
            header, mark, body = part.partition(_MESSAGE)
            channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
            if not mark and (sampling or recipient is None):  # a message begins, or an answer without messages
                begun = header.strip()
                begins = "assistant".startswith(begun[:9]) or (sampling and "to=".startswith(begun[:3]))
                content += [] if begins else [header.partition("<|")[0]]
            elif recipient is not None:
                if sampling and not ended:
                    continue
                try:
                    arguments = read_object((body.strip() or "{}") if mark else "")
                    calls.append(ToolCall(name=recipient[1], arguments=arguments))
                except ValueError:
                    malformed.append(part)
                    content.append(part)
            elif channel is not None and channel[1] == "analysis":
                reasoning.append(body.strip())
                closed = ended
            else:
                content.append(body)
            if mark and recipient is None and "<|constrain|>" in header and "final" not in header:
                malformed.append(part)  # arguments of no function
        thought = "\n".join(reasoning) if reasoning else None
        return AnswerParts(
            thought, closed or bool(content or calls), "".join(content), number_calls(calls), tuple(malformed)
        )


def _messages(text: str) -> list[tuple[str, bool]]:
    """The messages of an answer, and whether each is closed."""
    pieces = _ENDS.split(text)
    return [(part, number < len(pieces) - 1) for number, part in enumerate(pieces) if part.strip()]
