"""Turns written to span attributes are read back equal, in whatever order the spans come."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.errors import TraceError
from agl_slime.tokens import attributes as names
from agl_slime.tokens.span_codec import decode_turns
from agl_slime.tokens.turn import Turn
from tests.harness.samples import encode
from tests.harness.trace_strategies import conversations


@given(conversations(), st.randoms(use_true_random=False))
def test_any_tree_of_turns_is_read_back_from_json_in_any_order(turns: list[Turn], random: Any):
    spans = [SimpleNamespace(attributes=json.loads(json.dumps(span.attributes))) for span in encode(turns, model="m")]
    random.shuffle(spans)
    assert decode_turns(spans) == turns


MESSAGES = st.sampled_from([{"content": "a"}, {"content": "b"}, {"content": 1}, {"content": True}])


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(MESSAGES, max_size=4)), max_size=8))
def test_turns_with_any_base_keep_their_messages(calls: list[tuple[int, list[dict[str, object]]]]):
    turns = [
        Turn(prompt_ids=[1], response_ids=[2], messages=tuple(messages), base_turn=base % number if number else None)
        for number, (base, messages) in enumerate(calls)
    ]
    read = decode_turns(encode(turns))
    assert [json.dumps(turn.messages) for turn in read] == [json.dumps(turn.messages) for turn in turns]


@given(conversations(max_turns=4), conversations(max_turns=4), st.data())
def test_encoders_interleave(first: list[Turn], second: list[Turn], data: st.DataObject):
    spans = {0: encode(first), 1: encode(second)}
    order = data.draw(st.permutations([0] * len(first) + [1] * len(second)))
    places: dict[int, list[int]] = {0: [], 1: []}
    for place, stream in enumerate(order):
        places[stream].append(place)
    read = decode_turns([spans[stream][places[stream].index(place)] for place, stream in enumerate(order)])
    for stream, turns in ((0, first), (1, second)):
        written = [read[place] for place in places[stream]]
        # base turns are numbered over both streams
        numbered = [None if turn.base_turn is None else places[stream][turn.base_turn] for turn in turns]
        assert [turn.base_turn for turn in written] == numbered
        assert [replace(turn, base_turn=None, kept_tokens=0) for turn in written] == [
            replace(turn, base_turn=None, kept_tokens=0) for turn in turns
        ]


@given(conversations(max_turns=5).filter(lambda turns: len(turns) > 1), st.data())
def test_a_lost_turn_before_the_last_is_noticed(turns: list[Turn], data: st.DataObject):
    spans = encode(turns)
    del spans[data.draw(st.integers(0, len(spans) - 2))]
    with pytest.raises(TraceError, match="missing"):
        decode_turns(spans)


@given(conversations(max_turns=4, min_response=1), st.data())
def test_another_token_or_log_prob_is_noticed(turns: list[Turn], data: st.DataObject):
    spans = encode(turns)
    packed = [
        (span, key)
        for span in spans
        for key in (names.PROMPT_IDS, names.RESPONSE_IDS, names.LOG_PROBS)
        if span.attributes[key]
    ]
    span, key = data.draw(st.sampled_from(packed))
    text = span.attributes[key]
    index = data.draw(st.integers(0, 3))
    span.attributes[key] = text[:index] + ("A" if text[index] != "A" else "B") + text[index + 1 :]
    with pytest.raises(TraceError):
        decode_turns(spans)
