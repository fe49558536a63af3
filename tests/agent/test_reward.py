"""What counts as a reward where it enters. Nothing is ever made into one."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from agl_slime.agent.outcome import check_reward, missing_rewards
from agl_slime.errors import RewardError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (-2, -2.0),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3.0),
        (Fraction(1, 4), 0.25),
    ],
)
def test_numbers_of_all_kinds_become_floats(value: object, expected: float) -> None:
    rewards = check_reward(value, source="judge")
    assert rewards == {"primary": expected}
    assert type(rewards["primary"]) is float


def test_one_element_arrays_and_tensors_are_numbers() -> None:
    torch = pytest.importorskip("torch")
    assert check_reward(np.array([0.5]), source="judge") == {"primary": 0.5}
    assert check_reward(torch.tensor(0.5), source="judge") == {"primary": 0.5}


def test_named_rewards_keep_their_order_so_the_first_is_primary() -> None:
    assert list(check_reward({"correct": 1, "format": 0.5}, source="judge").items()) == [
        ("correct", 1.0),
        ("format", 0.5),
    ]


def test_a_later_reward_may_be_none_and_is_left_out() -> None:
    value = {"correct": 1.0, "judge": None, "format": 0.5}
    assert check_reward(value, source="judge") == {"correct": 1.0, "format": 0.5}
    assert missing_rewards(value) == ["judge"]
    assert missing_rewards(1.0) == []


@pytest.mark.parametrize(
    ("value", "reason", "says"),
    [
        (None, "no_reward", "None"),
        ({"correct": None}, "no_reward", "'correct'"),
        ({"correct": None, "format": 1.0}, "no_reward", "'correct'"),
        ({}, "bad_reward", "empty"),
        ("1.0", "bad_reward", "'1.0' of type str"),
        (b"1", "bad_reward", "bytes"),
        ([1.0], "bad_reward", "list"),
        (1j, "bad_reward", "complex"),
        (math.nan, "bad_reward", "finite"),
        (math.inf, "bad_reward", "finite"),
        (-math.inf, "bad_reward", "finite"),
        (np.float32("nan"), "bad_reward", "finite"),
        (np.array([1.0, 2.0]), "bad_reward", "not one number"),
        ({"correct": 1.0, "format": math.nan}, "bad_reward", "'format'"),
        (10**400, "bad_reward", "finite"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_everything_else_is_refused_with_its_reason(value: object, reason: str, says: str) -> None:
    with pytest.raises(RewardError, match=r"^judge") as caught:
        check_reward(value, source="judge")
    assert caught.value.reason == reason
    assert says in str(caught.value)
