"""Packing round-trips every value it accepts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agl_slime.tokens.codec import unpack_log_probs, unpack_token_ids
from tests.unit.test_trace_codec import pack_log_probs, pack_token_ids


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_round_trip(ids: list[int]):
    assert unpack_token_ids(pack_token_ids(ids)).tolist() == ids


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_float32_log_probs_round_trip_bit_for_bit(values: list[float]):
    back = unpack_log_probs(pack_log_probs(values)).tolist()
    assert [value.hex() for value in back] == [value.hex() for value in values]
