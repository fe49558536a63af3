"""Routed experts and nuclei between an engine's answer and a Sample."""

from __future__ import annotations

import base64
import json
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agl_slime.agent.access import replay_of, sampling_of
from agl_slime.agent.partial import _generation_from_json, _generation_to_json
from agl_slime.engine.client.generation import Generation, PartRequest, SamplingParams, parse_generation
from agl_slime.engine.client.replay import Nucleus, RoutedExperts
from agl_slime.engine.client.resumable import ResumableGeneration
from agl_slime.errors import ConfigError, DataSourceError, EngineProtocolError, TraceError
from agl_slime.support.agl import LLM
from agl_slime.tokens import attributes as names
from agl_slime.tokens.converter import Conversion, _time_between_calls, convert_trajectory
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.span_codec import decode_turns
from agl_slime.tokens.trajectory import Trajectory
from agl_slime.tokens.turn import Turn
from agl_slime.train.slime.args import PluginSettings
from agl_slime.train.slime.replay import check_replayed, with_tensors
from agl_slime.types import sample_from_json, sample_to_json
from tests.harness.samples import encode

SHAPE = (2, 3)
SAMPLING = SamplingParams(max_new_tokens=4, routed_experts=SHAPE)


def packed(values: Any) -> str:
    return base64.b64encode(np.asarray(values, dtype="<i4").tobytes()).decode()


