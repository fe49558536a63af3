"""Random conversations as token ids: every relation of an agent's next prompt to its earlier turns."""

import itertools
from typing import Any

import numpy as np
from hypothesis import strategies as st

from agl_slime.engine.client.generation import WeightSpan
from agl_slime.tokens.codec import common_prefix
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.turn import Turn

# A small vocabulary makes equal responses and observations common; real ids appear as well.
token = st.one_of(st.integers(0, 4), st.integers(0, 2**31 - 1))
log_prob = st.floats(min_value=-30, max_value=0, width=32)

# Finish reason, request id, number of resumes, weight versions: one draw, because draws dominate the tests' cost.
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
    history = list(draw(st.sampled_from(earlier)).messages or ()) if earlier and draw(st.booleans()) else []
    new = [{"role": "user", "content": text} for text in draw(st.lists(st.text(max_size=8), max_size=2))]
    return history[: draw(st.integers(0, len(history)))] + new


def _link(draw: st.DrawFn, turns: list[Turn], prompt: list[int]) -> dict[str, Any]:
    base = draw(st.integers(0, len(turns) - 1))
    ids = turns[base].token_ids
    n = common_prefix(ids, np.array(prompt, dtype=np.int32))
    if not draw(st.integers(0, 3)):
        n = draw(st.integers(0, n))
    fork = None if n == len(ids) else draw(st.sampled_from(ForkReason))
    return {"base_turn": base, "kept_tokens": n, "fork": fork}


@st.composite
def conversations(
    draw: st.DrawFn, *, max_turns: int = 7, min_response: int = 0, log_probs: bool = True, links: bool | None = None
) -> list[Turn]:
    """Turns of one rollout: each prompt extends an earlier turn, samples an earlier prompt again, edits or cuts an
    earlier history, or is new. With ``links`` a turn names the turn that it continues, or a shorter prefix; foreign
    spans have no links."""
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
            ids = base.token_ids.tolist()
            cut = draw(st.integers(1, len(ids)))
            rest = ids[cut + draw(st.integers(0, 3)) :] if kind == "edit" else []
            prompt = ids[:cut] + new + rest
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
