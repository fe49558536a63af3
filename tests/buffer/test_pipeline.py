"""The five stages on groups small enough to compute by hand, and with stages of somebody else's."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from agl_slime.buffer import stages
from agl_slime.buffer.pipeline import GroupPipeline
from agl_slime.buffer.settings import PipelineSettings
from agl_slime.errors import ConfigError
from tests.buffer.items import Snapshot, process

NOW = 1000.0


def item(uid: int, reward: Any = 1.0, instance_id: str = "math_001") -> dict[str, Any]:
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    return {"uid": f"u{uid}", "instance_id": instance_id, "messages": messages, "reward": reward, "extra_info": {}}


def snapshot(rewards: list[Any], *, age: float = 0.0, instance_id: str = "math_001") -> Snapshot:
    items = [item(n, reward, instance_id) for n, reward in enumerate(rewards)]
    return Snapshot(instance_id=instance_id, items=items, last_item_time=NOW - age)


def pipeline(group_size: int = 4, *, functions: dict[str, Any] | None = None, **settings: Any) -> GroupPipeline:
    """With -1 as the mark of failed items, as slime's documentation has it."""
    settings.setdefault("reward_range", (0.0, 1.0))
    task_type = settings.pop("task_type", "")
    return GroupPipeline(functions, settings=PipelineSettings(group_size=group_size, **settings), task_type=task_type)


def test_the_defaults_are_the_documented_ones():
    settings = PipelineSettings(group_size=8)
    assert settings.min_valid_group_size_ratio == 1.0
    assert settings.min_valid_item_size_ratio == 0.7
    assert settings.group_timeout_seconds == 300
    assert settings.min_timeout_group_size_ratio == 0.7


def test_a_complete_group_is_normalised_and_keeps_its_raw_rewards():
    result = process(pipeline(), [snapshot([1, 0, 1, 0])], now=NOW)
    assert [entry["reward"] for entry in result.data] == pytest.approx(
        [1, -1, 1, -1], abs=1e-6
    )  # mean 0.5, population std 0.5
    assert [entry["raw_reward"] for entry in result.data] == [1, 0, 1, 0]
    assert result.meta_info == {"total_samples": 4, "num_groups": 1, "avg_group_size": 4, "avg_reward": 0.5}


@pytest.mark.parametrize("reward", [0, 0.3, 1])
def test_equal_rewards_become_exactly_zero(reward):
    assert [entry["reward"] for entry in process(pipeline(), [snapshot([reward] * 4)], now=NOW).data] == [0, 0, 0, 0]


def test_an_incomplete_group_waits():
    result = process(pipeline(), [snapshot([1, 0, 1])], now=NOW)
    assert result.data == []
    assert result.finished == []
    assert result.meta_info["total_samples"] == 3


def test_a_late_group_with_enough_items_is_used_and_padded():
    result = process(pipeline(group_timeout_seconds=300), [snapshot([1, 0, 1], age=301)], now=NOW)
    assert len(result.valid) == 1
    assert len(result.data) == 4


def test_the_timeout_counts_from_the_last_item_and_is_exclusive():
    assert process(pipeline(), [snapshot([1, 0, 1], age=300)], now=NOW).finished == []


def test_a_late_group_with_too_few_items_is_dropped_with_its_reason():
    result = process(pipeline(), [snapshot([1, 0], age=301)], now=NOW)
    (group,) = result.ends
    assert (group.valid, group.reason, group.item_reasons) == (False, "timeout", ["timeout", "timeout"])
    assert group.detail == "2 of 4 items, at least 3 valid ones are needed"


def test_failed_items_of_a_late_group_do_not_count_as_valid_data():
    (group,) = process(pipeline(), [snapshot([1, 0, -1], age=301)], now=NOW).ends
    assert (group.valid, group.reason) == (False, "timeout")


def test_failed_items_are_filtered_and_the_gap_is_padded():
    result = process(pipeline(), [snapshot([1, 0, -1, 1])], now=NOW)
    (group,) = result.valid
    assert group.item_reasons == ["", "", "filtered_item", ""]
    assert len(result.data) == 4
    assert {entry.get("padding_of") for entry in result.data} == {None, "u0"}


def test_a_group_with_too_few_usable_items_is_refused():
    (group,) = process(pipeline(), [snapshot([1, -1, -1, 0])], now=NOW).ends
    assert (group.valid, group.reason) == (False, "too_few_valid_items")


@pytest.mark.parametrize(
    "bad",
    [{"reward": None}, {"reward": "1"}, {"reward": math.nan}, {"messages": "hello"}, {"extra_info": {"error": "x"}}],
)
def test_default_filter_refuses_untrainable_items(bad):
    assert not stages.filter_item({**item(0), **bad})
    assert stages.filter_item(item(0))
    assert not stages.filter_item(item(0, 1.5), reward_range=(0.0, 1.0))


def test_token_ids_may_replace_messages():
    assert stages.filter_item({"uid": "u", "instance_id": "i", "reward": 0.0, "tokens": [1, 2]})


def test_padding_shares_the_reward_between_an_item_and_its_copies():
    _, padded = stages.pad_group_data(("i", [item(0, 0.6), item(1, -0.2), item(2, 0.3)]), 5)
    assert len(padded) == 5
    assert math.fsum(entry["reward"] for entry in padded) == pytest.approx(0.7)
    assert [(entry["uid"], entry.get("padding_of"), entry.get("padding_shares")) for entry in padded] == [
        ("u0", None, 2),
        ("u1", None, 2),
        ("u2", None, None),
        ("u0#pad1", "u0", 2),
        ("u1#pad1", "u1", 2),
    ]
    assert padded[0]["reward"] == padded[3]["reward"] == 0.3


def test_one_survivor_can_fill_a_group():
    _, padded = stages.pad_group_data(("i", [item(0, 1.0)]), 4)
    assert [entry["reward"] for entry in padded] == [0.25] * 4
    assert len({entry["uid"] for entry in padded}) == 4


def test_a_group_of_one_is_complete_with_one_item():
    assert [entry["raw_reward"] for entry in process(pipeline(1), [snapshot([0.5])], now=NOW).data] == [0.5]


def test_groups_with_equal_rewards_can_be_dropped():
    for last in (1, 0.99999994):
        (group,) = process(pipeline(drop_zero_variance=True), [snapshot([1, 1, 1, last])], now=NOW).ends
        assert (group.valid, group.reason) == (False, "zero_variance")
        used = process(pipeline(), [snapshot([1, 1, 1, last])], now=NOW).data
        assert [item["reward"] for item in used] == [0.0] * 4


def test_more_items_than_a_group_holds_are_surplus():
    result = process(pipeline(2), [snapshot([1, 0, 1])], now=NOW)
    assert len(result.data) == 2
    assert result.ends[0].item_reasons == ["", "", "surplus_item"]


def test_the_snapshot_is_left_as_it_was():
    groups = [snapshot([1, 0, -1, 1])]
    before = copy.deepcopy(groups)
    process(pipeline(), groups, now=NOW)
    assert groups == before


def test_stages_can_be_replaced_one_by_one_in_the_documented_forms():
    calls: list[str] = []

    def get_group_data_meta_info(temp_data):
        calls.append("meta")
        return {"instances": sorted(temp_data)}

    def is_valid_group(group, min_valid_group_size, task_type="math"):
        calls.append(f"valid {min_valid_group_size} {task_type}")
        return len(group[1]) >= min_valid_group_size, len(group[1]) >= min_valid_group_size

    def filter_item(item, task_type):
        calls.append("filter")
        return item["reward"] >= 0

    def normalize_group_data(group, epsilon=1e-8, algo="grpo"):
        calls.append(f"normalize {algo}")
        for entry in group[1]:  # in place, as the generators in slime's repository do
            entry["raw_reward"], entry["reward"] = entry["reward"], entry["reward"] * 2
        return group

    def pad_group_data(group, group_size):
        calls.append(f"pad {group_size}")
        return group[0], group[1] + [dict(group[1][0])] * (group_size - len(group[1]))

    functions = {
        "get_group_data_meta_info": get_group_data_meta_info,
        "is_valid_group": is_valid_group,
        "filter_item": filter_item,
        "normalize_group_data": normalize_group_data,
        "pad_group_data": pad_group_data,
        "run_rollout": None,
    }
    result = process(pipeline(3, functions=functions, task_type="sums"), [snapshot([5, -1, 7])], now=NOW)
    assert result.ends[0].reason == "too_few_valid_items"  # 2 of 3 are left, 3 are needed
    result = process(
        pipeline(3, functions=functions, task_type="sums", min_valid_item_size_ratio=0.6),
        [snapshot([5, -1, 7])],
        now=NOW,
    )
    assert [entry["reward"] for entry in result.data] == [10, 14, 10]
    assert result.meta_info == {"instances": ["math_001"]}
    assert calls[-6:] == ["valid 3 sums", "filter", "filter", "filter", "normalize grpo", "pad 3"]
    assert calls[0] == "meta"


def test_transform_group_alone_decides_what_is_delivered():
    calls: list[Any] = []

    def transform_group(group, task_type):
        instance_id, items = group
        calls.append((instance_id, [entry["reward"] for entry in items], task_type))
        kept = [entry for entry in items if entry["reward"] is not None]
        return instance_id, [{**entry, "reward": 10 * entry["reward"]} for entry in kept]

    functions = {"transform_group": transform_group}
    whole = pipeline(2, functions=functions, task_type="sums")
    (group,) = process(whole, [snapshot([-1, 7, None])], now=NOW).ends
    assert calls == [("math_001", [-1, 7, None], "sums")]
    assert [entry["reward"] for entry in group.data] == [-10, 70]
    assert group.item_reasons == ["", "", "filtered_item"]
    (short,) = process(whole, [snapshot([7, None])], now=NOW).ends
    assert short.detail == "ValueError: transform_group returned 1 items; expected a multiple of the group size 2"
    assert process(whole, [snapshot([7])], now=NOW).finished == []  # waits as any other


def test_items_with_new_uids_from_a_transform_stand_for_all():
    functions = {"transform_group": lambda group: (group[0], [{**entry, "uid": None} for entry in group[1]])}
    (group,) = process(pipeline(2, functions=functions), [snapshot([1, 0])], now=NOW).ends
    assert (group.valid, group.item_reasons) == (True, ["", ""])


def test_transform_beside_a_stage_that_it_replaces_is_refused():
    functions = {"transform_group": lambda group: group, "filter_item": lambda item: True}
    with pytest.raises(ConfigError, match="transform_group replaces filter_item; leave one out"):
        pipeline(2, functions=functions)


def test_a_validity_that_answers_with_one_bool_means_both():
    functions = {"is_valid_group": lambda group, size: len(group[1]) >= 2}
    assert len(process(pipeline(2, functions=functions), [snapshot([1, 0])], now=NOW).valid) == 1
    assert process(pipeline(2, functions=functions), [snapshot([1])], now=NOW).finished == []


def test_a_group_that_claims_to_be_valid_is_finished():
    functions = {"is_valid_group": lambda group: (True, False)}
    (group,) = process(pipeline(2, functions=functions), [snapshot([1, 0])], now=NOW).ends
    assert group.valid


@pytest.mark.parametrize(
    ("functions", "detail"),
    [
        ({"filter_item": lambda item: 1 / 0}, "ZeroDivisionError: division by zero"),
        (
            {"pad_group_data": lambda group, group_size: (group[0], group[1][:1])},
            "ValueError: the stages returned 1 items",
        ),
        ({"pad_group_data": lambda group, group_size: (group[0], [])}, "ValueError: the stages returned 0 items"),
        (
            {"normalize_group_data": lambda g: (g[0], [{**i, "reward": math.nan} for i in g[1]])},
            "ValueError: the stages returned reward nan",
        ),
        (  # no reader can use it: it would request the same group forever
            {"normalize_group_data": lambda g: (g[0], [{**i, "messages": None} for i in g[1]])},
            "ValueError: the stages returned messages None",
        ),
    ],
)
def test_broken_stage_drops_its_group_with_the_error(functions, detail):
    groups = [snapshot([1, 0], instance_id="a"), snapshot([1, 0], instance_id="b")]
    result = process(pipeline(2, functions=functions), groups, now=NOW)
    assert [(group.valid, group.reason) for group in result.ends] == [(False, "stage_error")] * 2
    assert result.ends[0].detail.startswith(detail)


def test_a_broken_meta_stage_does_not_stop_the_batch():
    def get_group_data_meta_info(temp_data):
        raise KeyError("reward")

    result = process(
        pipeline(2, functions={"get_group_data_meta_info": get_group_data_meta_info}), [snapshot([1, 0])], now=NOW
    )
    assert len(result.data) == 2
    assert result.meta_info["error"] == "get_group_data_meta_info raised KeyError: 'reward'"
