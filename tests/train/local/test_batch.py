"""Batches of samples: their tokens, advantages and refusals, and their division into minibatches and microbatches."""

import copy
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.errors import ConfigError, RewardError, TrainerError
from agl_slime.train.local import LocalTrainerSettings, TrainBatch
from agl_slime.train.local.batch import MicroBatch, make_microbatches, split_minibatches
from agl_slime.types import Sample, sample_from_fields


def sample(**fields: Any) -> Sample:
    """Two prompt tokens, a response of three, of which the second is an observation."""
    values: dict[str, Any] = {"group_index": 0, "index": 0, "rollout_id": 0, "tokens": [10, 11, 12, 13, 14]}
    values |= {"response_length": 3, "loss_mask": [1, 0, 1], "rollout_log_probs": [-0.5, 0.0, -1.5], "reward": 1.0}
    values |= {"status": Sample.Status.COMPLETED}
    return sample_from_fields(**{**values, **fields})


def pair() -> list[Sample]:
    return [sample(), sample(index=1, rollout_id=1, reward=0.0, status=Sample.Status.TRUNCATED)]


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


def test_rewards_are_normalised_with_the_standard_deviation_unless_raw():
    expected = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert rewards(pair()) == pytest.approx([expected, -expected], abs=1e-12)
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
    samples = [sample(loss_mask=None), sample(rollout_id=1, remove_sample=True)]
    originals = copy.deepcopy(samples)
    batch = TrainBatch.from_samples(samples)
    assert [positions.tolist() for positions in batch.target_positions] == [[2, 3, 4], []]
    assert batch.token_rollout_mask_sums.tolist() == [3, 3, 3]
    assert samples == originals


@pytest.mark.parametrize("out", [{"remove_sample": True}, {"status": Sample.Status.FAILED}])
def test_a_sample_out_of_the_loss_shifts_nothing_and_needs_no_reward(out: dict[str, Any]):
    """No baseline and no normaliser; nor does it need log-probs."""
    for fields in ({"reward": -9.0}, {"reward": None, "rollout_log_probs": None}):
        batch = TrainBatch.from_samples([*pair(), sample(rollout_id=2, **fields, **out)], std_normalization=False)
        assert batch.token_rewards.tolist() == [0.5, 0.5, -0.5, -0.5]
        assert (batch.n_samples, batch.n_rollouts, batch.n_tokens) == (3, 2, 4)
        assert batch.token_log_probs is not None
        assert len(batch.token_log_probs) == 4
        halves = split_minibatches(batch, n_minibatches=3, rng=np.random.default_rng(0))
        assert sorted(half.tolist() for half in halves) == [[0], [1]]


def test_rewards_are_picked_by_name():
    samples = [sample(reward={"score": 1.0, "format": 0.0}), sample(rollout_id=1, reward={"score": 0.0, "format": 1.0})]
    assert rewards(samples, rewards="format", rewards_normalization=False) == [0.0, 1.0]
    with pytest.raises(RewardError, match=r"sample 0 is \{'score': 1.0"):
        rewards(samples)
    with pytest.raises(RewardError, match="reward_key 'style'"):
        rewards(samples, rewards="style")
    with pytest.raises(RewardError, match="no rollout has the rewards style, only format, score"):
        rewards(samples, rewards="score,style")
    for text in ("score=x", "=1", "score?", "score,,=2", "score=inf"):
        with pytest.raises(ConfigError, match="write names with weights"):
            LocalTrainerSettings(rewards=text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("score=1,format=0.2", [1.0 - 0.2, 0.0, -1.0 + 0.2]),  # each with a standard deviation of 1
        ("score=2", [2.0, 0.0, -2.0]),
        ("score+format=2", [-1.0, 0.0, 1.0]),  # 0, 0.5 and 1 more than their mean, over their own deviation
        ("score,format?", [1.0, 0.0, -1.0]),
        ("equal,format?", [-1.0, 0.0, 1.0]),
        ("score,rare", [1.0 + 2**-0.5, 0.0, -1.0 - 2**-0.5]),  # the second of two rollouts
    ],
)
def test_several_rewards_are_normalized_each_or_as_a_sum(text: str, expected: list[float]):
    named = [{"score": 2.0 - n, "format": float(n), "equal": 3.0} for n in range(3)]
    named[0]["rare"], named[2]["rare"] = 1.0, 0.0
    samples = [sample(rollout_id=n, reward=reward) for n, reward in enumerate(named)]
    assert rewards(samples, rewards=text) == pytest.approx(expected, abs=1e-5)


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


@pytest.mark.parametrize(
    ("fields", "settings", "error", "message"),
    [
        ([{}, {"rollout_id": 1, "reward": math.nan}], {"rewards_normalization": True}, RewardError, "nan"),
        ([{}, {"rollout_id": 1, "reward": math.nan}], {"rewards_normalization": False}, RewardError, "nan"),
        ([{}, {"reward": 0.0}], {}, RewardError, r"rollout 0 .* 1\.0 and 0\.0"),  # siblings
        ([{"group_index": None}, {"group_index": None, "rollout_id": 1}], {}, TrainerError, "group_index"),
        ([], {}, TrainerError, "no samples"),
    ],
)
def test_a_batch_without_comparable_rewards_is_refused(fields: Any, settings: Any, error: Any, message: str):
    with pytest.raises(error, match=message):
        TrainBatch.from_samples([sample(**each) for each in fields], **settings)


