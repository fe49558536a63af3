from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

from agl_slime.errors import RewardError, TrainerError
from agl_slime.train.local import TrainBatch
from agl_slime.train.local.batch import split_minibatches
from agl_slime.types import Sample, sample_from_fields


def sample(**fields: Any) -> Sample:
    """Two prompt tokens, a response of three, of which the second is an observation."""
    values = {
        "group_index": 0,
        "index": 0,
        "rollout_id": 0,
        "tokens": [10, 11, 12, 13, 14],
        "response_length": 3,
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.5, 0.0, -1.5],
        "reward": 1.0,
        "status": Sample.Status.COMPLETED,
    }
    return sample_from_fields(**{**values, **fields})


def pair() -> list[Sample]:
    return [
        sample(),
        sample(index=1, rollout_id=1, reward=0.0, status=Sample.Status.TRUNCATED),
    ]


def rewards(samples: Any, **settings: Any) -> list[float]:
    """The advantage of each sample, of which each has a token under the mask."""
    batch = TrainBatch.from_samples(samples, **settings)
    return batch.token_rewards[batch.token_offsets[:-1]].tolist()


def test_a_batch_lists_the_tokens_under_the_mask():
    batch = TrainBatch.from_samples(pair(), std_normalization=False)
    assert (batch.n_samples, batch.n_rollouts, batch.n_tokens) == (2, 2, 4)
    assert [ids.tolist() for ids in batch.tokens] == [[10, 11, 12, 13, 14]] * 2
    assert [positions.tolist() for positions in batch.target_positions] == [[2, 4], [2, 4]]
    assert batch.token_offsets.tolist() == [0, 2, 4]
    assert batch.rollout_ids.tolist() == [0, 1]
    assert batch.token_rewards.tolist() == [0.5, 0.5, -0.5, -0.5]
    assert batch.token_rollout_mask_sums.tolist() == [2, 2, 2, 2]
    assert batch.token_log_probs is not None
    assert batch.token_log_probs.tolist() == [-0.5, -1.5, -0.5, -1.5]


def test_nested_groups_are_flattened():
    a, b = pair()
    assert rewards([[a], [b]]) == rewards([[[a, b]]]) == rewards([a, b])


def test_rewards_are_normalised_with_the_standard_deviation_by_default():
    expected = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert rewards(pair()) == pytest.approx([expected, -expected], abs=1e-12)


def test_rewards_stay_raw_on_request():
    assert rewards(pair(), rewards_normalization=False) == [1.0, 0.0]


def test_siblings_share_their_mask_sum_and_their_advantage():
    samples = [
        sample(rollout_id=5),
        sample(rollout_id=5, loss_mask=[1, 1, 1], rollout_log_probs=[-1.0] * 3),
        sample(rollout_id=6, reward=0.0),
    ]
    batch = TrainBatch.from_samples(samples, std_normalization=False)
    assert batch.token_rollout_mask_sums.tolist() == [5] * 5 + [2] * 2
    assert batch.token_rewards.tolist() == [0.5] * 5 + [-0.5] * 2


def test_samples_without_rollout_id_get_unused_ids():
    samples = [sample(rollout_id=None), sample(rollout_id=0), sample(rollout_id=None), sample(rollout_id=2)]
    assert TrainBatch.from_samples(samples).rollout_ids.tolist() == [1, 0, 3, 2]


def test_a_missing_mask_is_all_ones_and_a_removed_sample_all_zeros():
    batch = TrainBatch.from_samples([sample(loss_mask=None), sample(rollout_id=1, remove_sample=True)])
    assert [positions.tolist() for positions in batch.target_positions] == [[2, 3, 4], []]
    assert batch.token_rollout_mask_sums.tolist() == [3, 3, 3]


OUT = [{"remove_sample": True}, {"status": Sample.Status.FAILED}]


@pytest.mark.parametrize("out", OUT)
def test_a_sample_out_of_the_loss_shifts_no_baseline_and_no_normaliser(out: dict[str, Any]):
    batch = TrainBatch.from_samples([*pair(), sample(rollout_id=2, reward=-9.0, **out)], std_normalization=False)
    assert batch.token_rewards.tolist() == [0.5, 0.5, -0.5, -0.5]
    assert (batch.n_samples, batch.n_rollouts, batch.n_tokens) == (3, 2, 4)
    halves = split_minibatches(batch, n_minibatches=3, rng=np.random.default_rng(0))
    assert sorted(half.tolist() for half in halves) == [[0], [1]]


