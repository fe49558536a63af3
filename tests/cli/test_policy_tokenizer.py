"""The tiny policy's tokenizer and chat template."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

pytest.importorskip("torch", reason='the tiny policy needs torch: pip install "agl-slime[local]"')

from agl_slime.cli.demo import LookupDemonstrations, ReverseDemonstrations
from agl_slime.cli.demo.tokenizer import DEFAULT_SOURCES, make_tokenizer, train_tokenizer
from agl_slime.cli.demo.warmup import encode
from agl_slime.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(LookupDemonstrations())


def test_it_has_the_size_asked_for_and_is_the_same_each_time(tokenizer: Any) -> None:
    assert len(tokenizer) == 460
    assert make_tokenizer(LookupDemonstrations()).get_vocab() == tokenizer.get_vocab()
    assert tokenizer.eos_token == "<|im_end|>"


def test_any_text_survives(tokenizer: Any) -> None:
    for text in (
        "plain words",
        "naïve 漢字 🙂",
        '{"a": [1, 2]}\n\n\tx',
        "<tool_call></tool_call>",
        "   leading and trailing   ",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_markers_are_one_token_and_tool_markers_stay_in_the_text(tokenizer: Any) -> None:
    for marker in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|im_start|>", "<|im_end|>"):
        assert len(tokenizer.encode(marker)) == 1
    assert (
        tokenizer.decode(tokenizer.encode("<tool_call>x</tool_call><|im_end|>"), skip_special_tokens=True)
        == "<tool_call>x</tool_call>"
    )


def test_most_keys_are_single_letters_so_that_they_are_quick_to_copy(tokenizer: Any) -> None:
    source, rng = LookupDemonstrations(), random.Random(0)
    keys = [source.make_task(rng)["key"] for _ in range(500)]
    assert sum(len(tokenizer.encode(key)) == len(key) for key in keys) >= 450


def test_the_template_only_appends(tokenizer: Any) -> None:
    """What is rendered for a conversation is a prefix of what is rendered for any continuation of it."""
    for source in DEFAULT_SOURCES:
        for conversation in source.demonstrations(random.Random(1), 20, quality="imperfect"):
            rendered = [
                tokenizer.apply_chat_template(conversation[:count], tokenize=False)
                for count in range(1, len(conversation) + 1)
            ]
            for shorter, longer in itertools.pairwise(rendered):
                assert longer.startswith(shorter)


def test_tool_calls_given_as_objects_are_rendered_as_the_model_writes_them(tokenizer: Any) -> None:
    source = LookupDemonstrations()
    written = [*source.prompt({"key": "kqz"}), {"role": "assistant", "content": source.tool_call("kqz")}]
    for arguments in ({"key": "kqz"}, '{"key": "kqz"}'):
        given = [
            *source.prompt({"key": "kqz"}),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "lookup", "arguments": arguments}}],
            },
        ]
        assert tokenizer.apply_chat_template(given, tokenize=False) == tokenizer.apply_chat_template(
            written, tokenize=False
        )


def test_tools_and_observations(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "tool", "content": "a"},
        {"role": "tool", "content": "b"},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=[{"type": "function", "function": {"name": "f"}}], tokenize=False, add_generation_prompt=True
    )
    head = (
        '<|im_start|>system\nBe brief.\n<tools>\n{"type": "function", "function": {"name": "f"}}\n</tools><|im_end|>\n'
    )
    assert text.startswith(head + "<|im_start|>user\nhi<|im_end|>\n")
    assert text.endswith(
        "<|im_start|>user\n<tool_response>a</tool_response><tool_response>b</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.count("Be brief.") == 1


def test_conversation_is_encoded_as_rendered_with_each_turn_marked(tokenizer: Any) -> None:
    for source, turns_of_it in ((LookupDemonstrations(), 2), (ReverseDemonstrations(), 1)):
        for conversation in source.demonstrations(random.Random(2), 10, quality="clean"):
            ids, turns = encode(tokenizer, conversation)
            assert tokenizer.decode(ids) + "\n" == tokenizer.apply_chat_template(conversation, tokenize=False)
            said = [message["content"] for message in conversation if message["role"] == "assistant"]
            assert len(said) == turns_of_it
            for number, content in enumerate(said):
                own = [token for token, turn in zip(ids, turns, strict=True) if turn == number]
                assert tokenizer.decode(own) == content + "<|im_end|>"


def test_too_few_words_for_the_vocabulary_is_an_error() -> None:
    with pytest.raises(ConfigError, match="vocab_size is 460"):
        train_tokenizer(["one", "two"], vocab_size=460)
