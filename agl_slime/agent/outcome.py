"""Checks of a rollout's reward, and the choice of its answers that are trained.

``loss_scale`` "default" trains every sampled answer, "last_round" the last one. A function ``scale(messages, turn,
turns)`` gets the conversation up to and including an answer, the answer's number from 1 and the number of turns, and
returns 1 to train it or 0 to keep it as context. Other weights are refused: slime's loss masks are 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, TypeAlias

from agl_slime.errors import ConfigError, RewardError
from agl_slime.tokens.turn import Turn

LossScale: TypeAlias = Literal["default", "last_round"] | Callable[[list[dict[str, Any]], int, int], float]


def check_reward(value: Any, *, source: str) -> dict[str, float]:
    """The named rewards of ``value``, the primary first; a plain number (also of numpy or torch) is named ``primary``.
    ``None``, strings, NaN and infinities raise ``RewardError``: a reward is never invented. Only the primary reward is
    required: other rewards may be ``None`` and are left out (``missing_rewards``)."""
    if isinstance(value, Mapping):
        if not value:
            raise RewardError(f"{source} returned an empty dict; name at least one reward.")
        present = [(name, item) for at, (name, item) in enumerate(value.items()) if item is not None or not at]
        return {str(name): _number(item, f"{source}[{name!r}]") for name, item in present}
    return {"primary": _number(value, source)}


def missing_rewards(value: Any) -> list[str]:
    """The names of the rewards that are ``None``."""
    return [str(name) for name, item in value.items() if item is None] if isinstance(value, Mapping) else []


def _number(value: Any, source: str) -> float:
    if value is None:
        raise RewardError(f"{source} returned None; expected a number.", reason="no_reward")
    item = getattr(value, "item", None)
    if item is not None and not isinstance(value, (str, bytes)):
        try:
            value = item()  # one-element arrays and tensors
        except (RuntimeError, ValueError, TypeError) as error:
            raise RewardError(f"{source} returned {value!r}, which is not one number.") from error
    if not isinstance(value, Real):
        raise RewardError(f"{source} returned {value!r} of type {type(value).__name__}; expected a number.")
    try:
        number = float(value)
    except OverflowError:  # an integer above the largest float
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{source} returned {number!r}; a reward must be a finite number.")
    return number


def untrained_turns(scale: LossScale, turns: Sequence[Turn]) -> tuple[int, ...]:
    """Indices of the turns that are context only. Raises ``ConfigError`` when ``scale`` leaves no turn to train,
    returns another weight than 0 or 1, or is no loss scale."""
    sampled = [index for index, turn in enumerate(turns) if len(turn.response_ids)]
    if scale == "default":
        return ()
    if scale == "last_round":
        return tuple(sampled[:-1])
    if not callable(scale):
        raise ConfigError(f"loss_scale must be 'default', 'last_round' or a function, got {scale!r}")
    left_out = []
    for index in sampled:
        messages = [*map(dict, turns[index].messages or ()), {"role": "assistant", "content": turns[index].text}]
        weight = scale(messages, index + 1, len(turns))
        if weight not in (0, 1):
            raise ConfigError(f"loss_scale must return 0 or 1 for each answer, got {weight!r} for answer {index + 1}")
        if not weight:
            left_out.append(index)
    if sampled and len(left_out) == len(sampled):
        raise ConfigError(f"loss_scale leaves all {len(sampled)} answers of a rollout out; nothing could be trained")
    return tuple(left_out)
