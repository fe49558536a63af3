"""A rollout whose turns have rewards of their own gives each token the same advantage in the Samples that it has anyway
as in a Sample per reward."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agl_slime.support.agl import Rollout
from agl_slime.tokens.converter import convert_trajectory
from agl_slime.tokens.reward import TurnReward
from agl_slime.tokens.trajectory import Trajectory
from agl_slime.tokens.turn import Turn
from agl_slime.train.local.batch import TrainBatch
from agl_slime.types import Sample
from tests.harness.trace_strategies import conversations

_reward = st.sampled_from((-1.0, 0.0, 0.25, 1.0, 3.0))


@st.composite
def _rewards(draw: st.DrawFn, turns: list[Turn]) -> dict[int, TurnReward]:
    """Of some turns, a role's, or of several turns by the first of them."""
    rewards: dict[int, TurnReward] = {}
    role = TurnReward(draw(_reward), {}, "role:planner")
    for turn in range(len(turns)):
        kind = draw(st.sampled_from(("rollout", "role", "turn", "before")))
        if kind == "before" and (last := rewards.get(turn - 1)) is not None:
            rewards[turn] = last
        elif kind == "role":
            rewards[turn] = role
        elif kind == "turn":
            rewards[turn] = TurnReward(draw(_reward), {}, f"turn:{turn}")
    return rewards


@st.composite
def _rollouts(draw: st.DrawFn) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    made = []
    for number in range(draw(st.integers(1, 4))):
        turns = draw(conversations(min_response=1, max_turns=5, links=False))
        named = Rollout(rollout_id=f"ro-{number}", input={}, start_time=0.0)
        trajectory = Trajectory(
            rollout_id=named.rollout_id, attempt_id="at", task={}, turns=tuple(turns), reward=draw(_reward)
        )
        untrained = draw(st.sets(st.integers(1, len(turns)), max_size=2)) if len(turns) > 1 else set()
        options = {"untrained_turns": untrained, "turn_rewards": draw(_rewards(turns))}
        numbers = {"rollout_id": number, "group_index": draw(st.integers(0, 1))}
        made.append(({"trajectory": trajectory}, {**options, **numbers}))
    return made


def _advantages(rollouts: list[tuple[dict[str, Any], dict[str, Any]]], *, reward_spans: bool, **settings: Any) -> Any:
    """Each trained token, by all that comes before it: how often, with which advantage and denominator; and how many
    Samples and ids these took."""
    samples: list[Sample] = []
    for whose, options in rollouts:
        samples += convert_trajectory(whose["trajectory"], reward_spans=reward_spans, **options).samples
    batch = TrainBatch.from_samples(samples, **settings)
    ends = batch.token_offsets
    rewards = Counter(
        (
            int(batch.rollout_ids[i]),
            tuple(ids[: at + 1].tolist()),
            batch.token_rewards[n],
            batch.token_rollout_mask_sums[n],
        )
        for i, ids in enumerate(batch.tokens)
        for n, at in zip(range(ends[i], ends[i + 1]), batch.target_positions[i], strict=True)
    )
    return rewards, batch.n_samples, sum(map(len, batch.tokens))


@given(_rollouts(), st.booleans(), st.booleans())
def test_token_advantages_equal_those_of_one_sample_per_reward(rollouts: Any, normalized: bool, std: bool) -> None:
    settings = {"rewards_normalization": normalized, "std_normalization": std}
    without, n_many, ids_many = _advantages(rollouts, reward_spans=False, **settings)
    with_spans, n_with_spans, ids_with_spans = _advantages(rollouts, reward_spans=True, **settings)
    assert with_spans == without
    assert n_with_spans <= n_many
    assert ids_with_spans <= ids_many
