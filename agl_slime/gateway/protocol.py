"""What a protocol is: a request read, an answer written whole or as events, an error in its own form."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

import orjson

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.calls import IMPOSED, Answered, Call, number
from agl_slime.gateway.errors import openai_error
from agl_slime.gateway.messages import HALF_A_CHARACTER, Message
from agl_slime.support.agl import LLM
from agl_slime.support.http import json_bytes

Decode = Callable[[list[int]], str]
Kept = Mapping[str, list[Message]]
"""Conversations that may be gone on from, by the id of the answer that each ends with."""
NOTHING_KEPT: Kept = MappingProxyType({})

_IGNORED = """
    metadata client_metadata user store service_tier speed safety_identifier moderation diagnostics rid betas container
    inference_geo prompt_cache_key prompt_cache_options prompt_cache_retention cache_control reasoning reasoning_effort
    thinking verbosity separate_reasoning include_reasoning prediction truncation context_management max_tool_calls
    parallel_tool_calls
"""
IGNORED = frozenset(_IGNORED.split())
"""Fields of any protocol that the answer does not depend on, or not here."""
_OBJECTS = ("chat_template_kwargs", "stream_options", "text", "output_config")
_LARGEST = 2**31 - 1  # of a number that is handed on to an engine
_LISTS = ("tools", "include")


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    return (f"event: {event}\n".encode() if event else b"") + b"data: " + json_bytes(data) + b"\n\n"


class Stream(ABC):
    """An answer as events. ``texts`` is what has been told of each choice; ``head`` has the id and the model."""

    def __init__(self, body: Mapping[str, Any], head: Answered, decode: Decode) -> None:
        self.body, self.head, self.decode = body, head, decode
        self.texts: list[tuple[str, str]] = [("", "")] * len(head.choices)

    def update(self, texts: list[tuple[str, str]]) -> bytes:
        """What has come since the last time."""
        events = b""
        for index, (now, told) in enumerate(zip(texts, self.texts, strict=True)):
            parts = [new[len(old) :] if new.startswith(old) else "" for new, old in zip(now, told, strict=True)]
            self.texts[index] = tuple(old + part for old, part in zip(told, parts, strict=True))  # type: ignore[assignment]
            if any(parts):
                events += b"".join(self.more(index, *parts))
        return events

    def finish(self, answered: Answered) -> bytes:
        """What was held back, and the end."""
        rest = self.update([(choice.reasoning, choice.content) for choice in answered.choices])
        return rest + b"".join(self.end(answered))

    @abstractmethod
    def begin(self) -> Iterator[bytes]: ...

    @abstractmethod
    def more(self, index: int, reasoning: str, content: str) -> Iterator[bytes]: ...

    @abstractmethod
    def end(self, answered: Answered) -> Iterator[bytes]: ...

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def error(self, refusal: GatewayRequestError) -> bytes:
        return sse(openai_error(refusal)) + b"data: [DONE]\n\n"


class Protocol(ABC):
    """One way of asking. ``honoured`` are the fields that are, by the run's sampling where tokens are trained;
    ``ignored`` those that docs/any-agent.md lists as that; all others are refused. ``prefix`` is what ids of answers
    begin with, ``grows`` the list to which clients add what was said since the last request, ``orphan`` what is said
    of a tool's result without a call; ``calls_in_text``: agents that declare no tools may write calls of their own.
    ``counts``: only how long the prompt is gets answered."""

    honoured: frozenset[str]
    ignored: frozenset[str] = IGNORED
    prefix: str = ""
    grows: str = ""
    orphan: str = "{}"
    calls_in_text: bool = False
    counts: bool = False

    @abstractmethod
    def read(self, body: Mapping[str, Any], kept: Kept = NOTHING_KEPT) -> Call:
        """Raises ``GatewayRequestError``."""

    def more(self, items: list[Any], kept: Kept) -> list[Message]:
        """The messages that ``read`` would add for these ``items`` at the end of ``grows``, after one that is no
        answer; none where a body is always read whole. Raises ``GatewayRequestError``, also for items that change more
        than the messages."""
        return []

    def kept_items(self, items: list[Any]) -> list[Any]:
        """Those of a list that grows that writing an answer needs."""
        return []

    def counted(self, tokens: int) -> dict[str, Any]:
        """The answer of a protocol that ``counts``."""
        return {"input_tokens": tokens}

    @abstractmethod
    def answer(self, body: Mapping[str, Any], answered: Answered, decode: Decode) -> dict[str, Any]: ...

    @abstractmethod
    def stream(self, body: Mapping[str, Any], head: Answered, decode: Decode) -> Stream: ...

    def error(self, refusal: GatewayRequestError) -> dict[str, Any]:
        return openai_error(refusal)

    def check_fields(self, body: Mapping[str, Any]) -> None:
        """A field that would be dropped in silence is refused by name, unless it is empty; so is one of another shape
        than all protocols give it."""
        for name in sorted(body.keys() - self.honoured - self.ignored):
            if body[name] not in (None, False, "", [], {}):
                raise GatewayRequestError(f"{name} is not supported here", code="unsupported_parameter", param=name)
        for names, kind, told in ((_OBJECTS, dict, "an object"), (_LISTS, list, "a list")):
            for name in names:
                if body.get(name) and not isinstance(body[name], kind):
                    raise GatewayRequestError(f"{name} must be {told}, got {body[name]!r:.80}", param=name)

    @staticmethod
    def asked(body: Mapping[str, Any]) -> dict[str, Any]:
        """What the client would sample with."""
        told = {name: body[name] for name in IMPOSED if body.get(name) is not None}
        for name in told.keys() - {"logit_bias", "seed"}:
            number(body, name, least=-2, most=_LARGEST, whole=name == "top_k")
        number(body, "seed", least=-_LARGEST, most=_LARGEST)
        biases = told.get("logit_bias", {})
        if not isinstance(biases, Mapping) or not all(key.isdecimal() and len(key) < 10 for key in biases):
            raise GatewayRequestError("logit_bias must be an object from token ids to numbers", param="logit_bias")
        for key in biases:
            number(biases, key, least=-100, most=100, whole=False)
        return told

    @staticmethod
    def max_tokens(body: Mapping[str, Any]) -> int | None:
        """The limit by whichever of its names the client uses."""
        names = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")
        return next((value for name in names if (value := number(body, name, least=1)) is not None), None)


def list_of_models(roles: Mapping[str, LLM], name: str, *, since: datetime) -> dict[str, Any]:
    """The models of a rollout as both SDKs read them, or one of them by its ``name``."""
    cards = [
        {
            "id": llm.model,
            "object": "model",
            "created": int(since.timestamp()),
            "owned_by": "agl-slime",
            "type": "model",
            "display_name": llm.model,
            "created_at": since.isoformat(timespec="seconds"),
        }
        for llm in {llm.model: llm for llm in roles.values()}.values()
    ]
    if name:
        return {**cards[0], "id": name}
    return {"object": "list", "data": cards, "has_more": False, "first_id": None, "last_id": None}


def parsed_body(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except ValueError as error:
        try:  # some clients send text that is cut within a character, which no tokenizer reads
            body = orjson.loads(HALF_A_CHARACTER.sub("\ufffd", json.dumps(json.loads(raw), ensure_ascii=False)))
        except (ValueError, RecursionError):
            raise GatewayRequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise GatewayRequestError(f"the body must be a JSON object, got {type(body).__name__}", code="invalid_json")
    return body
