"""The embedded engine's KV cache: what is computed once, what it may take, what it refuses."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason='the embedded engine needs torch: pip install "agl-slime[local]"')
transformers = pytest.importorskip("transformers")

from agl_slime.engine.engine import Engine  # noqa: E402
from agl_slime.engine.requests import Request, Sampling  # noqa: E402
from agl_slime.engine.slots import SlotModel  # noqa: E402
from agl_slime.engine.weights import read_weights  # noqa: E402
from agl_slime.errors import ConfigError  # noqa: E402

PROMPT = list(range(10, 50))
Ask = Callable[..., list[Request]]


def policy(directory: Path) -> Any:
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa")


@pytest.fixture
def engine(policy_dir: Path) -> Iterator[Engine]:
    engine = Engine(policy(policy_dir), transformers.AutoTokenizer.from_pretrained(policy_dir), max_running=8)
    yield engine
    engine.close()


@pytest.fixture
def ask(engine: Engine) -> Ask:
    """Submits prompts together and returns the requests when all have ended."""

    def asked(*prompts: list[int], **fields: Any) -> list[Request]:
        ended: queue.Queue[Request] = queue.Queue()
        sampling = Sampling(max_new_tokens=5, ignore_eos=True, temperature=0)
        requests = [
            Request(rid=str(number), input_ids=prompt, sampling=sampling, on_finish=ended.put, **fields)
            for number, prompt in enumerate(prompts)
        ]
        engine.submit(*requests)
        for _ in requests:
            ended.get(timeout=30)
        return requests

    return asked


def test_the_members_of_a_group_share_one_prefill(ask: Ask, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    forward = engine._slots._forward
    monkeypatch.setattr(
        engine._slots, "_forward", lambda ids, *rest: (computed.append(len(ids)), forward(ids, *rest))[1]
    )
    group = ask(*[PROMPT] * 8)
    assert computed == [len(PROMPT)] + [8] * 4
    assert [request.cached_tokens for request in group] == [0] + [len(PROMPT) - 1] * 7
    assert len({tuple(request.output_ids) for request in group}) == 1


def test_a_group_s_prompt_may_fill_its_rows(policy_dir: Path) -> None:
    slots = SlotModel(policy(policy_dir), slots=4, context=len(PROMPT))
    filled = slots.prefill([PROMPT] * 3)
    assert torch.equal(filled.logits[0], filled.logits[1])
    assert torch.equal(filled.logits[0], filled.logits[2])


def test_conversation_reuses_the_cache_of_its_last_turn(ask: Ask) -> None:
    first = ask(PROMPT)[0]
    told = PROMPT + first.output_ids
    second = ask([*told, 7, 8, 9])[0]
    assert second.cached_tokens == len(told) - 1  # the last sampled token was never an input
    assert ask([99, *PROMPT])[0].cached_tokens == 0


def test_weight_update_and_flush_clear_the_cache(ask: Ask, engine: Engine, policy_dir: Path) -> None:
    ask(PROMPT)
    assert ask(PROMPT)[0].cached_tokens == len(PROMPT) - 1
    engine.update_weights(read_weights(policy_dir), version="2").result(10)
    assert ask(PROMPT)[0].cached_tokens == 0
    engine.flush().result(10)
    assert ask(PROMPT)[0].cached_tokens == 0


def test_prompt_log_probs_are_computed_despite_the_cache(ask: Ask) -> None:
    fresh = ask(PROMPT, logprob_start_len=20)[0]
    again = ask(PROMPT, logprob_start_len=20)[0]
    assert (fresh.cached_tokens, again.cached_tokens) == (0, 20)
    assert [token for _, token in again.input_log_probs] == PROMPT[20:]
    for before, after in zip(fresh.input_log_probs[1:], again.input_log_probs[1:], strict=True):
        assert after[0] == pytest.approx(before[0], abs=1e-5)


def test_rows_wait_again_where_the_cache_is_full(policy_dir: Path) -> None:
    """Two of four rows fit to the end; all are answered, and the rectangle never grows beyond the bound."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy_dir)
    engine = Engine(policy(policy_dir), tokenizer, max_running=4, context_length=600, max_total_tokens=1200)
    ended: queue.Queue[Request] = queue.Queue()
    try:
        sampling = Sampling(max_new_tokens=500, ignore_eos=True, temperature=0)
        engine.submit(
            *(Request(rid=str(n), input_ids=[5 + n] * 20, sampling=sampling, on_finish=ended.put) for n in range(4))
        )
        answers = [ended.get(timeout=60) for _ in range(4)]
    finally:
        engine.close()
    assert [len(answer.output_ids) for answer in answers] == [500] * 4
    rows, width = engine._slots._ids.shape
    assert rows * width <= engine.max_total_tokens == 1200


def test_a_cache_smaller_than_the_context_bounds_the_context(policy_dir: Path) -> None:
    assert SlotModel(policy(policy_dir), slots=4, context=4096, max_total_tokens=512).context == 512
    with pytest.raises(ConfigError, match="max_total_tokens must be at least 16, got 3"):
        SlotModel(policy(policy_dir), slots=4, context=4096, max_total_tokens=3)


def test_a_model_that_would_be_served_wrongly_is_refused() -> None:
    """Cohere's logits are scaled after the head, which a server that asks body and head does not see."""
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


def test_engine_summary_states_capacity_and_bytes_per_token(engine: Engine) -> None:
    said = engine.summary
    slots = engine._slots
    assert f"{slots.capacity:,} together" in said
    assert f"the KV cache of a token takes {slots.bytes_per_token / 1000:.2f} kB" in said
    held = sum(layer[0, :, 0].numel() * layer.element_size() for layer in (*slots._keys, *slots._values))
    assert slots.bytes_per_token == held
