"""The reward of a rollout and those of single turns, as Agent Lightning's reward spans carry them. A reward that is
missing or no finite number is an error, never a 0.0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agl_slime.errors import RewardError
from agl_slime.trace import attributes as names
from agl_slime.trace.span_codec import is_packed, parse_json, turn_numbers

REWARD_PREFIX = "agentlightning.reward"
_LINK_PREFIX = "agentlightning.link"
_FIRST_NAME, _FIRST_VALUE = f"{REWARD_PREFIX}.0.name", f"{REWARD_PREFIX}.0.value"

if TYPE_CHECKING:
    from agl_slime.support.agl import Span


@dataclass(frozen=True)
class Reward:
    """``primary`` is what is trained on; ``named`` are all dimensions, the primary one among them."""

    primary: float
    named: Mapping[str, float]


@dataclass(frozen=True)
class TurnReward(Reward):
    """``of`` names what was rewarded: ``role:NAME``, or ``turn:N`` by the first of the turns. Turns that share it share
    one reward."""

    of: str


def read_reward(spans: Sequence[Span], *, reward_key: str | None = None) -> Reward:
    """The final reward in ``spans``, which are those of one attempt in the order of their sequence ids.

    ``primary`` is what ``agentlightning.find_final_reward`` finds: the first dimension of the last reward span; with
    ``reward_key``, the last dimension of that name. ``named`` holds the last value of every dimension. Raises
    ``RewardError`` with reason ``no_reward`` when there is none (or none of that name), ``bad_reward`` when one is not
    a finite number. Rewards that are linked to something count only where all are.
    """
    from agl_slime.support.agl import find_final_reward  # seconds of import, which merging tokens does without

    named: dict[str, float] = {}
    primary: float | None = None
    try:
        # find_final_reward reads the same spans, each again; it is asked where the form is an older one
        read = [_dimensions(span) for span in spans]
        found = list(zip(spans, read, strict=True))
        whole = [(span, dimensions) for span, dimensions in found if not (dimensions and _is_linked(span))]
        if any(dimensions for _, dimensions in whole):
            found = whole
        for _, dimensions in found:  # also one that a later reward replaces must be a number
            named.update((name, _finite(value, name)) for name, value in dimensions)
        for span, dimensions in reversed(found):
            primary = dimensions[0][1] if dimensions else find_final_reward([span])
            if primary is not None:
                break
    except RewardError:
        raise
    except ValueError as error:  # pydantic's: a value that is no number
        raise RewardError(f"a reward span does not hold named numbers: {error}") from error
    if primary is None:
        raise RewardError("the rollout has no reward: emit one, or return a number", reason="no_reward")
    if not named:  # the forms of Agent Lightning before 0.3, which have no names
        named["primary"] = _finite(primary, "primary")
    if reward_key is None:
        return Reward(_finite(primary, "primary"), named)
    if reward_key not in named:
        known = ", ".join(sorted(named))
        raise RewardError(f"the rollout has no reward named {reward_key!r}, only {known}", reason="no_reward")
    return Reward(named[reward_key], named)


def read_turn_rewards(spans: Sequence[Span], *, reward_key: str | None = None) -> dict[int, TurnReward]:
    """The rewards of single turns, by the number of the turn among the model calls in ``spans``: those of reward spans
    that Agent Lightning's ``make_link_attributes`` has linked to the calls, by ``gen_ai.response.id``, ``span_id`` or
    any attribute, such as ``agl_slime.role``. The last one of a turn counts; ``reward_key`` picks its dimension where
    it has one of that name. Raises ``RewardError`` when one is no finite number or is linked to nothing; a role that
    the gateway knows may have made no call."""
    linked = [(span, dimensions) for span in spans if (dimensions := _dimensions(span)) and _is_linked(span)]
    if not linked:
        return {}
    from agl_slime.support.agl import extract_links_from_attributes, query_linked_spans

    numbers = turn_numbers(spans)
    found: dict[int, TurnReward] = {}
    for span, dimensions in linked:
        links = extract_links_from_attributes(span.attributes)
        said = {link.key_match: link.value_match for link in links}
        meant = query_linked_spans(spans, links)
        calls = (call.attributes for call in meant if is_packed(call.attributes))
        turns = [numbers[str(call.get(names.STREAM)), call[names.TURN_INDEX]] for call in calls]
        of_role = [*said] == [names.ROLE]
        if not meant and not of_role:
            raise RewardError(f"a reward is linked to {said}, and no span of the rollout is that")
        if not meant and said[names.ROLE] not in (known := _roles(spans)):
            told = f"and this rollout has {', '.join(known) or 'none'}"
            raise RewardError(f"a reward is linked to the role {said[names.ROLE]!r}, {told}")
        named = {name: _finite(value, name) for name, value in dimensions}
        primary = named.get(reward_key or "", named[dimensions[0][0]])
        found.update(dict.fromkeys(turns, TurnReward(primary, named, f"role:{said[names.ROLE]}" if of_role else "")))
    first: dict[int, int] = {}  # of the turns that a later reward has not taken
    for turn, reward in sorted(found.items(), key=lambda item: item[0]):
        first.setdefault(id(reward), turn)
    return {turn: replace(one, of=one.of or f"turn:{first[id(one)]}") for turn, one in found.items()}


def _roles(spans: Sequence[Span]) -> list[str]:
    """The roles that calls have, and those that they might have had."""
    listed = next((told for span in reversed(spans) if (told := span.attributes.get(names.ROLES))), "[]")
    called = (str(role) for span in spans if (role := span.attributes.get(names.ROLE)))
    return sorted({*parse_json(str(listed), names.ROLES), *called})


def _is_linked(span: Span) -> bool:
    return any(key.startswith(_LINK_PREFIX) for key in span.attributes)


def _dimensions(span: Span) -> list[tuple[str, float]]:
    """The names and values of a reward span, as ``agentlightning.get_rewards_from_span`` reads them; empty for other
    spans."""
    attributes = span.attributes
    count = sum(key.startswith(REWARD_PREFIX) for key in attributes)
    if not count:
        return []
    name, value = attributes.get(_FIRST_NAME), attributes.get(_FIRST_VALUE)
    if count == 2 and type(name) is str and type(value) is float:  # the usual one; its general reader takes 10 µs
        return [(name, value)]
    from agl_slime.support.agl import get_rewards_from_span

    return [(dimension.name, dimension.value) for dimension in get_rewards_from_span(span)]


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RewardError(f"reward {name!r} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond what a float holds
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"reward {name!r} must be finite, got {number!r}")
    return number
