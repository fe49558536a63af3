"""Rewards of single turns and roles: linked reward spans, the Samples they go to, the baseline they are compared by."""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime import slime_hooks
from agl_slime.errors import ConfigError, RewardError, TrainerError
from agl_slime.support.agl import Rollout, Span, emit_reward, make_link_attributes
from agl_slime.tokens import attributes as names
from agl_slime.tokens.converter import convert_rollout, convert_trajectory
from agl_slime.tokens.reward import TurnReward, read_reward
from agl_slime.tokens.turn import Trajectory, Turn
from agl_slime.train.local.batch import TrainBatch
from agl_slime.train.slime.hooks import credits_tokens
from agl_slime.types import Sample
from tests.harness.samples import trained_ids
from tests.harness.trace_strategies import conversations
from tests.tokens.spans import attempt_spans
from tests.tokens.test_converter import FIRST, SECOND, rollout

THIRD = Turn(prompt_ids=[1, 2, 3, 4, 5, 90, 91, 6, 7, 8, 92], response_ids=[9], log_probs=[-4.0])


def linked(value: Any, links: dict[str, str], **spans: Any) -> Span:
    core = emit_reward(value, propagate=False, attributes=make_link_attributes(links), **spans)
    attributes: Any = core.attributes
    return Span.from_attributes(
        name=core.name, attributes=attributes, rollout_id="ro-1", attempt_id="at-1", sequence_id=50, start_time=500.0
    )


def three(*rewards: Span, whole: Any = 1.0) -> list[Span]:
    """Three turns of one conversation, by a planner and a coder; the rewards come after."""
    spans = attempt_spans([FIRST, SECOND, THIRD], whole)
    for number, role in enumerate(("planner", "coder", "planner")):
        spans[number].attributes |= {names.RESPONSE_ID: f"chatcmpl-{number}", names.ROLE: role}
    for number, span in enumerate(rewards):
        span.sequence_id = 50 + number
    return [*spans, *rewards]


def trained(spans: list[Span], **options: Any) -> list[tuple[Any, list[int], Any]]:
    """Of each Sample the reward, the ids under its mask, and the rewarded part."""
    samples = convert_rollout(rollout(), spans, rollout_id=3, **options).samples
    return [(s.reward, trained_ids(s), s.metadata.get("reward_of")) for s in samples]


@pytest.mark.parametrize("key", [names.RESPONSE_ID, "span_id"])
def test_turn_reward_gets_its_own_sample_and_each_token_trains_once(key: str) -> None:
    spans = three()
    assert trained(spans) == [(1.0, [4, 5, 6, 7, 8, 9], None)]
    value = "chatcmpl-1" if key == names.RESPONSE_ID else spans[1].span_id
    reward = linked(-0.5, {key: value})
    for _ in range(2):
        assert trained([*spans, reward]) == [(1.0, [4, 5, 9], None), (-0.5, [6, 7, 8], "turn:1")]
        spans[1].sequence_id, spans[2].sequence_id = spans[2].sequence_id, spans[1].sequence_id  # any order
    spans[1].attributes[names.UNTRAINED] = "role:judge"
    assert trained([*spans, reward]) == [(1.0, [4, 5, 9], None)]


def test_a_reward_of_a_role_goes_to_its_turns_and_the_last_one_counts() -> None:
    early, late = linked(0.1, {names.ROLE: "planner"}), linked(0.2, {names.ROLE: "planner"})
    spans = three(early, late, linked(9.0, {names.ROLE: "critic"}))
    spans[2].attributes[names.ROLES] = '["main_llm", "planner", "coder", "critic"]'  # who made no call
    assert trained(spans) == [(0.2, [4, 5, 9], "role:planner"), (1.0, [6, 7, 8], None)]


def test_a_reward_that_is_linked_to_nothing_or_is_no_number_is_an_error() -> None:
    for links, message in (
        ({names.ROLE: "planer"}, r"role 'planer', and this rollout has coder, planner"),
        ({names.RESPONSE_ID: "gone"}, r"linked to \{'gen_ai.response.id': 'gone'\}"),
    ):
        with pytest.raises(RewardError, match=message):
            trained(three(linked(0.5, links)))
    bad = linked(0.5, {names.RESPONSE_ID: "chatcmpl-1"})
    bad.attributes["agentlightning.reward.0.value"] = float("nan")
    with pytest.raises(RewardError, match="finite"):
        trained(three(bad))


