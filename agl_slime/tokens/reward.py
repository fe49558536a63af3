"""The rewards of a rollout and of its turns, from Agent Lightning's reward spans. A missing or non-finite reward is an
error, never 0.0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agl_slime.errors import RewardError
from agl_slime.tokens import attributes as names
from agl_slime.tokens.span_codec import is_packed, parse_json, turn_numbers

REWARD_PREFIX = "agentlightning.reward"
_LINK_PREFIX = "agentlightning.link"
_FIRST_NAME, _FIRST_VALUE = f"{REWARD_PREFIX}.0.name", f"{REWARD_PREFIX}.0.value"

if TYPE_CHECKING:
    from agl_slime.support.agl import Span


@dataclass(frozen=True)
class Reward:
    """``primary`` is trained on; ``named`` has all dimensions, with the primary one."""

    primary: float
    named: Mapping[str, float]


@dataclass(frozen=True)
class TurnReward(Reward):
    """``of`` names the rewarded object: ``role:NAME``, or ``turn:N`` with the first of the turns. Turns with the same
    object share one reward."""

    of: str


def read_reward(spans: Sequence[Span], *, reward_key: str | None = None) -> Reward:
    """The final reward in ``spans``, the spans of one attempt in the order of their sequence ids.

    ``primary`` is the result of ``agentlightning.find_final_reward``: the first dimension of the last reward span; with
    ``reward_key``, the last dimension of that name. ``named`` has the last value of every dimension. Raises
    ``RewardError`` with reason ``no_reward`` without a reward (of that name), ``bad_reward`` for one that is not a
    finite number. Rewards linked to spans count only if all rewards are linked.
    """
    from agl_slime.support.agl import find_final_reward  # imports for seconds

    named: dict[str, float] = {}
    primary: float | None = None
    try:
        # find_final_reward would read each span again; only old forms of rewards need it
        pairs = [(span, _dimensions(span)) for span in spans]
        unlinked = [(span, dimensions) for span, dimensions in pairs if not (dimensions and _is_linked(span))]
        if any(dimensions for _, dimensions in unlinked):
            pairs = unlinked
        for _, dimensions in pairs:  # a replaced reward must be a number, too
            named.update((name, _finite(value, name)) for name, value in dimensions)
        for span, dimensions in reversed(pairs):
            primary = dimensions[0][1] if dimensions else find_final_reward([span])
            if primary is not None:
                break
    except RewardError:
        raise
    except ValueError as error:  # pydantic's: a value that is no number
        raise RewardError(f"a reward span has no named numbers: {error}") from error
    if primary is None:
        raise RewardError("the rollout has no reward: emit one, or return a number", reason="no_reward")
    if not named:  # Agent Lightning before 0.3 has no names
        named["primary"] = _finite(primary, "primary")
    if reward_key is None:
        return Reward(_finite(primary, "primary"), named)
    if reward_key not in named:
        only = ", ".join(sorted(named))
        raise RewardError(f"the rollout has no reward named {reward_key!r}, only {only}", reason="no_reward")
    return Reward(named[reward_key], named)


def read_turn_rewards(spans: Sequence[Span], *, reward_key: str | None = None) -> dict[int, TurnReward]:
    """The rewards of single turns, by the index of the turn among the model calls in ``spans``. Agent Lightning's
    ``make_link_attributes`` links reward spans to calls by ``gen_ai.response.id``, ``span_id`` or any attribute, such
    as ``agl_slime.role``. The last reward of a turn counts; ``reward_key`` selects its dimension if it has that name.
    Raises ``RewardError`` if a reward is not a finite number or its link matches no span; a role of the gateway may
    have made no call."""
    linked = [(span, dimensions) for span in spans if (dimensions := _dimensions(span)) and _is_linked(span)]
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
        named = {name: _finite(value, name) for name, value in dimensions}
        primary = named.get(reward_key or "", named[dimensions[0][0]])
        of = f"role:{target[names.ROLE]}" if of_role else ""
        rewards.update(dict.fromkeys(turns, TurnReward(primary, named, of)))
    first_turns: dict[int, int] = {}  # of each reward, without turns that a later reward replaced
    for turn, reward in sorted(rewards.items(), key=lambda item: item[0]):
        first_turns.setdefault(id(reward), turn)
    return {turn: replace(one, of=one.of or f"turn:{first_turns[id(one)]}") for turn, one in rewards.items()}


def _roles(spans: Sequence[Span]) -> list[str]:
    """The roles of the gateway and of the calls."""
    listed = next((roles for span in reversed(spans) if (roles := span.attributes.get(names.ROLES))), "[]")
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
    if count == 2 and type(name) is str and type(value) is float:  # the usual form; the general reader takes 10 µs
        return [(name, value)]
    from agl_slime.support.agl import get_rewards_from_span

    return [(dimension.name, dimension.value) for dimension in get_rewards_from_span(span)]


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RewardError(f"reward {name!r} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond a float's range
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"reward {name!r} must be finite, got {number!r}")
    return number
