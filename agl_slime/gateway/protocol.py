"""``Protocol``: reads requests, writes answers (whole or as events) and errors in the form of one API."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.calls import IMPOSED, Call, CallResult, number
from agl_slime.gateway.messages import HALF_A_CHARACTER, Message
from agl_slime.support.agl_types import LLM
from agl_slime.support.http import is_too_deep, json_bytes, json_value
from agl_slime.tokens.thinking import ThinkingRequest

Decode = Callable[[list[int]], str]
Histories = Mapping[str, list[Message]]
"""Histories that a request may continue, by the id of the last answer of each."""
NO_HISTORIES: Histories = MappingProxyType({})

_IGNORED = """
    metadata client_metadata user store service_tier speed safety_identifier moderation diagnostics rid betas container
    inference_geo prompt_cache_key prompt_cache_options prompt_cache_retention cache_control verbosity
    separate_reasoning include_reasoning prediction truncation context_management max_tool_calls parallel_tool_calls
"""
IGNORED = frozenset(_IGNORED.split())
"""Fields of any protocol that do not change the answer here."""
_OBJECTS = ("chat_template_kwargs", "stream_options", "text", "output_config")
_THINKING = ("reasoning_effort", "reasoning", "thinking", "output_config")
_SWITCHES = {"enabled": True, "adaptive": True, "disabled": False}
_UNDECIDED = ("auto", "default", "")  # efforts that leave it to the model
_MOST_LOG_PROBS = 100  # top log-probs of a position
_LARGEST = 2**31 - 1  # number that an engine takes
_LARGEST_SEED = 2**63 - 1  # TRL sends seeds of 63 bits
_LISTS = ("tools", "include")
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def sse(data: Any, event: str | None = None) -> bytes:
    return (f"event: {event}\n".encode() if event else b"") + b"data: " + json_bytes(data) + b"\n\n"


def token_name(ids: list[int]) -> str:
    """A token in log-probs under vLLM's ``return_tokens_as_token_ids``."""
    return f"token_id:{ids[0]}"


def openai_error(refusal: GatewayRequestError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code}}


class Stream(ABC):
    """An answer as events. ``texts`` is the part of each choice that was sent; ``head`` has the id and the model."""

    def __init__(self, body: Mapping[str, Any], head: CallResult, decode: Decode) -> None:
        self.body, self.head, self.decode = body, head, decode
        self.texts: list[tuple[str, str]] = [("", "")] * len(head.choices)

    def update(self, texts: list[tuple[str, str]]) -> bytes:
        """The events for the text that was added since the last call."""
        events = b""
        for index, (now, sent) in enumerate(zip(texts, self.texts, strict=True)):
            added = [new[len(old) :] if new.startswith(old) else "" for new, old in zip(now, sent, strict=True)]
            self.texts[index] = tuple(old + part for old, part in zip(sent, added, strict=True))  # type: ignore[assignment]
            if any(added):
                events += b"".join(self.delta(index, *added))
        return events

    def finish(self, result: CallResult) -> bytes:
        """The events for the text not sent yet, and for the end."""
        rest = self.update([(choice.reasoning, choice.content) for choice in result.choices])
        return rest + b"".join(self.end(result))

    @abstractmethod
    def begin(self) -> Iterator[bytes]: ...

    @abstractmethod
    def delta(self, index: int, reasoning: str, content: str) -> Iterator[bytes]: ...

    @abstractmethod
    def end(self, result: CallResult) -> Iterator[bytes]: ...

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def error(self, refusal: GatewayRequestError) -> bytes:
        return sse(openai_error(refusal)) + b"data: [DONE]\n\n"


