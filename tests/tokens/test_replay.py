"""Routed experts and nuclei between an engine's answer and a Sample, in spans and in files of the run."""

import base64
import json
import os
import random
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.agent.access import replay_of, sampling_of
from agl_slime.agent.partial import _generation_from_json, _generation_to_json
from agl_slime.data.source import GroupSource
from agl_slime.engine.client.generation import Generation, PartRequest, SamplingParams, parse_generation
from agl_slime.engine.client.replay import Nucleus, RoutedExperts
from agl_slime.engine.client.resumable import ResumableGeneration
from agl_slime.errors import ConfigError, DataSourceError, EngineProtocolError, TraceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM
from agl_slime.tokens import attributes as names
from agl_slime.tokens import replay as replay_files
from agl_slime.tokens.converter import Conversion, _time_between_calls, convert_trajectory, with_replay
from agl_slime.tokens.replay import FiledReplay, file_replay, remove_replay
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.span_codec import TurnEncoder, decode_turns
from agl_slime.tokens.turn import Trajectory, Turn
from agl_slime.train.slime.args import PluginSettings
from agl_slime.train.slime.replay import check_recorded, in_slimes_form
from agl_slime.types import sample_from_json, sample_to_json
from tests.harness.datasource import QUICK, Listener
from tests.harness.examples import examples
from tests.harness.samples import encode, turn
from tests.harness.stores import enqueue, finish
from tests.harness.trace_strategies import conversations
from tests.harness.waiting import until

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


def test_missing_experts_or_nuclei_and_another_shape_name_the_fix() -> None:
    with pytest.raises(EngineProtocolError, match="--enable-return-routed-experts"):
        parsed([5], request((1, 2)))
    with pytest.raises(EngineProtocolError, match=r"answered 18 routed_experts.*\[2, 2, 3\].*--moe-router-topk"):
        parsed([5], request((1, 2)), routed_experts=packed(np.zeros(18)))
    sampling = SamplingParams(max_new_tokens=4, top_p=0.9, nucleus=True)
    assert sampling.to_payload()["custom_params"] == {"return_top_p_token_ids": True}
    with pytest.raises(EngineProtocolError, match=r"sglang-top_p\.patch"):
        parsed([5], request((1,), sampling))
    for offsets in ([0, 1], [0, 1, 2], [1, 2]):
        ragged = {"top_p_token_ids": packed([5, 6]), "top_p_token_offsets": packed(offsets)}
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
    starts = []
    for ids, kind, experts in (([7, 8], "abort", rows(3, 1)), ([], "abort", None), ([9, 9], "length", rows(2, 4))):
        starts.append((part := resumed.next_request()).experts_start)
        meta = {} if experts is None else {"routed_experts": packed(experts)}  # none: aborted in the queue
        resumed.add(parsed(ids, part, kind, **meta))
    assert starts == [1, 4, 4]
    assert resumed.result(latency_s=0.0).experts == RoutedExperts(1, rows(5, 1))
    resumed = ResumableGeneration(prompt_ids=(1, 2), sampling=SAMPLING)
    resumed.add(parsed([7, 8], resumed.next_request(), "abort"))  # a broken stream: its events have no experts
    part = resumed.next_request()
    assert part.experts_start == 0
    resumed.add(parsed([9], part, "stop", routed_experts=packed(rows(4))))
    assert resumed.result(latency_s=0.0).experts == RoutedExperts(0, rows(4))


def chain() -> list[Turn]:
    """Two turns, of which the second has the rows from token 3 on."""

    def nucleus(ids: list[int], offsets: list[int]) -> Nucleus:
        return Nucleus(np.array(ids, dtype=np.int32), np.array(offsets, dtype=np.int32))

    experts = [RoutedExperts(0, rows(3).astype(np.uint8)), RoutedExperts(3, rows(2, 3).astype(np.uint8))]
    first = turn([1, 2], [3, 4], experts=experts[0], nucleus=nucleus([3, 9, 4], [0, 2, 3]))
    link: dict[str, Any] = {"base_turn": 0, "kept_tokens": 4}
    return [first, turn([1, 2, 3, 4, 5], [6], experts=experts[1], nucleus=nucleus([6, 7], [0, 2]), **link)]


def test_damaged_experts_are_an_error_and_not_other_experts() -> None:
    spans = encode(chain())
    json.dumps([span.attributes for span in spans])
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
    with pytest.raises(TraceError, match="no routed experts"):
        merge_turns([turn([1, 2], [3, 4]), second])


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


def test_slime_gets_int32_tensors_and_no_group_without_experts() -> None:
    torch = pytest.importorskip("torch")
    group = converted().samples
    (sample,) = in_slimes_form(group)
    assert sample.rollout_routed_experts.dtype == sample.rollout_top_p_token_ids.dtype == torch.int32
    args = Namespace(use_rollout_routing_replay=True, num_layers=2, moe_router_topk=3)
    check_recorded(args, group)
    group[0].rollout_routed_experts = None
    with pytest.raises(DataSourceError, match="rollout a has no rollout_routed_experts"):
        check_recorded(args, group)


