"""The choice of a rollout's answers that are trained.

``loss_scale`` "default" trains every sampled answer, "last_round" the last one. A function ``scale(messages, turn,
turns)`` gets the conversation up to and including an answer, the answer's number from 1 and the number of turns, and
returns 1 to train it or 0 to keep it as context. Other weights are refused: slime's loss masks are 0 or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from agl_slime.errors import ConfigError
from agl_slime.tokens.turn import Turn

LossScale: TypeAlias = Literal["default", "last_round"] | Callable[[list[dict[str, Any]], int, int], float]


def check_loss_scale(scale: Any) -> None:
    """Raise ``ConfigError`` when ``scale`` is no loss scale."""
    if scale not in ("default", "last_round") and not callable(scale):
        raise ConfigError(f"loss_scale must be 'default', 'last_round' or a function, got {scale!r}")


def untrained_turns(scale: LossScale, turns: Sequence[Turn]) -> tuple[int, ...]:
    """Indices of the turns that are context only. Raises ``ConfigError`` when ``scale`` leaves no turn to train,
    returns another weight than 0 or 1, or is no loss scale."""
    sampled = [index for index, turn in enumerate(turns) if len(turn.response_ids)]
    if scale == "default":
        return ()
    if scale == "last_round":
        return tuple(sampled[:-1])
    check_loss_scale(scale)
    assert callable(scale)
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
