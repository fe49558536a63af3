"""Bodies of /generate: accepted fields, refused ones and their messages."""

from typing import Any

import pytest

from agl_slime.engine.requests import BadRequest, Sampling, parse_generate
from agl_slime.engine.requests import parse as parse_model


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


@pytest.mark.parametrize("ids", [[5, 460], [5, -1]])
def test_ids_outside_of_the_vocabulary_are_refused(ids: list[int]) -> None:
    [request], *_ = parse({"input_ids": ids})
    with pytest.raises(BadRequest, match="vocab size"):
        request.check(context_length=64, vocab_size=460, eos_ids=set())


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
