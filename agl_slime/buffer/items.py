"""Items on the wire: strict JSON, checked where they enter."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import orjson

from agl_slime.buffer.errors import BufferRequestError
from agl_slime.buffer.stages import Item

_LONGEST_ID = 1024


@dataclass(frozen=True, slots=True)
class WrittenItem:
    """An item that may be stored. ``key`` names its group within the task type, ``body`` is its JSON."""

    uid: str
    instance_id: Any
    key: str
    reward: float | None
    body: bytes


def parse_json(raw: bytes) -> Any:
    """Strict JSON (no NaN, no infinities). Raises ``BufferRequestError``."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BufferRequestError(f"the body is not JSON: {error}") from error


def parse_items(raw: bytes) -> tuple[list[WrittenItem], list[Item]]:
    """The item or items of a body, ready to store and as they came."""
    value = parse_json(raw)
    if not isinstance(value, list):
        return [check_item(value, raw=raw)], [value]
    if not value:
        raise BufferRequestError("the list of items is empty; send at least one item")
    return [check_item(item, position) for position, item in enumerate(value)], value


def check_item(item: Any, position: int = 0, *, raw: bytes | None = None) -> WrittenItem:
    """Whatever a rollout ended with may be stored; it needs an ``instance_id`` to belong to a group. An item without
    ``uid`` gets one.

    Items of one instance form groups in the order in which they come. ``group_id`` (optional) keeps groups of one
    instance apart, as those of several epochs. ``raw`` is the item's own JSON, when it came alone.
    """
    if not isinstance(item, dict):
        raise BufferRequestError(
            f"item {position} is of type {type(item).__name__}; expected an object with uid, instance_id, messages, reward, extra_info"
        )
    instance_id = _identifier(item, "instance_id", position)
    if instance_id is None:
        raise BufferRequestError(
            f"item {position} has no instance_id; it is the name of the prompt that the item answers"
        )
    group_id = _identifier(item, "group_id", position)
    uid = _identifier(item, "uid", position)
    if uid is None:
        uid, raw = uuid.uuid4().hex, None
        item["uid"] = uid
    reward = item.get("reward")
    body = raw if raw is not None else orjson.dumps(item)
    return WrittenItem(
        uid=str(uid),
        instance_id=instance_id,
        key=orjson.dumps(instance_id if group_id is None else [instance_id, group_id]).decode(),
        reward=float(reward) if isinstance(reward, (int, float)) else None,
        body=body,
    )


def _identifier(item: Item, name: str, position: int) -> str | int | None:
    value = item.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        value = int(value)  # 3.0 is an integer in JSON Schema; beyond 2**53 it may have been another one
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise BufferRequestError(
            f"item {position}: {name} is of type {type(value).__name__}; expected a string or an integer"
        )
    if isinstance(value, str) and not 0 < len(value) <= _LONGEST_ID:
        raise BufferRequestError(f"item {position}: {name} has {len(value)} characters; expected 1 to {_LONGEST_ID}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise BufferRequestError(f"item {position}: {name} is {value}; expected an integer of at most 64 bits")
    return value
