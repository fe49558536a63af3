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


def test_markers_are_one_token_and_tool_markers_stay_in_the_text(tokenizer: Any) -> None:
    for marker in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|im_start|>", "<|im_end|>"):
        assert len(tokenizer.encode(marker)) == 1
    call = tokenizer.encode("<tool_call>x</tool_call><|im_end|>")
    assert tokenizer.decode(call, skip_special_tokens=True) == "<tool_call>x</tool_call>"
    assert (len(tokenizer), tokenizer.eos_token) == (460, "<|im_end|>")
    assert make_tokenizer(LookupDemonstrations()).get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ConfigError, match="vocab_size is 460"):
        train_tokenizer(["one", "two"], vocab_size=460)


def test_the_template_only_appends(tokenizer: Any) -> None:
    """The rendering of a conversation is a prefix of the rendering of any continuation."""
    for source in DEFAULT_SOURCES:
        for conversation in source.demonstrations(random.Random(1), 20, quality="imperfect"):
            lengths = range(1, len(conversation) + 1)
            rendered = [tokenizer.apply_chat_template(conversation[:n], tokenize=False) for n in lengths]
            for shorter, longer in itertools.pairwise(rendered):
                assert longer.startswith(shorter)


def test_tools_calls_and_observations_are_rendered_as_the_model_writes_them(tokenizer: Any) -> None:
    source = LookupDemonstrations()
    prompt = source.prompt({"key": "kqz"})

    def rendered(**answer: Any) -> str:
        return tokenizer.apply_chat_template([*prompt, {"role": "assistant", **answer}], tokenize=False)

    for arguments in ({"key": "kqz"}, '{"key": "kqz"}'):
        call = {"type": "function", "function": {"name": "lookup", "arguments": arguments}}
        assert rendered(content="", tool_calls=[call]) == rendered(content=source.tool_call("kqz"))

    roles = {"system": "Be brief.", "user": "hi"}
    messages = [{"role": role, "content": content} for role, content in roles.items()]
    messages += [{"role": "tool", "content": content} for content in "ab"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text == (
        '<|im_start|>system\nBe brief.\n<tools>\n{"type": "function", "function": {"name": "f"}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>user\n<tool_response>a</tool_response>"
        "<tool_response>b</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(("source", "n_turns"), [(LookupDemonstrations(), 2), (ReverseDemonstrations(), 1)])
def test_conversation_is_encoded_as_rendered_with_each_turn_marked(source: Any, n_turns: int, tokenizer: Any) -> None:
    for conversation in source.demonstrations(random.Random(2), 10, quality="clean"):
        ids, turns = encode(tokenizer, conversation)
        assert tokenizer.decode(ids) + "\n" == tokenizer.apply_chat_template(conversation, tokenize=False)
        answers = [message["content"] for message in conversation if message["role"] == "assistant"]
        assert len(answers) == n_turns
        for number, content in enumerate(answers):
            tokens = [token for token, turn in zip(ids, turns, strict=True) if turn == number]
            assert tokenizer.decode(tokens) == content + "<|im_end|>"
