"""Packing of ids and log-probs: exact both ways, refusals, token buffers."""

import base64
import json
import mmap
import os
import struct
from itertools import takewhile
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.engine.client.transport import _encoded
from agl_slime.errors import TraceError
from agl_slime.tokens import codec


def pack_token_ids(ids: Any) -> str:
    return codec.pack_array(codec.token_array(ids))


def pack_log_probs(values: Any) -> str:
    return codec.pack_array(codec.log_prob_array(values))


def test_wire_format_is_little_endian_32_bits_in_base64():
    assert base64.b64decode(pack_token_ids([1, 258, 151643])) == struct.pack("<3i", 1, 258, 151643)
    assert base64.b64decode(pack_log_probs([-0.5, 0.0])) == struct.pack("<2f", -0.5, 0.0)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_round_trip(ids: list[int]):
    for values in (ids, tuple(ids), np.array(ids, dtype=np.int64), np.array(ids, dtype=">i4")):
        assert codec.unpack_token_ids(pack_token_ids(values)).tolist() == ids


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_float32_log_probs_round_trip_bit_for_bit(values: list[float]):
    back = codec.unpack_log_probs(pack_log_probs(values)).tolist()
    assert [value.hex() for value in back] == [value.hex() for value in values]


letters, numbers = st.text("ab"), st.lists(st.integers(0, 1))


@given(
    st.tuples(letters, letters) | st.tuples(numbers | numbers.map(tuple), numbers | numbers.map(tuple)),
    st.integers(0, 9),
)
def test_histories_part_where_their_first_two_items_differ(pair: tuple[Any, Any], shared: int):
    a, b = pair
    for left, right in ((a, b), (a, a[:shared] + b if type(a) is type(b) else b)):
        alike = sum(1 for _ in takewhile(lambda items: items[0] == items[1], zip(left, right, strict=False)))
        assert codec.shared_length(left, right) == alike


def test_ids_outside_32_bits_and_no_integers_are_refused() -> None:
    outside: list[Any] = [[1, 2**31, 3], [-(2**31) - 1], [2**70], np.array([1, 2**32])]
    for ids in outside:
        with pytest.raises(TraceError, match=f"must fit into 32 bits, got {max(map(int, ids), key=abs)}"):
            pack_token_ids(ids)
    for bad in ([1.5], ["7"], [[1], [2]], 7, "17", b"1234", np.array([1.5]), np.array([[1]])):
        with pytest.raises(TraceError):
            pack_token_ids(bad)


def test_non_finite_log_probs_are_refused_with_their_position() -> None:
    for bad in (float("nan"), float("inf"), -float("inf"), 1e39, None):
        with pytest.raises(TraceError, match="position 1"):
            pack_log_probs([-0.1, bad])


@pytest.mark.parametrize("bad", ["not base64!", base64.b64encode(b"12345").decode(), "é", None])
def test_a_damaged_string_is_refused(bad: str):
    with pytest.raises(TraceError):
        codec.unpack_token_ids(bad)
    with pytest.raises(TraceError, match="finite"):
        codec.unpack_log_probs(base64.b64encode(struct.pack("<f", float("nan"))).decode())


def test_arrays_are_read_only_and_not_the_callers():
    mine = np.array([1, 2, 3], dtype=np.int32)
    ids = codec.token_array(mine)
    mine[0] = 9
    assert ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 5
    with pytest.raises(ValueError, match="read-only"):
        codec.log_prob_array([-1.0])[0] = 0.0


@given(
    st.lists(st.tuples(st.sampled_from(["on", "on", "back", "ask"]), st.lists(st.integers(0, 2**31 - 1), max_size=5)))
)
def test_prompt_is_encoded_as_the_json_of_its_ids_after_any_history(steps: list[Any]) -> None:
    buffer, ids = codec.TokenBuffer(), list[int]()
    for kind, added in steps:
        length = len(ids) // 2 if kind == "back" else len(ids)
        prompt = buffer.prompt(length, codec.token_array(added))
        assert prompt == [*ids[:length], *added]
        assert json.loads(_encoded({"input_ids": prompt})) == {"input_ids": [*prompt]}
        if kind != "ask":
            buffer.cut(length)
            buffer.extend(added)
            ids = [*ids[:length], *added]
        assert [*buffer.ids] == ids


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_process_does_not_share_its_token_buffer() -> None:
    buffer = codec.TokenBuffer(range(3_000))
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
    monkeypatch.setattr(mmap, "mmap", Mock(side_effect=OSError("Cannot allocate memory")))
    buffer = codec.TokenBuffer(range(3_000))
    buffer.extend(range(30_000))
    buffer.cut(29_000)
    assert buffer.ids.tolist() == [*range(3_000), *range(26_000)]


def test_views_of_a_token_buffer_do_not_change() -> None:
    buffer, views = codec.TokenBuffer(), []
    for n in range(600):
        buffer.extend([n])
        views.append(buffer.ids)
    assert len({view.base.ctypes.data for view in views[-80:] if view.base is not None}) == 1  # one array for all
    buffer.cut(300)
    buffer.extend([-1] * 400)
    assert ([view[-1] for view in views], buffer.ids[300]) == ([*range(600)], -1)
    with pytest.raises(ValueError, match="read-only"):
        views[0][0] = 5
