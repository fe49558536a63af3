"""Events of Agent Lightning 1.0 as spans of the store and back: a reward event is a reward span, a model call's span is
a ``model_request`` event, any other event is stored whole in a span."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.agl1.schemas import ATTEMPT, EventCreate, RewardData
from agl_slime.support.agl_types import Span
from agl_slime.support.http import json_bytes
from agl_slime.tokens import attributes as names
from agl_slime.tokens.converter import untrained_turns
from agl_slime.tokens.reward import REWARD_PREFIX, UNNAMED, reward_dimensions, split_missing
from agl_slime.tokens.span_codec import decode_turns, is_packed, parse_json
from agl_slime.tokens.turn import Turn

EVENT_SPAN = "agl1.event"
_TYPE, _DATA = "agl1.event.type", "agl1.event.data"
_REWARD_SPAN = "agentlightning.annotation"


def span_of(event: EventCreate) -> tuple[str, dict[str, Any]]:
    """Name and attributes of an event's span. Raises ``ValidationError`` for a reward that is no finite number."""
    if event.event_type != "reward":
        return EVENT_SPAN, {_TYPE: event.event_type, _DATA: json_bytes(event.data).decode()}
    reward = RewardData.model_validate(event.data)
    from agl_slime.support.agl import make_link_attributes

    values, missing = split_missing(reward.named)
    attributes: dict[str, Any] = {_TYPE: "reward", _DATA: json_bytes(event.data).decode(), **missing}
    for index, (name, value) in enumerate(values.items()):
        attributes |= {f"{REWARD_PREFIX}.{index}.name": name, f"{REWARD_PREFIX}.{index}.value": value}
    if reward.response_id is not None:
        attributes |= make_link_attributes({names.RESPONSE_ID: reward.response_id})
    elif reward.role is not None:
        attributes |= make_link_attributes({names.ROLE: reward.role})
    return _REWARD_SPAN, attributes


def events_of(
    rollout_id: str, spans: Sequence[Span], *, event_type: str | None = None, triplet: bool = False
) -> list[dict[str, Any]]:
    """The events of an attempt's ``spans``, in order. ``triplet`` trims them for a trainer: ids, log-probs, rewards,
    answers that are trained, and the last of several posted calls with the same prompt."""
    turns = decode_turns(spans)
    untrained = untrained_turns(spans, turns) if triplet else ()
    numbered, served, events = iter(enumerate(turns)), set[int](), []
    for span in spans:
        if is_packed(span.attributes):
            number, turn = next(numbered)
            if number in untrained:
                continue
            served.add(len(events))
            kind, data = "model_request", _model_request(turn, span.attributes, triplet=triplet)
        elif (event := _posted_event(span)) is not None:
            kind, data = event
            data = _trim(kind, data) if triplet else data
        else:
            continue
        if event_type in (None, kind):
            timestamp = span.end_time or span.start_time or 0.0
            ids = {"rollout_id": rollout_id, "attempt_id": ATTEMPT}
            events.append({"event_type": kind, **ids, "timestamp": timestamp, "data": data})
    return _last_of_each_prompt(events, served) if triplet else events


def refused_call(path: str, refusal: GatewayRequestError, *, model: str) -> tuple[str, dict[str, Any]]:
    """Name and attributes of the span of a refused model call, in the form of 1.0's failed calls, without the request,
    which is arbitrary."""
    data = {
        "model": model,
        "path": path,
        "request": {},
        "response": {"error": {"message": str(refusal), "code": refusal.code, "param": refusal.param}},
        "server": {"model": model, "version": None},
        "http_status": refusal.status,
        "status": "error",
        "retry_count": 0,
    }
    return span_of(EventCreate(event_type="model_request", data=data))


def _posted_event(span: Span) -> tuple[str, dict[str, Any]] | None:
    """Type and data of a posted event, or of a reward from another emitter."""
    if _TYPE in span.attributes:
        return str(span.attributes[_TYPE]), parse_json(str(span.attributes[_DATA]), _DATA)
    rewards, _ = split_missing(reward_dimensions(span))
    return ("reward", {"value": rewards.get(UNNAMED, rewards) if len(rewards) == 1 else rewards}) if rewards else None


def _model_request(turn: Turn, attributes: Mapping[str, Any], *, triplet: bool) -> dict[str, Any]:
    version = turn.weight_versions[-1].version if turn.weight_versions else None
    number = int(version) if version is not None and version.isdecimal() else version
    server = {"model": attributes.get(names.REQUEST_MODEL), "version": number}
    log_probs = turn.log_probs.tolist() if turn.log_probs is not None else None
    status: dict[str, Any] = {"server": server, "http_status": 200, "status": "ok"}
    if triplet:
        ids = {"prompt_token_ids": turn.prompt_ids.tolist(), "response_token_ids": turn.response_ids.tolist()}
        return {**ids, "response_log_probs": log_probs, **status}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": turn.text},
        "token_ids": turn.response_ids.tolist(),
        "logprobs": {"content": [{"logprob": value} for value in log_probs]} if log_probs is not None else None,
        "finish_reason": turn.finish_reason,
    }
    prompt, sampled = len(turn.prompt_ids), len(turn.response_ids)
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return {
        "model": server["model"],
        "model_version": server["version"],
        "request": {"messages": list(turn.messages or ())},
        "response": {"prompt_token_ids": turn.prompt_ids.tolist(), "choices": [choice], "usage": usage},
        "latency_ms": turn.latency_s * 1000,
        "retry_count": 0,
        "usage": usage,
        "finish_reason": turn.finish_reason,
        **status,
    }


def _trim(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a posted event in ``format=triplet``."""
    if kind == "reward":
        return {"value": data.get("value"), **{name: data[name] for name in ("source", "reason") if name in data}}
    if kind != "model_request":
        return data
    response = data.get("response")
    response = response if isinstance(response, dict) else {}
    choices = response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    server = data.get("server")
    server = server if isinstance(server, dict) else {}
    trimmed = {
        "prompt_token_ids": _token_ids(response.get("prompt_token_ids")) or _token_ids(first.get("prompt_token_ids")),
        "response_token_ids": _token_ids(first.get("token_ids")),
        "response_log_probs": None,
        "server": {"model": server.get("model"), "version": server.get("version")},
    }
    return {**trimmed, **{name: data[name] for name in ("http_status", "status") if name in data}}


def _token_ids(value: Any) -> list[int]:
    """The token ids; empty if a posted event has something else."""
    return value if isinstance(value, list) and all(type(token) is int for token in value) else []


def _last_of_each_prompt(events: Sequence[dict[str, Any]], served: Collection[int]) -> list[dict[str, Any]]:
    """The events without retries among posted calls, as in 1.0. Calls without a prompt stay, and the gateway's own, at
    the places ``served``, in place of posted ones: their retries are untrained turns."""
    calls = (event["data"] if event["event_type"] == "model_request" else {} for event in events)
    prompts = [tuple(call.get("prompt_token_ids", ())) for call in calls]
    last = {prompts[n]: n for n in sorted(range(len(events)), key=served.__contains__) if prompts[n]}
    return [event for n, event in enumerate(events) if n in served or last.get(prompts[n], n) == n]
