"""Sampling of rows with different parameters, against the definition computed row by row."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason='the embedded engine needs torch: pip install "agl-slime[local]"')

from agl_slime.engine.requests import Request, Sampling  # noqa: E402
from agl_slime.engine.sampling import ALL_TOKENS, RowParams, sample  # noqa: E402


def rows(*params: tuple[float, float, int]) -> RowParams:
    return RowParams.of(
        Request(rid="", input_ids=[], sampling=Sampling(temperature=temperature, top_p=top_p, top_k=top_k))
        for temperature, top_p, top_k in params
    )


def test_a_row_is_sampled_as_if_it_were_alone() -> None:
    """Frequencies in a mixed batch follow each row's own cut distribution."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0])
    count = 10_000
    settings = [(1.0, 1.0, ALL_TOKENS), (0.7, 0.6, ALL_TOKENS), (1.5, 1.0, 3), (1.0, 1.0, 1), (1.3, 0.8, 4)]
    generator = torch.Generator().manual_seed(2)
    for temperature, top_p, top_k in settings:
        probabilities = torch.softmax(logits / temperature, dim=-1)
        preceding = probabilities.cumsum(-1) - probabilities  # the logits are in descending order
        cut = probabilities * (preceding <= top_p) * (torch.arange(6) < top_k)
        expected = cut / cut.sum()
        params = rows(*([(temperature, top_p, top_k)] * (count // 2) + [(1.0, 0.9, 5)] * (count // 2)))
        ids, *_ = sample(logits.expand(count, -1), params, generator)
        shares = torch.bincount(ids[: count // 2], minlength=6) / (count // 2)
        assert float((shares - expected).abs().max()) < 5 * (0.25 / (count // 2)) ** 0.5
        assert set(ids[: count // 2].tolist()) <= set(expected.nonzero().flatten().tolist())


def test_a_large_vocabulary_is_drawn_from_as_a_small_one_is() -> None:
    """By blocks of tokens; few tokens have nearly all of the weight, in blocks far apart and at their ends."""
    likely = {0: 2.0, 255: 1.0, 256: 0.5, 5000: 0.0, 8191: 1.5}
    logits = torch.full((8192,), -30.0)
    for token, logit in likely.items():
        logits[token] = logit
    count = 5_000
    ids, log_probs, *_ = sample(
        logits.expand(count, -1), rows(*[(1.0, 1.0, ALL_TOKENS)] * count), torch.Generator().manual_seed(5)
    )
    expected = torch.softmax(logits, dim=-1)
    for token in likely:
        assert abs(float((ids == token).float().mean()) - float(expected[token])) < 5 * (0.25 / count) ** 0.5
    assert set(ids.tolist()) == set(likely)
    assert float((log_probs - expected.log()[ids]).abs().max()) < 1e-5


@pytest.mark.parametrize("spread", [8.0, 0.01])
def test_filtered_sampling_of_a_large_vocabulary_equals_a_full_sort(spread: float) -> None:
    """Also where the likely tokens have less weight than top_p, and beside rows that cut nothing or take the first."""
    logits = torch.randn(6000, generator=torch.Generator().manual_seed(6)) * spread
    settings = [(1.0, 0.7, ALL_TOKENS), (1.0, 1.0, 5), (0.8, 0.4, 3000), (1.0, 1.0, ALL_TOKENS), (1.0, 1.0, 1)]
    generator, drawn = torch.Generator().manual_seed(7), [set() for _ in settings]
    for _ in range(200):
        ids, *_ = sample(logits.expand(len(settings), -1), rows(*settings), generator)
        for row, token in enumerate(ids.tolist()):
            drawn[row].add(token)
    for (temperature, top_p, top_k), tokens in zip(settings, drawn, strict=True):
        ordered, order = torch.softmax(logits / temperature, dim=-1).sort(descending=True)
        allowed = (ordered.cumsum(-1) - ordered <= top_p + 1e-6) & (torch.arange(6000) < top_k)
        assert tokens <= set(order[allowed].tolist())
    assert drawn[4] == {int(logits.argmax())}
    assert len(drawn[0]) > 1 or spread > 1
