"""Chat templates of the shapes that models in use have, for tests: each is one way in which a template can treat a
growing conversation."""

from __future__ import annotations

from dataclasses import dataclass

_TOOLS = """\
{#- calls stand in <tool_call> #}
{%- if tools %}{{- '\\n\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '\\n</tools>' }}{%- endif %}"""

_SYSTEM = (
    """\
{%- set first = messages[0] %}
{%- if first.role == 'system' or tools %}
{{- '<|im_start|>system\\n' + (first.content if first.role == 'system' else 'You are a helpful assistant.') }}"""
    + _TOOLS
    + """\
{{- '<|im_end|>\\n' }}
{%- endif %}"""
)

_GROUPED_TOOL = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"""

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# tool results of one step stand in one user message; answers are written as they are
GROUPS_TOOLS = (
    _SYSTEM
    + """\
{%- for message in messages %}
{%- if message.role == 'tool' %}"""
    + _GROUPED_TOOL
    + """\
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)

# thinking is written in the answers after the last question and left out of those before it;
# an answer at the end gets an empty block when it has none
DROPS_THINKING = (
    _SYSTEM
    + """\
{%- set turn = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set turn.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}"""
    + _GROUPED_TOOL
    + """\
{%- elif message.role == 'assistant' %}
{%- set text = message.content %}{%- set thought = '' %}
{%- if '</think>' in text %}
{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > turn.last and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
{{- text + '<|im_end|>\\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
)

# opens each answer with a thinking block and leaves thinking out of every answer that is there, the last one too; no
# line ends between messages
REASONER = """\
{{- '<｜begin▁of▁sentence｜>' }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{- message.content }}
{%- elif message.role == 'user' %}{{- '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}
{{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- else %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<｜tool▁outputs▁begin｜>' }}{%- endif %}
{{- message.content + '\\n' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""

# nothing ends an answer but the marker of the next role, which the model samples to stop
ROLE_MARKERS = """\
{#- calls stand in <tool_call> #}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}{{- '<|' + message.role + '|>\\n' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""

# a blank and no marker on either side of an answer's end: the one shape with boundaries that merges can reach across
BARE = """\
{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""


# a system message stands before every conversation that brings none
DEFAULT_SYSTEM = (
    """\
{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}"""
    + CHATML
)


# only the last three tool results are written in full
FORGETS_RESULTS = """\
{%- set results = messages | selectattr('role', 'equalto', 'tool') | list | length %}
{%- set seen = namespace(n=0) %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{%- set seen.n = seen.n + 1 %}{%- endif %}
{%- set old = message.role == 'tool' and seen.n <= results - 3 %}
{{- '<|im_start|>' + message.role + '\\n' + ('[old]' if old else message.content) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


# a finished conversation ends with a token of its own, which is not there when an answer follows
ENDS_WITH_TOKEN = """\
{#- calls stand in <tool_call> #}
{%- for message in messages %}{{- '<|' + message.role + '|>\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- '<|endoftext|>' }}{%- endif %}"""

# each answer is opened with an empty block, which only answers after the last question keep
DROPS_EMPTY_BLOCKS = """\
{%- set turn = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set turn.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > turn.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{%- endif %}"""

# what is written for a question depends on how many came before it
COUNTS_ROUNDS = """\
{%- set round = namespace(n=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set round.n = round.n + 1 %}{{- '[Round ' ~ round.n ~ ']\\n' }}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@dataclass(frozen=True)
class Shape:
    """``stops`` are the tokens that end an answer, the usual one first. ``opens_thinking``: an answer begins inside a
    thinking block."""

    source: str
    stops: tuple[str, ...]
    opens_thinking: bool = False

    @property
    def end(self) -> str:
        return self.stops[0]


TEMPLATES = {
    "chatml": Shape(CHATML, ("<|im_end|>",)),
    "groups_tools": Shape(GROUPS_TOOLS, ("<|im_end|>", "<|endoftext|>")),
    "drops_thinking": Shape(DROPS_THINKING, ("<|im_end|>",)),
    "reasoner": Shape(REASONER, ("<｜end▁of▁sentence｜>",), opens_thinking=True),
    "role_markers": Shape(ROLE_MARKERS, ("<|user|>", "<|observation|>", "<|endoftext|>")),
    "default_system": Shape(DEFAULT_SYSTEM, ("<|im_end|>",)),
    "forgets_results": Shape(FORGETS_RESULTS, ("<|im_end|>",)),
    "ends_with_token": Shape(ENDS_WITH_TOKEN, ("<|im_end|>",)),
    "drops_empty_blocks": Shape(DROPS_EMPTY_BLOCKS, ("<|im_end|>",)),
    "counts_rounds": Shape(COUNTS_ROUNDS, ("<|im_end|>",)),
    "bare": Shape(BARE, ("<|endoftext|>",)),
}

# a system message is the first or none; arguments of calls are objects
SYSTEM_FIRST = """\
{%- if messages[0].role == 'system' or tools %}
{{- '<|im_start|>system\\n' }}
{%- for tool in tools or [] %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
{%- elif message.role in ('user', 'assistant', 'tool') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' + (value | string) + '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}{{- raise_exception('Unexpected message role.') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# the system message is the first question's beginning; questions and answers take turns, and there are no tools
TAKES_TURNS = """\
{%- set system = messages[0].role == 'system' %}
{%- for message in (messages[1:] if system else messages) %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + (messages[0].content + '\\n\\n' if system and loop.first else '') }}
{{- (message.content | trim) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
