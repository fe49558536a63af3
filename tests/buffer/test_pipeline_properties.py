from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.buffer import stages
from agl_slime.buffer.pipeline import GroupPipeline
from agl_slime.buffer.settings import PipelineSettings
from tests.buffer.items import Snapshot, process

rewards = st.one_of(st.floats(0, 1), st.just(-1.0), st.just(math.nan), st.none(), st.just("broken"))
ratios = st.floats(0.01, 1.0)


@st.composite
def snapshots(draw: st.DrawFn) -> list[Snapshot]:
    groups = draw(st.lists(st.tuples(st.lists(rewards, max_size=7), st.floats(0, 600)), max_size=6))
    return [
        Snapshot(
            instance_id=f"i{number}",
            items=[
                {"uid": f"{number}.{n}", "instance_id": f"i{number}", "messages": [], "reward": reward}
                for n, reward in enumerate(values)
            ],
            last_item_time=1000.0 - age,
        )
        for number, (values, age) in enumerate(groups)
    ]


@given(groups=snapshots(), group_size=st.integers(1, 5), group_ratio=ratios, item_ratio=ratios, timeout_ratio=ratios)
def test_delivered_groups_are_whole_trainable_and_accounted_for(
    groups, group_size, group_ratio, item_ratio, timeout_ratio
):
    settings = PipelineSettings(
        group_size=group_size,
        min_valid_group_size_ratio=group_ratio,
        min_valid_item_size_ratio=item_ratio,
        min_timeout_group_size_ratio=timeout_ratio,
    )
    result = process(GroupPipeline(settings=settings), groups, now=1000.0)
    ids = [group.instance_id for group in groups]
    finished = [snapshot.instance_id for snapshot, _ in result.finished]
    valid = [snapshot.instance_id for snapshot, group in result.finished if group.valid]
    assert set(valid) <= set(finished) <= set(ids)
    assert len(set(finished)) == len(finished)
    assert len(result.data) == len(valid) * group_size
    uids = [item["uid"] for item in result.data]
    assert len(set(uids)) == len(uids)
    for snapshot, group in result.finished:
        assert len(group.item_reasons) == len(snapshot.items)
        used = [item["uid"] for item, reason in zip(snapshot.items, group.item_reasons, strict=True) if not reason]
        assert [item["uid"] for item in group.data if "padding_of" not in item] == used
        assert {item["padding_of"] for item in group.data if "padding_of" in item} <= set(used)
        assert bool(group.reason) != group.valid
    for group in groups:
        if group.instance_id not in finished:
            assert len(group.items) < settings.min_valid_group_size
            assert 1000.0 - group.last_item_time <= 300


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12), group_size=st.integers(1, 24))
def test_padding_keeps_the_total_reward_and_the_weight_of_each_rollout(values, group_size):
    items = [{"uid": str(n), "reward": value} for n, value in enumerate(values)]
    accepted = items[:group_size]
    _, padded = stages.pad_group_data(("i", items), group_size)
    assert len(padded) == group_size
    assert math.fsum(item["reward"] for item in padded) == pytest.approx(
        math.fsum(item["reward"] for item in accepted), abs=1e-6
    )
    for item in accepted:
        family = [entry for entry in padded if entry.get("padding_of", entry["uid"]) == item["uid"]]
        assert math.fsum(entry["reward"] for entry in family) == pytest.approx(item["reward"], abs=1e-9, rel=1e-12)
        assert all(
            entry["reward"] * entry.get("padding_shares", 1) == pytest.approx(item["reward"], abs=1e-9, rel=1e-12)
            for entry in family
        )


@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_normalised_rewards_have_mean_zero_and_unit_spread_or_are_zero(values):
    _, items = stages.normalize_group_data(("i", [{"reward": value} for value in values]))
    result = [item["reward"] for item in items]
    assert math.fsum(result) == pytest.approx(0, abs=1e-6)
    variance = math.fsum(value * value for value in result) / len(result)
    assert (
        variance == pytest.approx(1, abs=1e-5)
        or all(value == 0 for value in result)
        or max(values) - min(values) < 1e-2
    )
