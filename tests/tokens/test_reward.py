"""Rewards as Agent Lightning writes them, in every form that its own reader knows."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agl_slime.errors import RewardError
from agl_slime.support.agl import Span, emit_reward, find_final_reward, get_rewards_from_span
from agl_slime.tokens.reward import read_reward


def reward_span(value: Any, **options: Any) -> Span:
    core = emit_reward(value, propagate=False, **options)
    return Span.from_attributes(name=core.name, attributes=core.attributes)


def raw(name: str, value: Any) -> Span:
    return Span.from_attributes(
        name="agentlightning.annotation",
        attributes={"agentlightning.reward.0.name": name, "agentlightning.reward.0.value": value},
    )


@pytest.mark.parametrize(("written", "read"), [(1.0, 1.0), (-2, -2.0), (True, 1.0), (0.0, 0.0)])
def test_a_number_is_the_reward(written: Any, read: float):
    reward = read_reward([reward_span(written)])
    assert (reward.primary, dict(reward.named)) == (read, {"primary": read})


def test_the_last_reward_counts():
    assert (
        read_reward([reward_span(0.1), Span.from_attributes(name="other", attributes={}), reward_span(0.9)]).primary
        == 0.9
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, 10**400])
@pytest.mark.parametrize("after", [raw("primary", 1.0), raw("other", 1.0), reward_span(0.5)])
def test_a_bad_reward_that_a_later_one_replaces_is_not_passed_over(bad: Any, after: Span):
    for spans in ([raw("primary", bad), after], [after, raw("primary", bad)]):
        with pytest.raises(RewardError) as refused:
            read_reward(spans)
        assert refused.value.reason == "bad_reward"


def test_the_first_dimension_is_primary():
    reward = read_reward([reward_span({"format": 0.5, "correct": 1.0}, primary_key="correct")])
    assert (reward.primary, dict(reward.named)) == (1.0, {"correct": 1.0, "format": 0.5})


def test_a_named_dimension_can_be_asked_for():
    spans = [reward_span({"correct": 1.0, "format": 0.5}, primary_key="correct"), reward_span(0.75)]
    reward = read_reward(spans, reward_key="format")
    assert (reward.primary, dict(reward.named)) == (0.5, {"correct": 1.0, "format": 0.5, "primary": 0.75})


def test_the_form_of_agent_lightning_0_2_is_read():
    assert (
        read_reward([Span.from_attributes(name="agentlightning.annotation", attributes={"reward": 0.25})]).primary
        == 0.25
    )


@pytest.mark.parametrize(
    "attributes",
    [
        {"agentlightning.reward.0.name": "a", "agentlightning.reward.0.value": 0.5},
        {"agentlightning.reward.0.name": "a", "agentlightning.reward.0.value": 2},
        {"agentlightning.reward.0.name": "a", "agentlightning.reward.0.value": "0.5"},
        {"agentlightning.reward.0.name": "a", "agentlightning.reward.0.value": 0.5, "other": 1},
        {
            f"agentlightning.reward.{n}.{field}": value
            for n in (1, 0)
            for field, value in (("value", n / 2), ("name", f"r{n}"))
        },
        {
            "agentlightning.reward.0.name": "a",
            "agentlightning.reward.0.value": 0.5,
            "agentlightning.reward.0.note": "extra",
        },
        {"agentops.task.output": '{"type": "reward", "value": 0.75}'},
    ],
)
def test_every_form_is_read_as_agent_lightning_reads_it(attributes: dict[str, Any]):
    spans = [
        raw("first", 0.125),
        Span.from_attributes(name="agentlightning.annotation", attributes=attributes),
        Span.from_attributes(attributes={}),
    ]
    reward = read_reward(spans)
    assert reward.primary == find_final_reward(spans)
    assert reward.named == {
        dimension.name: dimension.value for span in spans for dimension in get_rewards_from_span(span)
    }


@pytest.mark.parametrize(
    "spans", [[], [Span.from_attributes(name="agl_slime.generate", attributes={"gen_ai.usage.input_tokens": 1})]]
)
def test_no_reward_is_an_error_and_not_zero(spans: list[Span]):
    with pytest.raises(RewardError, match="no reward") as error:
        read_reward(spans)
    assert error.value.reason == "no_reward"


def test_a_name_that_is_not_there_is_an_error():
    with pytest.raises(RewardError, match="no reward named 'style', only correct") as error:
        read_reward([raw("correct", 1.0)], reward_key="style")
    assert error.value.reason == "no_reward"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "high"])
def test_non_finite_reward_is_an_error(bad: Any):
    with pytest.raises(RewardError) as error:
        read_reward([raw("primary", bad)])
    assert error.value.reason == "bad_reward"


def test_non_finite_secondary_reward_dimension_is_refused():
    with pytest.raises(RewardError, match="reward 'format' must be finite, got nan"):
        read_reward([reward_span({"correct": 1.0, "format": math.nan}, primary_key="correct")])
