"""Renderings by the compiled template, without the copies of messages and schemas that ``apply_chat_template`` makes.

The text is the same if the messages are plain JSON and are prepared as transformers prepares them, which depends on its
version. At the first use of a template its preparation of messages and its renderings of a few conversations are
compared. If one differs, or transformers does not render at all, ``apply_chat_template`` renders everything, and the
log says so once.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, Template, nodes
from jinja2.runtime import LoopContext

from agl_slime.errors import PromptError
from agl_slime.tokens.tokenizer import ChatTokenizer, render_chat

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
_Render = Callable[[Sequence[Message], bool], str]

_PROMPT = "add_generation_prompt"
_MARK = "\0generation prompt\0"  # stands before the generation prompt in a rendering that is split there
_LOOP = frozenset(("first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex", "revindex0"))
_SCALARS = frozenset((str, int, float, bool, type(None)))
REASONING = ("reasoning_content", "thinking", "reasoning")  # in transformers' order
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": [1.5, None, "é"]}}}
_ANSWER = {"role": "assistant", "content": "answer", "reasoning_content": "thinking"}
_QUESTION = {"role": "user", "content": "question"}
_PROBES: tuple[list[dict[str, Any]], ...] = (
    [_QUESTION],
    [{"role": "system", "content": "system"}, _QUESTION, _ANSWER, _QUESTION],
    [_QUESTION, {**_ANSWER, "tool_calls": [_CALL]}, {"role": "tool", "tool_call_id": "call00000", "content": "result"}],
    [_QUESTION, {"role": "assistant", "content": None, "tool_calls": [{**_CALL, "none": None}]}, _QUESTION],
)
_PART = {"type": "text", "text": "x", "none": None}
_MESSAGES: list[dict[str, Any]] = [message for probe in _PROBES for message in probe] + [
    {"role": "assistant", "content": "", "thinking": "t", "reasoning": "r", "extra": {"none": None}},
    {"role": "assistant", "content": [_PART], "reasoning": "", "tool_calls": None},
]


@dataclass(frozen=True)
class Renderer:
    """Renders messages, with a generation prompt or without, as ``render_chat`` does."""

    transformers: _Render

    def __call__(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        return self.transformers(messages, generation_prompt)

    def parts(self, messages: Sequence[Message]) -> tuple[str, str] | None:
        """The text without the generation prompt, and that prompt, by one rendering; ``None`` where only two tell."""
        return None


@dataclass(frozen=True, kw_only=True)
class _Direct(Renderer):
    """Renders by compiled templates (``_compiled``); what they refuse is refused in transformers' words."""

    tokenizer: Any
    source: Any  # the tokenizer's template when this was made
    template: Template
    divided: Template | None
    prepare: Callable[[Message], Message]
    variables: Mapping[str, Any]

    def __call__(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        text = self._written(self.template, messages, generation_prompt)
        return self.transformers(messages, generation_prompt) if text is None else text

    def parts(self, messages: Sequence[Message]) -> tuple[str, str] | None:
        text = None if self.divided is None else self._written(self.divided, messages, True)
        if text is None or text.count(_MARK) != 1:
            return None
        closed, _, generation_prompt = text.partition(_MARK)
        return closed, generation_prompt

    def _written(self, template: Template, messages: Sequence[Message], generation_prompt: bool) -> str | None:
        if self.tokenizer.chat_template is not self.source or not all(map(_is_plain_message, messages)) or not messages:
            return None
        variables = {**self.tokenizer.special_tokens_map, **self.variables, _PROMPT: generation_prompt}
        try:
            return template.render(messages=[*map(self.prepare, messages)], **variables)
        except Exception:  # templates raise anything
            return None


def renderer(tokenizer: ChatTokenizer, tools: Sequence[Any] | None, options: Mapping[str, Any]) -> Renderer:
    direct = direct_renderer(tokenizer, tools, options)
    if isinstance(direct, str):
        _explain_once(direct)
        return Renderer(_transformers_renderer(tokenizer, tools, options))
    return direct


def _transformers_renderer(tokenizer: Any, tools: Sequence[Any] | None, options: Mapping[str, Any]) -> _Render:
    return lambda messages, generation_prompt: render_chat(
        tokenizer, messages, tools=tools, generation_prompt=generation_prompt, **options
    )


@functools.cache
def _explain_once(reason: str) -> None:
    logger.info("Each call renders its prompt through apply_chat_template: %s.", reason)


def direct_renderer(tokenizer: Any, tools: Sequence[Any] | None, options: Mapping[str, Any]) -> Renderer | str:
    """A renderer by the compiled template, or the reason why there is none."""
    try:
        from transformers import PreTrainedTokenizerBase
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:
        return "this transformers has no compiled templates"
    standard = PreTrainedTokenizerBase.apply_chat_template
    overridden = getattr(type(tokenizer), "apply_chat_template", None) is not standard
    if overridden or "apply_chat_template" in vars(tokenizer):
        return f"{type(tokenizer).__name__} renders by itself"
    if reserved := sorted(options.keys() & inspect.signature(standard).parameters.keys() - {"chat_template"}):
        return f"{reserved[0]} is an option of apply_chat_template"
    arguments = {name: value for name, value in options.items() if name != "chat_template"}
    if not (_plain(arguments) and _plain(tools)):
        return "tools or template arguments are not plain JSON"
    try:
        source = tokenizer.get_chat_template(options.get("chat_template"), tools)
        template, divided = _compiled(_compile_jinja_template, source)
        show = "{{ (tools if tools else messages) | tojson }}"
        prepared = json.loads(tokenizer.apply_chat_template(_MESSAGES, chat_template=show, tokenize=False))
        shown: Any = tools and tokenizer.apply_chat_template([_QUESTION], tools, chat_template=show, tokenize=False)
        schemas = tools and json.loads(shown)
    except Exception as error:  # a template is a program and may raise anything
        return f"the template cannot be compiled ({str(error) or type(error).__name__:.80})"
    if "sameas" in source:
        return "the template compares object identities"
    wanted = json.dumps(prepared)  # as text: the order of keys counts, and 1 is not True
    prepare = next((method for method in _PREPARATIONS if json.dumps([*map(method, _MESSAGES)]) == wanted), None)
    if prepare is None:
        return "this transformers prepares messages in an unknown way"
    schemas = _with_cache(schemas) if schemas else None
    transformers = _transformers_renderer(tokenizer, tools, options)
    direct = _Direct(
        transformers=transformers,
        tokenizer=tokenizer,
        source=tokenizer.chat_template,
        template=template,
        divided=divided,
        prepare=prepare,
        variables={"tools": schemas, "documents": None, **arguments},
    )
    for probe in _PROBES:
        for generation_prompt in (False, True):
            texts = [rendered_or_none(render, probe, generation_prompt) for render in (direct, transformers)]
            if texts[0] != texts[1]:
                return "the compiled template's rendering differs from apply_chat_template's"
    return direct


def rendered_or_none(render: Callable[..., str], messages: Sequence[Message], generation_prompt: bool) -> str | None:
    """The text of ``messages``; ``None`` where the template refuses them."""
    try:
        return render(messages, generation_prompt)
    except PromptError:
        return None


# -- preparations of messages by versions of transformers -----------------------------------------------------------


def _without_none(message: Message) -> Message:
    return {name: value for name, value in message.items() if value is not None}


def _with_reasoning(message: Message) -> Message:
    """The message without None, and with the reasoning under each name that a template may read."""
    if None in message.values():
        message = _without_none(message)
    thought = next((message[name] for name in REASONING if name in message), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


_PREPARATIONS: tuple[Callable[[Message], Message], ...] = (_with_reasoning, _without_none, lambda message: message)


def _is_plain_message(message: Any) -> bool:
    return type(message) is dict and all(type(value) is str or _plain(value) for value in message.values())


def _plain(value: Any) -> bool:
    """Whether ``value`` is JSON of Python's own types. These need no copy: templates cannot change them."""
    kind = type(value)
    if kind is dict:
        return all(type(name) is str for name in value) and all(map(_plain, value.values()))
    return all(map(_plain, value)) if kind is list else kind in _SCALARS


# -- templates ---------------------------------------------------------------------------------------------------------


class _Schema(dict[str, Any]):
    """A part of a tool's schema that keeps its JSON for all prompts."""

    __slots__ = ("_texts",)


def _with_cache(value: Any) -> Any:
    if isinstance(value, dict):
        schema = _Schema({name: _with_cache(item) for name, item in value.items()})
        schema._texts = {}
        return schema
    return [*map(_with_cache, value)] if isinstance(value, list) else value


@functools.lru_cache(maxsize=64)
def _compiled(compile_template: Callable[[str], Any], source: str) -> tuple[Template, Template | None]:
    """The template in transformers' environment, with a cache of schemas' JSON; and with ``_MARK`` before its
    generation prompt, if that is its end and the text before it does not depend on it. Of a template without the
    variable this is what follows the loop over the messages (Command R7B)."""
    original = compile_template(source).environment
    environment = original.overlay()
    environment.filters = {**original.filters, "tojson": _cached(original.filters["tojson"])}
    environment.getattr = _quick_getattr(environment)
    tree = environment.parse(source)
    uses = [name for name in tree.find_all(nodes.Name) if name.name == _PROMPT]
    end = tree.body[-1] if tree.body else None
    closing = isinstance(end, nodes.If) and uses == [end.test] and not (end.elif_ or end.else_)
    if uses and not closing:
        return environment.from_string(source), None
    loops = [number for number, node in enumerate(tree.body, 1) if _over_messages(node)]
    place = loops[-1] if loops and not uses else len(tree.body) - closing
    tree.body.insert(place, nodes.Output([nodes.TemplateData(_MARK)]))
    return environment.from_string(source), environment.from_string(tree)


def _over_messages(node: nodes.Node) -> bool:
    return isinstance(node, nodes.For) and getattr(node.iter, "name", "") == "messages"


def _quick_getattr(environment: Environment) -> Callable[[Any, str], Any]:
    """The sandbox's ``getattr`` without its questions about keys of messages and places in a loop."""
    ask = environment.getattr

    def quick(value: Any, name: str) -> Any:
        kind = type(value)
        if (kind is dict and name in value and not hasattr(dict, name)) or (kind is LoopContext and name in _LOOP):
            return value[name] if kind is dict else getattr(value, name)
        return ask(value, name)

    return quick


def _cached(to_json: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(to_json)
    def cached(value: Any, *args: Any, **options: Any) -> str:
        if type(value) is not _Schema:
            return to_json(value, *args, **options)
        key = repr((args, options))
        text = value._texts.get(key)
        if text is None:
            text = value._texts[key] = to_json(value, *args, **options)
        return text

    return cached
