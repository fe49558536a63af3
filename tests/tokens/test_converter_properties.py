"""Spans of any conversation become Samples that keep the package's first three invariants, whichever way they came."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
from hypothesis import given

from agl_slime.support.agl import Rollout, Span
from agl_slime.tokens.converter import Conversion, convert_rollout
from agl_slime.tokens.turn import Turn
from tests.harness.trace_strategies import conversations
from tests.tokens.spans import attempt_spans

ROLLOUT = Rollout(rollout_id="ro", input={}, start_time=0.0)


def check(conversion: Conversion, turns: list[Turn]) -> None:
    """Token-exact, aligned, once: against the engine's record, without the code that is tested."""
    trained: Counter[tuple[bytes, bytes, bytes]] = Counter()
    for sample in conversion.samples:
        n = sample.response_length
        assert 0 < n < len(sample.tokens)
        assert sample.loss_mask is not None
        assert sample.rollout_log_probs is not None
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == n
        assert {type(value) for value in sample.tokens} == {int}
        prompt_length = len(sample.tokens) - n
        for start, end in sample.metadata["turn_spans"]:
            first, last = prompt_length + start, prompt_length + end
            log_probs = sample.rollout_log_probs[start:end]
            trained[record(sample.tokens[:first], sample.tokens[first:last], log_probs)] += 1
        in_turns = {place for start, end in sample.metadata["turn_spans"] for place in range(start, end)}
        assert sample.loss_mask == [int(place in in_turns) for place in range(n)]
        assert all(
            value == 0.0 for value, mask in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if not mask
        )
    sampled = Counter(
        record(turn.prompt_ids.tolist(), turn.response_ids.tolist(), log_probs_of(turn))
        for turn in turns
        if len(turn.response_ids)
    )
    assert trained == sampled
    assert sum(sum(sample.loss_mask or []) for sample in conversion.samples) == conversion.trajectory.sampled_tokens


def log_probs_of(turn: Turn) -> list[float]:
    assert turn.log_probs is not None
    return turn.log_probs.tolist()


def record(prompt: list[int], response: list[int], log_probs: list[float]) -> tuple[bytes, bytes, bytes]:
    return (
        np.array(prompt, dtype="<i4").tobytes(),
        np.array(response, dtype="<i4").tobytes(),
        np.array(log_probs, dtype="<f4").tobytes(),
    )


@given(conversations().filter(lambda turns: any(len(turn.response_ids) for turn in turns)))
def test_packed_spans(turns: list[Turn]):
    check(convert_rollout(ROLLOUT, attempt_spans(turns)), turns)


@given(conversations().filter(lambda turns: any(len(turn.response_ids) for turn in turns)))
def test_token_lists(turns: list[Turn]):
    reward = attempt_spans([])[0]
    spans = []
    for i, turn in enumerate(turns):
        attributes = {
            "prompt_token_ids": turn.prompt_ids.tolist(),
            "response_token_ids": turn.response_ids.tolist(),
            "logprobs.content": json.dumps([{"logprob": value} for value in log_probs_of(turn)]),
        }
        spans.append(
            Span.from_attributes(
                name="openai.chat.completion", attributes=attributes, sequence_id=i + 1, start_time=float(i)
            )
        )
    spans.append(
        Span.from_attributes(
            name=reward.name, attributes=reward.attributes, sequence_id=len(turns) + 1, start_time=99.0
        )
    )
    check(convert_rollout(ROLLOUT, spans), turns)
