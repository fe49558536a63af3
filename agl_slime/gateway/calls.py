"""``Call`` and ``CallResult``: a model call and its answers in one form, which each protocol translates from and to."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agl_slime.engine.client.generation import Generation
from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.messages import Message
from agl_slime.tokens.answer import ToolCall
from agl_slime.tokens.codec import TokenArray, token_array
from agl_slime.tokens.images import Image
from agl_slime.tokens.thinking import ThinkingRequest

_NO_IDS = token_array([], name="prompt_ids")

# Parameters of the distribution that tokens are sampled from: set by the run, not by clients.
IMPOSED = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
IMPOSED += ("logit_bias", "seed")
GRAMMARS = ("regex", "ebnf", "json_schema")  # of SGLang


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request.

    Args:
        tools: the tools at the beginning of the prompt; ``loaded`` are added by later messages, and ``server_tools``
            are the types of tools that the provider's server would run.
        tool_choice: ``auto``, ``none``, ``required`` or the name of a function; ``allowed`` names the only tools that
            may be called.
        requested: sampling parameters that the client wants and the run may override.
        constraint: a grammar for the answer, as SGLang's sampling parameters.
        raw: no chat template: the only message is a text or a tuple of token ids.
        images: the images whose marks the messages have, by hash.
        store_from: index of the first message that is stored under the answer's id, and under ``conversation``;
            ``None`` stores nothing.
        returned_arguments: by tool, the form in which a call's arguments come back, if it is not the model's.
        compacts: the answer is to be a summary of the conversation; ``summary_index`` is the message with the last one.
    """

    messages: list[Message]
    model: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    requested: Mapping[str, Any] = field(default_factory=dict)
    constraint: Mapping[str, Any] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thinking: ThinkingRequest = field(default_factory=ThinkingRequest)
    top_log_probs: int = 0
    stream: bool = False
    raw: bool = False
    store_from: int | None = None
    images: Mapping[str, Image] = field(default_factory=dict)
    conversation: str = ""
    loaded: tuple[dict[str, Any], ...] = ()
    server_tools: tuple[str, ...] = ()
    allowed: frozenset[str] | None = None
    returned_arguments: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    compacts: bool = False
    summary_index: int | None = None

    @property
    def offered(self) -> tuple[dict[str, Any], ...]:
        """All tools that the prompt has."""
        return (*self.tools, *self.loaded) if self.loaded else self.tools

    def as_returned(self, choice: Choice) -> Choice:
        """``choice`` as its client will send it back in the next request."""
        if not any(call.name in self.returned_arguments for call in choice.calls):
            return choice
        calls = (
            replace(call, arguments=form(call.arguments)) if (form := self.returned_arguments.get(call.name)) else call
            for call in choice.calls
        )
        return replace(choice, calls=tuple(calls))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One answer. ``finish`` is ``stop``, ``length`` or ``tool_calls``; ``generation`` is ``None`` after a limit."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: str = "stop"
    generation: Generation | None = None

    @property
    def token_ids(self) -> list[int]:
        """The sampled ids, including the stop token."""
        return list(self.generation.output_ids) if self.generation is not None else []


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """All answers to one request. A retry gets the same ``id``. ``compacted``: the messages that the answer sums up."""

    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    prompt_ids: TokenArray = field(default_factory=lambda: _NO_IDS)
    cached_tokens: int = 0
    compacted: Sequence[Message] = ()

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def output_tokens(self) -> int:
        return sum(len(choice.generation.output_ids) for choice in self.choices if choice.generation is not None)


# -- reading fields ---------------------------------------------------------------------------------------------------


def number(body: Mapping[str, Any], name: str, *, least: float = 0, most: float = math.inf, whole: bool = True) -> Any:
    """A number field of a request; ``None`` if absent."""
    value = body.get(name)
    if value is None:
        return None
    kind = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not kind or not least <= value <= most:
        expected = f"a {'whole ' * whole}number of at least {least:g}"
        expected += f" and at most {most:g}" if most < math.inf else ""
        raise GatewayRequestError(f"{name} must be {expected}, got {value!r:.80}", param=name)
    return value


def strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A field with a string or a list of strings; an empty stop string would stop before the first token."""
    value = body.get(name)
    listed = [value] if isinstance(value, str) else value or []
    if not isinstance(listed, list) or not all(isinstance(item, str) and item for item in listed):
        message = f"{name} must be a string or a list of strings, none empty, got {value!r:.80}"
        raise GatewayRequestError(message, param=name)
    return tuple(listed)


def json_constraint(schema: Any) -> dict[str, Any]:
    return {"json_schema": schema if isinstance(schema, str) else json.dumps(schema)}


def json_format(form: Any, *, schema_in: str = "") -> dict[str, Any] | None:
    """The constraint of OpenAI's text and JSON formats; ``None`` for another ``form``, and for one without a schema,
    which stands in its field ``schema_in``, if there is one."""
    kind = form.get("type", "text") if isinstance(form, Mapping) else None
    if kind in ("text", "json_object"):
        return {} if kind == "text" else json_constraint({"type": "object"})
    holder = (form.get(schema_in) if schema_in else form) if kind == "json_schema" else None
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    return json_constraint(schema) if isinstance(schema, Mapping) else None


def grammar(body: Mapping[str, Any]) -> dict[str, Any]:
    """The first of SGLang's constraints in a request; empty without any."""
    return next(({name: body[name]} for name in GRAMMARS if body.get(name)), {})
