"""The group pipeline: from a snapshot of groups to a batch that is fit to train on.

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

# The names under which a generator may bring its own stages, as slime documents them.
STAGE_NAMES = ("get_group_data_meta_info", "is_valid_group", "filter_item", "normalize_group_data", "pad_group_data")

# Reasons why a finished group is not trained on; a stage that breaks gives "stage_error".
REASON_TIMEOUT = "timeout"
REASON_INVALID = "invalid_group"
REASON_FILTERED = "too_few_valid_items"
REASON_ZERO_VARIANCE = "zero_variance"
REASON_STAGE_ERROR = "stage_error"
REASON_ITEM_FILTERED = "filtered_item"
REASON_SURPLUS = "surplus_item"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSnapshot:
    """A group at a moment. ``key`` tells groups of one instance apart (epochs); ``last_item_time`` is in seconds of the
    caller's clock."""

    instance_id: Any
    items: Sequence[Item]
    last_item_time: float
    key: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A group that leaves the buffer: ``valid`` with ``data`` to train on, or refused for ``reason`` (a short word;
    ``detail`` is the sentence).

    ``item_reasons`` has one entry per item of the snapshot: ``""`` for the ones that are used, else why not.
    """

    snapshot: GroupSnapshot
    valid: bool
    data: tuple[Item, ...] = ()
    reason: str = ""
    detail: str = ""
    item_reasons: tuple[str, ...] = ()
    timed_out: bool = False


Stage = Callable[..., Any]

# What a stage may take after the data.
_PASSED = frozenset({"group_size", "min_valid_group_size", "task_type"})


class GroupPipeline:
    """The five stages under one set of settings. A stage that is not given has its default.

    A stage takes its documented arguments, or only the first ones: ``filter_item(item)`` and ``filter_item(item,
    task_type)`` both do. ``is_valid_group`` may answer with one bool for both questions, as the generators in slime's
    repository do.
    """

    def __init__(
        self,
        *,
        settings: PipelineSettings,
        task_type: str = "",
        get_group_data_meta_info: Stage | None = None,
        is_valid_group: Stage | None = None,
        filter_item: Stage | None = None,
        normalize_group_data: Stage | None = None,
        pad_group_data: Stage | None = None,
    ) -> None:
        self.settings = settings
        self.task_type = task_type
        self.custom_meta_info = get_group_data_meta_info is not None
        self.custom_validity = is_valid_group is not None
        self._meta_info = _trimmed(get_group_data_meta_info or stages.get_group_data_meta_info)
        self._is_valid = _trimmed(is_valid_group or stages.is_valid_group)
        self._filter = _trimmed(filter_item or partial(stages.filter_item, reward_range=settings.reward_range))
        self._normalize = _trimmed(
            normalize_group_data or partial(stages.normalize_group_data, reward_range=settings.reward_range)
        )
        self._pad = _trimmed(pad_group_data or stages.pad_group_data)

    @classmethod
    def from_functions(
        cls, functions: Mapping[str, Stage], *, settings: PipelineSettings, task_type: str = ""
    ) -> GroupPipeline:
        """A pipeline with the stages found under their documented names; other names are ignored."""
        return cls(
            settings=settings,
            task_type=task_type,
            **{name: functions[name] for name in STAGE_NAMES if name in functions},
        )

    # -- stage by stage -----------------------------------------------------------------------------------------------

    def meta_info(self, items: Iterable[Item]) -> dict[str, Any]:
        """Stage 1 over everything that is there. What a stage of somebody else's breaks is reported under ``error``,
        beside the default's figures."""
        data: dict[Any, list[Item]] = {}
        for item in items:
            data.setdefault(item["instance_id"], []).append(dict(item))
        try:
            info = self._meta_info(data)
            if not isinstance(info, Mapping):
                raise TypeError(f"expected a dict, got {type(info).__name__}")
        except Exception as error:  # a stage of somebody else's must not stop the batch
            return {
                **stages.get_group_data_meta_info(data),
                "error": f"get_group_data_meta_info raised {type(error).__name__}: {error}",
            }
        return dict(info)

    def finish(self, snapshot: GroupSnapshot, *, now: float) -> FinishedGroup | None:
        """Stages 2 to 5 for one group; ``None`` while it is to wait for more items."""
        settings = self.settings
        items = [dict(item) for item in snapshot.items]
        timed_out = now - snapshot.last_item_time > settings.group_timeout_seconds
        try:
            needed = settings.min_valid_group_size
            valid, done = self._judge(snapshot, items, needed)
            if not done and not timed_out:
                return None
            late = not done
            if late:
                needed = settings.items_for(settings.min_timeout_group_size_ratio)
                valid, _ = self._judge(snapshot, items, needed)
            if not valid:
                reason = REASON_TIMEOUT if late else REASON_INVALID
                told = f"{len(items)} of {settings.group_size} items, at least {needed} valid ones are needed"
                return self._refused(snapshot, reason, told, late)
            return self._use(snapshot, items, late)
        except Exception as error:  # one group that breaks a stage is recorded; the others go on
            return self._refused(snapshot, REASON_STAGE_ERROR, f"{type(error).__name__}: {error}", timed_out)

    # -- internals ----------------------------------------------------------------------------------------------------

    def _judge(self, snapshot: GroupSnapshot, items: list[Item], needed: int) -> tuple[bool, bool]:
        answer = self._is_valid((snapshot.instance_id, items), needed, self.task_type)
        valid, done = answer if isinstance(answer, tuple) else (answer, answer)
        return bool(valid), bool(done) or bool(valid)  # valid groups are among the finished ones

    def _use(self, snapshot: GroupSnapshot, items: list[Item], timed_out: bool) -> FinishedGroup:
        settings = self.settings
        reasons = ["" if self._filter(item, self.task_type) else REASON_ITEM_FILTERED for item in items]
        kept = [item for item, reason in zip(items, reasons, strict=True) if not reason]
        ratios = [settings.min_valid_item_size_ratio] + ([settings.min_timeout_group_size_ratio] if timed_out else [])
        needed = settings.items_for(max(ratios))
        if len(kept) < needed:
            reason = REASON_TIMEOUT if timed_out else REASON_FILTERED
            told = f"{len(kept)} of {settings.group_size} items are valid, {needed} are needed"
            return self._refused(snapshot, reason, told, timed_out)
        if settings.drop_zero_variance and len(kept) > 1 and len({stages.numeric_reward(item) for item in kept}) == 1:
            told = f"all {len(kept)} rewards are {kept[0].get('reward')}"
            return self._refused(snapshot, REASON_ZERO_VARIANCE, told, timed_out)
        if len(kept) > settings.group_size:
            used = [at for at, reason in enumerate(reasons) if not reason]
            for at in used[settings.group_size :]:
                reasons[at] = REASON_SURPLUS
            kept = kept[: settings.group_size]
        _, normalized = self._normalize((snapshot.instance_id, kept))
        _, padded = self._pad((snapshot.instance_id, list(normalized)), settings.group_size)
        self._check(padded)
        return FinishedGroup(
            snapshot=snapshot, valid=True, data=tuple(padded), item_reasons=tuple(reasons), timed_out=timed_out
        )

    def _check(self, padded: Sequence[Item]) -> None:
        """What is handed out must be trainable, whoever wrote the stages."""
        size = self.settings.group_size
        if not padded or len(padded) % size:
            raise ValueError(f"the stages returned {len(padded)} items; expected a multiple of the group size {size}")
        for item in padded:
            if not isinstance(item.get("messages"), list):
                raise ValueError(f"the stages returned messages {item.get('messages')!r}; expected a list")
            if stages.numeric_reward(item) is None:
                raise ValueError(f"the stages returned reward {item.get('reward')!r}; expected a finite number")

    def _refused(self, snapshot: GroupSnapshot, reason: str, detail: str, timed_out: bool) -> FinishedGroup:
        reasons = tuple(reason for _ in snapshot.items)
        return FinishedGroup(
            snapshot=snapshot, valid=False, reason=reason, detail=detail, item_reasons=reasons, timed_out=timed_out
        )


def _trimmed(function: Stage) -> Stage:
    """``function``, called with as many positional arguments as it takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature takes what it is given
        return function
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return function
    count = 0
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break
        if parameter.default is not parameter.empty and parameter.name not in _PASSED:
            break  # a setting of the stage's own, such as `epsilon`, keeps its default
        count += 1

    def call(*args: Any) -> Any:
        return function(*args[:count])

    return call
