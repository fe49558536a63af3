"""Spans and tokens: how model calls are written to spans, and how the spans of a rollout become slime Samples."""

from agl_slime.trace.turn import Turn, TurnEncoder, decode_turns

__all__ = ["Turn", "TurnEncoder", "decode_turns"]