@pytest.mark.parametrize("out", OUT)
def test_a_sample_out_of_the_loss_needs_no_reward_and_no_log_probs(out: dict[str, Any]):
    batch = TrainBatch.from_samples([*pair(), sample(rollout_id=2, reward=None, rollout_log_probs=None, **out)])
    assert batch.token_log_probs is not None
    assert len(batch.token_log_probs) == batch.n_tokens == 4


def test_the_samples_are_left_alone():
    samples = [sample(loss_mask=None), sample(rollout_id=1, remove_sample=True)]
    originals = copy.deepcopy(samples)
    TrainBatch.from_samples(samples)
    assert samples == originals


def test_the_reward_key_picks_from_a_dict():
    samples = [sample(reward={"score": 1.0, "format": 0.0}), sample(rollout_id=1, reward={"score": 0.0, "format": 1.0})]
    assert rewards(samples, reward_key="format", rewards_normalization=False) == [0.0, 1.0]
    with pytest.raises(RewardError, match=r"sample 0 is \{'score': 1.0"):
        rewards(samples)
    with pytest.raises(RewardError, match="reward_key 'style'"):
        rewards(samples, reward_key="style")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": None}, "reward of sample 1 is None"),
        ({"reward": "good"}, "reward of sample 1 is 'good'"),
        ({"loss_mask": [1, 1]}, "loss_mask of sample 1 has 2 entries, response_length is 3"),
        ({"loss_mask": [1, 2, 1]}, "loss_mask of sample 1 .* 0 and 1"),
        ({"rollout_log_probs": None}, "sample 1 has no rollout_log_probs"),
        ({"rollout_log_probs": [-1.0]}, "rollout_log_probs of sample 1 has 1 entries, response_length is 3"),
        ({"rollout_log_probs": [-1.0, math.nan, -1.0]}, "rollout_log_probs of sample 1 has nan at position 1"),
        ({"rollout_log_probs": [-1.0, None, -1.0]}, "rollout_log_probs of sample 1 (must be numbers|has nan)"),
        ({"tokens": [12, 13, 14]}, "response_length of sample 1 is 3 with 3 tokens"),
        ({"tokens": []}, "response_length of sample 1 is 3 with 0 tokens"),
        ({"tokens": [1.5, 2, 3, 4, 5]}, "tokens of sample 1 .* integers"),
        ({"tokens": [[1, 2], [3, 4]], "response_length": 1, "loss_mask": [1]}, "tokens of sample 1 .*shape"),
        ({"tokens": [-1, 2, 3, 4, 5]}, "tokens of sample 1 contain -1"),
        ({"response_length": -1, "loss_mask": [], "rollout_log_probs": []}, "response_length of sample 1 is -1"),
        ({"multimodal_train_inputs": {"pixels": 1}}, "has images; use slime"),
    ],
)
def test_untrainable_batch_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises((TrainerError, RewardError), match=message):
        TrainBatch.from_samples([sample(), sample(rollout_id=1, **fields)])


@pytest.mark.parametrize("normalize", [True, False])
def test_a_reward_that_is_not_finite_is_refused(normalize: bool):
    with pytest.raises((TrainerError, RewardError), match="nan"):
        rewards([sample(), sample(rollout_id=1, reward=math.nan)], rewards_normalization=normalize)


def test_siblings_with_different_rewards_are_refused():
    with pytest.raises(RewardError, match=r"rollout 0 .* 1\.0 and 0\.0"):
        rewards([sample(), sample(reward=0.0)])


def test_samples_without_any_group_are_refused():
    with pytest.raises(TrainerError, match="group_index"):
        rewards([sample(group_index=None), sample(group_index=None, rollout_id=1)])


def test_an_empty_batch_is_refused():
    with pytest.raises(TrainerError, match="no samples"):
        TrainBatch.from_samples([])