# -- minibatches and microbatches --------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    """Samples of random lengths and masks, many of which begin alike."""
    samples = []
    for _ in range(draw(st.integers(1, 12))):
        mask = draw(st.lists(st.integers(0, 1), max_size=8))
        length = draw(st.integers(1, 6)) + len(mask)
        sample = sample_from_fields(
            tokens=draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)),
            response_length=len(mask),
            loss_mask=mask,
            reward=0.0,
            rollout_id=draw(st.integers(0, 5)),
        )
        samples.append(sample)
    return TrainBatch.from_samples(samples, rewards_normalization=False)


@given(batch=batches(), n_minibatches=st.integers(1, 6), seed=st.integers(0, 1000))
def test_minibatches_hold_every_sample_once_and_whole_rollouts(batch: TrainBatch, n_minibatches: int, seed: int):
    minibatches = split_minibatches(batch, n_minibatches=n_minibatches, rng=np.random.default_rng(seed))
    assert sorted(np.concatenate(minibatches).tolist()) == list(range(batch.n_samples))
    rollouts = [set(batch.rollout_ids[part].tolist()) for part in minibatches]
    assert sum(len(ids) for ids in rollouts) == batch.n_rollouts  # none in two parts
    sizes = [len(ids) for ids in rollouts]
    assert len(minibatches) == min(n_minibatches, batch.n_rollouts)
    assert max(sizes) - min(sizes) <= 1
    repeated = split_minibatches(batch, n_minibatches=n_minibatches, rng=np.random.default_rng(seed))
    assert [part.tolist() for part in minibatches] == [part.tolist() for part in repeated]


@given(batch=batches(), max_tokens=st.integers(1, 60), sharing=st.booleans(), data=st.data())
def test_microbatches_hold_every_token_under_the_mask_once(batch, max_tokens, sharing, data):
    chosen = data.draw(st.sets(st.integers(0, batch.n_samples - 1)))
    micros = list(make_microbatches(batch, sorted(chosen), max_tokens=max_tokens, sharing=sharing))
    flat = np.concatenate([batch.tokens[i][batch.target_positions[i]] for i in range(batch.n_samples)])
    index = [place for micro in micros for place in micro.token_index.tolist()]
    assert sorted(index) == [place for i in sorted(chosen) for place in range(*batch.token_offsets[i : i + 2])]
    trained_prefixes = [batch.tokens[i][: positions[-1]] for i in chosen if len(positions := batch.target_positions[i])]
    rows = [row for micro in micros for row in sequences_of(micro)]
    # nothing is computed for nothing: every sequence ends at the last position that predicts a token
    assert sorted(row.tolist() for row in rows) == sorted(ids.tolist() for ids in trained_prefixes)
    sample_of = np.repeat(np.arange(batch.n_samples), batch.token_counts)
    for micro in micros:
        assert (len(micro.ids) if sharing else micro.cells.size) <= max_tokens or len(micro.cells) == 1
        assert micro.cells.size <= 2 * max_tokens or len(micro.cells) == 1
        assert flat[micro.token_index].tolist() == micro.targets.tolist()
        assert (micro.cells.flatten()[micro.homes] == np.arange(len(micro.ids))).all()
        for source, place in zip(micro.sources, micro.token_index, strict=True):
            i, of_sample = sample_of[place], place - batch.token_offsets[sample_of[place]]
            position = batch.target_positions[i][of_sample] - 1
            row, column = divmod(micro.homes[source], micro.cells.shape[1])
            assert column == micro.positions[source] == position
            prefix = micro.ids[micro.cells[row, : column + 1]]  # what attention sees
            assert prefix.tolist() == batch.tokens[i][: position + 1].tolist()


def sequences_of(micro: MicroBatch) -> list[np.ndarray]:
    """Each row of ``cells`` as far as it is one sequence: the next place has the next position."""
    ends = []
    for row in micro.cells:
        steps = np.flatnonzero(micro.positions[row] != np.arange(len(row)))
        ends.append(int(steps[0]) if len(steps) else len(row))
    return [micro.ids[row[:end]] for row, end in zip(micro.cells, ends, strict=True)]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12))
def test_common_prefixes_of_ordered_sequences_are_stored_once(sequences: list[list[int]]):
    ordered = [np.array(ids) for ids in sorted(sequences)]
    n_ids = sum(map(len, ordered))
    micro = MicroBatch.from_sequences(
        ordered, sources=np.arange(n_ids), targets=np.zeros(n_ids), token_index=np.arange(n_ids)
    )
    prefixes = {tuple(ids[: end + 1]) for ids in sequences for end in range(len(ids))}
    assert len(micro.ids) == len(prefixes)
