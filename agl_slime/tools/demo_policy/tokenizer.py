"""A small byte-level BPE tokenizer, trained locally, with a ChatML-style template that renders tool calls.

The template is append-only: the rendering of a conversation is a prefix of the rendering of any continuation, so
a rollout can be continued in token space.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agl_slime.cli.demo import LOOKUP_POLICY, DemonstrationSource, LookupDemonstrations, ReverseDemonstrations
from agl_slime.errors import ConfigError

DEFAULT_SOURCES: tuple[DemonstrationSource, ...] = (LookupDemonstrations(), ReverseDemonstrations())
"""The tokenizer always learns from these as well, so that policies of different agents share their prompts' words."""

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_TOOL_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")

# General words fill the vocabulary, so that merges are not spent on the random letters of keys: those stay single
# tokens, which is what makes them quick to copy.
_GENERAL_TEXT = (
    "The model reads the question and writes an answer. When it needs to know something, it can use a tool: it sends "
    "a name and a list of arguments, waits for the result, and then goes on from there. A good\n"
    "answer is short and correct. If the first try fails, look at the error message, think about what went wrong, and "
    "try again with other values. Please explain each step before you give the final number.\n"
    "You are a helpful assistant. Here is some text for you to read, check and change. Write the sum of these "
    "numbers, count the words in that line, return the last item, or say which of the two is larger.\n"
    "Every user has a file with data, code, time and place; every file has a first and a second part. We can add, "
    "find, open, close, start, stop, sort, reverse or search them by key, value, type or order."
)

# Digits one by one, as in Qwen's pre-tokenizer; a run of blanks keeps its last one for the word that follows.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (LOOKUP_POLICY / "chat_template.jinja").read_text(encoding="utf-8")
"""Every tiny policy has the template of the shipped one."""


def make_tokenizer(source: DemonstrationSource) -> PreTrainedTokenizerFast:
    """The tokenizer for ``source``; the two default tasks are always among its texts."""
    texts = [_GENERAL_TEXT] * 8
    for each in (*DEFAULT_SOURCES, source):
        # few conversations: the fixed wording repeats in all of them, the random keys do not
        for quality in ("clean", "imperfect"):
            for conversation in each.demonstrations(random.Random(0), 16, quality=quality):
                for message in conversation:
                    texts += [str(message["role"]), str(message["content"])]
    return train_tokenizer(texts)


def train_tokenizer(texts: Sequence[str], *, vocab_size: int = 460, max_length: int = 4096) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly ``vocab_size`` tokens, the added tokens included; ``ConfigError`` when
    ``texts`` hold too few different words. The same texts in the same order give the same tokenizer."""
    added = (PAD, START, END, *_TOOL_MARKERS)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_SPLIT), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(added), initial_alphabet=alphabet, show_progress=False)
    # A marker is one token of its own, so no merge may be spent on its letters.
    split = re.compile("|".join(re.escape(token) for token in added))
    tokenizer.train_from_iterator([piece for text in texts for piece in split.split(text)], trainer)
    # Only the ChatML markers are special: the tool markers belong to a turn's text and stay in the decoded text.
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _TOOL_MARKERS])
    size = tokenizer.get_vocab_size()
    if size != vocab_size:
        raise ConfigError(
            f"vocab_size is {vocab_size}, these texts give {size} tokens: pass more texts or vocab_size={size}"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