class Protocol(ABC):
    """The translation of one API. Fields are honoured, ignored (docs/any-agent.md lists them) or refused."""

    honoured: frozenset[str]
    ignored: frozenset[str] = IGNORED
    prefix: str = ""
    """Start of the ids of answers."""
    list_field: str = ""
    """Field with the conversation, to which clients append messages from request to request."""
    orphan_error: str = "{}"
    """Error for a tool's result without a call."""
    calls_in_text: bool = False
    """Agents that declare no tools may write calls as text."""
    counts_only: bool = False
    """The answer is the number of tokens of the prompt."""

    @abstractmethod
    def read(self, body: Mapping[str, Any], histories: Histories = NO_HISTORIES) -> Call:
        """The call that a request's body makes. Raises ``GatewayRequestError``."""

    def check_headers(self, headers: Mapping[str, str]) -> None:  # noqa: B027
        """Hook: raises ``GatewayRequestError`` for headers whose request cannot be read from its body alone."""

    def read_more(self, items: list[Any], histories: Histories) -> list[Message]:
        """The messages that ``read`` would add for ``items`` after a message of ``list_field`` that is no answer; none
        if a body is always read whole. Raises ``GatewayRequestError``, also for items that change more."""
        return []

    def kept_items(self, items: list[Any]) -> list[Any]:
        """The items of ``list_field`` that writing an answer needs."""
        return []

    def count_answer(self, ids: list[int]) -> dict[str, Any]:
        """The answer of a protocol with ``counts_only``, from the prompt's ids."""
        return {"input_tokens": len(ids)}

    @abstractmethod
    def answer(self, body: Mapping[str, Any], result: CallResult, decode: Decode) -> dict[str, Any]: ...

    @abstractmethod
    def stream(self, body: Mapping[str, Any], head: CallResult, decode: Decode) -> Stream: ...

    def error(self, refusal: GatewayRequestError) -> dict[str, Any]:
        return openai_error(refusal)

    def check_fields(self, body: Mapping[str, Any]) -> None:
        """Refuse fields that are neither honoured nor ignored, unless empty, and fields of a wrong type."""
        for name in sorted(body.keys() - self.honoured - self.ignored):
            if body[name] not in (None, False, "", [], {}):
                raise GatewayRequestError(f"{name} is not supported here", code="unsupported_parameter", param=name)
        for names, kind, expected in ((_OBJECTS, dict, "an object"), (_LISTS, list, "a list")):
            for name in names:
                if body.get(name) and not isinstance(body[name], kind):
                    raise GatewayRequestError(f"{name} must be {expected}, got {body[name]!r:.80}", param=name)
        if is_too_deep(body.get("chat_template_kwargs")):
            message = "chat_template_kwargs is nested more than 250 deep"
            raise GatewayRequestError(message, param="chat_template_kwargs")

    def call_fields(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a ``Call`` that have one name in every API."""
        return {
            "model": str(body.get("model") or ""),
            "requested": self.requested_sampling(body),
            "template_kwargs": body.get("chat_template_kwargs") or {},
            "thinking": self.thinking_request(body),
            "stream": bool(body.get("stream")),
        }

    @staticmethod
    def requested_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling parameters that the client wants."""
        requested = {name: body[name] for name in IMPOSED if body.get(name) is not None}
        for name in requested.keys() - {"logit_bias", "seed"}:
            number(body, name, least=-2, most=_LARGEST, whole=name == "top_k")
        number(body, "seed", least=-_LARGEST_SEED, most=_LARGEST_SEED)
        biases = requested.get("logit_bias", {})
        if not isinstance(biases, Mapping) or not all(key.isdecimal() and len(key) < 10 for key in biases):
            raise GatewayRequestError("logit_bias must be an object from token ids to numbers", param="logit_bias")
        for key, bias in biases.items():
            number({f"logit_bias.{key}": bias}, f"logit_bias.{key}", least=-100, most=100, whole=False)
        return requested

    @staticmethod
    def thinking_request(body: Mapping[str, Any]) -> ThinkingRequest:
        """The fields that switch thinking or set its effort; of several the first counts."""
        on: bool | None = None
        budget, switch_field, level, level_field = 0, "", "", ""
        for name in _THINKING:
            value = body.get(name)
            value = value if isinstance(value, Mapping) else {"effort": value}
            effort, tokens = value.get("effort"), value.get("budget_tokens", value.get("max_tokens"))
            switch = _SWITCHES.get(str(value.get("type")), value.get("enabled"))
            if type(tokens) is int and switch is not False:
                switch = tokens > 0
            if on is None and isinstance(switch, bool):
                on, budget, switch_field = switch, tokens if type(tokens) is int else 0, name
            if not level and isinstance(effort, str) and effort not in _UNDECIDED:
                level, level_field = effort, name
        return ThinkingRequest(on, level, budget, switch_field, level_field)

    @staticmethod
    def max_tokens(body: Mapping[str, Any]) -> int | None:
        """The token limit, under any of its names."""
        names = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")
        return next((value for name in names if (value := number(body, name, least=1)) is not None), None)

    @staticmethod
    def top_log_probs(body: Mapping[str, Any], name: str = "top_logprobs") -> int:
        return number(body, name, most=_MOST_LOG_PROBS) or 0


def list_of_models(roles: Mapping[str, LLM], name: str, *, since: datetime) -> dict[str, Any]:
    """The models of a rollout in a form that both SDKs read, or the one with this ``name``."""
    head = {"object": "model", "created": int(since.timestamp()), "owned_by": "agl-slime"}
    head |= {"type": "model", "created_at": since.isoformat(timespec="seconds")}
    models = dict.fromkeys(llm.model for llm in roles.values())
    cards = [{"id": model, "display_name": model, **head} for model in models]
    if name:
        return {**cards[0], "id": name}
    return {"object": "list", "data": cards, "has_more": False, "first_id": None, "last_id": None}


def parsed_body(raw: bytes) -> dict[str, Any]:
    try:
        body = json_value(raw)
    except ValueError as error:
        try:  # some clients send text cut within a character, which no tokenizer reads
            body = json_value(HALF_A_CHARACTER.sub("\ufffd", json.dumps(json.loads(raw), ensure_ascii=False)).encode())
        except (ValueError, RecursionError):
            raise GatewayRequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise GatewayRequestError(f"the body must be a JSON object, got {type(body).__name__}", code="invalid_json")
    return body
