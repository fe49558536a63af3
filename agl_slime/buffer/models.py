"""Pydantic models of HTTP requests, and their errors as one sentence."""

from __future__ import annotations

import sys
import uuid
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, Field, StrictBool, StrictInt, StringConstraints, ValidationError
from pydantic_core import PydanticCustomError

from agl_slime.errors import BufferRequestError
from agl_slime.support.http import json_bytes, parse_json

Model = TypeVar("Model", bound=BaseModel)


def _whole(value: Any) -> Any:
    """A whole float as an integer, as in JSON Schema, up to 2**53, beyond which floats are inexact."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 else value


def _refuse_huge(value: Any) -> Any:
    """``value``; raises for an integer that no float can hold."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise PydanticCustomError("beyond_floats", "a reward must be at most 1e18 in size")
    return value


Whole = BeforeValidator(_whole)
# SQLite's JSON cuts texts at NUL
Name = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[^\x00]*$")]
Id = Name | Annotated[StrictInt, Field(ge=-(2**63), le=2**63 - 1), Whole]
Digits = Annotated[str, StringConstraints(pattern="^[1-9][0-9]{0,5}$")]


class ItemFields(BaseModel):
    """The item of a finished rollout. Further fields are allowed, and delivered unchanged. A repeated write of a
    ``uid`` (generated if missing) is stored once; items of one ``instance_id`` form groups, which ``group_id``
    separates, as for several epochs. An item without a ``reward`` is never trained on; ``error`` in ``extra_info``
    marks failures."""

    uid: Id | None = None
    instance_id: Id
    group_id: Id | None = None
    messages: list[dict[str, Any]]
    reward: Annotated[Any, BeforeValidator(_refuse_huge)] = None
    extra_info: dict[str, Any] | None = None
    task_type: str | None = None


class ReadRequest(BaseModel):
    """A reader's request for whole groups, at least one, of at most ``batch_size`` items. A repeated ``request_id``
    gets the same answer again; ``ack`` names earlier ones whose items the reader has saved."""

    batch_size: Annotated[StrictInt, Field(ge=1, le=2**53), Whole] | None = None
    task_type: str | None = None
    request_id: Name | None = None
    ack: list[str] | None = None


class StartRequest(BaseModel):
    """The fields of ``/start_rollout`` that the buffer reads; the generator gets the whole payload. slime's client
    sends ``num_repeat_per_sample``, the items per group, as text; ``skip_instance_ids`` and ``trained_groups`` (the
    ``buffer_group`` of items) were trained on before; ``fresh`` drops the items of earlier runs, as each evaluation
    does."""

    task_type: str
    num_repeat_per_sample: Annotated[StrictInt, Field(ge=1, le=1_000_000), Whole] | Digits = 1
    input_file: str | None = None
    sampling_params: dict[str, Any] | None = None
    skip_instance_ids: list[Id] | None = None
    trained_groups: list[str] | None = None
    fresh: StrictBool = False

    @property
    def group_size(self) -> int:
        return int(self.num_repeat_per_sample)


@dataclass(frozen=True, slots=True)
class WrittenItem:
    """A checked item. ``key`` identifies its group within the task type, ``body`` is its JSON."""

    uid: str
    instance_id: Any
    key: str
    reward: float | None
    body: bytes


def check(model: type[Model], value: Any, subject: str = "the body") -> Model:
    """``value`` as the model; raises ``BufferRequestError`` naming the field, its value and the expected type."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        place = errors[0]["loc"]
        if not place:
            raise BufferRequestError(f"{subject} is of type {type(value).__name__}; expected an object") from None
        field = ".".join(str(part) for index, part in enumerate(place) if index == 0 or isinstance(part, int))
        if errors[0]["type"] == "missing":
            raise BufferRequestError(f"{subject} has no {field}") from None
        expected = " or ".join(dict.fromkeys(entry["msg"] for entry in errors if entry["loc"][:1] == place[:1]))
        raise BufferRequestError(f"{subject}: {field} is {shortened(errors[0]['input'])}; {expected}") from None


def parse_body(raw: bytes) -> Any:
    """``support.http.parse_json`` that raises ``BufferRequestError``."""
    try:
        return parse_json(raw)
    except ValueError as error:
        raise BufferRequestError(str(error)) from error


def parse_items(raw: bytes) -> tuple[str | None, list[WrittenItem]]:
    """The task type in a body of one or several items, and the items, ready to store."""
    value = parse_body(raw)
    if isinstance(value, list):
        if not value:
            raise BufferRequestError("the list of items is empty; send at least one item")
        checked = [(check(ItemFields, item, f"item {number}"), item, None) for number, item in enumerate(value)]
    else:
        checked = [(check(ItemFields, value, "item 0"), value, raw)]
    tasks = {fields.task_type for fields, _, _ in checked}
    if len(tasks) > 1:
        raise BufferRequestError(f"the items name several values of task_type ({tasks}); send one per request")
    return tasks.pop(), [_written(*entry) for entry in checked]


def _written(fields: ItemFields, item: dict[str, Any], raw: bytes | None) -> WrittenItem:
    if fields.uid is None:
        item["uid"], raw = uuid.uuid4().hex, None
    key = fields.instance_id if fields.group_id is None else [fields.instance_id, fields.group_id]
    return WrittenItem(
        uid=str(item["uid"] if fields.uid is None else fields.uid),
        instance_id=fields.instance_id,
        key=orjson.dumps(key).decode(),
        reward=float(fields.reward) if isinstance(fields.reward, (int, float)) else None,
        body=json_bytes(item) if raw is None else raw,
    )
