"""Renderings without what ``apply_chat_template`` does around each: it copies every message and schema, and writes
schemas as JSON again. Here the compiled template gets them as they are.

That is the same text by construction where the messages are plain JSON and transformers hands them on as we do, which
versions of it do differently. So it is asked, when a template is first used: its own preparation of messages, and its
renderings of a few conversations. Where one differs, or where transformers is not what renders at all, every rendering
is its own, which the log says once.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agl_slime.errors import PromptError
from agl_slime.tokens.tokenizer import ChatTokenizer, render_chat

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
_Render = Callable[[Sequence[Message], bool], str]

_SCALARS = frozenset((str, int, float, bool, type(None)))
REASONING = ("reasoning_content", "thinking", "reasoning")  # as transformers looks for them
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": [1.5, None, "é"]}}}
_SAID = {"role": "assistant", "content": "said", "reasoning_content": "thought"}
_ASKED = {"role": "user", "content": "asked"}
_PROBES: tuple[list[dict[str, Any]], ...] = (
    [_ASKED],
    [{"role": "system", "content": "system"}, _ASKED, _SAID, _ASKED],
    [_ASKED, {**_SAID, "tool_calls": [_CALL]}, {"role": "tool", "tool_call_id": "call00000", "content": "result"}],
    [_ASKED, {"role": "assistant", "content": None, "tool_calls": [{**_CALL, "none": None}]}, _ASKED],
)
_HANDED_ON: list[dict[str, Any]] = [message for probe in _PROBES for message in probe] + [
    {"role": "assistant", "content": "", "thinking": "t", "reasoning": "r", "extra": {"none": None}},
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "x", "none": None}],
        "reasoning": "",
        "tool_calls": None,
    },
]


def renderer(tokenizer: ChatTokenizer, tools: Sequence[Any] | None, options: Mapping[str, Any]) -> _Render:
    """What renders messages with the generation_prompt of an answer or without, as ``render_chat`` does and with its errors."""
    made = direct_renderer(tokenizer, tools, options)
    if isinstance(made, str):
        _explain_once(made)
        return _long_way(tokenizer, tools, options)
    return made


def _long_way(tokenizer: ChatTokenizer, tools: Sequence[Any] | None, options: Mapping[str, Any]) -> _Render:
    return lambda messages, generation_prompt: render_chat(
        tokenizer, messages, tools=tools, generation_prompt=generation_prompt, **options
    )


@functools.cache
def _explain_once(why: str) -> None:
    logger.info("Each call renders its prompt through apply_chat_template: %s.", why)


def direct_renderer(tokenizer: Any, tools: Sequence[Any] | None, options: Mapping[str, Any]) -> _Render | str:
    """The short way, or why there is none."""
    try:
        from transformers import PreTrainedTokenizerBase
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:
        return "this transformers has no compiled templates"
    own = PreTrainedTokenizerBase.apply_chat_template
    if getattr(type(tokenizer), "apply_chat_template", None) is not own or "apply_chat_template" in vars(tokenizer):
        return f"{type(tokenizer).__name__} renders by itself"
    if taken := sorted(options.keys() & inspect.signature(own).parameters.keys() - {"chat_template"}):
        return f"{taken[0]} is an option of apply_chat_template"
    more = {name: value for name, value in options.items() if name != "chat_template"}
    if not (_plain(more) and _plain(tools)):
        return "tools or template arguments are not plain JSON"
    try:
        source = tokenizer.get_chat_template(options.get("chat_template"), tools)
        template = _compiled(_compile_jinja_template, source)
        show = "{{ (tools if tools else messages) | tojson }}"
        handed = json.loads(tokenizer.apply_chat_template(_HANDED_ON, chat_template=show, tokenize=False))
        schemas = tools and json.loads(
            tokenizer.apply_chat_template([_ASKED], tools, chat_template=show, tokenize=False)
        )
    except Exception as error:  # a template is a program, and may raise anything
        return f"the template cannot be compiled ({str(error) or type(error).__name__:.80})"
    if "sameas" in source:
        return "the template compares objects, which copies are not"
    prepare = next((way for way in _WAYS if _text([*map(way, _HANDED_ON)]) == _text(handed)), None)
    if prepare is None:
        return "this transformers prepares messages in a way of its own"
    schemas = _written_once(schemas) if schemas else None
    long_way, current = _long_way(tokenizer, tools, options), tokenizer.chat_template

    def direct(messages: Sequence[Message], generation_prompt: bool) -> str:
        if tokenizer.chat_template is not current or not all(map(_is_plain_message, messages)) or not messages:
            return long_way(messages, generation_prompt)
        known = {**tokenizer.special_tokens_map, **more}
        given = [*map(prepare, messages)]
        try:
            return template.render(
                messages=given, tools=schemas, documents=None, add_generation_prompt=generation_prompt, **known
            )
        except Exception:  # a template that refuses does so in transformers' words
            return long_way(messages, generation_prompt)

    for probe in _PROBES:
        for generation_prompt in (False, True):
            if _tried(direct, probe, generation_prompt) != _tried(long_way, probe, generation_prompt):
                return "a rendering of its own differs from apply_chat_template's"
    return direct


def _tried(render: _Render, messages: Sequence[Message], generation_prompt: bool) -> str | None:
    try:
        return render(messages, generation_prompt)
    except PromptError:
        return None


# -- what transformers does to messages, by its versions ---------------------------------------------------------------


def _as_is(message: Message) -> Message:
    return message


def _without_none(message: Message) -> Message:
    return {name: value for name, value in message.items() if value is not None}


def _with_reasoning(message: Message) -> Message:
    """Without what is None, and the reasoning under each of its names that a template may read."""
    if None in message.values():
        message = _without_none(message)
    thought = next((message[name] for name in REASONING if name in message), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


_WAYS = (_with_reasoning, _without_none, _as_is)


def _text(value: Any) -> str:
    return json.dumps(value)  # the order of keys counts, and 1 is not True


def _is_plain_message(message: Any) -> bool:
    return type(message) is dict and all(type(value) is str or _plain(value) for value in message.values())


def _plain(value: Any) -> bool:
    """Whether ``value`` is JSON of Python's own types, which need no copy: templates cannot change what they get."""
    kind = type(value)
    if kind is dict:
        return all(type(name) is str for name in value) and all(map(_plain, value.values()))
    return all(map(_plain, value)) if kind is list else kind in _SCALARS


# -- templates ---------------------------------------------------------------------------------------------------------


class _Schema(dict[str, Any]):
    """A part of a tool's schema, whose JSON is written once for all prompts."""

    __slots__ = ("_texts",)


def _written_once(value: Any) -> Any:
    if isinstance(value, dict):
        schema = _Schema({name: _written_once(item) for name, item in value.items()})
        schema._texts = {}
        return schema
    return [*map(_written_once, value)] if isinstance(value, list) else value


@functools.lru_cache(maxsize=64)
def _compiled(compile_template: Callable[[str], Any], source: str) -> Any:
    """transformers' own environment, in which the JSON of a schema is kept."""
    theirs = compile_template(source).environment
    environment = theirs.overlay()
    environment.filters = {**theirs.filters, "tojson": _kept(theirs.filters["tojson"])}
    return environment.from_string(source)


def _kept(to_json: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(to_json)
    def kept(value: Any, *args: Any, **options: Any) -> str:
        if type(value) is not _Schema:
            return to_json(value, *args, **options)
        key = repr((args, options))
        text = value._texts.get(key)
        if text is None:
            text = value._texts[key] = to_json(value, *args, **options)
        return text

    return kept
