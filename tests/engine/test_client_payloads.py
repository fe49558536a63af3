"""SGLang's answers as typed objects."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agl_slime.engine.client.describe import parse_workers
from agl_slime.engine.client.generation import SamplingParams, WeightSpan, parse_generation
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


def test_a_newer_servers_answer() -> None:
    listed = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}]
    got = parse_generation(answer(weight_versions=listed), latency_s=0.5)
    assert got.output_ids == (366, 12)
    assert got.log_probs == (-1.5, -0.25)
    assert (got.text, got.finish_reason, got.request_id) == ("ab", "length", "4a9f")
    assert (got.prompt_tokens, got.cached_tokens, got.latency_s) == (20, 16, 0.5)
    assert got.weight_versions == (WeightSpan("6", 0, 1), WeightSpan("7", 1, 2))
    assert got.weight_version == "7"


def test_an_older_server_names_one_version_for_all() -> None:
    assert parse_generation(answer()).weight_versions == (WeightSpan("7", 0, 2),)


def test_spans_without_tokens_are_dropped_and_overlong_ones_cut() -> None:
    listed = [{"version": "6", "start": 0, "end": 0}, {"version": "7", "start": 0, "end": 9}]
    assert parse_generation(answer(weight_versions=listed)).weight_versions == (WeightSpan("7", 0, 2),)


def test_aborted_in_the_queue_has_no_counts() -> None:
    got = parse_generation(
        {
            "text": "",
            "output_ids": [],
            "meta_info": {"id": "x", "finish_reason": {"type": "abort", "message": "Aborted"}},
        }
    )
    assert (got.output_ids, got.finish_reason, got.prompt_tokens, got.weight_versions) == ((), "abort", 0, ())


@pytest.mark.parametrize(
    "body",
    [
        [answer()],  # n > 1
        "text",
        {},
        answer(finish_reason=None),
        answer(finish_reason={"type": "unheard-of"}),
        answer(output_token_logprobs=None),
        answer(output_token_logprobs=[[-1.0]]),
        answer(output_token_logprobs=[[None, 3, None]]),  # NaN on its way through SGLang's JSON
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
    payload = SamplingParams(
        temperature=0.5, top_k=3, max_new_tokens=9, stop=("</x>",), stop_token_ids=(5,), extra={"min_new_tokens": 2}
    ).to_payload()
    assert payload["stop"] == ["</x>"]
    assert payload["stop_token_ids"] == [5]
    assert payload["min_new_tokens"] == 2
    assert payload["skip_special_tokens"] is False


# what sglang-router 0.3.2 answers
ROUTER_ANSWER = {
    "workers": [
        {
            "id": "ab6a",
            "url": "http://127.0.0.1:18702",
            "model_id": "m",
            "worker_type": "regular",
            "is_healthy": True,
            "connection_mode": "HTTP",
        },
        {
            "id": "0eab",
            "url": "http://127.0.0.1:18701/",
            "model_id": "m",
            "worker_type": "regular",
            "is_healthy": False,
            "connection_mode": "HTTP",
        },
    ],
    "total": 2,
    "stats": {"prefill_count": 0, "decode_count": 0, "regular_count": 2},
}


def test_workers_of_a_router_with_the_unhealthy() -> None:
    assert parse_workers(ROUTER_ANSWER) == ("http://127.0.0.1:18702", "http://127.0.0.1:18701")


def test_data_parallel_ranks_are_one_server() -> None:
    assert parse_workers(
        {"workers": [{"url": "http://w:8000@0"}, {"url": "http://w:8000@1"}, {"url": "http://v:8000@0"}]}
    ) == (
        "http://w:8000",
        "http://v:8000",
    )


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {"workers": None},
        {"workers": [{"id": 1}]},
        {"workers": ["w"]},
        {"workers": [{"url": "grpc://w:1"}]},
    ],
)
def test_other_workers_answers_are_refused(body: Any) -> None:
    with pytest.raises(EngineProtocolError):
        parse_workers(body)
