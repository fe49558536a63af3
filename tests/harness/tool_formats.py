"""Formats of tool calls, each in a small chat template."""

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.harness.tokenizers import small_tokenizer

_JSON = "{{ f.arguments | tojson }}"
_TEXT = "{{ v if v is string else v | tojson }}"


def _each(call: str, start: str = "", end: str = "", between: str = "") -> str:
    head = "{% for c in m.tool_calls %}{% set f = c.function %}{% if not loop.first %}" + between + "{% endif %}"
    return start + head + call + "{% endfor %}" + end


def _pairs(pair: str) -> str:
    return "{% for k, v in f.arguments.items() %}" + pair + "{% endfor %}"


def _named(name: str = "arguments") -> str:
    return '{"name": "{{ f.name }}", "' + name + '": ' + _JSON + "}"


_PYTHON = "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}"
_PYTHON += "{% endfor %})"
_GEMMA = (
    "{% macro value(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is mapping %}{{ '{' }}"
    '{% for k, e in v.items() %}<|"|>{{ k }}<|"|>:{{ value(e) }}{{ "," if not loop.last }}{% endfor %}{{ "}" }}'
    "{% elif v is sequence %}[{% for e in v %}{{ value(e) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
_INVOKE = '<%sinvoke name="{{ f.name }}">\n'
_KIMI_ID = "functions.{{ f.name }}:{{ loop.index0 }}"


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of calls, in Jinja."""

    calls: str
    marks: tuple[str, ...] = ()  # tokens of its models
    typed: bool = True  # values have types without a schema
    single: bool = False  # an answer has one call
    thinking: tuple[str, str] = ("<think>", "</think>")
    around: tuple[str, str] = ("", "")  # of content
    preamble: str = ""


FORMATS: Mapping[str, Format] = {
    "hermes": Format(
        calls=_each("\n<tool_call>\n" + _named() + "\n</tool_call>"), marks=("<tool_call>", "</tool_call>")
    ),
    "qwen_xml": Format(
        calls=_each(
            "\n<tool_call>\n<function={{ f.name }}>\n"
            + _pairs("<parameter={{ k }}>\n" + _TEXT + "\n</parameter>\n")
            + "</function>\n</tool_call>"
        ),
        marks=("<tool_call>", "</tool_call>"),
        typed=False,
    ),
    "seed": Format(
        calls=_each(
            "\n<seed:tool_call>\n<function={{ f.name }}>\n"
            + _pairs("<parameter={{ k }}>" + _TEXT + "</parameter>\n")
            + "</function>\n</seed:tool_call>"
        ),
        marks=("<seed:tool_call>", "</seed:tool_call>"),
        typed=False,
        thinking=("<seed:think>", "</seed:think>"),
    ),
    "glm": Format(
        calls=_each(
            "\n<tool_call>{{ f.name }}\n"
            + _pairs("<arg_key>{{ k }}</arg_key>\n<arg_value>" + _TEXT + "</arg_value>\n")
            + "</tool_call>"
        ),
        marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        typed=False,
    ),
    "hunyuan": Format(
        calls=_each(
            "<tool_call:opensource>{{ f.name }}<tool_sep:opensource>\n"
            + _pairs(
                "<arg_key:opensource>{{ k }}</arg_key:opensource>\n"
                "<arg_value:opensource>" + _TEXT + "</arg_value:opensource>\n"
            )
            + "</tool_call:opensource>\n",
            "<tool_calls:opensource>\n",
            "</tool_calls:opensource>",
        ),
        marks=("<tool_call:opensource>", "</tool_call:opensource>", "<tool_calls:opensource>"),
        typed=False,
        thinking=("<think:opensource>", "</think:opensource>"),
    ),
    "minimax": Format(
        calls=_each(
            _INVOKE % "" + _pairs('<parameter name="{{ k }}">' + _TEXT + "</parameter>\n") + "</invoke>\n",
            "\n<minimax:tool_call>\n",
            "</minimax:tool_call>",
        ),
        marks=("<minimax:tool_call>", "</minimax:tool_call>"),
        typed=False,
    ),
    "deepseek_v32": Format(
        calls=_each(
            _INVOKE % "｜DSML｜"
            + _pairs(
                "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
                + _TEXT
                + "</｜DSML｜parameter>\n"
            )
            + "</｜DSML｜invoke>\n",
            "\n\n<｜DSML｜tool_calls>\n",
            "</｜DSML｜tool_calls>",
        ),
        marks=("｜DSML｜",),
    ),
    "deepseek_v3": Format(
        calls=_each(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n" + _JSON + "\n```<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "\n",
        ),
        marks=("<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    "deepseek_v31": Format(
        calls=_each(
            "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>" + _JSON + "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
        marks=("<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    "kimi": Format(
        calls=_each(
            "<|tool_call_begin|>" + _KIMI_ID + "<|tool_call_argument_begin|>" + _JSON + "<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
        marks=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "mistral": Format(calls=_each(_named(), "[TOOL_CALLS][", "]", ", "), marks=("[TOOL_CALLS]",)),
    "mistral_args": Format(
        calls=_each("[TOOL_CALLS]{{ f.name }}[ARGS]" + _JSON),
        marks=("[TOOL_CALLS]", "[ARGS]"),
        thinking=("[THINK]", "[/THINK]"),
    ),
    "nemotron_v2": Format(calls=_each(_named(), "<TOOLCALL>[", "]</TOOLCALL>", ", "), marks=("<TOOLCALL>",)),
    "minimax_m1": Format(calls=_each(_named() + "\n", "\n<tool_calls>\n", "</tool_calls>"), marks=("<tool_calls>",)),
    "cohere": Format(
        calls=_each(
            '{"tool_call_id": "0", "tool_name": "{{ f.name }}", "parameters": ' + _JSON + "}",
            "<|START_ACTION|>[",
            "]<|END_ACTION|>",
            ",\n",
        ),
        marks=("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        thinking=("<|START_THINKING|>", "<|END_THINKING|>"),
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "solar": Format(
        calls=_each(
            "<|tool_call:begin|>id<|tool_call:name|>{{ f.name }}<|tool_call:args|>" + _JSON + "<|tool_call:end|>",
            "<|tool_calls|>",
        ),
        marks=("<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:end|>"),
    ),
    "functionary": Format(calls=_each("<function={{ f.name }}>" + _JSON + "</function>")),
    "llama_json": Format(calls=_each(_named("parameters"), between="; "), marks=("<|python_tag|>",)),
    "lfm2": Format(
        calls=_each(_PYTHON, "<|tool_call_start|>[", "]<|tool_call_end|>", ", "),
        marks=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "gemma4": Format(
        calls=_each(
            "<|tool_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments.items() %}{{ k }}:{{ value(v) }}"
            "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>"
        ),
        marks=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        thinking=("<|channel>thought", "<channel|>"),
        preamble=_GEMMA,
    ),
    "harmony": Format(
        calls=_each(
            "{{ '<|start|>assistant' if m.content or m.reasoning_content or not loop.first }}"
            "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>" + _JSON + "<|call|>"
        ),
        marks=("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"),
    ),
}


def template_of(kind: str, *, opens: bool = False) -> str:
    """A chat template with a format's calls; with ``opens`` an answer begins inside its reasoning."""
    form = FORMATS[kind]
    opening, closing = form.thinking
    answer = (
        "{% if m.reasoning_content %}" + opening + "\n{{ m.reasoning_content }}\n" + closing + "\n\n{% endif %}"
        "{% if m.content %}" + "{{ m.content }}".join(form.around) + "{% endif %}"
    )
    if kind == "harmony":
        answer = (
            "{% if m.reasoning_content %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}"
            "{% if m.content %}{{ '<|start|>assistant' if m.reasoning_content }}"
            "<|channel|>{{ 'commentary' if m.tool_calls else 'final' }}<|message|>{{ m.content }}"
            "{{ '<|end|>' if m.tool_calls }}{% endif %}"
        )
    return (
        form.preamble
        + "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
        "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + answer
        + "{% if m.tool_calls %}"
        + form.calls
        + "{% endif %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + (opening + "\n") * opens + "{% endif %}"
    )


@functools.cache
def tokenizer_of(kind: str, *, opens: bool = False) -> Any:
    """A small tokenizer with the marks of a format as tokens, and its template."""
    tokenizer = copy.deepcopy(small_tokenizer())
    form = FORMATS[kind]
    marks = [mark for mark in (*form.marks, *form.thinking) if mark.endswith((">", "]", "｜"))]
    tokenizer.add_tokens(marks)
    tokenizer.chat_template = template_of(kind, opens=opens)
    return tokenizer


@functools.cache
def _compiled(kind: str) -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template_of(kind))


def written(
    kind: str, calls: Sequence[tuple[str, Mapping[str, Any]]], content: str = "", reasoning: str | None = None
) -> str:
    """An answer as the format's template writes it, without the end of the turn."""
    functions = [{"name": name, "arguments": dict(arguments)} for name, arguments in calls]
    listed = [{"id": f"call_{number}", "type": "function", "function": each} for number, each in enumerate(functions)]
    message = {"role": "assistant", "content": content, "tool_calls": listed, "reasoning_content": reasoning}
    text = _compiled(kind).render(messages=[message])
    return text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
