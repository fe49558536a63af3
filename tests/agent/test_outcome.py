"""Rewards are checked where they enter, and nothing is made into one; loss scales choose the trained answers."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from agl_slime.agent.outcome import check_reward, missing_rewards, untrained_turns
from agl_slime.errors import ConfigError, RewardError
from agl_slime.tokens.turn import Turn


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (np.float32(0.25), 0.25),
        (np.array([0.5]), 0.5),
        (Fraction(1, 4), 0.25),
    ],
)
def test_numbers_of_all_kinds_become_floats(value: object, expected: float) -> None:
    rewards = check_reward(value, source="judge")
    assert rewards == {"primary": expected}
    assert type(rewards["primary"]) is float


def test_named_rewards_keep_their_order_and_a_later_one_may_be_none() -> None:
    """The first is primary; one of None is left out, and named."""
    torch = pytest.importorskip("torch")
    value = {"correct": torch.tensor(0.5), "judge": None, "format": 1}
    assert list(check_reward(value, source="judge").items()) == [("correct", 0.5), ("format", 1.0)]
    assert missing_rewards(value) == ["judge"]
    assert missing_rewards(1.0) == []


@pytest.mark.parametrize(
    ("value", "reason", "word"),
    [
        (None, "no_reward", "None"),
        ({"correct": None, "format": 1.0}, "no_reward", "'correct'"),
        ({}, "bad_reward", "empty"),
        ("1.0", "bad_reward", "'1.0' of type str"),
        ([1.0], "bad_reward", "list"),
        (math.nan, "bad_reward", "finite"),
        (math.inf, "bad_reward", "finite"),
        (np.float32("nan"), "bad_reward", "finite"),
        (np.array([1.0, 2.0]), "bad_reward", "not one number"),
        ({"correct": 1.0, "format": math.nan}, "bad_reward", "'format'"),
        (10**400, "bad_reward", "finite"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_everything_else_is_refused_with_its_reason(value: object, reason: str, word: str) -> None:
    with pytest.raises(RewardError, match=r"^judge") as caught:
        check_reward(value, source="judge")
    assert caught.value.reason == reason
    assert word in str(caught.value)


def turns(*responses: list[int]) -> list[Turn]:
    return [
        Turn(prompt_ids=[1], response_ids=ids, text=f"answer {n}", messages=[{"role": "user", "content": "?"}])
        for n, ids in enumerate(responses)
    ]


def test_loss_scale_trains_all_last_or_selected_turns() -> None:
    three = turns([1], [2], [3])
    assert untrained_turns("default", three) == ()
    assert untrained_turns("last_round", three) == (0, 1)
    assert untrained_turns(lambda messages, turn, turns: int(turn != 2), three) == (1,)
    assert untrained_turns(lambda messages, turn, turns: messages[-1]["content"] == "answer 2", three) == (0, 1)
    assert untrained_turns("last_round", turns([1], [2], [])) == (0,)  # an answer without tokens is no round
    assert untrained_turns("last_round", []) == ()


def test_weights_nothing_at_all_and_other_values_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"got 0\.5 for answer 1"):
        untrained_turns(lambda messages, turn, turns: 0.5, turns([1]))
    with pytest.raises(ConfigError, match="all 2 answers"):
        untrained_turns(lambda messages, turn, turns: 0, turns([1], [2]))
    bad: Any = "first_round"
    with pytest.raises(ConfigError, match="got 'first_round'"):
        untrained_turns(bad, turns([1]))
