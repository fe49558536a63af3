"""Whatever an agent does with its history, each sampled token is trained once, at its place, with the engine's id and
log-prob."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.turn import Turn
from tests.harness.conversations import linked
from tests.harness.tokenizers import small_tokenizer
from tests.harness.trace_strategies import conversations


@given(conversations())
def test_each_sampled_token_is_trained_once_and_no_other_token(turns: list[Turn]):
    segments = merge_turns(turns)
    trained = Counter(at.turn for segment in segments for at in segment.placements)
    assert trained == Counter(i for i, turn in enumerate(turns) if len(turn.response_ids))
    assert sum(int(segment.loss_mask.sum()) for segment in segments) == sum(len(turn.response_ids) for turn in turns)
    for segment in segments:
        assert segment.log_probs is not None
        assert len(segment.token_ids) == len(segment.loss_mask) == len(segment.log_probs)
        for at in segment.placements:
            turn = turns[at.turn]
            assert segment.token_ids[: at.start].tobytes() == turn.prompt_ids.tobytes()
            assert segment.token_ids[at.start : at.end].tobytes() == turn.response_ids.tobytes()
            assert segment.log_probs[at.start : at.end].tobytes() == turn.log_probs.tobytes()  # type: ignore[union-attr]
        placed = {place for at in segment.placements for place in range(at.start, at.end)}
        assert {i for i, mask in enumerate(segment.loss_mask.tolist()) if mask} == placed
        assert all(segment.log_probs[i] == 0.0 for i in range(len(segment.token_ids)) if i not in placed)
        assert segment.prompt_length > 0
        assert segment.loss_mask[-1] == 1
    reasons = [segment.fork_reason for segment in segments]
    assert reasons[:1] in ([], [None])
    assert None not in reasons[1:]


@given(conversations(min_response=1, links=False), st.booleans())
def test_a_turn_that_extends_the_end_of_a_segment_never_forks(turns: list[Turn], says_so: bool):
    """Against the rule written as a search: a new segment starts only when no segment's whole content begins the
    prompt."""
    turns = linked(turns) if says_so else turns
    segments = merge_turns(turns)
    for segment in segments:
        index = segment.placements[0].turn
        prompt = turns[index].prompt_ids.tolist()
        extended = []
        for earlier in segments:
            ends = [at.end for at in earlier.placements if at.turn < index]
            if ends and earlier.token_ids[: ends[-1]].tolist() == prompt[: ends[-1]]:
                extended.append(ends[-1])
        prefixes = [turn.length for turn in turns[:index] if turn.token_ids.tolist() == prompt[: turn.length]]
        assert not extended or max(prefixes) > max(extended)


@given(conversations(log_probs=False))
def test_without_log_probs_there_are_none(turns: list[Turn]):
    assert all(segment.log_probs is None for segment in merge_turns(turns))


@given(
    st.lists(
        st.tuples(st.text(max_size=10), st.lists(st.integers(0, 399), min_size=1, max_size=12)), min_size=2, max_size=4
    )
)
def test_retokenized_text_forks_with_that_reason_and_no_other(exchanges: list[tuple[str, list[int]]]):
    """Any tokens are sampled, half characters too; each next prompt is rendered from the text, as a chat API does."""
    tokenizer = small_tokenizer()
    history: list[dict[str, str]] = []
    turns: list[Turn] = []
    for question, sampled in exchanges:
        history.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
        response = [*sampled, tokenizer.eos_token_id]
        turns.append(Turn(prompt_ids=tokenizer.encode(text), response_ids=response, log_probs=[-1.0] * len(response)))
        history.append({"role": "assistant", "content": tokenizer.decode(sampled)})
    segments = merge_turns(turns, tokenizer)
    assert {segment.fork_reason for segment in segments[1:]} <= {ForkReason.RETOKENIZATION}
    for number, (turn, following) in enumerate(itertools.pairwise(turns)):
        continued = following.prompt_ids[: turn.length].tolist() == turn.token_ids.tolist()
        together = any({number, number + 1} <= {at.turn for at in segment.placements} for segment in segments)
        assert continued == together
