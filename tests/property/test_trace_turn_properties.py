"""Turns written to span attributes are read back equal, in whatever order the spans come."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.errors import TraceError
from agl_slime.trace import attributes as names
from agl_slime.trace.token_tree import TokenTree, common_prefix
from agl_slime.trace.turn import Turn, TurnEncoder, decode_turns
from tests.property.trace_strategies import conversations


def encode(turns: list[Turn], **options: object) -> list[SimpleNamespace]:
    encoder = TurnEncoder(**options)  # type: ignore[arg-type]
    return [SimpleNamespace(attributes=encoder.encode(turn)) for turn in turns]


@given(conversations(), st.booleans())
def test_any_tree_of_turns_is_read_back_equal(turns: list[Turn], list_form: bool):
    assert decode_turns(encode(turns, model="m", list_form=list_form)) == turns


@given(conversations(), st.booleans())
def test_attributes_survive_a_store_that_speaks_json(turns: list[Turn], list_form: bool):
    spans = [
        SimpleNamespace(attributes=json.loads(json.dumps(span.attributes)))
        for span in encode(turns, list_form=list_form)
    ]
    assert decode_turns(spans) == turns


@given(conversations(), st.randoms(use_true_random=False))
def test_the_order_of_the_spans_of_one_encoder_does_not_matter(turns: list[Turn], random: object):
    spans = encode(turns)
    random.shuffle(spans)  # type: ignore[attr-defined]
    assert decode_turns(spans) == turns


@given(conversations(max_turns=4), conversations(max_turns=4), st.data())
def test_encoders_interleave(first: list[Turn], second: list[Turn], data: st.DataObject):
    a, b = (
        [(span, turn) for span, turn in zip(encode(first), first, strict=True)],
        list(zip(encode(second), second, strict=True)),
    )
    merged = []
    while a or b:
        merged.append((a if a and (not b or data.draw(st.booleans())) else b).pop(0))
    assert decode_turns([span for span, _ in merged]) == [turn for _, turn in merged]


@given(conversations(max_turns=5).filter(lambda turns: len(turns) > 1), st.data())
def test_a_lost_turn_before_the_last_is_noticed(turns: list[Turn], data: st.DataObject):
    spans = encode(turns)
    del spans[data.draw(st.integers(0, len(spans) - 2))]
    with pytest.raises(TraceError, match="missing"):
        decode_turns(spans)


@given(conversations(max_turns=4), st.data())
def test_another_token_or_log_prob_is_noticed(turns: list[Turn], data: st.DataObject):
    spans = encode(turns)
    packed = [
        (span, key)
        for span in spans
        for key in (names.PROMPT_IDS, names.RESPONSE_IDS, names.LOG_PROBS)
        if len(span.attributes.get(key, "")) >= 8
    ]
    if not packed:
        return
    span, key = data.draw(st.sampled_from(packed))
    text = span.attributes[key]
    at = data.draw(st.integers(0, 3))
    span.attributes[key] = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
    with pytest.raises(TraceError):
        decode_turns(spans)


@settings(max_examples=500)  # owners are told wrongly only where an edge is split more than once
@given(
    st.lists(st.lists(st.integers(0, 1), max_size=8), min_size=3, max_size=10), st.lists(st.integers(0, 1), max_size=8)
)
def test_the_tree_finds_what_a_search_of_all_sequences_finds(sequences: list[list[int]], wanted: list[int]):
    tree = TokenTree()
    arrays = [np.array(s, dtype=np.int32) for s in sequences]
    for owner, ids in enumerate(arrays):
        tree.insert(ids, owner)
    ids = np.array(wanted, dtype=np.int32)
    match = tree.match(ids)
    shared = [common_prefix(held, ids) for held in arrays]
    assert match.length == max(shared, default=0)
    if match.length:
        assert match.first == shared.index(match.length)
        assert match.latest == len(shared) - 1 - shared[::-1].index(match.length)
    ending = {
        length: tuple(i for i, s in enumerate(sequences) if len(s) == length and s == wanted[:length])
        for length in range(1, len(wanted) + 1)
    }
    assert match.ends == tuple((length, owners) for length, owners in ending.items() if owners)
