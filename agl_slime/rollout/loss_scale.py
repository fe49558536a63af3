"""Which answers of a rollout are trained.

``default`` trains every sampled answer, ``last_round`` the last one. A function is asked for each answer:
``scale(messages, turn, turns)`` gets the conversation up to and including that answer, its number from 1 and how many
there are, and returns 1 to train it or 0 to keep it as context. Other weights are refused: slime's loss masks are 0 or
1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, cast

from agl_slime.errors import ConfigError
from agl_slime.trace.turn import Turn

LossScale: TypeAlias = Literal["default", "last_round"] | Callable[[list[dict[str, Any]], int, int], float]


def check_loss_scale(scale: Any) -> LossScale:
    """``scale``, or ``ConfigError`` when it is none."""
    if scale in ("default", "last_round") or callable(scale):
        return cast(LossScale, scale)
    raise ConfigError(
        f"loss_scale must be 'default', 'last_round' or a function of (messages, turn, turns), got {scale!r}"
    )


def untrained_turns(scale: LossScale, turns: Sequence[Turn]) -> tuple[int, ...]:
    """Indices of the turns that are context only. ``ConfigError`` when that would be all of them, or a function returns
    another weight than 0 or 1."""
    sampled = [
        index for index, turn in enumerate(turns) if len(turn.response_ids)
    ]  # an answer that was aborted at once has nothing to train
    if scale == "default" or not sampled:
        return ()
    if scale == "last_round":
        return tuple(sampled[:-1])
    assert callable(scale)
    left_out = []
    for index in sampled:
        messages = [*map(dict, turns[index].messages or ()), {"role": "assistant", "content": turns[index].text}]
        weight = scale(messages, index + 1, len(turns))
        if weight not in (0, 1):
            raise ConfigError(
                f"loss_scale must return 0 or 1 for each answer, got {weight!r} for answer {index + 1}; weights cannot be trained with"
            )
        if not weight:
            left_out.append(index)
    if len(left_out) == len(sampled):
        raise ConfigError(f"loss_scale leaves all {len(sampled)} answers of a rollout out; nothing could be trained")
    return tuple(left_out)
