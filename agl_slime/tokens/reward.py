"""Rewards of a rollout and its turns, from Agent Lightning's spans; without a finite number an error, never 0.0."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from numbers import Real
from typing import TYPE_CHECKING, Any

from agl_slime.errors import RewardError
from agl_slime.tokens import attributes as names
from agl_slime.tokens.span_codec import is_packed, parse_json, turn_numbers

REWARD_PREFIX = "agentlightning.reward"
_LINK_PREFIX = "agentlightning.link"
UNNAMED = "primary"
"""Agent Lightning's name of a reward that is a plain number."""
OTHER_NAMES = "other_rewards"
"""The reason of a rollout whose rewards have other names than the one that the run trains on."""
LARGEST = 1e18
"""The largest size of a reward: the square of a larger one leaves float32 in the loss."""

if TYPE_CHECKING:
    from agl_slime.support.agl import Span


@dataclass(frozen=True)
class Reward:
    """A reward: ``primary`` is trained on; ``named`` has all dimensions, the primary one first; ``missing`` names the
    others, which are ``None`` or no usable number."""

    primary: float
    named: Mapping[str, float]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TurnReward(Reward):
    """The reward of a ``target``, shared by its turns: ``role:NAME``, or ``turn:N`` with the first of them."""

    target: str


def reward_number(value: Any, subject: str) -> float:
    """``value`` (also of numpy or torch) as a number. ``None``, text, NaN, infinities and numbers beyond ``LARGEST``
    raise ``RewardError``, which begins with ``subject``, such as "the judge returned": a reward is never invented."""
    if value is None:
        raise RewardError(f"{subject} None; expected a number.", reason="no_reward")
    item = getattr(value, "item", None)
    if item is not None and not isinstance(value, (str, bytes)):
        try:
            value = item()  # one-element arrays and tensors
        except (RuntimeError, ValueError, TypeError) as error:
            raise RewardError(f"{subject} {value!r}, which is not one number.") from error
    if not isinstance(value, Real):
        raise RewardError(f"{subject} {value!r:.80} of type {type(value).__name__}; expected a number.")
    try:
        number = float(value)
    except OverflowError:  # an integer above the largest float
        number = math.inf
    if not abs(number) <= LARGEST:
        raise RewardError(f"{subject} {number!r}; a reward must be a finite number of at most {LARGEST:g} in size.")
    return number


def check_reward(value: Any, *, source: str) -> dict[str, float | RewardError]:
    """The named rewards of ``value`` in its order, each a number or what is wrong with it; a plain number is named
    ``primary``. Raises ``RewardError`` without any number: which of several is trained on, the reader knows."""
    if not isinstance(value, Mapping):
        return {UNNAMED: reward_number(value, f"{source} returned")}
    if not value:
        raise RewardError(f"{source} returned an empty dict; name at least one reward.")
    check_names(value, source)
    named = {name: _checked(item, f"{source}[{name!r}] returned") for name, item in value.items()}
    errors = [item for item in named.values() if isinstance(item, RewardError)]
    if len(errors) == len(named):
        raise errors[0]
    return named


def check_names(names: Iterable[Any], source: str) -> None:
    """Raise ``RewardError`` for a name that is no text."""
    for name in names:
        if not isinstance(name, str):
            raise RewardError(f"{source} has a reward named {name!r:.80}; a name must be a text")


def posted_reward(value: Any) -> dict[str, float | RewardError]:
    """``check_reward`` of a JSON value, in which ``true`` is no number."""
    named = value.items() if isinstance(value, Mapping) else [(UNNAMED, value)]
    return check_reward({name: repr(item) if isinstance(item, bool) else item for name, item in named}, source="reward")


def split_missing(named: Mapping[str, float | RewardError]) -> tuple[dict[str, float], dict[str, str]]:
    """The numbers of ``named``, and the attribute of their reward span that says what is wrong with the others."""
    numbers: dict[str, float] = {n: item for n, item in named.items() if not isinstance(item, RewardError)}
    if len(numbers) == len(named):
        return numbers, {}
    reason = {name: [item.reason, str(item)] if isinstance(item, RewardError) else None for name, item in named.items()}
    return numbers, {names.REWARDS_MISSING: json.dumps(reason)}


def select_reward(
    named: Mapping[str, float | RewardError], *, first: str, reward_key: str | None = None, run_key: str | None = None
) -> Reward:
    """The reward of ``named`` that is trained on: ``reward_key``, else the run's ``run_key``, else ``first``. A plain
    number is the run's reward under any name. Raises ``RewardError``."""
    key = reward_key or (run_key if run_key is not None and [*named] != [UNNAMED] else first)
    if key not in named:
        reason = "" if reward_key else f"; a run trains on one name, and its first rollout has {key!r}"
        only = f"only {', '.join(sorted(named))}{reason}"
        raise RewardError(f"the rollout has no reward named {key!r}, {only}", reason=OTHER_NAMES)
    if isinstance(primary := named[key], RewardError):
        raise primary
    numbers, _ = split_missing(named)
    return Reward(primary, {key: primary, **numbers}, tuple(name for name in named if name not in numbers))


