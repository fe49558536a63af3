"""Random trees of conversations over real vocabularies and templates: each sampled token is trained once, prompts are
what is held, and what clients change in form makes no fork."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.span_codec import decode_turns
from tests.gateway.random_agents import Audit
from tests.harness.chat_templates import TEMPLATES
from tests.harness.vocabularies import chat_tokenizer

# templates that write history as it was
PLAIN = ("chatml", "groups_tools", "role_markers", "default_system", "ends_with_token")
CASES = [
    ("qwen", "groups_tools"),
    ("deepseek", "chatml"),
    ("anthropic", "role_markers"),
    ("deepseek", "reasoner"),
    ("qwen", "drops_thinking"),
    ("anthropic", "ends_with_token"),
]


async def audit(vocabulary: str, template: str, *, seed: int, turns: int) -> Audit:
    opened = TEMPLATES[template].opens_thinking
    made = Audit(chat_tokenizer(vocabulary, template), random.Random(seed), template in PLAIN, opened=opened)
    await made.run(turns)
    return made


@pytest.mark.parametrize(("vocabulary", "template"), CASES)
@pytest.mark.parametrize("seed", range(3))
async def test_every_sampled_token_is_trained_once(vocabulary: str, template: str, seed: int) -> None:
    done = await audit(vocabulary, template, seed=seed, turns=40)
    assert done.continued


async def test_siblings_with_the_same_words_and_other_tokens_are_not_guessed() -> None:
    """What both say is rendered as text; neither's tokens are taken for the other's."""
    made = Audit(chat_tokenizer("deepseek", "chatml"), random.Random(0), plain=True)
    encode, end = made.tokenizer.encode, made.tokenizer.eos_token_id
    says = [["sa", "me"], ["s", "ame"], ["fine"]]  # in other tokens than a tokenizer would give

    async def generate(input_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
        pieces = says[len(made.engine.asked)]
        made.engine.asked.append(tuple(input_ids))
        ids = [*(token for piece in pieces for token in encode(piece, add_special_tokens=False)), end]
        how: dict[str, Any] = {"finish_reason": "stop", "matched_stop": end, "text": "".join(pieces)}
        return Generation(output_ids=tuple(ids), log_probs=(-1.0,) * len(ids), **how)

    made.engine.generate = generate  # type: ignore[method-assign]
    hello = [{"role": "user", "content": "Hello?"}]
    answers = await made.ask(hello, n=2)
    assert [answer["content"] for answer in answers] == ["same", "same"]
    await made.ask([*hello, answers[0], {"role": "user", "content": "And?"}])
    made.check()
    turns = decode_turns(made.spans)
    assert turns[0].response_ids.tolist() != turns[1].response_ids.tolist()
    assert turns[2].fork is ForkReason.EDITED_HISTORY


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "template"), CASES)
async def test_a_hundred_thousand_turns(vocabulary: str, template: str) -> None:
    for seed in range(170):
        await audit(vocabulary, template, seed=1000 + seed, turns=100)
