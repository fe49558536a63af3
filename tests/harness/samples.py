"""Turns, their spans, and the trained tokens of Samples."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from agl_slime.tokens.span_codec import TurnEncoder
from agl_slime.tokens.turn import Turn
from agl_slime.types import Sample


def turn(prompt_ids: Any, response_ids: Any = (7,), **fields: Any) -> Turn:
    return Turn(prompt_ids=prompt_ids, response_ids=response_ids, log_probs=[-0.5] * len(response_ids), **fields)


def encode(turns: Sequence[Turn], **options: Any) -> list[SimpleNamespace]:
    """One span per turn, with its attributes only."""
    encoder = TurnEncoder(**options)
    return [SimpleNamespace(attributes=encoder.encode(each)) for each in turns]


def trained_ids(*samples: Sample) -> list[int]:
    """The token ids under the loss masks."""
    return [t for s in samples for t, m in zip(s.tokens[-s.response_length :], s.loss_mask or [], strict=True) if m]