def test_samples_of_turns_keep_their_tokens_and_log_probs() -> None:
    samples = convert_rollout(rollout(), three(linked(0.5, {names.RESPONSE_ID: "chatcmpl-1"}))).samples
    assert samples[0].tokens == THIRD.token_ids.tolist()
    assert samples[0].loss_mask == [1, 1, 0, 0, 0, 0, 0, 0, 1]
    assert samples[1].tokens == SECOND.token_ids.tolist()
    assert samples[1].rollout_log_probs == [-1.0, -2.0, -3.0]
    assert [sample.metadata["reward"] for sample in samples] == [1.0, 1.0]
    assert [sample.metadata["forks"] for sample in samples] == [{}, {}]


def test_a_fork_that_is_split_by_rewards_counts_once() -> None:
    second = Turn(prompt_ids=[70, 71], response_ids=[72], log_probs=[-0.1])
    third = Turn(prompt_ids=[70, 71, 72, 73], response_ids=[74], log_probs=[-0.2])
    spans = attempt_spans([FIRST, second, third], 1.0)
    conversion = convert_rollout(rollout(), [*spans, linked(0.5, {"span_id": spans[2].span_id})])
    assert [sample.metadata["fork_reason"] for sample in conversion.samples] == [None, "new_context", None]
    assert conversion.forks == {"new_context": 1}


def test_each_encoder_marks_untrained_turns_of_its_stream_only() -> None:
    """A gateway that is started again in the middle of a rollout counts its turns anew."""
    first, second = three(), three(whole=None)[:3]
    for number, span in enumerate(second):
        span.sequence_id = 20 + number
    spans = [*first, *second]
    for span, turns in zip(spans, ("[]", "[0]", "[0]", None, "[]", "[1]", "[]"), strict=True):
        span.attributes |= {names.UNTRAINED_TURNS: turns} if turns is not None else {}
    assert len({span.attributes[names.STREAM] for span in (first[0], second[0])}) == 2
    untrained = convert_rollout(rollout(), spans).samples[0].metadata["untrained_turns"]
    assert untrained == [0]  # of the second nothing is left out any more


def test_rollout_reward_is_not_replaced_by_turn_rewards() -> None:
    spans = three(linked(0.25, {names.RESPONSE_ID: "chatcmpl-0"}))
    assert read_reward(spans) == read_reward(three())
    assert read_reward(attempt_spans([], None) + spans[-1:]).primary == 0.25


def test_reward_key_picks_from_a_turns_named_rewards() -> None:

    named = linked({"style": 0.7, "exact": 0.3}, {names.ROLE: "planner"}, primary_key="style")
    bare = linked(0.4, {names.ROLE: "coder"})
    of_all = attempt_spans([], {"exact": 1.0, "style": 0.0}, primary_key="exact")
    spans = [*three(whole=None), *of_all, named, bare]
    samples_trained = trained(spans, reward_key="exact")
    assert samples_trained[0][0] == {"style": 0.7, "exact": 0.3}
    assert samples_trained[1][0] == {"primary": 0.4, "exact": 0.4}


def test_later_reward_overrides_the_first_turn_of_an_earlier_group_reward() -> None:
    spans = three()
    spans[1].attributes[names.RESPONSE_ID] = "chatcmpl-0"  # two choices of one request
    both, first = linked(0.5, {names.RESPONSE_ID: "chatcmpl-0"}), linked(0.7, {"span_id": spans[0].span_id})
    both.sequence_id, first.sequence_id = 50, 51
    samples_trained = trained([*spans, both, first])
    assert samples_trained == [(0.7, [4, 5], "turn:0"), (0.5, [6, 7, 8], "turn:1"), (1.0, [9], None)]


def group(**options: Any) -> list[Sample]:
    """Two rollouts of one prompt, their planners' turns rewarded apart."""
    samples: list[Sample] = []
    for number, (whole, planner) in enumerate(((1.0, 0.0), (0.0, 4.0))):
        spans = three(linked(planner, {names.ROLE: "planner"}), whole=whole)
        samples += convert_rollout(rollout(), spans, rollout_id=number, group_index=0, **options).samples
    return samples


def test_reward_spans_give_one_sample_with_its_turns_rewards() -> None:
    whole, second = group(reward_spans=True)
    assert whole.tokens == THIRD.token_ids.tolist()
    assert whole.loss_mask == [1, 1, 0, 0, 1, 1, 1, 0, 1]
    assert whole.metadata["reward_spans"] == [["role:planner", 0.0, 0, 2], ["role:planner", 0.0, 8, 9]]
    assert (whole.reward, second.reward) == (1.0, 0.0)
    batch = TrainBatch.from_samples([whole, second], std_normalization=False)
    assert batch.token_rewards.tolist() == [-2.0] * 2 + [0.5] * 3 + [-2.0] + [2.0] * 2 + [-0.5] * 3 + [2.0]


