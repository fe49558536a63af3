"""Turns of one rollout as token sequences to train on.

Invariant: each sampled token is under mask 1 in exactly one segment, at the place where it was sampled. A turn whose
prompt begins with all tokens of a segment extends that segment, and the tokens that the prompt adds (observations,
template) get mask 0. Any other turn starts a segment, whose whole prompt is context with mask 0: tokens sampled earlier
train where they were sampled first.

Extension is decided by tokens alone. The reason of a fork comes from the maker of the prompt (``Turn.fork``); for turns
of other recorders, which lack it, forks are classified by tokens and text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agl_slime.engine.client.replay import Nucleus
from agl_slime.errors import TraceError
from agl_slime.tokens.codec import LogProbArray, TokenArray
from agl_slime.tokens.forks import ForkReason, classify_fork
from agl_slime.tokens.images import Image
from agl_slime.tokens.replay import experts_of, nucleus_of
from agl_slime.tokens.turn import Turn

if TYPE_CHECKING:
    from agl_slime.tokens.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Placement:
    """The response of turn number ``turn`` is tokens ``start`` (inclusive) to ``end`` (exclusive) of its segment."""

    turn: int
    start: int
    end: int


@dataclass(frozen=True)
class Segment:
    """One token sequence: ``token_ids`` with ``loss_mask`` (1 where this segment trains a sampled token) and
    ``log_probs`` (0.0 where the mask is 0), all of one length.

    ``placements`` are the turns trained here, in order; the first starts where the response starts. ``log_probs`` is
    ``None`` when a turn has none. ``fork_reason`` is ``None`` for the segment that the rollout began with.
    """

    token_ids: TokenArray
    loss_mask: npt.NDArray[np.int8]
    log_probs: LogProbArray | None
    placements: tuple[Placement, ...]
    fork_reason: ForkReason | None
    experts: npt.NDArray[Any] | None = None
    """``[tokens - 1, layers, experts per token]``."""
    nucleus: Nucleus | None = None
    """The nucleus of the tokens from ``prompt_length`` on."""
    images: tuple[Image, ...] = ()
    """In the order of their tokens."""

    @property
    def prompt_length(self) -> int:
        return self.placements[0].start


@dataclass
class _Open:
    """A segment to which turns are added; ``token_bytes`` are all its tokens as bytes, ``images`` the images in
    them."""

    fork_reason: ForkReason | None
    token_bytes: bytes = b""
    images: tuple[Image, ...] = ()
    placements: list[Placement] = field(default_factory=list)

    def close(self, turns: Sequence[Turn], untrained: Collection[int]) -> Segment | None:
        """The segment; ``None`` when none of its turns is trained. Tokens after the last trained turn are left out:
        they are context for nothing."""
        placements = [place for place in self.placements if place.turn not in untrained]
        if not placements:
            return None
        tokens = turns[placements[-1].turn].token_ids  # the last turn's prompt has all tokens before it
        mask = np.zeros(len(tokens), dtype=np.int8)
        log_probs: LogProbArray | None = np.zeros(len(tokens), dtype=np.float32)
        for place in placements:
            mask[place.start : place.end] = 1
            of_turn = turns[place.turn].log_probs
            if of_turn is None:
                log_probs = None
            elif log_probs is not None:
                log_probs[place.start : place.end] = of_turn
        experts, nucleus = experts_of(turns, placements[-1].turn), None
        if experts is None and any(turn.experts is not None for turn in turns):
            raise TraceError(f"turn {placements[-1].turn} has no routed experts for some of its tokens")
        if any(turn.nucleus is not None for turn in turns):
            first = placements[0].start
            offsets = [(place.turn, place.start - first) for place in placements]
            nucleus = nucleus_of(turns, offsets, len(tokens) - first)
            if nucleus is None:
                raise TraceError("a trained turn has no nucleus although others of its rollout have one")
        images = turns[placements[-1].turn].images
        return Segment(tokens, mask, log_probs, tuple(placements), self.fork_reason, experts, nucleus, images)

    def is_extended_by(self, prompt: bytes, images: tuple[Image, ...]) -> bool:
        """Whether a prompt begins with this segment. Images are compared, too: all images of one size
        have the same tokens."""
        return prompt.startswith(self.token_bytes) and images[: len(self.images)] == self.images


def merge_turns(
    turns: Sequence[Turn], tokenizer: ChatTokenizer | None = None, *, untrained: Collection[int] = ()
) -> list[Segment]:
    """The segments of a rollout, in the order in which they began; turns without sampled tokens add nothing.

    A prompt that begins with several segments extends the longest, among equal ones the latest. ``tokenizer`` is used
    to classify a fork, never to make tokens. The turns whose indices are ``untrained`` are context only; a segment of
    such turns alone is left out. Raises ``TraceError`` when a turn has an empty prompt.
    """
    segments: list[_Open] = []
    for index, turn in enumerate(turns):
        if not len(turn.response_ids):
            continue
        if not len(turn.prompt_ids):
            raise TraceError(
                f"turn {index} has an empty prompt; training needs at least one token before the first sampled one"
            )
        prompt = turn.prompt_ids.tobytes()
        extended = [segment for segment in reversed(segments) if segment.is_extended_by(prompt, turn.images)]
        segment = max(extended, key=lambda segment: len(segment.token_bytes), default=None)
        if segment is None:
            segment = _Open(classify_fork(turn, turns[:index], tokenizer) if segments else None)
            segments.append(segment)
        segment.token_bytes, segment.images = prompt + turn.response_ids.tobytes(), turn.images
        segment.placements.append(Placement(index, len(turn.prompt_ids), turn.length))
    closed = (segment.close(turns, untrained) for segment in segments)
    return [segment for segment in closed if segment is not None]