def rows(count: int, first: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(first * 6, (first + count) * 6, dtype=np.int32).reshape(count, *SHAPE) % 100


def answer(ids: list[int], kind: str = "length", **meta: Any) -> dict[str, Any]:
    pairs = [[-0.5, token, None] for token in ids]
    return {"text": "", "meta_info": {"finish_reason": {"type": kind}, "output_token_logprobs": pairs, **meta}}


def request(prompt: tuple[int, ...], sampling: SamplingParams = SAMPLING, start: int = 0) -> PartRequest:
    return PartRequest(prompt, sampling, start)


def parsed(ids: list[int], request: PartRequest, kind: str = "length", **meta: Any) -> Generation:
    return parse_generation(answer(ids, kind, **meta), request=request)


def test_missing_experts_and_another_shape_are_errors_naming_the_flag() -> None:
    with pytest.raises(EngineProtocolError, match="--enable-return-routed-experts"):
        parsed([5], request((1, 2)))
    with pytest.raises(EngineProtocolError, match=r"answered 18 routed_experts.*\[2, 2, 3\].*--moe-router-topk"):
        parsed([5], request((1, 2)), routed_experts=packed(np.zeros(18)))


def test_engine_without_nuclei_is_an_error_naming_the_patch() -> None:
    sampling = SamplingParams(max_new_tokens=4, top_p=0.9, nucleus=True)
    assert sampling.to_payload()["custom_params"] == {"return_top_p_token_ids": True}
    with pytest.raises(EngineProtocolError, match=r"sglang-top_p\.patch"):
        parsed([5], request((1,), sampling))
    ragged = {"top_p_token_ids": packed([5, 6]), "top_p_token_offsets": packed([0, 1])}
    with pytest.raises(EngineProtocolError, match="top_p_token_offsets"):
        parsed([5], request((1,), sampling), **ragged)


def test_experts_begin_at_the_requested_row_in_the_smallest_type() -> None:
    generation = parsed([5], request((1, 2, 3), start=2), routed_experts=packed(rows(3)))
    assert generation.experts == RoutedExperts(2, rows(1, 2))
    for values, dtype in ((rows(1), np.uint8), (rows(1) + 300, np.uint16)):
        experts = parsed([5], request((1,)), routed_experts=packed(values)).experts
        assert experts is not None
        assert experts.rows.dtype == dtype


def test_resumed_answer_requests_only_missing_expert_rows() -> None:
    resumed = ResumableGeneration(prompt_ids=(1, 2, 3), sampling=SAMPLING, experts_start=1)
    first = resumed.next_request()
    assert first.experts_start == 1
    resumed.add(parsed([7, 8], first, "abort", routed_experts=packed(rows(3, 1))))
    second = resumed.next_request()
    assert second.experts_start == 4
    resumed.add(parsed([], second, "abort"))  # in the queue, without anything
    resumed.add(parsed([9, 9], resumed.next_request(), routed_experts=packed(rows(2, 4))))
    assert resumed.result(latency_s=0.0).experts == RoutedExperts(1, rows(5, 1))


def test_rows_lost_by_a_broken_stream_are_requested_with_the_next_part() -> None:
    resumed = ResumableGeneration(prompt_ids=(1, 2), sampling=SAMPLING)
    resumed.add(parsed([7, 8], resumed.next_request(), "abort"))  # events have no experts
    last = resumed.next_request()
    assert last.experts_start == 0
    resumed.add(parsed([9], last, "stop", routed_experts=packed(rows(4))))
    assert resumed.result(latency_s=0.0).experts == RoutedExperts(0, rows(4))


def chain() -> list[Turn]:
    """Two turns, of which the second has the rows from token 3 on."""
    first = Turn(
        prompt_ids=[1, 2],
        response_ids=[3, 4],
        log_probs=[-1.0, -1.0],
        experts=RoutedExperts(0, rows(3).astype(np.uint8)),
        nucleus=Nucleus(np.array([3, 9, 4], dtype=np.int32), np.array([0, 2, 3], dtype=np.int32)),
    )
    second = Turn(
        prompt_ids=[1, 2, 3, 4, 5],
        response_ids=[6],
        log_probs=[-1.0],
        base_turn=0,
        kept_tokens=4,
        experts=RoutedExperts(3, rows(2, 3).astype(np.uint8)),
        nucleus=Nucleus(np.array([6, 7], dtype=np.int32), np.array([0, 2], dtype=np.int32)),
    )
    return [first, second]


def test_turns_come_back_from_their_spans_with_experts_and_nuclei() -> None:
    spans = encode(chain())
    json.dumps([span.attributes for span in spans])
    assert decode_turns(spans) == chain()
    spans[0].attributes[names.EXPERTS] = packed(rows(3) + 1)[: len(spans[0].attributes[names.EXPERTS])]
    with pytest.raises(TraceError, match="routed_experts"):
        decode_turns(spans)


def test_segment_has_expert_rows_but_for_the_last_token_and_all_nuclei() -> None:
    first, second = chain()
    (segment,) = merge_turns([first, second])
    assert segment.experts is not None
    assert segment.nucleus is not None
    assert np.array_equal(segment.experts, rows(5))
    assert segment.nucleus.offsets.tolist() == [0, 2, 3, 3, 5]  # nothing for the tool's token
    bare = Turn(prompt_ids=first.prompt_ids, response_ids=first.response_ids, log_probs=first.log_probs)
    with pytest.raises(TraceError, match="no routed experts"):
        merge_turns([bare, second])


def trajectory_of(turns: list[Turn]) -> Trajectory:
    return Trajectory(rollout_id="a", attempt_id="1", task={}, turns=tuple(turns), reward=1.0)


def converted() -> Conversion:
    return convert_trajectory(trajectory_of(chain()))


def test_replay_data_is_in_the_sample_only_and_survives_saving() -> None:
    conversion = converted()
    assert all(turn.experts is None and turn.nucleus is None for turn in conversion.trajectory.turns)
    (sample,) = conversion.samples
    assert sample.rollout_routed_experts.shape == (5, 2, 3)
    loaded = sample_from_json(json.loads(json.dumps(sample_to_json(sample))))
    for name in ("rollout_routed_experts", "rollout_top_p_token_ids", "rollout_top_p_token_offsets"):
        assert np.array_equal(getattr(loaded, name), getattr(sample, name))
    first = chain()[0]
    arrays: dict[str, Any] = {"experts": first.experts, "nucleus": first.nucleus}
    generation = Generation(output_ids=(3, 4), log_probs=(-1.0, -1.0), text="", finish_reason="abort", **arrays)
    assert _generation_from_json(json.loads(json.dumps(_generation_to_json(generation)))) == generation


def test_slime_is_given_int32_tensors_which_it_indexes_with() -> None:
    torch = pytest.importorskip("torch")
    (sample,) = with_tensors(converted().samples)
    assert sample.rollout_routed_experts.dtype == sample.rollout_top_p_token_ids.dtype == torch.int32


def test_slimes_flags_become_engine_parameters() -> None:
    args = Namespace(use_rollout_routing_replay=True, num_layers=2, moe_router_topk=3, rollout_top_p=0.9)
    settings = PluginSettings.from_args(args, {})
    sampling = sampling_of(LLM(endpoint="", model="", sampling_parameters=dict(settings.sampling or {})))
    assert sampling.routed_experts == (2, 3)
    assert sampling.nucleus
    assert not replay_of(settings.eval_sampling or {})
    with pytest.raises(ConfigError, match="--moe-router-topk None"):
        PluginSettings.from_args(Namespace(use_rollout_routing_replay=True, num_layers=2), {})


def test_a_group_without_experts_is_refused_under_slimes_flag() -> None:
    args = Namespace(use_rollout_routing_replay=True, num_layers=2, moe_router_topk=3)
    group = converted().samples
    check_replayed(args, group)
    group[0].rollout_routed_experts = None
    with pytest.raises(DataSourceError, match="rollout a has no rollout_routed_experts"):
        check_replayed(args, group)


def test_speculative_decoding_is_counted_over_parts_and_turns() -> None:
    resumed = ResumableGeneration(prompt_ids=(1, 2), sampling=SamplingParams(max_new_tokens=3))
    spec = {"spec_accept_token_num": 2, "spec_draft_token_num": 5, "spec_verify_ct": 1}
    resumed.add(parse_generation(answer([7, 8], "abort", **spec)))
    resumed.add(parse_generation(answer([9], "stop", **spec)))
    first = Turn.from_generation([1, 2], resumed.result(latency_s=0.0))
    second = Turn.from_generation([1, 2, 7, 8, 9, 4], parse_generation(answer([3], "stop", **spec)))
    (sample,) = convert_trajectory(trajectory_of(decode_turns(encode([first, second])))).samples
    assert vars(sample.spec_info) == {
        "spec_accept_token_num": 6,
        "spec_draft_token_num": 15,
        "spec_verify_ct": 3,
        "completion_token_num": 4,
    }
    assert sample.session_id == "a"


def test_time_outside_calls_excludes_overlapping_calls() -> None:
    calls = [(10.0, 2.0), (11.0, 3.0), (16.0, 1.0)]  # two at once until 14, then a tool for two seconds
    spans: Any = [SimpleNamespace(start_time=start, attributes={names.LATENCY_S: took}) for start, took in calls]
    assert (_time_between_calls(spans), _time_between_calls([])) == (2.0, 0.0)