def test_slimes_flags_become_engine_parameters() -> None:
    args = Namespace(use_rollout_routing_replay=True, num_layers=2, moe_router_topk=3, rollout_top_p=0.9)
    settings = PluginSettings.from_args(args, {})
    sampling = sampling_of(LLM(endpoint="", model="", sampling_parameters=dict(settings.sampling or {})))
    assert sampling.routed_experts == (2, 3)
    assert sampling.nucleus
    assert not replay_of(settings.eval_sampling or {})
    with pytest.raises(ConfigError, match="--moe-router-topk None"):
        PluginSettings.from_args(Namespace(use_rollout_routing_replay=True, num_layers=2), {})


def test_speculative_decoding_is_counted_over_parts_and_turns() -> None:
    resumed = ResumableGeneration(prompt_ids=(1, 2), sampling=SamplingParams(max_new_tokens=3))
    spec = {"spec_accept_token_num": 2, "spec_draft_token_num": 5, "spec_verify_ct": 1}
    resumed.add(parse_generation(answer([7, 8], "abort", **spec)))
    resumed.add(parse_generation(answer([9], "stop", **spec)))
    first = Turn.from_generation([1, 2], resumed.result(latency_s=0.0))
    second = Turn.from_generation([1, 2, 7, 8, 9, 4], parse_generation(answer([3], "stop", **spec)))
    (sample,) = convert_trajectory(trajectory_of(decode_turns(encode([first, second])))).samples
    assert vars(sample.spec_info) == {name: 3 * n for name, n in spec.items()} | {"completion_token_num": 4}
    assert sample.session_id == "a"


def test_time_outside_calls_excludes_overlapping_calls() -> None:
    calls = [(10.0, 2.0), (11.0, 3.0), (16.0, 1.0)]  # two at once until 14, then a tool for two seconds
    spans: Any = [SimpleNamespace(start_time=start, attributes={names.LATENCY_S: took}) for start, took in calls]
    assert (_time_between_calls(spans), _time_between_calls([])) == (2.0, 0.0)


# -- files of the run -------------------------------------------------------------------------------------------------


LIMIT = "agl_slime.tokens.replay.FILED_FROM_BYTES"


def experts(start: int, count: int, *, most: int = 8, seed: int = 0) -> RoutedExperts:
    rng = np.random.default_rng([seed, start, count])
    return RoutedExperts(start, rng.integers(0, most, (count, 2, 3)).astype(np.uint8 if most < 256 else np.uint16))


def with_arrays(turns: list[Turn], rng: random.Random) -> list[Turn]:
    """``turns`` with experts of either type, nuclei, or neither."""
    most, with_experts, with_nucleus = rng.choice((8, 300)), rng.random() < 0.8, rng.random() < 0.5
    made: list[Turn] = []
    for plain in turns:
        end = 0 if plain.base_turn is None else made[plain.base_turn].experts_end
        start = min(plain.kept_tokens, end, len(plain.prompt_ids) - 1)
        offsets = np.cumsum([0, *(rng.randint(1, 5) for _ in plain.response_ids)]).astype(np.int32)
        nucleus = Nucleus(np.arange(offsets[-1], dtype=np.int32) % 99, offsets) if with_nucleus else None
        rows = experts(start, plain.length - 1 - start, most=most) if with_experts else None
        made.append(replace(plain, experts=rows, nucleus=nucleus))
    return made


def filed(turn: Turn, directory: Path, rollout_id: str) -> Turn:
    """As a session writes it."""
    place = file_replay(str(directory), rollout_id, "00000001", turn.experts, turn.nucleus)
    return turn if place is None else replace(turn, experts=None, nucleus=None, filed=place)


def samples_of(turns: list[Turn], directory: Path | None = None) -> list[Any]:
    made = trajectory_of(decode_turns(encode(turns)))
    return [sample_to_json(sample) for sample in convert_trajectory(made, replay_files=directory).samples]


@given(
    turns=conversations(min_response=1, links=True),
    rng=st.randoms(use_true_random=False),
    limit=st.sampled_from((1, 40, 120)),
    name=st.text(max_size=20),
)
@settings(max_examples=examples(60), deadline=None)
def test_samples_are_the_same_by_file_and_by_span(turns, rng, limit, name, tmp_path_factory):
    turns = with_arrays(turns, rng)
    directory = tmp_path_factory.mktemp("replay")
    rollout_id = f"ro-{name}".encode(errors="replace").decode()
    with patch(LIMIT, limit):
        written = [filed(original, directory, rollout_id) for original in turns]
    for original, stored in zip(turns, written, strict=True):
        sizes = [original.experts.rows.nbytes] if original.experts is not None else []
        if original.nucleus is not None:
            sizes += [original.nucleus.ids.nbytes, original.nucleus.offsets.nbytes]
        assert (stored.filed is not None) == (sum(sizes) >= limit)
        assert with_replay(stored, directory) == original
    assert decode_turns(encode(turns)) == turns
    assert samples_of(written, directory) == samples_of(turns)
    remove_replay(directory, [rollout_id])
    assert [*directory.iterdir()] == []


