"""The named generators against slime's ``MultiTurnLossMaskGenerator``: the same ids and masks for the same messages.

One difference is tested: on templates with a default system message (Qwen2.5's), slime's ``qwen3``, which is not meant
for them, cuts that message off a second time and loses the first tokens of other messages.
"""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agl_slime.tokens.masks import get_loss_mask_generator
from tests.harness.slime_programs import slime_package
from tests.harness.vocabularies import VOCABULARIES, chat_tokenizer
from tests.tokens.test_masks_text import CONVERSATION

pytestmark = pytest.mark.slime

PARAMETERS = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": "terminal", "description": "Run it.", "parameters": PARAMETERS}}]


@pytest.fixture
def slime_masks() -> Any:
    """slime's module by its path: importing the package would need Ray and SGLang."""
    return _load(slime_package() / "utils" / "mask_utils.py", "slime_mask_utils")


def _load(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("template", ["chatml", "groups_tools", "drops_thinking"])
@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5", "distill_qwen"])
def test_ids_and_masks_are_slimes(
    slime_masks: Any, kind: str, template: str, vocabulary: str, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = chat_tokenizer(vocabulary, template)
    if kind == "qwen":  # our test vocabularies hold DeepSeek's markers, which mean a distilled model
        monkeypatch.setattr(tokenizer, "get_added_vocab", dict)
    conversation = CONVERSATION
    if kind == "qwen":  # results in a row are one turn for ours, as for the template, and one turn each for slime's
        pairs = pairwise([{"role": ""}, *CONVERSATION])
        conversation = [message for earlier, message in pairs if not earlier["role"] == message["role"] == "tool"]
    for length in range(2, len(conversation) + 1):
        messages = conversation[:length]
        expected = slime_masks.MultiTurnLossMaskGenerator(tokenizer, kind).get_loss_mask(messages, tools)
        assert get_loss_mask_generator(tokenizer, kind).get_loss_mask(messages, tools) == tuple(expected)


def test_steps_marked_as_context_are_slimes(slime_masks: Any) -> None:
    tokenizer = chat_tokenizer("qwen", "drops_thinking")
    messages = [{**message, "step_loss_mask": n % 4 // 2} for n, message in enumerate(CONVERSATION)]
    for kind in ("qwen3", "qwen3_5", "distill_qwen"):
        theirs = slime_masks.MultiTurnLossMaskGenerator(tokenizer, kind)
        ours = get_loss_mask_generator(tokenizer, kind)
        assert ours.get_loss_mask(messages) == tuple(theirs.get_loss_mask(messages))
        mask = ours.get_loss_mask(messages)[1]
        assert ours.get_response_lengths([mask]) == theirs.get_response_lengths([mask])


def test_the_difference_on_a_default_system_message(slime_masks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat_tokenizer("qwen", "default_system")
    monkeypatch.setattr(tokenizer, "get_added_vocab", dict)
    messages = CONVERSATION[1:]  # no system message of its own
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert slime_masks.MultiTurnLossMaskGenerator(tokenizer, "qwen").get_loss_mask(messages)[0] == whole
    assert slime_masks.MultiTurnLossMaskGenerator(tokenizer, "qwen3").get_loss_mask(messages)[0] != whole
    for kind in ("auto", "qwen", "qwen3"):
        assert get_loss_mask_generator(tokenizer, kind).get_loss_mask(messages)[0] == whole
