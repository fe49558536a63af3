"""The group pipeline: from the items of a group to data that is fit to train on.

Meta information over everything, then per group: is it complete and valid, which items are usable, normalise, pad.
Valid groups are among the finished ones and finished ones among all; a finished group leaves the buffer, with its items
or with the reason why not. Nothing here waits, stores or locks; the clock is the caller's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agl_slime.buffer import stages
from agl_slime.buffer.settings import PipelineSettings
from agl_slime.buffer.stages import Item
from agl_slime.errors import ConfigError
from agl_slime.groups.normalize import all_equal

Stage = Callable[..., Any]

# The names under which a generator may bring its own stages, as slime documents them.
STAGE_NAMES = ("get_group_data_meta_info", "is_valid_group", "filter_item", "normalize_group_data", "pad_group_data")
# The one function that slime's own buffer calls in the place of the last three.
TRANSFORM_NAME = "transform_group"

# Reasons why a finished group, or an item of a used one, is not trained on.
REASON_TIMEOUT = "timeout"
REASON_INVALID = "invalid_group"
REASON_FILTERED = "too_few_valid_items"
REASON_ZERO_VARIANCE = "zero_variance"
REASON_STAGE_ERROR = "stage_error"
REASON_ITEM_FILTERED = "filtered_item"
REASON_SURPLUS = "surplus_item"

# What a stage may take after the data.
_PASSED = frozenset({"group_size", "min_valid_group_size", "task_type"})


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A group that leaves the buffer: with ``data`` to train on, or refused for ``reason`` (a short word; ``detail`` is
    the sentence). ``item_reasons`` has one entry per item: ``""`` for the ones that are used, else why not."""

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


class _RefusedError(Exception):
    """The group is not used: reason and detail."""


class GroupPipeline:
    """The five stages under one set of settings. A stage that ``functions``, such as the names of a module, does not
    have under its documented name has its default.

    A stage takes its documented arguments, or only the first ones: ``filter_item(item)`` and ``filter_item(item,
    task_type)`` both do. ``is_valid_group`` may answer with one bool for both questions, as the generators in slime's
    repository do. ``transform_group((instance_id, items), task_type)`` takes the place of the last three stages, as in
    slime's own buffer: what it returns is delivered. Raises ``ConfigError`` where one of those is there, too.
    """

    def __init__(
        self, functions: Mapping[str, Any] | None = None, *, settings: PipelineSettings, task_type: str = ""
    ) -> None:
        self.settings = settings
        self._task_type = task_type
        given = functions or {}
        own: dict[str, Stage] = {name: stage for name in STAGE_NAMES if callable(stage := given.get(name))}
        if callable(transform := given.get(TRANSFORM_NAME)) and (beside := own.keys() & set(STAGE_NAMES[2:])):
            raise ConfigError(f"{TRANSFORM_NAME} takes the place of {', '.join(sorted(beside))}; leave one out")
        self._transform = _trimmed(transform) if callable(transform) else None
        marks = {"reward_range": settings.reward_range}
        defaults: dict[str, Stage] = {
            **vars(stages),
            "filter_item": partial(stages.filter_item, **marks),
            "normalize_group_data": partial(stages.normalize_group_data, **marks),
        }
        chosen = [_trimmed(own.get(name, defaults[name])) for name in STAGE_NAMES]
        self._meta_info, self._is_valid, self._filter, self._normalize, self._pad = chosen
        self.custom_meta_info = "get_group_data_meta_info" in own
        self.custom_validity = "is_valid_group" in own

    def meta_info(self, items: Iterable[Item]) -> dict[str, Any]:
        """Stage 1 over these items; a custom stage that raises is reported under ``error``, beside the default's."""
        data: dict[Any, list[Item]] = {}
        for item in items:
            data.setdefault(item["instance_id"], []).append(dict(item))
        try:
            return dict(self._meta_info(data))
        except Exception as error:  # a stage of somebody else's must not stop the batch
            told = f"get_group_data_meta_info raised {type(error).__name__}: {error}"
            return {**stages.get_group_data_meta_info(data), "error": told}

    def finish(self, instance_id: Any, items: Iterable[Item], *, idle_s: float) -> FinishedGroup | None:
        """Stages 2 to 5 for a group, ``idle_s`` seconds after its last item; ``None`` while it is to wait for more."""
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
                told = f"{len(items)} of {settings.group_size} items, at least {needed} valid ones are needed"
                raise _RefusedError(REASON_INVALID if done else REASON_TIMEOUT, told)
            if self._transform is not None:
                return self._transformed(self._transform, instance_id, items)
            return self._use(instance_id, items, late=not done)
        except _RefusedError as refusal:
            return FinishedGroup.refused(len(items), *refusal.args)
        except Exception as error:  # one group that breaks a stage is recorded; the others go on
            return FinishedGroup.refused(len(items), REASON_STAGE_ERROR, f"{type(error).__name__}: {error}")

    def _judge(self, instance_id: Any, items: list[Item], needed: int) -> tuple[bool, bool]:
        answer = self._is_valid((instance_id, items), needed, self._task_type)
        valid, done = answer if isinstance(answer, tuple) else (answer, answer)
        return bool(valid), bool(done) or bool(valid)  # valid groups are among the finished ones

    def _use(self, instance_id: Any, items: list[Item], *, late: bool) -> FinishedGroup:
        settings = self.settings
        size = settings.group_size
        reasons = ["" if self._filter(item, self._task_type) else REASON_ITEM_FILTERED for item in items]
        kept = [at for at, reason in enumerate(reasons) if not reason]
        needed = settings.items_for(settings.min_valid_item_size_ratio)
        if late:
            needed = max(needed, settings.items_for(settings.min_timeout_group_size_ratio))
        if len(kept) < needed:
            told = f"{len(kept)} of {size} items are valid, {needed} are needed"
            raise _RefusedError(REASON_TIMEOUT if late else REASON_FILTERED, told)
        rewards = [reward for at in kept if (reward := stages.numeric_reward(items[at])) is not None]
        if settings.drop_zero_variance and len(rewards) == len(kept) > 1 and all_equal(rewards):
            raise _RefusedError(REASON_ZERO_VARIANCE, f"all {len(kept)} rewards are {rewards[0]}")
        for at in kept[size:]:
            reasons[at] = REASON_SURPLUS
        _, normalized = self._normalize((instance_id, [items[at] for at in kept[:size]]))
        _, padded = self._pad((instance_id, list(normalized)), size)
        return FinishedGroup(self._checked(padded, "the stages"), reasons)

    def _transformed(self, transform: Stage, instance_id: Any, items: list[Item]) -> FinishedGroup:
        _, made = transform((instance_id, [dict(item) for item in items]), self._task_type)
        made = self._checked(list(made), TRANSFORM_NAME)
        used = {item.get("uid") for item in made}
        known = used.intersection(item.get("uid") for item in items)  # none: it names them anew
        return FinishedGroup(
            made, ["" if not known or item.get("uid") in known else REASON_ITEM_FILTERED for item in items]
        )

    def _checked(self, items: list[Item], source: str) -> list[Item]:
        """What is delivered must be trainable, whoever wrote the stages."""
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
    """``function``, called with as many positional arguments as it takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature takes what it is given
        return function
    count = 0
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            return function
        own = parameter.default is not parameter.empty and parameter.name not in _PASSED
        if own or parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break  # a setting of the stage's own, such as `epsilon`, keeps its default
        count += 1
    return lambda *args: function(*args[:count])
