"""Sampling of rows with different parameters, against the definition computed row by row."""

from typing import Any

import numpy as np
import pytest

from agl_slime.engine.requests import Request, Sampling

ALL_TOKENS = 1 << 30


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason='the embedded engine needs torch: pip install "agl-slime[local]"')


def draw(logits: Any, *params: tuple[float, float, int], generator: Any) -> tuple[Any, Any]:
    """Ids and log-probs; ``params`` are temperature, top_p and top_k of each row."""
    import torch

    from agl_slime.engine.sampling import RowParams, sample

    samplings = [Sampling(temperature=params[0], top_p=params[1], top_k=params[2]) for params in params]
    rows = RowParams.for_requests(Request(rid="", input_ids=[], sampling=sampling) for sampling in samplings)
    draws = generator.random((len(params), 3))
    ids, log_probs, *_ = sample(logits.expand(len(params), -1), rows, torch.from_numpy(draws))
    return ids, log_probs


def test_a_row_is_sampled_as_if_it_were_alone(torch: Any) -> None:
    """Frequencies in a mixed batch follow each row's own cut distribution."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0])
    count = 10_000
    settings = [(1.0, 1.0, ALL_TOKENS), (0.7, 0.6, ALL_TOKENS), (1.5, 1.0, 3), (1.0, 1.0, 1), (1.3, 0.8, 4)]
    generator = np.random.default_rng(2)
    for temperature, top_p, top_k in settings:
        probabilities = torch.softmax(logits / temperature, dim=-1)
        preceding = probabilities.cumsum(-1) - probabilities  # the logits are in descending order
        cut = probabilities * (preceding <= top_p) * (torch.arange(6) < top_k)
        expected = cut / cut.sum()
        mixed = [(temperature, top_p, top_k)] * (count // 2) + [(1.0, 0.9, 5)] * (count // 2)
        ids, _ = draw(logits, *mixed, generator=generator)
        shares = torch.bincount(ids[: count // 2], minlength=6) / (count // 2)
        assert float((shares - expected).abs().max()) < 5 * (0.25 / (count // 2)) ** 0.5
        assert set(ids[: count // 2].tolist()) <= set(expected.nonzero().flatten().tolist())


def test_a_large_vocabulary_is_drawn_from_as_a_small_one_is(torch: Any) -> None:
    """By blocks of tokens; few tokens have nearly all of the weight, in blocks far apart and at their ends."""
    likely = {0: 2.0, 255: 1.0, 256: 0.5, 5000: 0.0, 8191: 1.5}
    logits = torch.full((8192,), -30.0)
    for token, logit in likely.items():
        logits[token] = logit
    count = 5_000
    generator = np.random.default_rng(5)
    ids, log_probs = draw(logits, *[(1.0, 1.0, ALL_TOKENS)] * count, generator=generator)
    expected = torch.softmax(logits, dim=-1)
    for token in likely:
        assert abs(float((ids == token).float().mean()) - float(expected[token])) < 5 * (0.25 / count) ** 0.5
    assert set(ids.tolist()) == set(likely)
    assert float((log_probs - expected.log()[ids]).abs().max()) < 1e-5


@pytest.mark.parametrize("spread", [8.0, 0.01])
def test_filtered_sampling_of_a_large_vocabulary_equals_a_full_sort(spread: float, torch: Any) -> None:
    """Also where the likely tokens have less weight than top_p, and beside rows that cut nothing or take the first."""
    logits = torch.randn(6000, generator=torch.Generator().manual_seed(6)) * spread
    settings = [(1.0, 0.7, ALL_TOKENS), (1.0, 1.0, 5), (0.8, 0.4, 3000), (1.0, 1.0, ALL_TOKENS), (1.0, 1.0, 1)]
    generator, drawn = np.random.default_rng(7), [set() for _ in settings]
    for _ in range(200):
        ids, _ = draw(logits, *settings, generator=generator)
        for row, token in enumerate(ids.tolist()):
            drawn[row].add(token)
    for (temperature, top_p, top_k), tokens in zip(settings, drawn, strict=True):
        ordered, order = torch.softmax(logits / temperature, dim=-1).sort(descending=True)
        allowed = (ordered.cumsum(-1) - ordered <= top_p + 1e-6) & (torch.arange(6000) < top_k)
        assert tokens <= set(order[allowed].tolist())
    assert drawn[4] == {int(logits.argmax())}
    assert len(drawn[0]) > 1 or spread > 1


def test_draws_depend_on_seed_and_place_alone_and_are_uniform(torch: Any) -> None:
    from agl_slime.engine.sampling import uniforms

    def request(seed: int, place: int, sampled: int = 0) -> Request:
        ids = {"input_ids": [0] * (place - sampled), "output_ids": [0] * sampled}
        return Request(rid="", sampling=Sampling(), seed=seed, **ids)

    rows = [request(seed, place) for seed in (*range(60), -1, 2**63 + 5) for place in range(1, 200)]
    drawn = uniforms(rows)
    assert torch.equal(uniforms(list(reversed(rows))), drawn.flip(0))
    assert torch.equal(uniforms([request(7, 90, sampled=30)]), uniforms([request(7, 90)]))  # as if resumed
    values = drawn.flatten().numpy()
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert len(set(values.tolist())) == len(values)
    shares = np.histogram(values, bins=64, range=(0, 1))[0] / len(values)
    assert np.abs(shares - 1 / 64).max() < 5 * (1 / 64 / len(values)) ** 0.5
    for near in (values[:-1] * values[1:], values[:-3] * values[3:], values[:-597] * values[597:]):  # draw, place, seed
        assert abs(near.mean() - 0.25) < 0.01