def test_small_experts_or_no_directory_leave_all_in_the_span(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert replay_files.FILED_FROM_BYTES == 256 * 1024
    large = experts(0, 60_000)
    assert file_replay(str(tmp_path / "elsewhere"), "ro-1", "s", large, None) is None
    assert file_replay(str(tmp_path), "ro-1", "s", experts(0, 60), None) is None  # small
    assert file_replay(str(tmp_path), "", "s", large, None) is None  # a session of no rollout
    assert [*tmp_path.iterdir()] == []
    place = file_replay(str(tmp_path), "ro-1", "s", large, None)
    assert place is not None
    assert place.length == large.rows.nbytes
    (tmp_path / "ro-2").write_text("a file in the place of the rollout's directory, as on a full disk")
    assert file_replay(str(tmp_path), "ro-2", "s", large, None) is None
    assert "stay in spans" in caplog.text


def test_branches_that_write_at_once_have_their_own_places(tmp_path: Path) -> None:
    parts = [experts(0, 50_000 + number, seed=number) for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        places = list(pool.map(lambda part: file_replay(str(tmp_path), "ro-1", "s", part, None), parts))
    for part, place in zip(parts, places, strict=True):
        assert place is not None
        assert place.read(tmp_path) == {"experts": part}


def filed_turn(directory: Path, rollout_id: str = "ro-1") -> Turn:
    with patch(LIMIT, 1):
        turn = Turn(prompt_ids=[1, 2], response_ids=[3, 4], log_probs=[-1.0, -1.0], experts=experts(0, 3))
        return filed(turn, directory, rollout_id)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


def _link(path: Path) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to("target")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b""), _flip, _link, _pipe])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, damage: Any) -> None:
    turn = filed_turn(tmp_path)
    with pytest.raises(TraceError, match="give replay_files"):  # never a Sample without experts
        samples_of([turn])
    damage(tmp_path / "ro-1" / "00000001")
    with pytest.raises(TraceError, match="routed experts") as raised:
        samples_of([turn], tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "bad",
    [
        *({"file": name} for name in ("../x", "/etc/passwd", "ro-1/../x", "ro-1/a/b", 3)),
        {"offset": -1},
        {"length": 10**18},
        {"length": True},
        *({"experts": sizes} for sizes in ((0, 10**6, 2, 3, 1), (0, 3, 2, 3, 5), None)),
        {"nucleus": (1, 1)},
    ],
    ids=str,
)
def test_a_span_cannot_name_another_file_nor_other_sizes(bad: dict[str, Any]) -> None:
    good: dict[str, Any] = {"file": "ro-1/s", "offset": 0, "length": 18, "checksum": 1, "experts": (0, 3, 2, 3, 1)}
    FiledReplay(**good)
    with pytest.raises(TraceError):
        FiledReplay(**{**good, **bad})


@pytest.mark.parametrize("text", ["", "3", "[1, 2, 3]", '["a/b", 0, 0, 0, 7, null]', '["a/b", 0, 0, 0, null, null, 1]'])
def test_a_damaged_reference_is_an_error_of_its_turn(text: str, tmp_path: Path) -> None:
    encoded = TurnEncoder().encode(filed_turn(tmp_path))
    encoded[names.REPLAY_FILE] = text
    with pytest.raises(TraceError, match="turn 0"):
        decode_turns([SimpleNamespace(attributes=encoded)])


async def _play(store: BridgeStore, directory: Path, *, linked: bool = False) -> str:
    """A rollout of one turn, whose experts are in a file."""
    [rollout_id] = await enqueue(store)
    turn = filed_turn(directory, rollout_id)
    if linked:
        _link(directory / rollout_id / "00000001")
    await finish(store, rollout_id, turns=[turn])
    return rollout_id


async def test_a_link_for_a_file_fails_its_rollout_and_all_go_with_their_release(tmp_path: Path) -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=QUICK, replay_files=tmp_path) as source:
        listener = Listener(source)
        first, linked, last = [await _play(store, tmp_path, linked=number == 1) for number in range(3)]
        await listener.until(lambda: len(listener.members) == 3)
        members = {member.rollout_id: member for member in listener.members}
        for rollout_id in (first, last):
            assert members[rollout_id].ok
            assert np.array_equal(members[rollout_id].samples[0].rollout_routed_experts, experts(0, 3).rows)
        assert (members[linked].ok, members[linked].failure) == (False, "bad_trace")
        assert members[linked].trajectory is not None  # its turns are shown nevertheless
        await until(lambda: not [*tmp_path.glob("ro-*")])
    assert [*tmp_path.iterdir()] == []
    assert store.usage().released == 3


async def test_non_releasing_reader_waits_for_the_releasing_one(tmp_path: Path) -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=replace(QUICK, release=False), replay_files=tmp_path) as source:
        listener = Listener(source)
        first, second = [await _play(store, tmp_path) for _ in range(2)]
        await listener.until(lambda: len(listener.members) == 2)
        await store.release([first])
        await until(lambda: not (tmp_path / first).exists())
        assert (tmp_path / second / "00000001").exists()
        await store.release([second])
        await until(lambda: not (tmp_path / second).exists())
