"""Answers in parts: the fields that a template reads, its treatment of thinking and calls, reminders beside them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from agl_slime.tokens import forks
from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.template import ChatTemplate
from tests.harness.chat_templates import CHATML
from tests.harness.conversations import answer, text_of
from tests.harness.model_templates import MODELS, Ways, template_of
from tests.harness.tokenizers import small_tokenizer

# as Gemma's: another token ends an answer with calls, and content is written behind them
ENDS_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "{{ m.content }}{{ '<|results|>' if m.tool_calls else '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# as DeepSeek V4's: of thinking before the last question the end alone is written
LEAVES_THE_END = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if loop.index0 > ns.last %}<think>{{ m.reasoning_content or '' }}{% endif %}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)

# as gpt-oss's: marks of channels in content are refused
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% if '<|message|>' in m.content %}{{ raise_exception('channels in content') }}{% endif %}"
    "{% if m.thinking and loop.last %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "<|start|>assistant{% endif %}"
    "<|channel|>final{% endif %}<|message|>{{ m.content }}"
    "{{ '<|return|>' if m.role == 'assistant' and loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
ASK, THEN = [{"role": "user", "content": "?"}], {"role": "user", "content": "And then?"}


def context_of(template: str, *tokens: str, messages: Any = ASK, **options: Any) -> tuple[ChatContext, Any]:
    """A conversation under a template, and its tokenizer with further special tokens."""
    tokenizer = copy.deepcopy(small_tokenizer(template))
    tokenizer.add_tokens([*tokens], special_tokens=True)
    return ChatContext(template=ChatTemplate(tokenizer=tokenizer, **options), messages=messages), tokenizer


@pytest.mark.parametrize("rest", ["", "Then", '<tool_call>\n{"name": "wea'])
def test_answer_truncated_after_a_call_is_closed_as_the_template_does(rest: str) -> None:
    context, tokenizer = context_of(ENDS_CALLS, "<|results|>", tools=TOOLS)
    first, generation = answer(context, tokenizer, CALL + rest, finish="length")
    context.add(THEN)
    ids = [*first, *generation.output_ids]
    following = context.prompt_ids()
    assert following[: len(ids)] == ids
    added = "<|results|><|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(following[len(ids) :]) == added


def test_a_template_that_leaves_the_end_of_dropped_thinking_drops_thinking() -> None:
    context, tokenizer = context_of(LEAVES_THE_END)
    answer(context, tokenizer, "So Rome.</think>It is Rome.")
    context.add(THEN)
    prompt, _ = answer(context, tokenizer, "So Oslo.</think>Oslo.")
    assert "<|im_start|>assistant\n</think>It is Rome." in tokenizer.decode(prompt)
    assert context.fork is ForkReason.DROPPED_THINKING


@pytest.mark.parametrize("options", [{"stop": "<|return|>"}, {"finish": "length"}])
def test_an_answer_in_a_channel_is_content_without_its_marks(options: Any) -> None:
    context, tokenizer = context_of(CHANNELS, "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
    answer(context, tokenizer, "<|channel|>final<|message|>Rome.", **options)
    context.add(THEN)
    prompt, _ = answer(context, tokenizer, "<|channel|>final<|message|>Oslo.", **options)
    assert context.fork is None
    end = options.get("stop", "<|end|>")
    assert tokenizer.decode(prompt) == (
        f"<|start|>user<|message|>?<|end|><|start|>assistant<|channel|>final<|message|>Rome.{end}"
        "<|start|>user<|message|>And then?<|end|><|start|>assistant"
    )


QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]


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
    for kwargs, reasons in (({}, {ForkReason.DROPPED_THINKING: 1}), ({"keep_thinking": True}, {})):
        context, tokenizer = context_of(source, template_kwargs=kwargs)
        answer(context, tokenizer, "<think>\nLet me count.\n</think>\n\nThree.")
        context.add(THEN)
        answer(context, tokenizer, "Yes.")
        assert context.forks == reasons
    assert "The template argument keep_thinking=true keeps it." in caplog.text


def test_an_answer_cut_within_its_thinking_is_closed_as_the_template_does() -> None:
    context, tokenizer = context_of(template_of(MODELS["Qwen3.8"]))
    answer(context, tokenizer, "I thought", finish="length")
    context.add(THEN)
    second, _ = answer(context, tokenizer, "so\n</think>\n\nDone.")
    assert context.fork is None
    messages = [*ASK, {"role": "assistant", "content": "", "reasoning_content": "I thought"}, THEN]
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
        options: Any = {"tools": TOOLS, "later_systems": later, "messages": QUESTION}
        context, tokenizer = context_of(template_of(MODELS["Qwen3.5"]), **options)
        answer(context, tokenizer, f"t\n</think>\n\n{call}")
        context.add({"role": "tool", "content": "one"}, reminder)
        prompt, _ = answer(context, tokenizer, "t\n</think>\n\nDone.")
        assert context.fork is fork, later
        assert place in text_of(tokenizer, prompt)
