"""The OpenAPI description of the Rollout Buffer's HTTP interface."""

from __future__ import annotations

from typing import Any

from agl_slime import __version__

_ID = {
    "oneOf": [
        {"type": "string", "minLength": 1, "maxLength": 1024},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    ]
}
_OPTIONAL_ID = {"oneOf": [*_ID["oneOf"], {"type": "null"}]}

_ITEM: dict[str, Any] = {
    "type": "object",
    "description": "What a rollout ended with. More fields may be there and come out again.",
    "required": ["instance_id"],
    "properties": {
        "uid": {
            **_OPTIONAL_ID,
            "description": "Names the item; a repeated write of it is stored once. Made up when missing.",
        },
        "instance_id": {**_ID, "description": "Names the prompt: items of one instance form groups."},
        "group_id": {**_OPTIONAL_ID, "description": "Keeps groups of one instance apart."},
        "messages": {"description": "The conversation in OpenAI's format."},
        "reward": {"description": "A number; failed rollouts have one outside of the valid range."},
        "extra_info": {"description": "Whatever is to be known later."},
    },
}

_REFUSAL = {
    "type": "object",
    "required": ["success", "message"],
    "properties": {"success": {"const": False}, "message": {"type": "string"}},
}

_ANSWER = {
    "type": "object",
    "required": ["success", "message", "data"],
    "properties": {
        "success": {"type": "boolean"},
        "message": {"type": "string"},
        "data": {
            "type": "object",
            "required": ["data", "meta_info"],
            "properties": {"data": {"type": "array", "items": {"type": "object"}}, "meta_info": {}},
        },
    },
}

_REFUSALS = {
    "400": "The request cannot be used",
    "401": "The token is missing or wrong",
    "403": "Not allowed",
    "404": "There is no such task type or path",
    "405": "Not this method",
    "409": "The uid is taken by another item",
    "413": "The body is too large",
    "503": "Try again later",
}


def _content(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _operation(summary: str, answer: Any, body: Any = None, *, body_required: bool = True) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "Done", "content": _content(answer)},
            **{status: {"description": text, "content": _content(_REFUSAL)} for status, text in _REFUSALS.items()},
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": body_required, "content": _content(body)}
    return operation


def openapi_description() -> dict[str, Any]:
    """The description as served at ``/openapi.json``."""
    read_request = {
        "type": "object",
        "properties": {
            "batch_size": {
                "type": ["integer", "null"],
                "minimum": 1,
                "description": "Most items to return, in whole groups, at least one group.",
            },
            "task_type": {"type": ["string", "null"], "description": "Needed only when several task types are in use."},
            "request_id": {
                "type": ["string", "null"],
                "minLength": 1,
                "maxLength": 1024,
                "description": "Asked again, it gets the same answer again.",
            },
            "ack": {
                "type": ["array", "null"],
                "items": {"type": "string"},
                "description": "Earlier request_ids whose items are held for good.",
            },
        },
    }
    start_request = {
        "type": "object",
        "required": ["task_type"],
        "properties": {
            "task_type": {"type": "string"},
            "num_repeat_per_sample": {
                "oneOf": [
                    {"type": "integer", "minimum": 1, "maximum": 1_000_000},
                    {"type": "string", "pattern": "^[1-9][0-9]{0,5}$"},
                ]
            },
            "input_file": {"type": "string"},
            "sampling_params": {"type": ["object", "null"]},
            "skip_instance_ids": {"type": ["array", "null"], "items": {"type": ["string", "integer"]}},
            "trained_groups": {"type": ["array", "null"], "items": {"type": "string"}},
        },
    }
    started = {"type": "object", "required": ["message"], "properties": {"message": {"type": "string"}}}
    items = {"oneOf": [_ITEM, {"type": "array", "items": _ITEM, "minItems": 1}]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "agl-slime rollout buffer", "version": __version__},
        "paths": {
            "/start_rollout": {"post": _operation("Start the generator of a task type", started, start_request)},
            "/buffer/write": {"post": _operation("Write an item or a list of items", _ANSWER, items)},
            "/get_rollout_data": {
                "post": _operation("Take groups that are ready to train on", _ANSWER, read_request, body_required=False)
            },
            "/stats": {"get": _operation("Everything that is counted", {"type": "object"})},
            "/health": {"get": _operation("Whether the server runs", {"type": "object"})},
        },
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }
