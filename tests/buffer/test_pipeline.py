"""The five stages on groups small enough to compute by hand, and with stages of somebody else's."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.buffer import stages
from agl_slime.buffer.pipeline import FinishedGroup, GroupPipeline
from agl_slime.buffer.settings import PipelineSettings
from agl_slime.errors import ConfigError
from tests.buffer.items import make_item

NOW = 1000.0


@dataclass(frozen=True)
class Snapshot:
    """A group at a moment."""

    instance_id: Any
    items: list[dict[str, Any]]
    last_item_time: float


class Processed:
    """The result of the five stages on snapshots; ``finished`` has each finished one with its end."""

    def __init__(self, pipeline: GroupPipeline, snapshots: list[Snapshot]) -> None:
        self.meta_info = pipeline.meta_info(item for snapshot in snapshots for item in snapshot.items)
        ends = [(s, pipeline.finish(s.instance_id, s.items, idle_s=NOW - s.last_item_time)) for s in snapshots]
        self.finished: list[tuple[Snapshot, FinishedGroup]] = [(s, end) for s, end in ends if end is not None]
        self.ends = [group for _, group in self.finished]
        self.valid = [group for group in self.ends if group.valid]
        self.data = [item for group in self.ends for item in group.data]


def item(uid: int, reward: Any = 1.0, instance_id: str = "math_001") -> dict[str, Any]:
    return make_item(f"{instance_id}.{uid}", instance_id, reward)


def snapshot(rewards: list[Any], *, age: float = 0.0, instance_id: str = "math_001") -> Snapshot:
    items = [item(n, reward, instance_id) for n, reward in enumerate(rewards)]
    return Snapshot(instance_id=instance_id, items=items, last_item_time=NOW - age)


def pipeline(group_size: int = 4, *, functions: dict[str, Any] | None = None, **settings: Any) -> GroupPipeline:
    """With -1 as the mark of failed items, as slime's documentation has it."""
    settings.setdefault("reward_range", (0.0, 1.0))
    task_type = settings.pop("task_type", "")
    return GroupPipeline(functions, settings=PipelineSettings(group_size=group_size, **settings), task_type=task_type)


def test_a_complete_group_is_normalised_and_keeps_its_raw_rewards():
    result = Processed(pipeline(), [snapshot([1, 0, 1, 0])])
    # mean 0.5, population std 0.5
    assert [entry["reward"] for entry in result.data] == pytest.approx([1, -1, 1, -1], abs=1e-6)
    assert [entry["raw_reward"] for entry in result.data] == [1, 0, 1, 0]
    assert result.meta_info == {"total_samples": 4, "num_groups": 1, "avg_group_size": 4, "avg_reward": 0.5}
    for reward in (0, 0.3, 1):
        equal = Processed(pipeline(), [snapshot([reward] * 4)]).data
        assert [entry["reward"] for entry in equal] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("rewards", "age"),
    [([1, 0, 1], 0), ([1, 0, 1], 300)],  # the time-out is exclusive
)
def test_an_incomplete_group_waits(rewards, age):
    result = Processed(pipeline(), [snapshot(rewards, age=age)])
    assert (result.data, result.finished, result.meta_info["total_samples"]) == ([], [], 3)


@pytest.mark.parametrize(
    ("rewards", "age", "group_size", "item_reasons"),
    [
        ([1, 0, 1], 301, 4, ["", "", ""]),
        ([1, 0, -1, 1], 0, 4, ["", "", "filtered_item", ""]),
        ([1, 0, 1], 0, 2, ["", "", "surplus_item"]),
        ([0.5], 0, 1, [""]),
    ],
)
def test_a_group_with_enough_items_is_padded_to_its_size(rewards, age, group_size, item_reasons):
    groups = [snapshot(rewards, age=age)]
    originals = copy.deepcopy(groups)
    result = Processed(pipeline(group_size, group_timeout_seconds=300), groups)
    (group,) = result.valid
    assert (group.item_reasons, len(result.data)) == (item_reasons, group_size)
    padded = {entry["padding_of"] for entry in result.data if "padding_of" in entry}
    assert padded == ({"math_001.0"} if item_reasons.count("") < group_size else set())
    assert groups == originals


@pytest.mark.parametrize(
    ("rewards", "age", "reason"),
    [
        ([1, 0], 301, "timeout"),
        ([1, 0, -1], 301, "timeout"),  # a failed item is no valid one
        ([1, -1, -1, 0], 0, "too_few_valid_items"),
    ],
)
def test_a_group_with_too_few_valid_items_is_dropped_with_its_reason(rewards, age, reason):
    (group,) = Processed(pipeline(), [snapshot(rewards, age=age)]).ends
    assert (group.valid, group.reason) == (False, reason)
    if len(rewards) == 2:
        assert group.item_reasons == ["timeout", "timeout"]
        assert group.detail == "2 of 4 items, at least 3 valid ones are needed"


@pytest.mark.parametrize(
    "bad",
    [{"reward": None}, {"reward": "1"}, {"reward": math.nan}, {"messages": "hello"}, {"extra_info": {"error": "x"}}],
)
def test_default_filter_refuses_untrainable_items(bad):
    assert not stages.filter_item({**item(0), **bad})
    assert stages.filter_item(item(0))
    # token ids may replace messages
    assert stages.filter_item({"uid": "u", "instance_id": "i", "reward": 0.0, "tokens": [1, 2]})


def test_rewards_are_trained_on_but_for_minus_one_or_beyond_a_range():
    for reward, reward_range, trained in (
        (-1, None, False),  # slime's mark of a failure
        (-1, (-1.0, 1.0), True),
        (-0.5, None, True),
        (100, None, True),
        (-0.5, (0.0, 1.0), False),
        (100, (0.0, 1.0), False),
    ):
        result = Processed(pipeline(2, reward_range=reward_range), [snapshot([reward, 1])])
        assert [entry["raw_reward"] for entry in result.data] == [reward, 1] * trained


def test_groups_with_equal_rewards_can_be_dropped():
    for last in (1, 0.99999994):
        (group,) = Processed(pipeline(drop_zero_variance=True), [snapshot([1, 1, 1, last])]).ends
        assert (group.valid, group.reason) == (False, "zero_variance")
        used = Processed(pipeline(), [snapshot([1, 1, 1, last])]).data
        assert [item["reward"] for item in used] == [0.0] * 4


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

    own = (get_group_data_meta_info, is_valid_group, filter_item, normalize_group_data, pad_group_data)
    options: dict[str, Any] = {"functions": {function.__name__: function for function in own}, "task_type": "sums"}
    groups = [snapshot([5, -1, 7])]
    assert Processed(pipeline(3, **options), groups).ends[0].reason == "too_few_valid_items"  # 3 are needed, 2 are left
    result = Processed(pipeline(3, **options, min_valid_item_size_ratio=0.6), groups)
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
    (group,) = Processed(whole, [snapshot([-1, 7, None])]).ends
    assert calls == [("math_001", [-1, 7, None], "sums")]
    assert [entry["reward"] for entry in group.data] == [-10, 70]
    assert group.item_reasons == ["", "", "filtered_item"]
    (short,) = Processed(whole, [snapshot([7, None])]).ends
    assert short.detail == "ValueError: transform_group returned 1 items; expected a multiple of the group size 2"
    assert Processed(whole, [snapshot([7])]).finished == []  # waits as any other

    # items with new uids stand for all
    functions = {"transform_group": lambda group: (group[0], [{**entry, "uid": None} for entry in group[1]])}
    (group,) = Processed(pipeline(2, functions=functions), [snapshot([1, 0])]).ends
    assert (group.valid, group.item_reasons) == (True, ["", ""])
    with pytest.raises(ConfigError, match="transform_group replaces filter_item; leave one out"):
        pipeline(2, functions={"transform_group": transform_group, "filter_item": lambda item: True})


@pytest.mark.parametrize(
    ("is_valid_group", "finished"),
    [
        (lambda group, size: len(group[1]) >= 2, [True]),  # a bool means both
        (lambda group, size: len(group[1]) >= 3, []),
        (lambda group: (True, False), [True]),  # a valid group is finished
    ],
)
def test_a_validity_of_ones_own_decides_with_one_bool_or_two(is_valid_group, finished):
    result = Processed(pipeline(2, functions={"is_valid_group": is_valid_group}), [snapshot([1, 0])])
    assert [group.valid for group in result.ends] == finished


@pytest.mark.parametrize(
    ("functions", "detail"),
    [
        ({"filter_item": lambda item: 1 / 0}, "ZeroDivisionError: division by zero"),
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
    result = Processed(pipeline(2, functions=functions), groups)
    assert [(group.valid, group.reason) for group in result.ends] == [(False, "stage_error")] * 2
    assert result.ends[0].detail.startswith(detail)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda data: data["reward"], "KeyError: 'reward'"),
        (lambda data: {"sum": 10**30}, "TypeError: Integer exceeds 64-bit range"),
    ],
)
def test_a_broken_meta_stage_does_not_stop_the_batch(answer, error):
    result = Processed(pipeline(2, functions={"get_group_data_meta_info": answer}), [snapshot([1, 0])])
    assert len(result.data) == 2
    assert result.meta_info["error"] == f"get_group_data_meta_info raised {error}"


# -- properties --------------------------------------------------------------------------------------------------------

rewards = st.one_of(st.floats(0, 1), st.just(-1.0), st.just(math.nan), st.none(), st.just("broken"))
ratios = st.floats(0.01, 1.0)


@st.composite
def snapshots(draw: st.DrawFn) -> list[Snapshot]:
    groups = draw(st.lists(st.tuples(st.lists(rewards, max_size=7), st.floats(0, 600)), max_size=6))
    return [snapshot(values, age=age, instance_id=f"i{number}") for number, (values, age) in enumerate(groups)]


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
    result = Processed(GroupPipeline(settings=settings), groups)
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
            assert NOW - group.last_item_time <= 300


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12), group_size=st.integers(1, 24))
def test_padding_keeps_the_total_reward_and_the_weight_of_each_rollout(values, group_size):
    items = [{"uid": str(n), "reward": value} for n, value in enumerate(values)]
    accepted = items[:group_size]
    _, padded = stages.pad_group_data(("i", items), group_size)
    assert len(padded) == group_size
    for item in accepted:
        family = [entry for entry in padded if entry.get("padding_of", entry["uid"]) == item["uid"]]
        assert math.fsum(entry["reward"] for entry in family) == pytest.approx(item["reward"], abs=1e-9, rel=1e-12)
        assert all(
            entry["reward"] * entry.get("padding_shares", 1) == pytest.approx(item["reward"], abs=1e-9, rel=1e-12)
            for entry in family
        )
