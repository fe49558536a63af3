"""Functions of a tokenizer and its chat template."""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from agl_slime.errors import ConfigError, PromptError

NO_TEMPLATE = (
    "the model has no chat template, so chat messages cannot be rendered: give --model-path a model that has one, "
    "or prompts as strings, which are used as they are"
)


class ChatTokenizer(Protocol):
    """The interface that this package needs; every ``transformers`` tokenizer with a chat template has it."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


RENDERER_ARGUMENTS = frozenset(("conversation", "messages", "tools", "tokenize", "tokenizer_kwargs", "padding"))
RENDERER_ARGUMENTS |= {"add_generation_prompt", "continue_final_message", "truncation", "max_length"}
RENDERER_ARGUMENTS |= {"return_tensors", "return_dict", "return_assistant_tokens_mask"}
"""Arguments of ``apply_chat_template`` that are not the template's."""


def read_json_object(text: str, flag: str, *, example: str) -> dict[str, Any]:
    """The value of a setting that is a JSON object, or empty. Raises ``ConfigError``."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} must be a JSON object such as '{example}', got {text!r:.99}")
    return value


def read_template_kwargs(text: str, flag: str) -> dict[str, Any]:
    """Chat template arguments from a setting in JSON. Raises ``ConfigError``."""
    kwargs = read_json_object(text, flag, example='{"preserve_thinking": true}')
    check_template_kwargs(kwargs, flag)
    return kwargs


def check_template_kwargs(kwargs: Mapping[Any, Any], named: str) -> None:
    """Raise ``ConfigError`` for a key that is no name, an argument that the renderer sets itself, or a chat template
    that is no template."""
    for key in kwargs:
        if not isinstance(key, str) or key in RENDERER_ARGUMENTS:
            raise ConfigError(f"{named} has {key!r:.80}, which is no argument of a chat template; leave it out")
    if (template := kwargs.get("chat_template")) is not None:
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            render_jinja_template(conversations=[], chat_template=template)
        except (TemplateSyntaxError, TypeError) as error:
            line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise ConfigError(f"chat_template of {named} is no Jinja template; correct it{line}: {error}") from error


def set_template_kwargs(tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
    """Set the template arguments of ``render_chat`` with this tokenizer; arguments of a call take precedence."""
    tokenizer.run_template_kwargs = dict(kwargs)


class HashedArguments(dict[str, Any]):
    """Template arguments as a cache key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


def template_source(tokenizer: Any, template_kwargs: Mapping[str, Any] | None) -> str:
    """The text of the chat template, or of the one in ``template_kwargs``; empty where it is unknown."""
    source = (template_kwargs or {}).get("chat_template") or getattr(tokenizer, "chat_template", None)
    return source if isinstance(source, str) else ""


def has_chat_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", True))  # a tokenizer without the attribute renders by itself


def render_chat(
    tokenizer: ChatTokenizer,
    messages: Iterable[Any],
    *,
    tools: Any = None,
    generation_prompt: bool = False,
    **options: Any,
) -> str:
    """The chat template's rendering of ``messages``, with a ``generation_prompt`` or without. ``PromptError`` when the
    template refuses them or is missing."""
    if not (has_chat_template(tokenizer) or options.get("chat_template")):
        raise PromptError(NO_TEMPLATE)
    options = {**getattr(tokenizer, "run_template_kwargs", {}), **options}
    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=tools or None, add_generation_prompt=generation_prompt, tokenize=False, **options
        )
    except Exception as error:  # a template is a program, and may raise anything
        reason = str(error) or type(error).__name__
        raise PromptError(f"the chat template cannot render these messages: {reason:.500}") from error


def encode_text(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """``tokenizer.encode``; where that is transformers', without the offsets, which take a third of the time."""
    if _encodes_as_transformers(type(tokenizer)) and "encode" not in vars(tokenizer):
        backend = tokenizer.backend_tokenizer
        splits = tokenizer.split_special_tokens or backend.encode_special_tokens
        if not (splits or backend.truncation or backend.padding):
            return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


@functools.cache
def _encodes_as_transformers(kind: type) -> bool:
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        return False
    names = ("encode", "_encode_plus", "_batch_encode_plus")
    return issubclass(kind, PreTrainedTokenizerFast) and all(
        getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in names
    )


def added_token_at(tokenizer: Any, text: str, start: int) -> str:
    """The longest added token of ``text`` at ``start``, empty without one; tokenizers split at these before BPE."""
    added = getattr(tokenizer, "get_added_vocab", dict)()
    return max((token for token in added if token and text.startswith(token, start)), key=len, default="")


def ends_with_added_token(tokenizer: Any, text: str) -> bool:
    """Whether ``text`` ends with an added token."""
    return text.endswith(tuple(filter(None, getattr(tokenizer, "get_added_vocab", dict)())))


def longest_prefix(tokenizer: ChatTokenizer, ids: list[int], text: str) -> tuple[int, str]:
    """The number of leading ``ids`` that decode to a prefix of ``text``, at most, and that prefix."""

    def decoded(length: int) -> str:
        return tokenizer.decode(ids[:length], skip_special_tokens=False)

    if text.startswith(whole := decoded(len(ids))):
        return len(ids), whole
    # bisection ignores characters cut in two; the loop steps back over them
    length = bisect_left(range(1, len(ids) + 1), True, key=lambda n: not text.startswith(decoded(n).rstrip("\ufffd")))
    while length and not text.startswith(decoded(length)):
        length -= 1
    return length, decoded(length)


@functools.lru_cache(maxsize=8)
def special_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """The special tokens that text for people omits: all but the marks of thinking."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {token.content for token in added if token.special} - {"<think>", "</think>"}
    return re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None
