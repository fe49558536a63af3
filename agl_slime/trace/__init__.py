"""Spans and tokens: how model calls are written to spans, and how the spans of a rollout become slime Samples."""

from agl_slime.tokens.forks import ForkReason
from agl_slime.trace.converter import (
    Conversion,
    ConversionOptions,
    convert_rollout,
    rollout_to_sample,
    rollout_to_samples,
)
from agl_slime.trace.reward import Reward, read_reward
from agl_slime.trace.segments import Segment, merge_turns
from agl_slime.trace.span_codec import TurnEncoder, decode_turns
from agl_slime.trace.spans import read_turns, spans_of_attempt
from agl_slime.trace.trajectory import Trajectory
from agl_slime.trace.turn import Turn

__all__ = [
    "Conversion",
    "ConversionOptions",
    "ForkReason",
    "Reward",
    "Segment",
    "Trajectory",
    "Turn",
    "TurnEncoder",
    "convert_rollout",
    "decode_turns",
    "merge_turns",
    "read_reward",
    "read_turns",
    "rollout_to_sample",
    "rollout_to_samples",
    "spans_of_attempt",
]
