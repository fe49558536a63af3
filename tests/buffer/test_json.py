"""Items with values that orjson does not carry through as they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agl_slime.buffer.models import parse_body, parse_items
from agl_slime.errors import BufferRequestError
from agl_slime.support.http import json_value
from tests.buffer.test_store import open_store


@pytest.mark.parametrize("stages", [{}, {"get_group_data_meta_info": lambda items: {"n": items[0]["extra_info"]["n"]}}])
def test_integers_above_64_bit_come_out_as_they_went_in(stages: dict[str, Any]):
    store = open_store(functions=stages)
    bodies = [
        b'{"uid": "%d", "instance_id": "a", "messages": [], "reward": 1, "extra_info": {"n": %d}}' % (at, 10**30 + at)
        for at in (0, 1)
    ]
    _, items = parse_items(b"[%b]" % b",".join(bodies))
    store.write([("math", items)])
    batch = store.read("math")
    assert batch is not None
    assert [json.loads(text)["extra_info"] for text in batch.items_json] == [{"n": 10**30}, {"n": 10**30 + 1}]


NUMBERS = ["9223372036854775807", "-9223372036854775809", "0.1234567890123456789", "0.00012345678901234567", "1e300"]


@pytest.mark.parametrize(
    "number", [*NUMBERS, "18446744073709551616", "12345678901234567890.5", '"12345678901234567890"']
)
def test_numbers_are_read_as_pythons_own_reader_reads_them(number: str):
    text = f'{{"a": [0.00012345678901234567, {number}]}}'
    assert json_value(text.encode()) == json.loads(text)


@pytest.mark.parametrize("odd", [b"NaN", b"1e999", b"-Infinity", b"{", b"9" * 5000])
def test_beside_a_long_integer_json_is_as_strict_as_without_one(odd: bytes):
    for text in (b"[%b]" % odd, b"[123456789012345678901234567890, %b]" % odd):
        with pytest.raises(BufferRequestError, match="the body is not JSON"):
            parse_body(text)


def test_depth_is_limited_beside_a_long_integer():
    for depth, fits in ((240, True), (260, False), (2000, False), (100_000, False)):
        text = b"[123456789012345678901234567890, " + b"[" * depth + b"]" * depth + b"]"
        if fits:
            assert parse_body(text)[0] == 123456789012345678901234567890
        else:
            with pytest.raises(BufferRequestError, match=r"nested|not JSON"):
                parse_body(text)
