"""Chat templates that behave as those of current models do with any history, composed of the ways in which they differ.

Written for tests: the words are ChatML's for all, what is refused, dropped, moved and rewritten is each model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Ways:
    """What a template does with system messages that are not the first (``system``), with a developer's, with
    questions in a row (``alternate``), calls in a given history, results of tools, thinking in earlier answers; and how
    it opens an answer. ``reads``: thinking from ``reasoning_content`` alone, or from a content with its marks as well;
    ``steps``: only of answers after the last one without calls."""

    system: Literal["written", "refused", "dropped", "collected", "never"] = "written"
    developer: Literal["written", "refused", "dropped"] = "dropped"
    alternate: bool = False
    calls: Literal["json", "items", "text", "one", "either"] = "json"
    results: Literal["role", "grouped", "after_a_call"] = "role"
    thinking: Literal["kept", "last", "steps", "none"] = "kept"
    reads: Literal["field", "both"] = "both"
    opening: str = ""
    needs_question: bool = False


_REFUSE = {
    "system": "{{- raise_exception('System message must be at the beginning.') }}",
    "role": "{{- raise_exception('Unexpected message role.') }}",
    "never": "{{- raise_exception('System role not supported') }}",
    "turns": "{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}",
    "calls": "{{- raise_exception('This model only supports single tool-calls at once!') }}",
    "results": "{{- raise_exception('There was no previous assistant message with a tool call!') }}",
    "question": "{{- raise_exception('No user query found in messages.') }}",
}
_WRITE = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_ARGUMENTS = {
    "json": "{{- c.function.arguments | tojson }}",
    "one": "{{- c.function.arguments | tojson }}",
    "text": "{{- '' + c.function.arguments }}",
    "items": "{%- for name, value in c.function.arguments | items %}"
    "{{- '<parameter=' ~ name ~ '>\\n' ~ value ~ '\\n</parameter>\\n' }}{%- endfor %}",
    "either": "{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
}


def template_of(ways: Ways) -> str:
    """The Jinja source."""
    later = {"written": _WRITE, "refused": _REFUSE["system"], "dropped": "", "collected": ""}
    system = _REFUSE["never"] if ways.system == "never" else later[ways.system]
    developer = {"written": _WRITE, "refused": _REFUSE["role"], "dropped": ""}[ways.developer]
    thought = {"kept": "true", "last": "loop.index0 > n.question", "steps": "loop.index0 > n.answer", "none": "false"}
    head, tail = ('{{- \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}', "}\\n</tool_call>")
    if ways.calls == "items":
        head, tail = "{{- '<tool_call>\\n<function=' + c.function.name + '>\\n' }}", "</function>\\n</tool_call>"
    if ways.calls == "text":
        head, tail = "{{- '<tool_call>' + c.function.name + '\\n' }}", "</tool_call>"
    parts = [
        "{%- set n = namespace(question=-1, answer=-1, turn=0, called=false, system='') %}",
        "{%- for m in messages %}{%- if m.role == 'user' %}{%- set n.question = loop.index0 %}{%- endif %}"
        "{%- if m.role == 'assistant' and not m.tool_calls %}{%- set n.answer = loop.index0 %}{%- endif %}"
        "{%- if m.role == 'system' %}{%- set n.system = n.system + m.content %}{%- endif %}{%- endfor %}",
        "{%- if n.question < 0 %}" + _REFUSE["question"] + "{%- endif %}" if ways.needs_question else "",
        "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for t in tools %}{{- (t | tojson) + '\\n' }}{%- endfor %}"
        "{{- '<|im_end|>\\n' }}{%- endif %}",
        "{{- '<|im_start|>system\\n' + n.system + '<|im_end|>\\n' }}" if ways.system == "collected" else "",
        "{%- for m in messages %}",
        "{%- if m.role in ('user', 'assistant') and not m.tool_calls %}"
        "{%- if (m.role == 'user') != (n.turn % 2 == 0) %}" + _REFUSE["turns"] + "{%- endif %}"
        "{%- set n.turn = n.turn + 1 %}{%- endif %}"
        if ways.alternate
        else "",
        "{%- if m.role == 'system' %}{%- if loop.first and " + str(ways.system not in ("never", "collected")).lower(),
        " %}" + _WRITE + "{%- else %}" + system + "{%- endif %}",
        "{%- elif m.role == 'developer' %}" + developer,
        "{%- elif m.role == 'user' %}{%- set n.called = false %}" + _WRITE,
        "{%- elif m.role == 'assistant' %}",
        "{%- set said = m.content or '' %}{%- set thought = m.reasoning_content or '' %}",
        "{%- if '</think>' in said and not thought and " + str(ways.reads == "both").lower() + " %}",
        "{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}",
        "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}{%- endif %}",
        "{{- '<|im_start|>assistant\\n' }}",
        "{%- if thought and "
        + thought[ways.thinking]
        + " %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}",
        "{{- said }}",
        "{%- if m.tool_calls %}{%- set n.called = true %}",
        "{%- if m.tool_calls | length > 1 %}" + _REFUSE["calls"] + "{%- endif %}" if ways.calls == "one" else "",
        "{%- for c in m.tool_calls %}"
        + head
        + _ARGUMENTS[ways.calls]
        + "{{- '"
        + tail
        + "' }}{%- endfor %}{%- endif %}",
        "{{- '<|im_end|>\\n' }}",
        "{%- elif m.role == 'tool' %}",
        "{%- if not n.called %}" + _REFUSE["results"] + "{%- endif %}" if ways.results == "after_a_call" else "",
        _GROUPED if ways.results == "grouped" else _WRITE,
        "{%- else %}" + _REFUSE["role"] + "{%- endif %}{%- endfor %}",
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n" + ways.opening.replace("\n", "\\n") + "' }}",
        "{%- endif %}",
    ]
    return "".join(parts)


_GROUPED = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
)

_QWEN = Ways(results="grouped")
_QWEN35 = Ways(
    system="refused",
    developer="refused",
    calls="items",
    results="grouped",
    thinking="last",
    opening="<think>\n",
    needs_question=True,
)
_LLAMA = Ways(developer="written", calls="one")
_MISTRAL = Ways(system="refused", developer="refused", alternate=True, calls="either", results="role")
_DEEPSEEK = Ways(system="collected", calls="text", thinking="none")
_NEMOTRON = Ways(developer="written", calls="items", thinking="last", reads="field", opening="<think>\n")
_GEMMA = Ways(system="refused", developer="refused", alternate=True)
_GLM = Ways(calls="items", thinking="last")
_GPT_OSS = Ways(system="dropped", developer="written", results="after_a_call", thinking="last")
_KIMI = Ways(developer="written", calls="either")
_KIMI_THINKING = Ways(developer="written", calls="either", thinking="steps", reads="field")

MODELS = {
    "Qwen2.5": _QWEN,
    "Qwen2.5-VL": Ways(developer="written"),
    "QwQ-32B": Ways(results="grouped", thinking="none", opening="<think>\n"),
    "Qwen3": Ways(results="grouped", thinking="last", calls="either"),
    "Qwen3-2507": Ways(results="grouped", calls="either"),
    "Qwen3-VL": Ways(system="dropped", results="grouped", calls="either"),
    "Qwen3-Coder": Ways(developer="written", calls="items", results="grouped"),
    "Qwen3.5": _QWEN35,
    "Qwen3.5 without thinking": Ways(**{**vars(_QWEN35), "opening": "<think>\n\n</think>\n\n"}),
    "Qwen3.6": _QWEN35,
    "Qwen3.8": Ways(**{**vars(_QWEN35), "developer": "written", "thinking": "kept", "reads": "field"}),
    "Llama 3.1": _LLAMA,
    "Llama 3.2": _LLAMA,
    "Llama 3.3": _LLAMA,
    "gpt-oss": _GPT_OSS,
    "DeepSeek-V3": _DEEPSEEK,
    "DeepSeek-R1": Ways(**{**vars(_DEEPSEEK), "opening": "<think>\n"}),
    "DeepSeek-V3.1": Ways(system="collected", calls="either", thinking="none", opening="</think>"),
    "DeepSeek-V4": Ways(developer="written", calls="either", thinking="last"),
    "GLM-4.5": _GLM,
    "GLM-4.6": _GLM,
    "GLM-4.7": Ways(**{**vars(_GLM), "opening": "<think>"}),
    "Kimi K2": _KIMI,
    "Kimi K2 Thinking": _KIMI_THINKING,
    "Kimi K2.5": Ways(**{**vars(_KIMI_THINKING), "opening": "<think>"}),
    "Kimi K3": Ways(calls="either", thinking="last", opening="<think>"),
    "MiniMax-M1": Ways(system="dropped", calls="either"),
    "MiniMax-M2": Ways(system="dropped", calls="items", results="after_a_call", thinking="last", opening="<think>\n"),
    "Mistral Nemo": _MISTRAL,
    "Mistral Small 3.2": _MISTRAL,
    "Ministral 3": _MISTRAL,
    "Devstral": Ways(developer="refused", calls="either"),
    "Gemma 2": Ways(system="never", developer="refused", alternate=True),
    "Gemma 3": _GEMMA,
    "Gemma 4": Ways(developer="written", thinking="none"),
    "Nemotron Nano 2": Ways(system="dropped", calls="either", thinking="none", opening="<think>\n"),
    "Nemotron 3 Nano": _NEMOTRON,
    "Nemotron 3 Super": _NEMOTRON,
    "Nemotron 3 Ultra": _NEMOTRON,
    "Phi-3.5": Ways(),
    "Granite 4": Ways(calls="either"),
    "SmolLM3": Ways(system="dropped", thinking="last"),
    "Command R7B": Ways(calls="json", thinking="none"),
    "Seed-OSS": Ways(developer="written", calls="items"),
    "LFM2": Ways(developer="written", thinking="last"),
    "Hunyuan 3": Ways(calls="items", thinking="last"),
}
