"""What a model call asks for and what it gets, whatever the protocol: each protocol translates into these and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.messages import Message
from agl_slime.sglang.generation import Generation
from agl_slime.tokens.answer import ToolCall
from agl_slime.tokens.codec import TokenArray, token_array
from agl_slime.tokens.images import Image

_NO_IDS = token_array([], name="prompt_ids")

# What changes the distribution that tokens are sampled from; the run decides on these.
IMPOSED = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
IMPOSED += ("logit_bias", "seed")
MOST_LOG_PROBS = 100  # of the likeliest tokens at each place


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request. ``asked`` are the sampling settings that its client wants and the run may decide otherwise;
    ``constraint`` what the answer is held to, as SGLang's sampling parameters; ``tool_choice`` is ``auto``, ``none``,
    ``required`` or the name of a function. ``raw``: the only message's content is a text, or a tuple of token ids,
    and no template is applied to it. ``kept``: of a conversation that may be gone on from by
    the answer's id, how many messages at its beginning are of this request alone. ``images``: those whose marks the
    messages have, by their hashes."""

    messages: list[Message]
    model: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    asked: Mapping[str, Any] = field(default_factory=dict)
    constraint: Mapping[str, Any] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    top_log_probs: int = 0
    stream: bool = False
    raw: bool = False
    kept: int | None = None
    images: Mapping[str, Image] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One answer. ``finish`` is ``stop``, ``length`` or ``tool_calls``; ``generation`` is ``None`` for the empty answer
    of a rollout that has reached a limit."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: str = "stop"
    generation: Generation | None = None

    @property
    def token_ids(self) -> list[int]:
        """The sampled ids, with the stop token."""
        return list(self.generation.output_ids) if self.generation is not None else []

    @property
    def output_tokens(self) -> int:
        return len(self.generation.output_ids) if self.generation is not None else 0


@dataclass(frozen=True, kw_only=True)
class Answered:
    """All answers to one request. ``id`` is the same however often it is told."""

    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    prompt_ids: TokenArray = field(default_factory=lambda: _NO_IDS)
    cached_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def output_tokens(self) -> int:
        return sum(choice.output_tokens for choice in self.choices)


# -- reading settings -------------------------------------------------------------------------------------------------


def number(body: Mapping[str, Any], name: str, *, least: float = 0, most: float = math.inf, whole: bool = True) -> Any:
    """A number of a request, or ``None`` when it has none."""
    value = body.get(name)
    if value is None:
        return None
    kind = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not kind or not least <= value <= most:
        what = f"a {'whole ' * whole}number of at least {least:g}" + (
            f" and at most {most:g}" if most < math.inf else ""
        )
        raise GatewayRequestError(f"{name} must be {what}, got {value!r:.80}", param=name)
    return value


def strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A string or a list of strings of a request; those that are empty would stop before the first token."""
    value = body.get(name)
    listed = [value] if isinstance(value, str) else value or []
    if not isinstance(listed, list) or not all(isinstance(item, str) and item for item in listed):
        raise GatewayRequestError(
            f"{name} must be a string or a list of strings, none empty, got {value!r:.80}", param=name
        )
    return tuple(listed)


def read_tool(tool: Any, where: str) -> dict[str, Any]:
    """A function of OpenAI's chat form as templates get it."""
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise GatewayRequestError(
            f"{where} must be a function with a name; other kinds of tools are not served", param=where
        )
    return function_tool(function["name"], function.get("description"), function.get("parameters"))


def function_tool(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """The one form that tools have in prompts, whatever protocol they came by."""
    schema = parameters if isinstance(parameters, Mapping) else {"type": "object", "properties": {}}
    function = {"name": name, "description": str(description or ""), "parameters": dict(schema)}
    return {"type": "function", "function": function}


def json_constraint(schema: Any) -> dict[str, Any]:
    return {"json_schema": schema if isinstance(schema, str) else json.dumps(schema)}