def read_reward(spans: Sequence[Span], *, reward_key: str | None = None, run_key: str | None = None) -> Reward:
    """The final reward in ``spans``, the spans of one attempt in the order of their sequence ids.

    ``primary`` is the result of ``agentlightning.find_final_reward``: the first dimension of the last reward span; with
    ``reward_key`` or ``run_key`` see ``select_reward``. ``named`` has the last value of every dimension. Raises
    ``RewardError`` with reason ``no_reward`` without a reward, ``other_rewards`` without one of that name,
    ``bad_reward`` for one that is no usable number. Rewards linked to spans count only if all rewards are linked.
    """
    from agl_slime.support.agl import find_final_reward  # imports for seconds

    pairs = [(span, reward_dimensions(span)) for span in spans]
    unlinked = [(span, dimensions) for span, dimensions in pairs if not (dimensions and _is_linked(span))]
    if any(dimensions for _, dimensions in unlinked):
        pairs = unlinked
    named: dict[str, float | RewardError] = {}
    for _, dimensions in pairs:  # a replaced reward must be a number, too
        named |= {name: item for name, item in dimensions.items() if not isinstance(named.get(name), RewardError)}
    for span, dimensions in reversed(pairs):
        if dimensions:
            return select_reward(named, first=next(iter(dimensions)), reward_key=reward_key, run_key=run_key)
        # rewards without names, of the deprecated @reward under AgentOps; on all spans it would read each one again
        if (old := find_final_reward([span])) is not None:
            named[UNNAMED] = _checked(old, "the reward is")
            return select_reward(named, first=UNNAMED, reward_key=reward_key, run_key=run_key)
    raise RewardError("the rollout has no reward: emit one, or return a number", reason="no_reward")


def read_turn_rewards(
    spans: Sequence[Span], *, reward_key: str | None = None, run_key: str | None = None
) -> dict[int, TurnReward]:
    """The rewards of single turns, by the index of the turn among the model calls in ``spans``. Agent Lightning's
    ``make_link_attributes`` links reward spans to calls by ``gen_ai.response.id``, ``span_id`` or any attribute, such
    as ``agl_slime.role``. The last reward of a turn counts; a key selects its dimension if it has that name. Raises
    ``RewardError`` for one that is no finite number or linked to no span; a role of the gateway may have no call."""
    linked = [(span, dimensions) for span in spans if (dimensions := reward_dimensions(span)) and _is_linked(span)]
    if not linked:
        return {}
    from agl_slime.support.agl import extract_links_from_attributes, query_linked_spans

    numbers = turn_numbers(spans)
    rewards: dict[int, TurnReward] = {}
    for span, dimensions in linked:
        links = extract_links_from_attributes(span.attributes)
        target = {link.key_match: link.value_match for link in links}
        matches = query_linked_spans(spans, links)
        calls = (call.attributes for call in matches if is_packed(call.attributes))
        turns = [numbers[str(call.get(names.STREAM)), call[names.TURN_INDEX]] for call in calls]
        of_role = [*target] == [names.ROLE]
        if not matches and not of_role:
            raise RewardError(f"a reward is linked to {target}, which no span of the rollout matches")
        if not matches and target[names.ROLE] not in (roles := _roles(spans)):
            available = f"and this rollout has {', '.join(roles) or 'none'}"
            raise RewardError(f"a reward is linked to the role {target[names.ROLE]!r}, {available}")
        key = next((key for key in (reward_key, run_key) if key in dimensions), None)
        reward = select_reward(dimensions, first=next(iter(dimensions)), reward_key=key)
        role = f"role:{target[names.ROLE]}" if of_role else ""
        rewards.update(dict.fromkeys(turns, TurnReward(reward.primary, reward.named, target=role)))
    first_turns: dict[int, int] = {}  # of each reward, without turns that a later reward replaced
    for turn, reward in sorted(rewards.items(), key=lambda item: item[0]):
        first = first_turns.setdefault(id(reward), turn)
        rewards[turn] = replace(reward, target=reward.target or f"turn:{first}")
    return rewards


def _roles(spans: Sequence[Span]) -> list[str]:
    """The roles of the gateway and of the calls."""
    listed = next((roles for span in reversed(spans) if (roles := span.attributes.get(names.ROLES))), "[]")
    called = (str(role) for span in spans if (role := span.attributes.get(names.ROLE)))
    return sorted({*parse_json(str(listed), names.ROLES), *called})


def _is_linked(span: Span) -> bool:
    return any(key.startswith(_LINK_PREFIX) for key in span.attributes)


def reward_dimensions(span: Span) -> dict[str, float | RewardError]:
    """The names of a reward span in order, each with its number or what is wrong with it; empty for other spans."""
    attributes = span.attributes
    if not any(key.startswith(REWARD_PREFIX) for key in attributes):
        return {}
    numbers: dict[str, float | RewardError] = {}
    for index in count():
        if (name := attributes.get(f"{REWARD_PREFIX}.{index}.name")) is None:
            break
        value = attributes.get(f"{REWARD_PREFIX}.{index}.value")
        with suppress(ValueError):
            value = float(value) if isinstance(value, str) else value
        numbers[str(name)] = _checked(value, f"the reward {str(name)!r} is")
    if not numbers:
        raise RewardError("a reward span has no named numbers")
    order = parse_json(str(attributes.get(names.REWARDS_MISSING, "{}")), names.REWARDS_MISSING)
    errors = {name: RewardError(reason[1], reason=reason[0]) for name, reason in order.items() if reason is not None}
    return {name: errors.get(name, 0.0) for name in order} | numbers


def _checked(value: Any, subject: str) -> float | RewardError:
    try:
        return reward_number(value, subject)
    except RewardError as error:
        return error
