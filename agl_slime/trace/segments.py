"""Turns of one rollout as token sequences to train on.

The rule that is kept here: each sampled token is under mask 1 in exactly one segment, at the place where it was
sampled. A turn whose prompt begins with all that a segment holds goes on in that segment, and what the prompt adds
(observations, template) gets mask 0. Any other turn starts a segment of its own, whose whole prompt is context with
mask 0: what was sampled in it earlier trains where it was sampled first.

Whoever made the prompts has said what each goes on from (``Turn.base_turn``). Turns that others recorded do not say it:
their prompts are compared with all turns before them, and forks are told apart by tokens and text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from agl_slime.errors import TraceError
from agl_slime.tokens.codec import LogProbArray, TokenArray, common_prefix
from agl_slime.tokens.forks import ForkReason, contains, rendering_drift
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
    """A segment while turns are added to it."""

    fork_reason: ForkReason | None
    placements: list[Placement] = field(default_factory=list)
    length: int = 0

    def add(self, placement: Placement) -> None:
        self.placements.append(placement)
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
    known = _bases_by_links(turns)
    segments: list[_Open] = []
    placed: dict[int, tuple[_Open, Placement]] = {}  # turn -> where it is trained
    search = _Search(turns, placed, tokenizer)
    for index, turn in enumerate(turns):
        if not len(turn.response_ids):
            continue
        if not len(turn.prompt_ids):
            raise TraceError(
                f"turn {index} has an empty prompt; training needs at least one token before the first sampled one"
            )
        bases = search.bases(index) if known is None else known[index]
        at_end = (placed[base] for base in bases if placed[base][0].length == placed[base][1].end)
        segment, _ = next(at_end, (None, None))
        if segment is None:
            reason = None
            if segments:
                reason = search.fork_reason(index) if known is None else turn.fork or ForkReason.BRANCH
            segment = _Open(reason)
            segments.append(segment)
        placement = Placement(index, len(turn.prompt_ids), turn.length)
        segment.add(placement)
        placed[index] = (segment, placement)
    closed = (segment.close(turns, untrained) for segment in segments)
    return [segment for segment in closed if segment is not None]


def _bases_by_links(turns: Sequence[Turn]) -> list[list[int]] | None:
    """Of each turn, the nearest one that its prompt wholly begins with, as the turns themselves say (``base_turn``);
    ``None`` when one does not say, or what it says is not so."""
    bases: list[list[int]] = []
    for index, turn in enumerate(turns):
        at, kept = turn.base_turn, turn.kept_tokens
        base = turns[at] if at is not None and at < index else None
        if index and (base is None or not _begins_alike(turn, base, kept)):
            return None
        if base is not None and turn.fork is None and kept < base.length:
            return None
        while base is not None and (kept < base.length or not len(base.response_ids)):
            kept, at = min(kept, base.kept_tokens), base.base_turn
            base = None if at is None else turns[at]
        bases.append([] if base is None or at is None else [at])
    return bases


def _begins_alike(turn: Turn, base: Turn, kept: int) -> bool:
    n = len(base.prompt_ids)
    same_prompt = np.array_equal(turn.prompt_ids[: min(n, kept)], base.prompt_ids[:kept])
    return same_prompt and np.array_equal(turn.prompt_ids[n:kept], base.response_ids[: max(0, kept - n)])


# -- turns that others recorded --------------------------------------------------------------------------------------


class _Search:
    """What the prompts of foreign spans go on from, found by their tokens, and why they do not go on."""

    def __init__(
        self,
        turns: Sequence[Turn],
        placed: Mapping[int, tuple[_Open, Placement]],
        tokenizer: ChatTokenizer | None,
    ) -> None:
        self._turns = turns
        self._placed = placed  # the turns to search, and their segments
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def bases(self, index: int) -> list[int]:
        """The longest turns that the prompt wholly begins with, the latest first."""
        prompt = self._turns[index].prompt_ids.tobytes()
        begun = [at for at in self._placed if prompt.startswith(self._tokens(at))]
        longest = max((len(self._tokens(at)) for at in begun), default=0)
        return [at for at in reversed(begun) if len(self._tokens(at)) == longest]

    def fork_reason(self, index: int) -> ForkReason:
        """See ``ForkReason`` for the classes."""
        prompt = self._turns[index].prompt_ids
        shared = {at: common_prefix(np.frombuffer(self._tokens(at), np.int32), prompt) for at in self._placed}
        longest = max(shared.values())
        if longest == len(prompt):
            return ForkReason.BRANCH
        kept = next((self._placed[base][1].end for base in self.bases(index)), 0)  # so far it holds whole turns
        rest = prompt[kept:]
        # the sampled answers that the most recent conversation through this place holds after it
        latest = self._tokens(max(at for at in shared if shared[at] == longest))
        held = (at for at in self._placed if latest.startswith(self._tokens(at)))
        lost = sorted((self._placed[at][1] for at in held), key=lambda at: (at.end, -at.turn)) if longest else []
        lost = [at for at in lost if at.end > longest]
        if lost:
            if self._tokenizer is not None:
                drift = rendering_drift(self._turns[lost[0].turn].token_ids[kept:], rest, self._tokenizer)
                if drift is not None:
                    return drift
            replaced = kept <= lost[0].start <= longest  # the prompt of that answer, then something else in its place
            if replaced or any(contains(rest, self._turns[at.turn].response_ids) for at in lost):
                return ForkReason.EDITED_HISTORY
        return ForkReason.BRANCH if kept else ForkReason.NEW_CONTEXT

    def _tokens(self, index: int) -> bytes:
        if index not in self._bytes:
            self._bytes[index] = self._turns[index].token_ids.tobytes()
        return self._bytes[index]
