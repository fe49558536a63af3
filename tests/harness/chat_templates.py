"""Chat templates of the shapes that current models have: each treats a growing conversation in another way."""

from dataclasses import dataclass

from tests.harness.model_templates import Ways, template_of

_WRITE = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
_OPEN = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
_TOOL_CALLS = "{#- calls stand in <tool_call> #}"
_SYSTEM = (
    """\
{%- set first = messages[0] %}
{%- if first.role == 'system' or tools %}
{{- '<|im_start|>system\\n' + (first.content if first.role == 'system' else 'You are a helpful assistant.') }}
"""
    + _TOOL_CALLS
    + """\
{%- if tools %}{{- '\\n\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '\\n</tools>' }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}"""
)
_LAST_QUESTION = """\
{%- set turn = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set turn.last = loop.index0 %}{%- endif %}{%- endfor %}"""


def _each(body: str) -> str:
    return "{%- for message in messages %}" + body + "{%- endfor %}"


def _tool_results(start: str, result: str, end: str) -> str:
    """The results in a row, as one message."""
    return (
        "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '" + start + "' }}{%- endif %}"
        "{{- " + result + " }}"
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '" + end + "' }}{%- endif %}"
    )


_RESPONSE = "'\\n<tool_response>\\n' + message.content + '\\n</tool_response>'"
_GROUPED_TOOL = _tool_results("<|im_start|>user", _RESPONSE, "<|im_end|>\\n")
_OTHERS = "{%- elif not (loop.first and message.role == 'system') %}" + _WRITE + "{%- endif %}"

CHATML = _each(_WRITE) + _OPEN

# the tool results of one step are one user message; answers are written unchanged
GROUPS_TOOLS = _SYSTEM + _each("{%- if message.role == 'tool' %}" + _GROUPED_TOOL + _OTHERS) + _OPEN

# thinking is written only in answers after the last question; a last answer without thinking gets an empty block
DROPS_THINKING = (
    _SYSTEM
    + _LAST_QUESTION
    + _each(
        "{%- if message.role == 'tool' %}"
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
{{- text + '<|im_end|>\\n' }}"""
        + _OTHERS
    )
    + """\
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
)

# opens each answer with a thinking block and drops the thinking of every answer, the last one too; no line ends between
# messages
REASONER = (
    "{{- '<｜begin▁of▁sentence｜>' }}"
    + _each(
        """\
{%- if message.role == 'system' %}{{- message.content }}
{%- elif message.role == 'user' %}{{- '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}
{{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- else %}"""
        + _tool_results("<｜tool▁outputs▁begin｜>", "message.content + '\\n'", "<｜tool▁outputs▁end｜>")
        + "{%- endif %}"
    )
    + "{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"
)

# only the next role's marker ends an answer; the model samples it to stop
ROLE_MARKERS = (
    _TOOL_CALLS
    + _each(
        "{%- if message.role == 'tool' %}"
        + _tool_results("<|observation|>", _RESPONSE, "")
        + "{%- else %}{{- '<|' + message.role + '|>\\n' + message.content }}{%- endif %}"
    )
    + "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
)

# a blank and no marker on either side of an answer's end: merges can cross the boundary
BARE = (
    _each("{{- message.role + ': ' + message.content + '\\n' }}")
    + "{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"
)

# a conversation without a system message gets one
DEFAULT_SYSTEM = (
    "{%- if messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}" + CHATML
)

# only the last three tool results are written in full
FORGETS_RESULTS = (
    """\
{%- set results = messages | selectattr('role', 'equalto', 'tool') | list | length %}
{%- set seen = namespace(n=0) %}"""
    + _each(
        """\
{%- if message.role == 'tool' %}{%- set seen.n = seen.n + 1 %}{%- endif %}
{%- set old = message.role == 'tool' and seen.n <= results - 3 %}
{{- '<|im_start|>' + message.role + '\\n' + ('[old]' if old else message.content) + '<|im_end|>\\n' }}"""
    )
    + _OPEN
)

# a conversation that no answer follows ends with another token
ENDS_WITH_TOKEN = (
    _TOOL_CALLS
    + _each("{{- '<|' + message.role + '|>\\n' + message.content + '<|im_end|>\\n' }}")
    + "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- '<|endoftext|>' }}{%- endif %}"
)

# each answer is opened with an empty block, which only answers after the last question keep
DROPS_EMPTY_BLOCKS = (
    _LAST_QUESTION
    + _each(
        """\
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > turn.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{{- message.content + '<|im_end|>\\n' }}"""
    )
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)

# the text of a question depends on the number of earlier ones
COUNTS_ROUNDS = (
    "{%- set round = namespace(n=0) %}"
    + _each(
        "{%- if message.role == 'user' %}{%- set round.n = round.n + 1 %}"
        "{{- '[Round ' ~ round.n ~ ']\\n' }}{%- endif %}" + _WRITE
    )
    + _OPEN
)


@dataclass(frozen=True)
class Shape:
    source: str
    stops: tuple[str, ...]  # tokens that end an answer, the usual one first
    opens_thinking: bool = False  # an answer begins inside a thinking block

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

# a system message is the first or none; a call's arguments are objects
SYSTEM_FIRST = template_of(Ways(system="refused", developer="refused", calls="items"))

# the first question begins with the system message; questions and answers alternate; no tools
TAKES_TURNS = """\
{%- set system = messages[0].role == 'system' %}
{%- for message in (messages[1:] if system else messages) %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + (messages[0].content + '\\n\\n' if system and loop.first else '') }}
{{- (message.content | trim) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
