"""Requests that come, end and are aborted at any time, in groups that begin alike, under a cache too small for all of
them: each answer is the model's for that request alone."""

import copy
import functools
import queue
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agl_slime.engine.requests import Request, Sampling
from tests.harness.examples import examples

CONTEXT, TOKENS, ROWS = 48, 100, 5
CLOSE = 1e-4


@functools.cache
def model_of(version: str) -> Any:
    """The old or the new weights, so large that the logits lie far apart: rounding does not change a greedy choice."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)
    torch.manual_seed(["old", "new"].index(version))
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        vocab_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,
        eos_token_id=1,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


@dataclass(frozen=True)
class Submit:
    """A group of ``members`` whose prompts are ``shared`` tokens of a common text and then ``suffix``."""

    shared: int
    suffix: tuple[int, ...]
    members: int
    count: int
    scored: bool = False


@dataclass(frozen=True)
class Event:
    """``sample``: run until ``value`` more tokens were sampled, or the engine is idle. ``abort`` the request of that
    number. ``update``: new weights under a pause of this mode, or the old ones again. ``flush``."""

    kind: str
    value: Any = None


submits = st.builds(
    Submit,
    shared=st.integers(0, 24),
    suffix=st.lists(st.integers(2, 63), min_size=1, max_size=4).map(tuple),
    members=st.integers(1, 4),
    count=st.integers(1, 16),
    scored=st.booleans(),
)
events = st.one_of(
    submits,
    submits,
    st.builds(Event, st.just("sample"), st.integers(1, 30)),
    st.builds(Event, st.just("abort"), st.integers(0, 20)),
    st.builds(Event, st.just("update"), st.sampled_from(["in_place", "retract"])),
    st.just(Event("flush")),
)
COMMON = [5 + 7 * place % 50 for place in range(24)]


def answered(schedule: list[Any], *, prefix_cache: bool) -> list[Request]:
    from agl_slime.engine.engine import Engine

    engine = Engine(
        copy.deepcopy(model_of("old")),
        SimpleNamespace(eos_token_id=1),
        max_running=ROWS,
        max_total_tokens=TOKENS,
        prefill_tokens=40,
        prefix_cache=prefix_cache,
    )
    engine.weight_version = "old"
    ended: queue.Queue[Request] = queue.Queue()
    requests: list[Request] = []
    try:
        for event in schedule:
            if isinstance(event, Submit):
                prompt = COMMON[: event.shared] + list(event.suffix)
                sampling = Sampling(temperature=0, max_new_tokens=event.count)
                group = [
                    Request(
                        rid=str(len(requests) + member),
                        input_ids=prompt,
                        sampling=sampling,
                        logprob_start_len=event.shared // 2 if event.scored and member == 0 else -1,
                        on_finish=ended.put,
                    )
                    for member in range(event.members)
                ]
                engine.submit(*group)
                requests += group
            elif event.kind == "sample":
                target = engine.tokens_sampled + event.value
                while engine.tokens_sampled < target and not engine.idle:
                    engine.abort("no such request").result(10)  # answered by the engine's thread between two steps
            elif event.kind == "abort":
                engine.abort(str(event.value)).result(10)
            elif event.kind == "update":
                engine.pause(event.value).result(10)
                version = "new" if engine.weight_version == "old" else "old"
                engine.update_weights(model_of(version).state_dict(), version=version).result(10)
                engine.resume().result(10)
            else:
                engine.flush().result(10)
        for _ in requests:
            ended.get(timeout=30)
        assert engine.idle
        assert engine.failure is None
        for cache in (*engine._slots._keys, *engine._slots._values):
            assert cache.shape[0] * cache.shape[2] <= TOKENS
        return requests
    finally:
        engine.close()


def check(request: Request, *, in_place: bool) -> None:
    """Each token is the first choice, and its log-prob that, of the version that sampled it."""
    import torch

    ids = request.input_ids + request.output_ids
    assert len(request.log_probs) == len(request.output_ids)
    first = len(request.input_ids) - 1
    for number, (version, start) in enumerate(request.versions):
        if number and in_place:
            return  # its KV cache is of both versions
        end = request.versions[number + 1][1] if number + 1 < len(request.versions) else len(request.output_ids)
        with torch.no_grad():
            table = torch.log_softmax(model_of(version)(torch.tensor([ids])).logits[0], dim=-1)
        for place in range(start, end):
            row, token = table[first + place], request.output_ids[place]
            assert float(row[token]) >= float(row.max()) - CLOSE
            assert request.log_probs[place] == pytest.approx(float(row[token]), abs=CLOSE)
        if number == 0:
            for place, (log_prob, token) in enumerate(request.input_log_probs, request.logprob_start_len):
                assert token == request.input_ids[place]
                if log_prob is not None:
                    assert log_prob == pytest.approx(float(table[place - 1, token]), abs=CLOSE)


@given(st.lists(events, min_size=2, max_size=12))
@example(
    [
        Submit(20, (7,), 4, 16),
        Event("sample", 9),
        Submit(20, (7, 9), 3, 16),
        Submit(24, (9,), 2, 16),
        Event("sample", 40),
    ]
)
@example([Submit(20, (7,), 2, 4), Event("sample", 99), Event("update", "in_place"), Submit(20, (7,), 2, 4)])
@settings(max_examples=examples(40))
def test_a_request_is_answered_as_if_it_were_alone(schedule: list[Any]) -> None:
    in_place = Event("update", "in_place") in schedule
    shared = answered(schedule, prefix_cache=True)
    for request in shared:
        check(request, in_place=in_place)
    if any(isinstance(event, Event) and event.kind in ("abort", "update") for event in schedule):
        return  # when these come, between which steps, is not the same twice
    alone = answered(schedule, prefix_cache=False)
    assert [request.output_ids for request in shared] == [request.output_ids for request in alone]
    assert not any(request.cached_tokens for request in alone)
