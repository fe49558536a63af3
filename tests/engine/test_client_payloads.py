"""SGLang's answers as typed objects, and the client's JSON, which equals the standard library's."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from agl_slime.engine.client.describe import parse_workers
from agl_slime.engine.client.generation import SamplingParams, WeightSpan, parse_generation
from agl_slime.engine.client.transport import _decoded, _encoded
from agl_slime.errors import EngineError, EngineProtocolError


def answer(**meta: Any) -> dict[str, Any]:
    fields = {
        "id": "4a9f",
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 20,
        "cached_tokens": 16,
        "weight_version": "7",
        "output_token_logprobs": [[-1.5, 366, None], [-0.25, 12, None]],
    }
    return {"text": "ab", "output_ids": [366, 12], "meta_info": fields | meta}


def versions(*spans: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in spans]


def test_a_newer_servers_answer() -> None:
    generation = parse_generation(answer(weight_versions=versions(("6", 0, 1), ("7", 1, 2))), latency_s=0.5)
    assert generation.output_ids == (366, 12)
    assert generation.log_probs == (-1.5, -0.25)
    assert (generation.text, generation.finish_reason, generation.request_id) == ("ab", "length", "4a9f")
    assert (generation.prompt_tokens, generation.cached_tokens, generation.latency_s) == (20, 16, 0.5)
    assert generation.weight_versions == (WeightSpan("6", 0, 1), WeightSpan("7", 1, 2))
    assert generation.weight_version == "7"


def test_one_version_for_all_tokens_and_spans_cut_to_the_tokens() -> None:
    whole = (WeightSpan("7", 0, 2),)
    assert parse_generation(answer()).weight_versions == whole  # an older server
    assert parse_generation(answer(weight_versions=versions(("6", 0, 0), ("7", 0, 9)))).weight_versions == whole


def test_aborted_in_the_queue_has_no_counts() -> None:
    meta = {"id": "x", "finish_reason": {"type": "abort", "message": "Aborted"}}
    generation = parse_generation({"text": "", "output_ids": [], "meta_info": meta})
    assert (generation.output_ids, generation.finish_reason) == ((), "abort")
    assert (generation.prompt_tokens, generation.weight_versions) == (0, ())


@pytest.mark.parametrize(
    "body",
    [
        [answer()],  # n > 1
        {},
        answer(finish_reason=None),
        answer(finish_reason={"type": "unheard-of"}),
        answer(output_token_logprobs=None),
        answer(output_token_logprobs=[[-1.0]]),
        answer(output_token_logprobs=[[None, 3, None]]),  # NaN in SGLang's JSON
        answer(output_token_logprobs=[[math.nan, 3, None]]),
        answer(output_token_logprobs=[[-math.inf, 3, None]]),
        answer(weight_versions=["7"]),
        answer(weight_versions=[{"version": "7"}]),
    ],
)
def test_any_other_form_is_refused(body: Any) -> None:
    with pytest.raises(EngineProtocolError):
        parse_generation(body)


def test_nan_logits_are_an_error_not_a_stop() -> None:
    with pytest.raises(EngineError, match="NaN logits") as caught:
        parse_generation(answer(finish_reason={"type": "stop", "matched": "NaN happened"}))
    assert type(caught.value) is EngineError  # a protocol error would be sent again


def test_sampling_params_use_the_engines_names() -> None:
    payload = SamplingParams(stop=("</x>",), stop_token_ids=(5,), extra={"min_new_tokens": 2}).to_payload()
    assert payload["stop"] == ["</x>"]
    assert payload["stop_token_ids"] == [5]
    assert payload["min_new_tokens"] == 2
    assert payload["skip_special_tokens"] is False


def test_workers_of_a_router_are_servers_healthy_or_not() -> None:
    # a shortened answer of sglang-router 0.3.2; the last two are data-parallel ranks of one server
    listed = [
        {"id": "ab6a", "url": "http://127.0.0.1:18702", "is_healthy": True},
        {"id": "0eab", "url": "http://127.0.0.1:18701/", "is_healthy": False},
        {"url": "http://w:8000@0"},
        {"url": "http://w:8000@1"},
    ]
    urls = ("http://127.0.0.1:18702", "http://127.0.0.1:18701", "http://w:8000")
    assert parse_workers({"workers": listed, "total": 4}) == urls


@pytest.mark.parametrize(
    "body",
    [None, {}, {"workers": None}, {"workers": [{"id": 1}]}, {"workers": ["w"]}, {"workers": [{"url": "grpc://w:1"}]}],
)
def test_other_workers_answers_are_refused(body: Any) -> None:
    with pytest.raises(EngineProtocolError):
        parse_workers(body)


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
