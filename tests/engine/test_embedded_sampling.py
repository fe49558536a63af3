"""Sampling of rows with different parameters, against the definition computed row by row."""

from typing import Any

import numpy as np
import pytest

from agl_slime.engine.requests import BadRequest, Request, Sampling, parse_generate
from agl_slime.engine.requests import parse as parse_model

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


def test_log_prob_has_the_same_bits_alone_and_beside_others_on_two_threads(torch: Any) -> None:
    """Of a vocabulary so large that torch would sum a single row in parts."""
    logits = torch.randn(64, 49_152, generator=torch.Generator().manual_seed(1))
    torch.set_num_threads(2)
    try:
        for row in logits:
            alone, beside = (
                draw(row, *[(1.0, 1.0, ALL_TOKENS)] * n, generator=np.random.default_rng(1)) for n in (1, 2)
            )
            assert (alone[0][0], alone[1][0]) == (beside[0][0], beside[1][0])
    finally:
        torch.set_num_threads(1)


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


def sampling_of(params: Any) -> Sampling:
    return parse_model(Sampling, params)


def parse(body: Any) -> Any:
    return parse_generate(body, encode=lambda text: [ord(letter) for letter in text])


def test_defaults_equal_sglangs() -> None:
    neutral = {"min_p": 0.0, "regex": None, "repetition_penalty": 1.0, "min_new_tokens": 0}
    for params in (None, {"temperature": None, "stop": None}, neutral):
        sampling = sampling_of(params)
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (1.0, 1.0, -1, 128)
        assert (sampling.skip_special_tokens, sampling.ignore_eos, sampling.no_stop_trim) == (True, False, False)
        assert sampling == Sampling()
    assert sampling_of({"max_new_tokens": None}).max_new_tokens is None  # up to the context


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"regex": "a+"}, "regex"),
        ({"max_tokens": 3}, "max_tokens.*3"),
        ({"temperature": float("nan")}, "temperature.*nan"),
        ({"temperature": -0.5}, "temperature.*-0.5"),
        ({"top_p": 0}, "top_p.*0"),
        ({"top_k": 1.0}, "top_k.*1.0"),
        ({"stop": ""}, "stop.*''"),
        ({"stop": ["a", 3]}, "stop.*3"),
        ({"stop_token_ids": [[1]]}, "stop_token_ids.*1"),
        ({"ignore_eos": "yes"}, "ignore_eos.*yes"),
    ],
)
def test_unsupported_parameters_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        sampling_of(params)


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"input_ids": [1], "text": "a"},
        {"input_ids": [[1], []]},
        {"input_ids": [1, True]},
        {"text": [3]},
        {"input_ids": [[1], [2]], "stream": True},
        {"input_ids": [1], "sampling_params": [{}, {}]},
        {"input_ids": [[1], [2]], "sampling_params": [{"n": 1}, {"n": 2}]},
        {"input_ids": [1], "sampling_params": {"n": 0}},
        {"input_ids": [[1], [2]], "sampling_params": {"n": 2049}},  # more than 4096 sequences
        {"input_ids": [[1], [2]], "rid": ["a", "a"]},
        {"input_ids": [1], "rid": 3},
        {"input_ids": [[1], [2]], "return_logprob": [True]},
    ],
)
def test_malformed_bodies_are_refused(body: Any) -> None:
    with pytest.raises(BadRequest):
        parse(body)


def test_one_prompt_gives_one_answer_and_lists_give_lists() -> None:
    [request], single, _ = parse({"input_ids": [1, 2], "rid": "x", "return_logprob": True, "logprob_start_len": 0})
    assert single
    assert (request.rid, request.input_ids, request.return_logprob, request.logprob_start_len) == ("x", [1, 2], True, 0)
    requests, single, _ = parse({"text": ["ab", "c"], "rid": "x"})
    assert not single
    assert [(request.rid, request.input_ids) for request in requests] == [("x_0", [97, 98]), ("x_1", [99])]
    requests, single, _ = parse({"input_ids": [[1], [2]], "sampling_params": {"n": 2}})
    assert not single
    assert [request.input_ids for request in requests] == [[1], [1], [2], [2]]
    assert len({request.rid for request in requests}) == 4
    [unscored], *_ = parse({"input_ids": [1, 2], "logprob_start_len": 0})  # needs return_logprob
    assert unscored.logprob_start_len == -1
