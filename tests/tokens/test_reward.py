"""Rewards in every form that Agent Lightning writes and reads."""

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


def raw(name: str, value: Any, **extra: Any) -> Span:
    attributes = {"agentlightning.reward.0.name": name, "agentlightning.reward.0.value": value, **extra}
    return Span.from_attributes(name="agentlightning.annotation", attributes=attributes)


def test_the_last_number_is_the_reward():
    for value, number in ((1.0, 1.0), (-2, -2.0), (True, 1.0), (0.0, 0.0)):
        reward = read_reward([reward_span(0.1), Span.from_attributes(name="other", attributes={}), reward_span(value)])
        assert (reward.primary, dict(reward.named)) == (number, {"primary": number})


@pytest.mark.parametrize("bad", [math.nan, math.inf, 10**400])
@pytest.mark.parametrize("later", [raw("primary", 1.0), raw("other", 1.0), reward_span(0.5)])
def test_a_bad_reward_that_a_later_one_replaces_is_not_passed_over(bad: Any, later: Span):
    for spans in ([raw("primary", bad), later], [later, raw("primary", bad)]):
        with pytest.raises(RewardError) as refused:
            read_reward(spans)
        assert refused.value.reason == "bad_reward"


def test_the_first_dimension_is_primary_unless_another_is_named():
    spans = [reward_span({"format": 0.5, "correct": 1.0}, primary_key="correct")]
    reward = read_reward(spans)
    assert (reward.primary, dict(reward.named)) == (1.0, {"correct": 1.0, "format": 0.5})
    reward = read_reward([*spans, reward_span(0.75)], reward_key="format")
    assert (reward.primary, dict(reward.named)) == (0.5, {"correct": 1.0, "format": 0.5, "primary": 0.75})
    with pytest.raises(RewardError, match="no reward named 'style', only correct, format") as error:
        read_reward(spans, reward_key="style")
    assert error.value.reason == "no_reward"


OLD_FORM = {"agentops.task.output": '{"type": "reward", "value": 0.75}'}
TWO = {f"agentlightning.reward.{n}.name": f"r{n}" for n in (1, 0)}
TWO |= {f"agentlightning.reward.{n}.value": n / 2 for n in (1, 0)}  # type: ignore[misc]


@pytest.mark.parametrize(
    "span",
    [
        *(raw("a", value) for value in (0.5, 2, "0.5")),
        raw("a", 0.5, other=1),
        raw("a", 0.5, **{"agentlightning.reward.0.note": "extra"}),
        *(Span.from_attributes(name="agentlightning.annotation", attributes=each) for each in (TWO, OLD_FORM)),
        Span.from_attributes(name="agentlightning.annotation", attributes={"reward": 0.25}),  # of 0.2
    ],
)
def test_every_form_is_read_as_agent_lightning_reads_it(span: Span):
    spans = [raw("first", 0.125), span, Span.from_attributes(attributes={})]
    reward = read_reward(spans)
    assert reward.primary == find_final_reward(spans)
    assert reward.named == {
        dimension.name: dimension.value for span in spans for dimension in get_rewards_from_span(span)
    }


def test_no_reward_or_one_that_is_no_finite_number_is_an_error_and_not_zero():
    call = Span.from_attributes(name="agl_slime.generate", attributes={"gen_ai.usage.input_tokens": 1})
    cases = [([], "no_reward"), ([call], "no_reward")]
    cases += [([raw("primary", bad)], "bad_reward") for bad in (math.nan, -math.inf, "high")]
    for spans, reason in cases:
        with pytest.raises(RewardError) as error:
            read_reward(spans)
        assert error.value.reason == reason
    with pytest.raises(RewardError, match="reward 'format' must be finite, got nan"):
        read_reward([reward_span({"correct": 1.0, "format": math.nan}, primary_key="correct")])
