"""Packing of ids and log-probs: exact both ways, and refusing what cannot be packed; histories part where their first
two items differ."""

from __future__ import annotations

import base64
import json
import mmap
import os
import struct
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.engine.client.transport import _encoded
from agl_slime.errors import TraceError
from agl_slime.tokens.codec import (
    TokenBuffer,
    log_prob_array,
    pack_array,
    shared_length,
    token_array,
    unpack_log_probs,
    unpack_token_ids,
)


def pack_token_ids(ids: Any) -> str:
    return pack_array(token_array(ids))


def pack_log_probs(values: Any) -> str:
    return pack_array(log_prob_array(values))


def test_ids_are_little_endian_int32_in_base64():
    assert base64.b64decode(pack_token_ids([1, 258, 151643])) == struct.pack("<3i", 1, 258, 151643)


def test_log_probs_are_little_endian_float32_in_base64():
    assert base64.b64decode(pack_log_probs([-0.5, 0.0])) == struct.pack("<2f", -0.5, 0.0)


def test_one_number_costs_five_and_a_third_characters():
    assert len(pack_token_ids(range(30_000))) == 30_000 * 16 // 3


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


@pytest.mark.parametrize("bad", [2**31, -(2**31) - 1, 2**70])
def test_ids_outside_32_bits_are_refused_by_value(bad: int):
    with pytest.raises(TraceError, match=f"must fit into 32 bits, got {bad}"):
        pack_token_ids([1, bad, 3])


@pytest.mark.parametrize(
    "ids", [np.array([1, 2], dtype=np.int64), np.array([1, 2], dtype=np.uint8), (1, 2), np.array([1, 2], dtype=">i4")]
)
def test_any_sequence_of_integers_will_do(ids: Any):
    assert unpack_token_ids(pack_token_ids(ids)).tolist() == [1, 2]


def test_an_array_that_is_too_wide_is_refused_by_value():
    with pytest.raises(TraceError, match="got 4294967296"):
        pack_token_ids(np.array([1, 2**32]))


@pytest.mark.parametrize("bad", [[1.5], ["7"], [None], [[1], [2]], 7, "17", b"1234", np.array([1.5]), np.array([[1]])])
def test_non_integer_ids_are_refused(bad: object):
    with pytest.raises(TraceError):
        pack_token_ids(bad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e39, None])
def test_non_finite_log_probs_are_refused_with_their_position(bad: float):
    with pytest.raises(TraceError, match="position 1"):
        pack_log_probs([-0.1, bad])


@pytest.mark.parametrize("bad", ["not base64!", "AAA", base64.b64encode(b"12345").decode(), "é", None, 5])
def test_a_damaged_string_is_refused(bad: str):
    with pytest.raises(TraceError):
        unpack_token_ids(bad)


def test_packed_nan_is_refused_on_reading():
    with pytest.raises(TraceError, match="finite"):
        unpack_log_probs(base64.b64encode(struct.pack("<f", float("nan"))).decode())


def test_arrays_are_read_only_and_not_the_callers():
    mine = np.array([1, 2, 3], dtype=np.int32)
    ids = token_array(mine)
    mine[0] = 9
    assert ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 5
    with pytest.raises(ValueError, match="read-only"):
        log_prob_array([-1.0])[0] = 0.0


@given(
    st.lists(st.tuples(st.sampled_from(["on", "on", "back", "ask"]), st.lists(st.integers(0, 2**31 - 1), max_size=5)))
)
def test_prompt_is_encoded_as_the_json_of_its_ids_after_any_history(steps: list[Any]) -> None:
    buffer, held = TokenBuffer(), []
    for kind, added in steps:
        kept = len(held) // 2 if kind == "back" else len(held)
        prompt = buffer.prompt(kept, added)
        assert prompt == [*held[:kept], *added]
        assert json.loads(_encoded({"input_ids": prompt})) == {"input_ids": [*prompt]}
        if kind != "ask":
            buffer.cut(kept)
            buffer.extend(added)
            held = [*held[:kept], *added]
        assert [*buffer.ids] == held


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_process_does_not_share_its_token_buffer() -> None:
    buffer = TokenBuffer(range(3_000))
    buffer.extend([1])  # into pages of its own
    if (child := os.fork()) == 0:
        try:
            buffer.extend([2])
        finally:
            os._exit(int(buffer.ids.tolist()[-1] != 2))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert buffer._ids[3_001] == 0
    assert buffer.ids[-1] == 1


def test_token_buffer_works_without_memory_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: Any, **options: Any) -> Any:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", none_left)
    buffer = TokenBuffer(range(3_000))
    buffer.extend(range(30_000))
    buffer.cut(29_000)
    assert buffer.ids.tolist() == [*range(3_000), *range(26_000)]
