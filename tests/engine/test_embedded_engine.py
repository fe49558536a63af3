"""The engine's thread without HTTP: updates, failures, KV cache, and requests that share it in any order."""

from __future__ import annotations

import copy
import functools
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agl_slime.engine.process import EmbeddedEngine
from agl_slime.engine.requests import Request, Sampling, parse_generate
from agl_slime.errors import ConfigError, EngineError
from tests.harness.examples import examples
from tests.harness.moe_policy import save_moe

if TYPE_CHECKING:
    from agl_slime.engine.engine import Engine


def load_model(directory: Path) -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa")


@contextmanager
def running_engine(policy: Path, **limits: Any) -> Iterator[Engine]:
    import transformers

    from agl_slime.engine.engine import Engine

    engine = Engine(load_model(policy), transformers.AutoTokenizer.from_pretrained(policy), **limits)
    try:
        yield engine
    finally:
        engine.close()


class Requests:
    """Submits requests to an engine; ``ended`` has them in the order in which they end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ended: queue.Queue[Request] = queue.Queue()

    def make(self, rid: str, ids: list[int] | None = None, *, score_from: int = -1, **sampling: Any) -> Request:
        return Request(
            rid=rid,
            input_ids=ids or [5, 6, 7],
            sampling=Sampling(**{"ignore_eos": True} | sampling),
            logprob_start_len=score_from,
            on_finish=self.ended.put,
        )

    def submit(self, rid: str, ids: list[int] | None = None, **options: Any) -> None:
        self.engine.submit(self.make(rid, ids, **options))

    def next(self) -> Request:
        return self.ended.get(timeout=60)

    def run(self, *prompts: list[int], **options: Any) -> list[Request]:
        """The requests of greedy prompts, submitted together, when all have ended."""
        options = {"max_new_tokens": 5, "temperature": 0} | options
        requests = [self.make(str(number), prompt, **options) for number, prompt in enumerate(prompts)]
        self.engine.submit(*requests)
        for _ in requests:
            self.next()
        return requests


@pytest.fixture
def requests(policy_dir: Path) -> Iterator[Requests]:
    with running_engine(policy_dir, max_running=8, prefill_tokens=64) as engine:
        yield Requests(engine)


def weights_of(directory: Path) -> dict[str, Any]:
    from agl_slime.engine.weights import read_weights

    return read_weights(directory)


def until_sampled(requests: Requests, count: int) -> None:
    """Until the engine has sampled ``count`` tokens in all; its thread answers each poll."""
    for _ in range(100_000):
        if requests.engine.tokens_sampled >= count:
            return
        requests.engine.abort("no such request").result(10)
    pytest.fail(f"no {count} tokens")


def test_update_without_pause_waits_for_running_and_holds_new_requests(requests: Requests, policy_dir: Path) -> None:
    requests.submit("old", max_new_tokens=150)
    until_sampled(requests, 1)
    update = requests.engine.update_weights(weights_of(policy_dir), version="2")
    requests.submit("new", max_new_tokens=3)
    assert [version for version, _ in requests.next().versions] == ["default"]
    update.result(10)
    assert [version for version, _ in requests.next().versions] == ["2"]


def test_weights_are_checked_before_any_is_changed(requests: Requests, policy_dir: Path) -> None:
    import torch

    good, name = weights_of(policy_dir), "model.norm.weight"
    doubled = {key: tensor * 2 for key, tensor in good.items() if key != name}
    for broken, message in (
        ({**doubled, name: good[name][:-1]}, "should be"),
        (doubled, "missing"),
        ({**doubled, name: good[name], "other.weight": good[name]}, "not in the model"),
        ({**doubled, name: good[name] * float("nan")}, "NaN"),
    ):
        with pytest.raises(ConfigError, match=message):
            requests.engine.update_weights(broken, version="9").result(10)
    assert requests.engine.weight_version == "default"
    requests.submit("a", temperature=1.0, top_k=1, max_new_tokens=1)
    with torch.no_grad():
        logits = load_model(policy_dir)(torch.tensor([[5, 6, 7]])).logits[0, -1]
    assert requests.next().log_probs == pytest.approx([float(logits.log_softmax(-1).max())], abs=1e-5)


def test_the_context_bounds_a_request_and_a_bad_one_of_a_batch_queues_none(requests: Requests) -> None:
    from agl_slime.engine.requests import BadRequest

    requests.submit("a", [9] * 4090, max_new_tokens=None)
    ended = requests.next()
    assert len(ended.output_ids) == 6
    assert ended.finish == {"type": "length", "length": 6}
    with pytest.raises(BadRequest, match="longer than the model's context length"):
        requests.submit("b", [9] * 4096)
    with pytest.raises(BadRequest):
        requests.engine.submit(requests.make("c"), requests.make("d", [460]))
    assert requests.engine.idle


def test_a_failure_in_the_model_ends_every_request_and_every_call(requests: Requests, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("threading.excepthook", lambda _: None)  # which prints the traceback

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of luck")

    engine = requests.engine
    monkeypatch.setattr(engine._slots, "prefill", broken)
    engine.submit(requests.make("a"), requests.make("b"))
    assert {requests.next().rid, requests.next().rid} == {"a", "b"}
    engine._thread.join(10)
    assert not engine.alive
    with pytest.raises(EngineError, match="out of luck"):
        requests.submit("c")
    with pytest.raises(EngineError, match="out of luck"):
        engine.pause().result(10)


def test_logits_that_are_not_finite_end_their_requests_and_not_the_engine(requests: Requests, policy_dir: Path) -> None:
    """Weights that are finite, and whose products are not."""
    weights, name = weights_of(policy_dir), "model.norm.weight"
    requests.engine.update_weights({**weights, name: weights[name] * 1e38}).result(10)
    for sampling in ({"max_new_tokens": 9}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}):
        requests.submit("a", **sampling)
        finish = requests.next().finish
        assert finish is not None
        assert (finish["type"], finish.get("status_code")) == ("abort", 500), finish
        assert "not finite" in finish["message"]
    requests.engine.update_weights(weights).result(10)
    requests.submit("a", max_new_tokens=3)
    assert len(requests.next().output_ids) == 3


# -- the KV cache ------------------------------------------------------------------------------------------------------

PROMPT = list(range(10, 50))


def test_the_members_of_a_group_share_one_prefill(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    slots = requests.engine._slots
    forward = slots._forward
    monkeypatch.setattr(slots, "_forward", lambda ids, *rest: (computed.append(len(ids)), forward(ids, *rest))[1])
    group = requests.run(*[PROMPT] * 8)
    assert computed == [len(PROMPT)] + [8] * 4
    assert [request.cached_tokens for request in group] == [0] + [len(PROMPT) - 1] * 7
    assert len({tuple(request.output_ids) for request in group}) == 1


def test_a_conversation_reuses_its_last_turn_until_new_weights_or_a_flush(requests: Requests, policy_dir: Path) -> None:
    [first] = requests.run(PROMPT)
    conversation = PROMPT + first.output_ids
    [second] = requests.run([*conversation, 7, 8, 9])
    assert second.cached_tokens == len(conversation) - 1  # the last sampled token was never an input
    assert [requests.run(prompt)[0].cached_tokens for prompt in ([99, *PROMPT], PROMPT, PROMPT)] == [0, 0, 39]
    requests.engine.update_weights(weights_of(policy_dir), version="2").result(10)
    assert requests.run(PROMPT)[0].cached_tokens == 0
    requests.engine.flush().result(10)
    assert requests.run(PROMPT)[0].cached_tokens == 0


def test_a_cache_is_bounded_by_its_tokens_and_a_group_may_fill_its_rows(policy_dir: Path) -> None:
    from agl_slime.engine.slots import SlotModel

    assert SlotModel(load_model(policy_dir), slots=4, context=4096, max_total_tokens=512).context == 512
    with pytest.raises(ConfigError, match="max_total_tokens must be at least 16, got 3"):
        SlotModel(load_model(policy_dir), slots=4, context=4096, max_total_tokens=3)
    logits = SlotModel(load_model(policy_dir), slots=4, context=len(PROMPT)).prefill([PROMPT] * 3).logits
    assert (logits == logits[0]).all()


def test_a_model_that_would_be_served_wrongly_is_refused() -> None:
    """Cohere's logits are scaled after the head, where a server that calls body and head does not scale."""
    import transformers

    from agl_slime.engine.slots import SlotModel

    config = transformers.CohereConfig(
        hidden_size=32,
        intermediate_size=48,
        vocab_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        logit_scale=0.01,
        initializer_range=0.5,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with pytest.raises(ConfigError, match="cannot serve this model"):
        SlotModel(model, slots=2, context=64)


def test_a_seed_gives_one_answer_alone_in_a_crowd_and_resumed(requests: Requests) -> None:
    def answer(ids: list[int], seed: int | None, *, crowd: int = 0, n_tokens: int = 12) -> list[int]:
        rows = [requests.make(str(row), ids, temperature=1.0, max_new_tokens=n_tokens) for row in range(crowd + 1)]
        rows[crowd // 2].seed = seed
        requests.engine.submit(*rows)
        for _ in rows:
            requests.next()
        assert len({tuple(row.output_ids) for row in rows}) == len(rows)
        return rows[crowd // 2].output_ids

    whole = answer([5, 6, 7], 3)
    assert answer([5, 6, 7], 3, crowd=6) == whole
    assert answer([5, 6, 7, *whole[:5]], 3, n_tokens=7) == whole[5:]
    assert answer([5, 6, 7], 4) != whole != answer([5, 6, 7], None)
    body = {"input_ids": [5, 6, 7], "sampling_params": {"sampling_seed": 2, "n": 2}}
    assert [request.seed for request in parse_generate(body, encode=lambda _: [])[0]] == [2, 3]


def test_deterministic_answers_need_a_model_without_experts(tmp_path: Path) -> None:
    from agl_slime.engine.server import load_server

    with pytest.raises(ConfigError, match=r"deterministic: .*expert"):
        load_server(str(save_moe(tmp_path)), token=None, deterministic=True)


def test_a_deterministic_engine_sets_the_mode_of_mkl_that_it_needs(policy_dir: Path, monkeypatch: Any) -> None:
    """In a process of its own, as MKL reads the mode once. On some processors an engine without it is refused."""
    monkeypatch.delenv("MKL_CBWR")
    engine = EmbeddedEngine(policy_dir, deterministic=1)
    try:
        engine.start()
    finally:
        engine.stop()


def test_deterministic_logits_do_not_depend_on_the_number_of_threads(policy_dir: Path) -> None:
    """Of batches of which a thread would have one to three rows."""
    import torch

    from agl_slime.engine.slots import SlotModel

    model = SlotModel(load_model(policy_dir), slots=12, context=64, deterministic=True, prefix_cache=False)
    expected = model.prefill([[7, 8, 9, 10]]).logits[0]
    torch.set_num_threads(2)
    try:
        for others in (4, 8, 10):
            model.flush()
            while model.active:
                model.release(0)
            model.prefill([*([number, 7, 8] for number in range(others)), [7, 8, 9]])
            logits = model.decode(torch.tensor([10] * (others + 1)))
            assert torch.equal(logits[-1], expected), others
    finally:
        torch.set_num_threads(1)


@settings(max_examples=examples(8), deadline=None)
@given(data=st.data())
def test_deterministic_logits_depend_on_the_sequence_alone(policy_dir: Path, data: st.DataObject) -> None:
    """To the last bit: alone, beside others, after a prefix from the cache, and with tokens decoded or prefilled."""
    import torch

    from agl_slime.engine.slots import SlotModel

    token = st.integers(0, 400)
    prompt = data.draw(st.lists(token, min_size=2, max_size=150), label="prompt")
    others = data.draw(st.lists(st.lists(token, min_size=1, max_size=90), max_size=5), label="others")
    decoded = data.draw(st.integers(0, min(20, len(prompt) - 1)), label="decoded")
    model = SlotModel(load_model(policy_dir), slots=8, context=512, deterministic=True)
    expected = model.prefill([prompt]).logits[0]
    model.release(0)
    if data.draw(st.booleans(), label="forget the prefix"):
        model.flush()
    cut = len(prompt) - decoded
    logits = model.prefill([*others, prompt[:cut]]).logits[-1]
    for following in prompt[cut:]:
        logits = model.decode(torch.tensor([*[3] * len(others), following]))[-1]
    assert torch.equal(logits, expected)


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
