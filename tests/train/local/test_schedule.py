from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.train.local.batch import MicroBatch, TrainBatch, make_microbatches, split_minibatches
from agl_slime.types import sample_from_fields


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
def test_microbatches_hold_every_token_under_the_mask_once(
    batch: TrainBatch, max_tokens: int, sharing: bool, data: st.DataObject
):
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
