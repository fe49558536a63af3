"""The group pipeline: from the items of a group to training data.

Stages: meta information over all items, then per group validity, filter of items, normalisation, padding. A finished
group leaves the buffer, either valid, with its items, or refused for a reason. Nothing here waits, stores or locks; the
caller passes the time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from agl_slime.buffer import stages
from agl_slime.buffer.settings import PipelineSettings
from agl_slime.buffer.stages import Item
from agl_slime.data.normalize import all_equal
from agl_slime.errors import ConfigError

Stage = Callable[..., Any]

# Documented names of a generator's custom stages.
STAGE_NAMES = ("get_group_data_meta_info", "is_valid_group", "filter_item", "normalize_group_data", "pad_group_data")
# A function that slime's own buffer calls instead of the last three.
TRANSFORM_NAME = "transform_group"

# Reasons not to train on a finished group, or on an item of a valid one.
REASON_TIMEOUT = "timeout"
REASON_INVALID = "invalid_group"
REASON_FILTERED = "too_few_valid_items"
REASON_ZERO_VARIANCE = "zero_variance"
REASON_STAGE_ERROR = "stage_error"
REASON_ITEM_FILTERED = "filtered_item"
REASON_SURPLUS = "surplus_item"

# Parameters of a stage beside the data.
_PASSED = frozenset({"group_size", "min_valid_group_size", "task_type"})


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A group that leaves the buffer with ``data`` to train on, or refused for ``reason`` (a metric name) and
    ``detail`` (a sentence). ``item_reasons``: per item ``""``, or the reason not to use it."""

    data: Sequence[Item]
    item_reasons: Sequence[str]
    reason: str = ""
    detail: str = ""

    @property
    def valid(self) -> bool:
        return not self.reason

    @classmethod
    def refused(cls, size: int, reason: str, detail: str) -> FinishedGroup:
        return cls((), [reason] * size, reason, detail)


_ODD_KEYS_AND_ARRAYS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


class _RefusedError(Exception):
    """A group is refused; the arguments are reason and detail."""


