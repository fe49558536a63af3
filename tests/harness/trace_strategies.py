"""Random conversations as token ids: every way in which an agent's next prompt can relate to what it has seen
before."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import strategies as st

from agl_slime.engine.client.generation import WeightSpan
from agl_slime.tokens.codec import common_prefix
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.turn import Turn

# A small vocabulary makes chance overlaps (equal responses, equal observations) common; real ids appear as well.
token = st.one_of(st.integers(0, 4), st.integers(0, 2**31 - 1))
log_prob = st.floats(min_value=-30, max_value=0, width=32)

# Finish reason, whether the request had an id, how often it was resumed, whether it names weight versions: drawn
# together, for a conversation has hundreds of draws, and they are most of what these tests cost.
circumstances = st.sampled_from(
    list(itertools.product(("stop", "length", "abort", "tool_calls"), (False, True), (0, 1, 2), (False, True)))
)


@st.composite
def _weight_spans(draw: st.DrawFn, n: int) -> tuple[WeightSpan, ...]:
    cuts = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))})
    return tuple(WeightSpan(str(i), start, end) for i, (start, end) in enumerate(itertools.pairwise(cuts)))


@st.composite
def _messages(draw: st.DrawFn, earlier: list[Turn]) -> list[dict[str, str]] | None:
    if draw(st.booleans()):
        return None
    held = list(draw(st.sampled_from(earlier)).messages or ()) if earlier and draw(st.booleans()) else []
    new = [{"role": "user", "content": text} for text in draw(st.lists(st.text(max_size=8), max_size=2))]
    return held[: draw(st.integers(0, len(held)))] + new


def _link(draw: st.DrawFn, turns: list[Turn], prompt: list[int]) -> dict[str, Any]:
    at = draw(st.integers(0, len(turns) - 1))
    held = turns[at].token_ids
    kept = common_prefix(held, np.array(prompt, dtype=np.int32))
    if not draw(st.integers(0, 3)):
        kept = draw(st.integers(0, kept))
    fork = None if kept == len(held) else draw(st.sampled_from(ForkReason))
    return {"base_turn": at, "kept_tokens": kept, "fork": fork}


@st.composite
def conversations(
    draw: st.DrawFn,
    *,
    max_turns: int = 7,
    min_response: int = 0,
    log_probs: bool = True,
    links: bool | None = None,
) -> list[Turn]:
    """Turns of one rollout: the prompt of each extends an earlier turn's end, samples an earlier prompt again, edits or
    cuts an earlier history, or is new. With ``links`` each says what it goes on from, or less than that; as foreign
    spans do not."""
    turns: list[Turn] = []
    linked = draw(st.booleans()) if links is None else links
    for index in range(draw(st.integers(1, max_turns))):
        new = draw(st.lists(token, min_size=0, max_size=6))
        kind = draw(st.sampled_from(["extend", "extend", "extend", "again", "cut", "edit", "new"])) if turns else "new"
        base = draw(st.sampled_from(turns)) if turns else None
        if kind == "new" or base is None:
            prompt = [draw(token), *new]
        elif kind == "extend":
            prompt = base.token_ids.tolist() + new
        elif kind == "again":
            prompt = base.prompt_ids.tolist()
        else:
            held = base.token_ids.tolist()
            at = draw(st.integers(1, len(held)))
            rest = held[at + draw(st.integers(0, 3)) :] if kind == "edit" else []
            prompt = held[:at] + new + rest
        response = draw(st.lists(token, min_size=min_response, max_size=6))
        finish_reason, named, resumed, changes = draw(circumstances)
        turns.append(
            Turn(
                prompt_ids=prompt,
                response_ids=response,
                log_probs=[draw(log_prob) for _ in response] if log_probs else None,
                finish_reason=finish_reason,
                weight_versions=draw(_weight_spans(len(response))) if changes else (),
                cached_tokens=draw(st.integers(0, len(prompt))),
                request_id=f"req-{index}" if named else "",
                text=draw(st.text(max_size=6)),
                messages=draw(_messages(turns)),
                latency_s=draw(st.floats(0, 10)),
                resumed=resumed,
                **(_link(draw, turns, prompt) if linked and turns else {}),
            )
        )
    return turns
