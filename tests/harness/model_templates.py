"""Chat templates that treat a history as current models' templates do, composed of their differences; all write
ChatML."""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Ways:
    """A template's treatment of each kind of message."""

    system: Literal["written", "refused", "dropped", "collected", "never"] = "written"  # after the first message
    developer: Literal["written", "refused", "dropped"] = "dropped"
    alternate: bool = False  # refuses two questions in a row
    calls: Literal["json", "items", "text", "one", "either"] = "json"
    # in_the_answer: in its turn, the content behind them; the next answer goes on in that turn
    results: Literal["role", "grouped", "after_a_call", "in_the_answer"] = "role"
    thinking: Literal["kept", "last", "steps", "none"] = "kept"  # steps: after the last answer without calls
    reads: Literal["field", "both"] = "both"  # thinking from ``reasoning_content``, or also from marks in the content
    opening: str = ""  # of an answer
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
    inside = ways.results == "in_the_answer"
    pieces = [
        f"{{%- set inside = {str(inside).lower()} %}}",
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
        "{%- set text = m.content or '' %}{%- set thought = m.reasoning_content or '' %}",
        "{%- if '</think>' in text and not thought and " + str(ways.reads == "both").lower() + " %}",
        "{%- set text = m.content.split('</think>')[-1].lstrip('\\n') %}",
        "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}{%- endif %}",
        "{%- if not (inside and loop.previtem and loop.previtem.role == 'tool') %}{{- '<|im_start|>assistant\\n' }}",
        "{%- endif %}{%- if thought and "
        + thought[ways.thinking]
        + " %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}",
        "{{- text if not (inside and m.tool_calls) }}",
        "{%- if m.tool_calls %}{%- set n.called = true %}",
        "{%- if m.tool_calls | length > 1 %}" + _REFUSE["calls"] + "{%- endif %}" if ways.calls == "one" else "",
        "{%- for c in m.tool_calls %}"
        + head
        + _ARGUMENTS[ways.calls]
        + "{{- '"
        + tail
        + "' }}{%- endfor %}{%- endif %}",
        _IN_THE_ANSWER if inside else "{{- '<|im_end|>\\n' }}",
        "{%- elif m.role == 'tool' %}",
        "{%- if inside %}{%- else %}",
        "{%- if not n.called %}" + _REFUSE["results"] + "{%- endif %}" if ways.results == "after_a_call" else "",
        (_GROUPED if ways.results == "grouped" else _WRITE) + "{%- endif %}",
        "{%- else %}" + _REFUSE["role"] + "{%- endif %}{%- endfor %}",
        "{%- if add_generation_prompt and not (inside and messages[-1].role == 'tool') %}{{- '<|im_start|>assistant\\n"
        + ways.opening.replace("\n", "\\n")
        + "' }}",
        "{%- endif %}",
    ]
    return "".join(pieces)


_GROUPED = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
)

_IN_THE_ANSWER = (
    "{%- set r = namespace(open=m.tool_calls, any=false) %}{%- for t in messages[loop.index0 + 1 :] %}"
    "{%- set r.open = r.open and t.role == 'tool' %}{%- if r.open %}{{- '<|im_end|>' if not r.any }}"
    "{{- '<tool_response>' + t.content + '</tool_response>' }}{%- set r.any = true %}{%- endif %}{%- endfor %}"
    "{{- text if m.tool_calls }}{{- '<|im_end|>' if text or not r.any }}"
    "{{- '\\n' if not m.tool_calls or (r.any and text) }}"
)

_QWEN35 = Ways(
    system="refused",
    developer="refused",
    calls="items",
    results="grouped",
    thinking="last",
    opening="<think>\n",
    needs_question=True,
)

# a model for each behaviour: Qwen3.6 is as Qwen3.5, GLM-4.6 as GLM-4.5, the Llamas and Mistrals are as one
MODELS = {
    "Qwen2.5": Ways(results="grouped"),
    "QwQ-32B": Ways(results="grouped", thinking="none", opening="<think>\n"),
    "Qwen3": Ways(results="grouped", thinking="last", calls="either"),
    "Qwen3-VL": Ways(system="dropped", results="grouped", calls="either"),
    "Qwen3-Coder": Ways(developer="written", calls="items", results="grouped"),
    "Qwen3.5": _QWEN35,
    "Qwen3.5 without thinking": replace(_QWEN35, opening="<think>\n\n</think>\n\n"),
    "Qwen3.8": replace(_QWEN35, developer="written", thinking="kept", reads="field"),
    "Llama 3.1": Ways(developer="written", calls="one"),
    "gpt-oss": Ways(system="dropped", developer="written", results="after_a_call", thinking="last"),
    "DeepSeek-V3": Ways(system="collected", calls="text", thinking="none"),
    "DeepSeek-R1": Ways(system="collected", calls="text", thinking="none", opening="<think>\n"),
    "DeepSeek-V3.1": Ways(system="collected", calls="either", thinking="none", opening="</think>"),
    "GLM-4.5": Ways(calls="items", thinking="last"),
    "GLM-4.7": Ways(calls="items", thinking="last", opening="<think>"),
    "Kimi K2": Ways(developer="written", calls="either"),
    "Kimi K2 Thinking": Ways(developer="written", calls="either", thinking="steps", reads="field"),
    "Kimi K2.5": Ways(developer="written", calls="either", thinking="steps", reads="field", opening="<think>"),
    "MiniMax-M2": Ways(system="dropped", calls="items", results="after_a_call", thinking="last", opening="<think>\n"),
    "Mistral Nemo": Ways(system="refused", developer="refused", alternate=True, calls="either"),
    "Gemma 2": Ways(system="never", developer="refused", alternate=True),
    "Gemma 4": Ways(developer="written", results="in_the_answer", thinking="last"),
    "Nemotron 3 Super": Ways(developer="written", calls="items", thinking="last", reads="field", opening="<think>\n"),
    "SmolLM3": Ways(system="dropped", thinking="last"),
}
