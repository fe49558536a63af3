"""Random trees of conversations over real vocabularies and templates: each sampled token is trained once, prompts are
what is held, and what clients change in form makes no fork."""

from __future__ import annotations

import random

import pytest

from tests.chat_templates import TEMPLATES
from tests.property.gateway_agents import Audit
from tests.vocabularies import chat_tokenizer

# templates that write history as it was, and those that leave out or move parts of it
PLAIN = ("chatml", "groups_tools", "role_markers", "default_system", "ends_with_token")
REWRITING = ("drops_thinking", "reasoner", "drops_empty_blocks", "forgets_results")
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


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "template"), CASES)
async def test_a_hundred_thousand_turns(vocabulary: str, template: str) -> None:
    for seed in range(170):
        await audit(vocabulary, template, seed=1000 + seed, turns=100)
