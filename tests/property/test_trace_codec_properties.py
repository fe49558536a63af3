"""Packing round-trips every value it accepts; histories part where their first two items differ."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agl_slime.tokens.codec import shared_length, unpack_log_probs, unpack_token_ids
from tests.unit.test_trace_codec import pack_log_probs, pack_token_ids


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_round_trip(ids: list[int]):
    assert unpack_token_ids(pack_token_ids(ids)).tolist() == ids


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_float32_log_probs_round_trip_bit_for_bit(values: list[float]):
    back = unpack_log_probs(pack_log_probs(values)).tolist()
    assert [value.hex() for value in back] == [value.hex() for value in values]


_texts, _lists = st.text("ab"), st.lists(st.integers(0, 1))


@given(st.tuples(_texts, _texts) | st.tuples(_lists | _lists.map(tuple), _lists | _lists.map(tuple)), st.integers(0, 9))
def test_histories_part_where_their_first_two_items_differ(pair: tuple[Any, Any], shared: int):
    a, b = pair
    for one, other in ((a, b), (a, a[:shared] + b if type(a) is type(b) else b)):
        alike = sum(1 for _ in takewhile(lambda items: items[0] == items[1], zip(one, other, strict=False)))
        assert shared_length(one, other) == alike