def test_a_span_of_a_reward_that_is_no_part_of_the_response_is_refused() -> None:
    whole = group(reward_spans=True)
    whole[1].metadata["reward_spans"][0][3] = 99
    with pytest.raises(TrainerError, match=r"reward_spans.* of sample 1 has .* with a response of 9 tokens"):
        TrainBatch.from_samples(whole)


def test_roles_are_compared_with_their_own_kind_by_both_trainers() -> None:
    args = Namespace(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=False)
    raw, advantages = slime_hooks.normalize_rewards(args, group())
    assert raw == [0.0, 1.0, 4.0, 0.0]
    assert advantages == [-2.0, 0.5, 2.0, -0.5]
    batch = TrainBatch.from_samples(group(), std_normalization=False)
    assert batch.token_rewards.tolist() == [-2.0] * 3 + [0.5] * 3 + [2.0] * 3 + [-0.5] * 3
    assert set(batch.token_rollout_mask_sums.tolist()) == {6}


def conversation(number: int, reward: float, turns: list[tuple[list[int], float]]) -> Sample:
    """A rollout whose answers are one token each; of a turn, the ids that are added after it, and its reward."""
    tokens, mask, spans = [1, 2], list[int](), []
    for turn, (added, of_turn) in enumerate(turns):
        spans.append([f"turn:{turn}", of_turn, len(mask), len(mask) + 1])
        tokens += [10 + number, *added]
        mask += [1, *(0 for _ in added)]
    fields: Any = {"tokens": tokens, "response_length": len(mask), "loss_mask": mask, "reward": reward}
    return Sample(**fields, group_index=0, rollout_id=number, metadata={"reward_spans": spans})


LEFT, RIGHT = [30, 31], [40, 41]
TWO = [
    conversation(0, 1.0, [(LEFT, 0.0), ([], 4.0)]),
    conversation(1, 0.0, [(LEFT, 2.0), ([], 0.0)]),
    conversation(2, 0.5, [(RIGHT, 1.0), ([], 2.0)]),
]
# returns from the first turn on: 0 + 0.95 * 5, 2 + 0.95 * 0, 1 + 0.95 * 2.5; from the second on, after LEFT: 5 and 0
OF_FIRST = np.array([4.75, 2.0, 3.375]) - np.mean([4.75, 2.0, 3.375])


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        ("group", [[-1.5, 2.5], [0.5, -1.5], [-0.5, 0.5]]),
        ("turn", [[-0.5, 2.5], [0.5, -2.5], [0.0, 0.0]]),
        ("anchor", [[0.5 + OF_FIRST[0], 3.0], [-0.5 + OF_FIRST[1], -3.0], [OF_FIRST[2], 0.0]]),
    ],
)
def test_a_turn_is_compared_by_the_rule_of_credit(credit: Any, expected: list[list[float]]) -> None:
    batch = TrainBatch.from_samples(TWO, credit=credit, std_normalization=False)
    assert batch.token_rewards.reshape(3, 2) == pytest.approx(np.array(expected))
    args = Namespace(agl_credit=credit, custom_reward_post_process_path="agl_slime.slime_hooks.normalize_rewards")
    args.grpo_std_normalization, hook = False, "agl_slime.slime_hooks.advantages_of_tokens"
    args.custom_advantage_function_path = hook
    raw, rewards = slime_hooks.normalize_rewards(args, TWO)
    assert raw == [1.0, 0.0, 0.5]
    assert rewards == pytest.approx([sum(turns) / 2 for turns in expected])
    rewards = pickle.loads(pickle.dumps(rewards))
    of_tokens: list[Any] = [getattr(reward, "values") for reward in rewards]  # noqa: B009
    masked = [values[np.array(s.loss_mask) > 0] for values, s in zip(of_tokens, TWO, strict=True)]
    assert np.array(masked) == pytest.approx(np.array(expected))


DISCOUNTS = 0.95 ** np.arange(12)[::-1]


