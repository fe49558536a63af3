"""Formats of tool calls, and the format that a chat template uses."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from agl_slime.errors import PromptError
from agl_slime.tokens.codec import shared_length
from agl_slime.tokens.formats import json_calls, literals, tagged
from agl_slime.tokens.formats.base import ToolParser, cut_at_marks, get_tool_parser, read_object, register_tool_parser
from agl_slime.tokens.formats.harmony import HarmonyParser
from agl_slime.tokens.formats.json_calls import HermesParser
from agl_slime.tokens.formats.tagged import types_of
from agl_slime.tokens.tokenizer import ChatTokenizer, HashedArguments, render_chat, template_source

__all__ = [
    "UNREAD_FORMAT",
    "HarmonyParser",
    "ToolParser",
    "cut_at_marks",
    "find_format",
    "get_tool_parser",
    "parser_for",
    "read_object",
    "register_tool_parser",
    "types_of",
]

# a format comes after the formats whose templates have its marks, too
_FORMATS: tuple[type[ToolParser], ...] = (
    *(HarmonyParser, json_calls.KimiParser, json_calls.SolarParser, tagged.DsmlParser, json_calls.DeepSeekV3Parser),
    *(json_calls.DeepSeekV31Parser, tagged.MiniMaxParser, tagged.HunyuanParser, tagged.SeedParser, tagged.GlmParser),
    *(tagged.QwenXmlParser, json_calls.FunctionaryParser, literals.Gemma4Parser, literals.Lfm2Parser),
    *(json_calls.MistralArgsParser, json_calls.MistralParser, json_calls.NemotronV2Parser, json_calls.MiniMaxM1Parser),
    *(json_calls.CohereParser, HermesParser, json_calls.LlamaJsonParser),
)
UNREAD_FORMAT = (
    "the chat template asks for tool calls in a format without a parser: set tool_parser to a format that "
    "the prompt asks for, register a parser (register_tool_parser), or offer no tools"
)
_NAME, _ARGUMENTS = "look_up_42", {"key": "kz 42", "n": "3"}
_QUESTION = "A question 42"


def parser_for(tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any] | None = None) -> ToolParser:
    """The parser of the tool calls of a tokenizer's chat template. ``PromptError`` if there is none."""
    parser = find_format(tokenizer, template_kwargs)
    if parser is None:
        raise PromptError(UNREAD_FORMAT)
    return parser


def find_format(tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> ToolParser | None:
    """The parser that reads the call that the template writes. If the template writes none, or refuses it: the parser
    whose marks are in the template's source, or else in the vocabulary (but for Hermes'); ``None`` without marks."""
    return _find(tokenizer, template_source(tokenizer, template_kwargs), HashedArguments(template_kwargs or {}))


@functools.lru_cache(maxsize=64)
def _find(tokenizer: Any, source: str, kwargs: HashedArguments) -> ToolParser | None:
    asked_for = [form() for form in _FORMATS if any(mark in source for mark in form.template_marks)]
    for written in _probes(tokenizer, kwargs):
        for form in [*asked_for, *(form() for form in _FORMATS)]:
            if _reads(form, written):
                return form
        return None  # a call that no parser reads
    vocabulary = getattr(tokenizer, "get_added_vocab", dict)()
    # Hermes' token is in the vocabularies of many models that write other formats
    candidates = (form for form in _FORMATS if form is not HermesParser)
    inherited = (form() for form in candidates if not vocabulary.keys().isdisjoint(form.template_marks))
    return next(iter(asked_for), None) or next(inherited, None)


def _reads(form: ToolParser, written: tuple[str, ...]) -> bool:
    """Whether a parser reads the probe's call, with or without the end of a turn after it."""
    tries = (form.parse(text).calls for answer in written for text in (answer, answer[: answer.rfind("}") + 1]))
    return any([(call.name, {**call.arguments}) for call in calls] == [(_NAME, _ARGUMENTS)] for calls in tries)


def _probes(tokenizer: Any, kwargs: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The rendered text of an answer with one call: after the generation prompt as far as that is shared, and after the
    question. Nothing if the template writes no call."""
    question = {"role": "user", "content": _QUESTION}
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
        call = {"id": "call00042", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        try:
            prompt = render_chat(tokenizer, [question], generation_prompt=True, **kwargs)
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            whole = render_chat(tokenizer, [question, answer], **kwargs)
        except PromptError:
            continue
        if _NAME in whole:
            yield whole[shared_length(prompt, whole) :], whole.rpartition(_QUESTION)[2]
