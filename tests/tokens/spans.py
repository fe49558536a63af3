"""Turns and a reward as the spans of one attempt."""

from typing import Any

from agl_slime.support.agl import Span, emit_reward
from agl_slime.tokens import attributes as names
from agl_slime.tokens.span_codec import TurnEncoder
from agl_slime.tokens.turn import Turn


def attempt_spans(
    turns: list[Turn],
    reward: Any = 1.0,
    *,
    rollout_id: str = "ro-1",
    attempt_id: str = "at-1",
    began: float = 100.0,
    **emit: Any,
) -> list[Span]:
    """One span per turn and one for the reward, without it for ``None``; ``emit`` goes to ``emit_reward``."""
    encoder = TurnEncoder()
    written = [(names.GENERATE_SPAN, encoder.encode(turn)) for turn in turns]
    if reward is not None:
        core = emit_reward(reward, propagate=False, **emit)
        written.append((core.name, dict(core.attributes)))
    return [
        Span.from_attributes(
            name=name,
            attributes=attributes,
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=i + 1,
            start_time=began + i,
            end_time=began + i + 0.5,
        )
        for i, (name, attributes) in enumerate(written)
    ]
