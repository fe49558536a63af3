"""The message of an answer with content beside thinking and several calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.template import ChatTemplate
from tests.harness.conversations import answer
from tests.harness.gateway import CALL, WEATHER
from tests.harness.tokenizers import small_tokenizer

# as Kimi's: a call is written by its id, which names the function
BY_ID = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)

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


def written(number: int) -> str:
    return (
        f'<|tool_call_begin|>functions.weather:{number}<|tool_call_argument_begin|>{{"city": "Rome"}}<|tool_call_end|>'
    )


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_answer_has_content_thinking_and_any_number_of_calls(calls: int) -> None:
    template = ChatTemplate(tokenizer=small_tokenizer(BY_ID), tools=[WEATHER])
    text = f"Let me see.{''.join(map(written, range(calls)))}"
    for thought, reasoning in (("So Rome.</think>", "So Rome."), ("\n</think>\n\n", None)):
        message = template.fields.convert(thought + text, template.reader).message
        assert (message["content"].strip(), message.get("reasoning_content")) == ("Let me see.", reasoning)
        ids = [call["id"] for call in message.get("tool_calls", ())]
        assert ids == [f"functions.weather:{n}" for n in range(calls)]


@pytest.mark.parametrize("rest", ["", "Then", '<tool_call>\n{"name": "wea'])
def test_answer_truncated_after_a_call_is_closed_as_the_template_does(rest: str) -> None:
    tokenizer = copy.deepcopy(small_tokenizer(ENDS_CALLS))
    tokenizer.add_tokens(["<|results|>"], special_tokens=True)
    template = ChatTemplate(tokenizer=tokenizer, tools=[WEATHER])
    context = ChatContext(template=template, messages=[{"role": "user", "content": "?"}])
    first, generation = answer(context, tokenizer, CALL + rest, finish="length")
    context.add({"role": "user", "content": "Go on."})
    ids = [*first, *generation.output_ids]
    following = context.prompt_ids()
    assert following[: len(ids)] == ids
    assert tokenizer.decode(following[len(ids) :]) == (
        "<|results|><|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_leaves_the_end_of_dropped_thinking_drops_thinking() -> None:
    tokenizer = small_tokenizer(LEAVES_THE_END)
    context = ChatContext(template=ChatTemplate(tokenizer=tokenizer), messages=[{"role": "user", "content": "?"}])
    answer(context, tokenizer, "So Rome.</think>It is Rome.")
    context.add({"role": "user", "content": "And then?"})
    prompt, _ = answer(context, tokenizer, "So Oslo.</think>Oslo.")
    assert "<|im_start|>assistant\n</think>It is Rome." in tokenizer.decode(prompt)
    assert context.fork is ForkReason.DROPPED_THINKING


@pytest.mark.parametrize("options", [{"stop": "<|return|>"}, {"finish": "length"}])
def test_an_answer_in_a_channel_is_content_without_its_marks(options: Any) -> None:
    tokenizer = copy.deepcopy(small_tokenizer(CHANNELS))
    tokenizer.add_tokens(["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"], special_tokens=True)
    context = ChatContext(template=ChatTemplate(tokenizer=tokenizer), messages=[{"role": "user", "content": "?"}])
    answer(context, tokenizer, "<|channel|>final<|message|>Rome.", **options)
    context.add({"role": "user", "content": "And then?"})
    prompt, _ = answer(context, tokenizer, "<|channel|>final<|message|>Oslo.", **options)
    assert context.fork is None
    end = options.get("stop", "<|end|>")
    assert tokenizer.decode(prompt) == (
        f"<|start|>user<|message|>?<|end|><|start|>assistant<|channel|>final<|message|>Rome.{end}"
        "<|start|>user<|message|>And then?<|end|><|start|>assistant"
    )