@pytest.mark.parametrize(
    ("credit", "labelled", "whole", "share"),
    [
        ("group", False, 1.0, 1 / 12),
        # its return and the rollout's reward are on every turn but the next, whose text shows the result
        ("anchor", False, 1.0, (1 + DISCOUNTS[5]) / (12 + DISCOUNTS.sum() - DISCOUNTS[6])),
        ("group", True, 1.0, 12 / 23),
        ("turn", True, 1.0, 2 / 13),
        ("turn", True, 0.0, 1.0),
    ],
)
def test_the_share_of_a_decisive_turn(credit: Any, labelled: bool, whole: float, share: float) -> None:
    """The sixth of twelve turns decides; ``labelled``: it has the reward, and the others 0."""
    rollouts = []
    for n in range(2):
        turns = [([60 + n if turn == 5 else 30 + turn], float(n and turn == 5)) for turn in range(12)]
        rollouts.append(conversation(n, n * whole, turns))
        if not labelled:
            rollouts[n].metadata = {}
    batch = TrainBatch.from_samples(rollouts, credit=credit, std_normalization=False)
    of_turns = np.abs(batch.token_rewards).reshape(2, 12).sum(axis=0)
    assert of_turns[5] / of_turns.sum() == pytest.approx(share)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"custom_reward_post_process_path": None}, "it takes what --custom-reward-post-process-path .* computes"),
        ({"advantage_estimator": "ppo"}, "with ppo: only cispo, grpo, gspo have"),
        ({"rewards_normalization": False}, "needs slime's rewards normalization"),
        ({"custom_advantage_function_path": None, "agl_credit": "turn"}, "agl_credit is 'turn'; it needs"),
    ],
)
def test_flags_of_slime_that_contradict_credit_of_tokens_are_refused(change: dict[str, Any], text: str) -> None:
    args = Namespace(custom_reward_post_process_path="agl_slime.slime_hooks.normalize_rewards")
    args.custom_advantage_function_path = "agl_slime.slime_hooks.advantages_of_tokens"
    assert credits_tokens(args)
    vars(args).update(change)
    with pytest.raises(ConfigError, match=text):
        credits_tokens(args)


@pytest.mark.parametrize(("turns", "tokens"), [(20, 12_100), (50, 28_600)])
def test_rewards_of_many_turns_do_not_repeat_their_tokens(turns: int, tokens: int) -> None:
    """The prompt, an answer of 50 tokens per turn, and 500 that are added before the next."""
    added, made, ids = (tokens - turns * 50) // turns, list[Turn](), list[int]()
    for turn in range(turns):
        ids = [*ids, *range(added if turn else tokens - turns * 50 - (turns - 1) * added)]
        made.append(Turn(prompt_ids=ids, response_ids=[*range(50)], log_probs=[-1.0] * 50))
        ids = [*ids, *range(50)]
    trajectory = Trajectory(rollout_id="ro", attempt_id="at", task={}, turns=tuple(made), reward=1.0)
    rewards = {turn: TurnReward(float(turn), {}, target=f"turn:{turn}") for turn in range(turns)}
    [whole] = convert_trajectory(trajectory, turn_rewards=rewards, reward_spans=True).samples
    assert (len(whole.tokens), len(whole.metadata["reward_spans"])) == (tokens, turns)
    split = convert_trajectory(trajectory, turn_rewards=rewards).samples
    assert (len(split), sum(len(sample.tokens) for sample in split)) == (turns, tokens * (turns + 1) // 2)


def test_the_gradient_is_the_same_in_one_sample_as_in_many(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason='training needs torch: pip install "agl-slime[local]"')
    from tests.harness.trainer_policy import save_policy
    from tests.harness.trainers import assert_close, gradient

    policy = save_policy(tmp_path)
    for aggregation in ("token", "rollout"):
        many, with_spans = (
            gradient(policy, group(reward_spans=value), aggregation=aggregation) for value in (False, True)
        )
        assert_close(with_spans, many)


# -- one Sample with reward spans against a Sample per reward --------------------------------------------------------


_reward = st.sampled_from((-1.0, 0.0, 0.25, 1.0, 3.0))


@st.composite
def _rewards(draw: st.DrawFn, turns: list[Turn]) -> dict[int, TurnReward]:
    """Of some turns, a role's, or of several turns by the first of them."""
    rewards: dict[int, TurnReward] = {}
    role = TurnReward(draw(_reward), {}, target="role:planner")
    for turn in range(len(turns)):
        kind = draw(st.sampled_from(("rollout", "role", "turn", "before")))
        if kind == "before" and (last := rewards.get(turn - 1)) is not None:
            rewards[turn] = last
        elif kind == "role":
            rewards[turn] = role
        elif kind == "turn":
            rewards[turn] = TurnReward(draw(_reward), {}, target=f"turn:{turn}")
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
            tuple(ids[: position + 1].tolist()),
            batch.token_rewards[n],
            batch.token_rollout_mask_sums[n],
        )
        for i, ids in enumerate(batch.tokens)
        for n, position in zip(range(ends[i], ends[i + 1]), batch.target_positions[i], strict=True)
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
