from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.trainers.local.batch import TrainBatch, make_microbatches, split_minibatches
from agl_slime.types import sample_from_fields


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    """Samples of random lengths and masks; every token id is different, so that each can be found again."""
    samples, next_id = [], 0
    for _ in range(draw(st.integers(1, 12))):
        mask = draw(st.lists(st.integers(0, 1), max_size=8))
        length = draw(st.integers(1, 6)) + len(mask)
        sample = sample_from_fields(
            tokens=list(range(next_id, next_id + length)),
            response_length=len(mask),
            loss_mask=mask,
            reward=0.0,
            rollout_id=draw(st.integers(0, 5)),
        )
        samples.append(sample)
        next_id += length
    return TrainBatch.from_samples(samples, rewards_normalization=False)


@given(batch=batches(), n_minibatches=st.integers(1, 6), seed=st.integers(0, 1000))
def test_minibatches_hold_every_sample_once_and_whole_rollouts(batch: TrainBatch, n_minibatches: int, seed: int):
    parts = split_minibatches(batch, n_minibatches=n_minibatches, rng=np.random.default_rng(seed))
    assert sorted(np.concatenate(parts).tolist()) == list(range(batch.n_samples))
    rollouts = [set(batch.rollout_ids[part].tolist()) for part in parts]
    assert sum(len(ids) for ids in rollouts) == batch.n_rollouts  # none in two parts
    sizes = [len(ids) for ids in rollouts]
    assert len(parts) == min(n_minibatches, batch.n_rollouts)
    assert max(sizes) - min(sizes) <= 1
    again = split_minibatches(batch, n_minibatches=n_minibatches, rng=np.random.default_rng(seed))
    assert [part.tolist() for part in parts] == [part.tolist() for part in again]


@given(batch=batches(), max_tokens=st.integers(1, 60), data=st.data())
def test_microbatches_hold_every_token_under_the_mask_once(batch: TrainBatch, max_tokens: int, data: st.DataObject):
    chosen = data.draw(st.sets(st.integers(0, batch.n_samples - 1)))
    micros = list(make_microbatches(batch, sorted(chosen), max_tokens=max_tokens))
    flat = np.concatenate([batch.tokens[i][batch.target_positions[i]] for i in range(batch.n_samples)])
    targets = [token for micro in micros for token in micro.targets.tolist()]
    assert sorted(targets) == sorted(
        token for i in chosen for token in batch.tokens[i][batch.target_positions[i]].tolist()
    )
    for micro in micros:
        n_rows, width = micro.shape
        assert n_rows * width <= max_tokens or n_rows == 1
        assert flat[micro.token_index].tolist() == micro.targets.tolist()
        # Ids count up within a sample, so the id that predicts a token is the one before it.
        assert (micro.ids[micro.sources] == micro.targets - 1).all()
        for row in range(n_rows):
            ids, columns = micro.ids[micro.rows == row], micro.columns[micro.rows == row]
            assert columns.tolist() == list(range(len(ids)))
            assert (np.diff(ids) == 1).all()  # of one sample
            # Nothing is computed for nothing: every sequence ends at the last position that predicts a token.
            assert ids[-1] + 1 in micro.targets
