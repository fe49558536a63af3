"""The client's JSON equals the standard library's, to the last bit."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import pytest

from agl_slime.engine.client.transport import _decoded, _encoded


@pytest.mark.parametrize(
    "payload",
    [
        {"input_ids": (1, 2), "sampling_params": {"temperature": 0.1, "stop": ["é\u2028"], "extra": None}},
        {"text": "cut \ud83d"},
        {"n": 2**70, "logit_bias": {5: 1.5}},
    ],
)
def test_payload_survives_encoding(payload: Any):
    assert json.loads(_encoded(payload)) == json.loads(json.dumps(payload))


@pytest.mark.parametrize("body", [b'[NaN, Infinity, "\\ud83d"]', b'{"a": [1e400]}'])
def test_nonstandard_json_of_servers_is_read(body: bytes):
    assert repr(_decoded(body)) == repr(json.loads(body))


def test_log_probs_keep_every_bit():
    rng = random.Random(0)
    drawn = [-rng.expovariate(1) * 10 ** rng.randint(-300, 300) for _ in range(2_000)]
    values = [*drawn, 5e-324, -0.0]
    packed = struct.pack(f"<{len(values)}d", *values)
    assert struct.pack(f"<{len(values)}d", *_decoded(json.dumps(values).encode())) == packed
    assert json.loads(_encoded(values)) == values
