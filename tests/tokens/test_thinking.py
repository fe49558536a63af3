"""Answers in parts: the fields that a template reads, its treatment of thinking, and reminders beside it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agl_slime.tokens import forks
from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.template import ChatTemplate
from tests.harness.chat_templates import CHATML
from tests.harness.conversations import answer, text_of
from tests.harness.model_templates import MODELS, Ways, template_of
from tests.harness.tokenizers import small_tokenizer
from tests.harness.vocabularies import base_tokenizer

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
THINKING = "<think>\nLet me count.\n</think>\n\nThree."
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def in_fields(source: str, text: str) -> dict[str, Any]:
    template = ChatTemplate(tokenizer=small_tokenizer(source), tools=TOOLS)
    return template.fields.convert(text, template.reader).message


def test_answer_parts_are_in_the_fields_that_the_template_reads() -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    text = f"<think>\nLet me see.\n</think>\n\nI look.\n{CALL}"
    renamed = template_of(Ways()).replace("reasoning_content", "deep_thoughts")
    for source, name in ((template_of(Ways(reads="field")), "reasoning_content"), (renamed, "deep_thoughts")):
        assert in_fields(source, text) == {
            "role": "assistant",
            "content": "I look.",
            name: "Let me see.",
            "tool_calls": [call],
        }
    assert in_fields(CHATML, text) == {"role": "assistant", "content": text}  # it knows of neither
    two = f"{CALL}\n{CALL}"
    assert len(in_fields(template_of(Ways()), two)["tool_calls"]) == 2
    assert in_fields(template_of(Ways(calls="one")), two) == {"role": "assistant", "content": two}


def test_a_fork_of_dropped_thinking_names_the_argument_that_keeps_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "_explained", set())
    source = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
        "{%- if m.reasoning_content and ((keep_thinking is defined and keep_thinking) or loop.last) %}"
        "{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base_tokenizer("anthropic"), eos_token="<|im_end|>", chat_template=source
    )
    for kwargs, reasons in (({}, {ForkReason.DROPPED_THINKING: 1}), ({"keep_thinking": True}, {})):
        template = ChatTemplate(tokenizer=tokenizer, template_kwargs=kwargs)
        context = ChatContext(template=template, messages=QUESTION)
        answer(context, tokenizer, THINKING)
        context.add({"role": "user", "content": "Sure?"})
        answer(context, tokenizer, "Yes.")
        assert context.forks == reasons
    assert "The template argument keep_thinking=true keeps it." in caplog.text


def test_an_answer_cut_within_its_thinking_is_closed_as_the_template_does() -> None:
    source = template_of(MODELS["Qwen3.8"])
    tokenizer = small_tokenizer(source)
    context = ChatContext(template=ChatTemplate(tokenizer=tokenizer), messages=QUESTION)
    answer(context, tokenizer, "I thought", finish="length")
    context.add({"role": "user", "content": "Go on."})
    second, _ = answer(context, tokenizer, "so\n</think>\n\nDone.")
    assert context.fork is None
    thought = {"role": "assistant", "content": "", "reasoning_content": "I thought"}
    messages = [*QUESTION, thought, {"role": "user", "content": "Go on."}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text_of(tokenizer, second) == whole


def test_reminder_after_a_tool_result_keeps_thinking_unlike_a_question() -> None:
    """As on Qwen3.5, which takes a user's message for a new question."""
    call = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    reminder = {"role": "system", "content": "Keep going."}
    for later, fork, place in (
        ("in_place", None, "<tool_response>\none\n\nKeep going.\n</tool_response>"),
        ("user", ForkReason.DROPPED_THINKING, "<|im_start|>user\nKeep going.<|im_end|>"),
        ("first", ForkReason.TEMPLATE, "Be brief.\n\nKeep going.<|im_end|>"),
    ):
        tokenizer = small_tokenizer(template_of(MODELS["Qwen3.5"]))
        options: Any = {"tools": TOOLS, "later_systems": later}
        context = ChatContext(template=ChatTemplate(tokenizer=tokenizer, **options), messages=QUESTION)
        answer(context, tokenizer, f"t\n</think>\n\n{call}")
        context.add({"role": "tool", "content": "one"}, reminder)
        prompt, _ = answer(context, tokenizer, "t\n</think>\n\nDone.")
        assert context.fork is fork, later
        assert place in text_of(tokenizer, prompt)
