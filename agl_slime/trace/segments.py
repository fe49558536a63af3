"""Turns of one rollout as token sequences to train on.

The rule that is kept here: each sampled token is under mask 1 in exactly one segment, at the place where it was
sampled. A turn whose prompt begins with all that a segment holds goes on in that segment, and what the prompt adds
(observations, template) gets mask 0. Any other turn starts a segment of its own, whose whole prompt is context with
mask 0: what was sampled in it earlier trains where it was sampled first.

The held sequences are in a radix tree, so a turn costs one comparison of its prompt with the path it follows, not with
every turn before it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from agl_slime.errors import TraceError
from agl_slime.tokens.codec import LogProbArray, TokenArray
from agl_slime.tokens.forks import ForkReason, contains, rendering_drift
from agl_slime.trace.token_tree import Match, TokenTree
from agl_slime.trace.turn import Turn

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

    @property
    def prompt_length(self) -> int:
        return self.placements[0].start


@dataclass
class _Open:
    """A segment while turns are added to it; ``history`` also lists the sampled responses that its first prompt holds
    as context."""

    fork_reason: ForkReason | None
    history: list[Placement]
    placements: list[Placement] = field(default_factory=list)
    length: int = 0

    def add(self, placement: Placement) -> None:
        self.placements.append(placement)
        self.history.append(placement)
        self.length = placement.end

    def close(self, turns: Sequence[Turn], untrained: Collection[int]) -> Segment | None:
        """The segment; ``None`` when none of its turns is trained. What follows the last trained one is context for
        nothing and left out."""
        placements = [at for at in self.placements if at.turn not in untrained]
        if not placements:
            return None
        tokens = turns[placements[-1].turn].token_ids  # the last turn's prompt holds all that came before it
        mask = np.zeros(len(tokens), dtype=np.int8)
        log_probs: LogProbArray | None = np.zeros(len(tokens), dtype=np.float32)
        for at in placements:
            mask[at.start : at.end] = 1
            own = turns[at.turn].log_probs
            if own is None:
                log_probs = None
            elif log_probs is not None:
                log_probs[at.start : at.end] = own
        return Segment(tokens, mask, log_probs, tuple(placements), self.fork_reason)


def merge_turns(
    turns: Sequence[Turn], tokenizer: ChatTokenizer | None = None, *, untrained: Collection[int] = ()
) -> list[Segment]:
    """The segments of a rollout, in the order in which they began; turns that sampled nothing contribute nothing.

    ``tokenizer`` is used to tell the reason of a fork, never to make tokens. The turns whose indices are ``untrained``
    are context only; a segment of such turns alone is left out. Raises ``TraceError`` when a turn has an empty prompt.
    """
    tree = TokenTree()
    segments: list[_Open] = []
    placed: dict[int, tuple[_Open, Placement]] = {}  # turn -> where it is trained
    for index, turn in enumerate(turns):
        if not len(turn.response_ids):
            continue
        if not len(turn.prompt_ids):
            raise TraceError(
                f"turn {index} has an empty prompt; training needs at least one token before the first sampled one"
            )
        match = tree.match(turn.prompt_ids)
        segment = _continued(match, placed)
        if segment is None:
            reason = _fork_reason(turn.prompt_ids, match, turns, placed, tokenizer) if segments else None
            segment = _Open(reason, history=[placed[owners[-1]][1] for _, owners in match.ends])
            segments.append(segment)
        placement = Placement(index, len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.response_ids))
        segment.add(placement)
        placed[index] = (segment, placement)
        if index + 1 < len(turns):
            tree.insert(turn.token_ids, index)
    closed = (segment.close(turns, untrained) for segment in segments)
    return [segment for segment in closed if segment is not None]


def _continued(match: Match, placed: dict[int, tuple[_Open, Placement]]) -> _Open | None:
    """The segment whose whole content is the longest held turn that the prompt begins with."""
    if match.ends:
        length, owners = match.ends[-1]
        for owner in reversed(owners):
            segment = placed[owner][0]
            if segment.length == length:
                return segment
    return None


def _fork_reason(
    prompt: TokenArray,
    match: Match,
    turns: Sequence[Turn],
    placed: dict[int, tuple[_Open, Placement]],
    tokenizer: ChatTokenizer | None,
) -> ForkReason:
    """Why ``prompt`` leaves what is held after ``match.length`` tokens; see ``ForkReason`` for the classes."""
    if match.length == len(prompt):
        return ForkReason.BRANCH
    kept = match.ends[-1][0] if match.ends else 0  # so far the prompt holds whole turns as they were
    rest = prompt[kept:]
    # the sampled answers that the most recent conversation through this place holds after it
    lost = [] if match.latest is None else [at for at in placed[match.latest][0].history if at.end > match.length]
    if lost:
        if tokenizer is not None:
            drift = rendering_drift(turns[lost[0].turn].token_ids[kept:], rest, tokenizer)
            if drift is not None:
                return drift
        replaced = kept <= lost[0].start <= match.length  # the prompt of that answer, then something else in its place
        if replaced or any(contains(rest, turns[at.turn].response_ids) for at in lost):
            return ForkReason.EDITED_HISTORY
    return ForkReason.BRANCH if kept else ForkReason.NEW_CONTEXT
