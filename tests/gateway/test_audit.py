"""Random trees of conversations over real vocabularies and templates: each sampled token is trained once, recorded
prompts are the prompts that were sent, and edits of form alone make no fork."""

from __future__ import annotations

import random

import pytest

from tests.gateway.random_agents import Audit
from tests.harness.chat_templates import TEMPLATES
from tests.harness.vocabularies import chat_tokenizer

# templates that write history verbatim
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
    done = Audit(chat_tokenizer(vocabulary, template), random.Random(seed), template in PLAIN, opened=opened)
    await done.run(turns)
    return done


@pytest.mark.parametrize(("vocabulary", "template"), CASES)
async def test_every_sampled_token_is_trained_once(vocabulary: str, template: str) -> None:
    for seed in range(3):
        assert (await audit(vocabulary, template, seed=seed, turns=40)).continued


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "template"), CASES)
async def test_a_hundred_thousand_turns(vocabulary: str, template: str) -> None:
    for seed in range(170):
        await audit(vocabulary, template, seed=1000 + seed, turns=100)
