"""The embedded engine's KV cache: reuse of prefixes, its bound, and models that it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agl_slime.errors import ConfigError
from tests.engine.engines import Requests, load_model, running_engine

PROMPT = list(range(10, 50))


@pytest.fixture
def requests(policy_dir: Path) -> Iterator[Requests]:
    with running_engine(policy_dir, max_running=8) as engine:
        yield Requests(engine)


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
    from agl_slime.engine.weights import read_weights

    [first] = requests.run(PROMPT)
    conversation = PROMPT + first.output_ids
    [second] = requests.run([*conversation, 7, 8, 9])
    assert second.cached_tokens == len(conversation) - 1  # the last sampled token was never an input
    assert [requests.run(prompt)[0].cached_tokens for prompt in ([99, *PROMPT], PROMPT, PROMPT)] == [0, 0, 39]
    requests.engine.update_weights(read_weights(policy_dir), version="2").result(10)
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