class GroupPipeline:
    """The five stages with their settings. ``functions``, such as the names of a module, may replace stages by their
    documented names.

    A stage takes its documented arguments, or only the first ones: ``filter_item(item)`` and ``filter_item(item,
    task_type)`` both work. ``is_valid_group`` may return one bool for valid and finished, as the generators in slime's
    repository do. ``transform_group((instance_id, items), task_type)`` replaces the last three stages, as in slime's
    own buffer: its result is delivered. Raises ``ConfigError`` when it comes together with one of these.
    """

    def __init__(
        self, functions: Mapping[str, Any] | None = None, *, settings: PipelineSettings, task_type: str = ""
    ) -> None:
        self.settings = settings
        self._task_type = task_type
        functions = functions or {}
        custom: dict[str, Stage] = {name: stage for name in STAGE_NAMES if callable(stage := functions.get(name))}
        if callable(transform := functions.get(TRANSFORM_NAME)) and (beside := custom.keys() & set(STAGE_NAMES[2:])):
            raise ConfigError(f"{TRANSFORM_NAME} replaces {', '.join(sorted(beside))}; leave one out")
        self._transform = _trimmed(transform) if callable(transform) else None
        reward_range = {"reward_range": settings.reward_range}
        defaults: dict[str, Stage] = {
            **vars(stages),
            "filter_item": partial(stages.filter_item, **reward_range),
            "normalize_group_data": partial(stages.normalize_group_data, **reward_range),
        }
        chosen = [_trimmed(custom.get(name, defaults[name])) for name in STAGE_NAMES]
        self._meta_info, self._is_valid, self._filter, self._normalize, self._pad = chosen
        self.custom_meta_info = "get_group_data_meta_info" in custom
        self.custom_validity = "is_valid_group" in custom

    def meta_info(self, items: Iterable[Item]) -> dict[str, Any]:
        """The result of stage 1 for these items. When a custom stage raises: the default's, with the error under
        ``error``."""
        data: dict[Any, list[Item]] = {}
        for item in items:
            data.setdefault(item["instance_id"], []).append(dict(item))
        try:
            return orjson.loads(orjson.dumps(dict(self._meta_info(data)), default=repr, option=_ODD_KEYS_AND_ARRAYS))
        except Exception as error:  # a custom stage must not stop the batch
            message = f"get_group_data_meta_info raised {type(error).__name__}: {error}"
            return {**stages.get_group_data_meta_info(data), "error": message}

    def finish(self, instance_id: Any, items: Iterable[Item], *, idle_s: float) -> FinishedGroup | None:
        """Stages 2 to 5 for a group, ``idle_s`` seconds after its last item; ``None`` while it waits for more items."""
        settings = self.settings
        items = [dict(item) for item in items]
        try:
            needed = settings.min_valid_group_size
            valid, done = self._judge(instance_id, items, needed)
            if not done:
                if idle_s <= settings.group_timeout_seconds:
                    return None
                needed = settings.items_for(settings.min_timeout_group_size_ratio)
                valid, _ = self._judge(instance_id, items, needed)
            if not valid:
                detail = f"{len(items)} of {settings.group_size} items, at least {needed} valid ones are needed"
                raise _RefusedError(REASON_INVALID if done else REASON_TIMEOUT, detail)
            if self._transform is not None:
                return self._transformed(self._transform, instance_id, items)
            return self._use(instance_id, items, late=not done)
        except _RefusedError as refusal:
            return FinishedGroup.refused(len(items), *refusal.args)
        except Exception as error:  # a group that breaks a stage does not stop the others
            return FinishedGroup.refused(len(items), REASON_STAGE_ERROR, f"{type(error).__name__}: {error}")

    def _judge(self, instance_id: Any, items: list[Item], needed: int) -> tuple[bool, bool]:
        answer = self._is_valid((instance_id, items), needed, self._task_type)
        valid, done = answer if isinstance(answer, tuple) else (answer, answer)
        return bool(valid), bool(done) or bool(valid)  # a valid group is finished

    def _use(self, instance_id: Any, items: list[Item], *, late: bool) -> FinishedGroup:
        settings = self.settings
        size = settings.group_size
        reasons = ["" if self._filter(item, self._task_type) else REASON_ITEM_FILTERED for item in items]
        valid = [index for index, reason in enumerate(reasons) if not reason]
        needed = settings.items_for(settings.min_valid_item_size_ratio)
        if late:
            needed = max(needed, settings.items_for(settings.min_timeout_group_size_ratio))
        if len(valid) < needed:
            detail = f"{len(valid)} of {size} items are valid, {needed} are needed"
            raise _RefusedError(REASON_TIMEOUT if late else REASON_FILTERED, detail)
        rewards = [reward for index in valid if (reward := stages.numeric_reward(items[index])) is not None]
        if settings.drop_zero_variance and len(rewards) == len(valid) > 1 and all_equal(rewards):
            raise _RefusedError(REASON_ZERO_VARIANCE, f"all {len(valid)} rewards are {rewards[0]}")
        for index in valid[size:]:
            reasons[index] = REASON_SURPLUS
        _, normalized = self._normalize((instance_id, [items[index] for index in valid[:size]]))
        _, padded = self._pad((instance_id, list(normalized)), size)
        return FinishedGroup(self._checked(padded, "the stages"), reasons)

    def _transformed(self, transform: Stage, instance_id: Any, items: list[Item]) -> FinishedGroup:
        _, made = transform((instance_id, [dict(item) for item in items]), self._task_type)
        made = self._checked(list(made), TRANSFORM_NAME)
        used = {item.get("uid") for item in made}
        same = used.intersection(item.get("uid") for item in items)  # empty when the transform assigns new uids
        reasons = ["" if not same or item.get("uid") in same else REASON_ITEM_FILTERED for item in items]
        return FinishedGroup(made, reasons)

    def _checked(self, items: list[Item], source: str) -> list[Item]:
        """``items`` if they are trainable; custom stages may return anything."""
        size = self.settings.group_size
        if not items or len(items) % size:
            raise ValueError(f"{source} returned {len(items)} items; expected a multiple of the group size {size}")
        for item in items:
            if not isinstance(item.get("messages"), list):
                raise ValueError(f"{source} returned messages {item.get('messages')!r}; expected a list")
            if stages.numeric_reward(item) is None:
                raise ValueError(f"{source} returned reward {item.get('reward')!r}; expected a finite number")
        return items


def _trimmed(function: Stage) -> Stage:
    """``function``, wrapped to receive only as many positional arguments as it takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return function
    count = 0
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            return function
        is_setting = parameter.default is not parameter.empty and parameter.name not in _PASSED
        if is_setting or parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break  # a setting of the stage, such as `epsilon`, keeps its default
        count += 1
    return lambda *args: function(*args[:count])
