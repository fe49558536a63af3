"""Rewards in every form that Agent Lightning writes and reads."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.errors import RewardError
from agl_slime.support.agl import Span, emit_reward, find_final_reward, get_rewards_from_span
from agl_slime.tokens.reward import check_reward, read_reward, split_missing


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


@pytest.mark.parametrize("bad", [math.nan, -math.inf, "high", 10**400, 1e308, -1e39, 2e18])
@pytest.mark.parametrize("later", [raw("primary", 1.0), raw("other", 1.0), reward_span(0.5)])
def test_a_bad_reward_that_a_later_one_replaces_is_not_passed_over(bad: Any, later: Span):
    for spans in ([raw("primary", bad), later], [later, raw("primary", bad)]):
        with pytest.raises(RewardError, match=r"the reward 'primary' is .*(a reward must be|expected) a") as refused:
            read_reward(spans, reward_key="primary")
        assert refused.value.reason == "bad_reward"
    other = read_reward([raw("primary", bad), raw("other", -1e18)])  # it is not trained, and the largest is
    assert (other.named, other.missing) == ({"other": -1e18}, ("primary",))


def test_the_first_dimension_is_primary_unless_another_is_named():
    spans = [reward_span({"format": 0.5, "correct": 1.0}, primary_key="correct")]
    reward = read_reward(spans)
    assert (reward.primary, dict(reward.named)) == (1.0, {"correct": 1.0, "format": 0.5})
    reward = read_reward([*spans, reward_span(0.75)], reward_key="format")
    assert (reward.primary, dict(reward.named)) == (0.5, {"correct": 1.0, "format": 0.5, "primary": 0.75})
    with pytest.raises(RewardError, match="no reward named 'style', only correct, format") as error:
        read_reward(spans, reward_key="style")
    assert error.value.reason == "other_rewards"


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
    dimensions = [dimension for each in spans for dimension in get_rewards_from_span(each)]
    unnamed = {} if get_rewards_from_span(span) else {"primary": reward.primary}
    assert reward.named == {dimension.name: dimension.value for dimension in dimensions} | unnamed


@pytest.mark.parametrize(
    "spans", [[], [Span.from_attributes(name="agl_slime.generate", attributes={"gen_ai.usage.input_tokens": 1})]]
)
def test_no_reward_is_an_error_and_not_zero(spans: list[Span]):
    with pytest.raises(RewardError, match="no reward") as error:
        read_reward(spans)
    assert error.value.reason == "no_reward"


@given(data=st.data(), values=st.dictionaries(st.sampled_from(["a", "b", "c"]), st.floats(-1, 1), min_size=2))
def test_the_order_of_a_dict_does_not_decide_which_reward_is_trained(data: st.DataObject, values: dict[str, float]):
    """One name is trained in a run; a plain number is that reward, and a rollout without the name says which it has."""
    key = data.draw(st.sampled_from([*values]))
    bad = data.draw(st.sets(st.sampled_from(["a", "b", "c"]))) & values.keys()
    named = {name: data.draw(st.sampled_from([None, "text", math.nan, 1e300])) for name in bad}
    items = data.draw(st.permutations([*(values | named).items()]))
    if bad == values.keys():
        with pytest.raises(RewardError):
            check_reward(dict(items), source="judge")
        return
    numbers, missing = split_missing(check_reward(dict(items), source="judge"))
    spans = [reward_span(numbers, primary_key=next(iter(numbers)), attributes=missing)]
    for keys in ({"run_key": key}, {"reward_key": key}):
        if key in bad:
            with pytest.raises(RewardError, match=rf"^judge\['{key}'\] returned ") as refused:
                read_reward(spans, **keys)
            assert refused.value.reason == ("no_reward" if named[key] is None else "bad_reward")
        else:
            reward = read_reward(spans, **keys)
            assert (reward.primary, next(iter(reward.named))) == (values[key], key)
            assert {*reward.missing} == bad
    first = items[0][0]  # the rollout's own
    if first in bad:
        with pytest.raises(RewardError):
            read_reward(spans)
    else:
        assert read_reward(spans).primary == values[first]
    with pytest.raises(
        RewardError, match=f"no reward named 'd', only {', '.join(sorted(values))}; a run trains on one"
    ):
        read_reward(spans, run_key="d")
    assert read_reward([reward_span(0.5)], run_key="d").primary == 0.5


@pytest.mark.parametrize(
    "value", [1, 0.5, True, np.float32(0.25), np.array([0.5]), Fraction(1, 4)], ids=lambda value: type(value).__name__
)
def test_numbers_of_all_kinds_become_floats(value: Any) -> None:
    rewards = check_reward(value, source="judge")
    assert rewards == {"primary": float(np.asarray(value, dtype=float).item())}
    assert type(rewards["primary"]) is float


@pytest.mark.parametrize(
    ("value", "reason", "word"),
    [
        (None, "no_reward", "None"),
        ({}, "bad_reward", "empty"),
        ("1.0", "bad_reward", "'1.0' of type str"),
        ([1.0], "bad_reward", "list"),
        (math.nan, "bad_reward", "finite"),
        (np.float32("nan"), "bad_reward", "finite"),
        (np.array([1.0, 2.0]), "bad_reward", "not one number"),
        ({"format": math.nan}, "bad_reward", "'format'"),
        (10**400, "bad_reward", "finite"),
        (1e39, "bad_reward", "at most 1e\\+18"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_everything_else_is_refused_with_its_reason(value: object, reason: str, word: str) -> None:
    with pytest.raises(RewardError, match=f"^judge.*{word}") as caught:
        check_reward(value, source="judge")
    assert caught.value.reason == reason
