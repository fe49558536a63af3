"""Requests to think, as clients send them, in the arguments of chat templates."""

import os
from pathlib import Path
from typing import Any

import pytest

from agl_slime.gateway.protocol import Protocol
from agl_slime.tokens.template import ChatTemplate
from agl_slime.tokens.thinking import thinking_arguments
from tests.harness.tokenizers import small_tokenizer

REAL = os.environ.get("AGL_SLIME_CHAT_TEMPLATES", "")
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_KNOWN = "{{ raise_exception('unknown') if reasoning_effort is defined and reasoning_effort not in "
WAYS = {
    "flag": "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
    "off by default": "{% if thinking is defined and thinking %}<think>{% else %}</think>{% endif %}",
    "flag for off": "{% if skip_thinking is defined and skip_thinking %}<think></think>{% endif %}",
    "any word": "Reasoning: {{ reasoning_effort or 'medium' }}",
    "three words": _KNOWN + "('low', 'medium', 'xhigh') }}{{ reasoning_effort or 'xhigh' }}",
    "word for off": _KNOWN + "('no_think', 'low', 'high') }}{{ reasoning_effort or 'no_think' }}",
    "flag of a level": "{{ 'brief' if low_effort is defined and low_effort }}",
    "one word": "{{ 'more' if reasoning_effort is defined and reasoning_effort == 'max' }}",
    "budget": "{% set n = thinking_budget if thinking_budget is defined else -1 %}{{ '' if n == -1 else n or 'none' }}",
    "always": "<think>\n",
    "never": "",
}
OFF, ON, ADAPTIVE = ({"thinking": {"type": kind}} for kind in ("disabled", "enabled", "adaptive"))


def effort(level: str) -> dict[str, Any]:
    return {"reasoning_effort": level}


SERVED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("flag", OFF, {"enable_thinking": False}),
    ("flag", {"thinking": {"type": "enabled", "budget_tokens": 0}}, {"enable_thinking": False}),
    ("flag", effort("none"), {"enable_thinking": False}),
    ("flag", {"reasoning": {"effort": "none"}}, {"enable_thinking": False}),
    ("flag", {"reasoning": {"enabled": False}}, {"enable_thinking": False}),
    ("flag", {**OFF, "output_config": {"effort": "high"}}, {"enable_thinking": False}),
    ("flag", {**ADAPTIVE, "output_config": {"effort": "low"}}, {}),
    ("flag", effort("auto"), {}),
    ("off by default", effort("minimal"), {"thinking": True}),
    ("off by default", ADAPTIVE, {"thinking": True}),
    ("off by default", OFF, {}),
    ("flag for off", OFF, {"skip_thinking": True}),
    ("flag for off", ON, {}),
    *(
        ("any word", effort(level), {"reasoning_effort": word})
        for level, word in (("none", "low"), ("minimal", "low"), ("high", "high"), ("max", "high"))
    ),
    ("any word", effort("medium"), {}),
    ("three words", {"output_config": {"effort": "minimal"}}, {"reasoning_effort": "low"}),
    ("three words", {"reasoning": {"effort": "medium"}}, {"reasoning_effort": "medium"}),
    ("three words", effort("high"), {}),
    ("word for off", effort("medium"), {"reasoning_effort": "high"}),
    ("word for off", ON, {"reasoning_effort": "high"}),
    ("word for off", OFF, {}),
    ("flag of a level", effort("minimal"), {"low_effort": True}),
    ("flag of a level", effort("high"), {}),
    ("one word", effort("xhigh"), {"reasoning_effort": "max"}),
    ("budget", {"thinking": {"type": "enabled", "budget_tokens": 512}}, {"thinking_budget": 512}),
    ("budget", {"reasoning": {"max_tokens": 512}}, {"thinking_budget": 512}),
    ("budget", OFF, {"thinking_budget": 0}),
    ("budget", ON, {}),
    ("always", ON, {}),
]
INEFFECTIVE: list[tuple[str, dict[str, Any], set[str]]] = [
    ("flag", effort("telepathy"), {"reasoning_effort"}),
    ("flag of a level", effort("medium"), {"reasoning_effort"}),
    ("one word", effort("low"), {"reasoning_effort"}),
    ("always", OFF, {"thinking"}),
    ("always", {**ADAPTIVE, "output_config": {"effort": "low"}}, {"output_config"}),
    ("never", {**ADAPTIVE, "output_config": {"effort": "low"}}, {"thinking", "output_config"}),
    ("never", {"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning"}),
]


def arguments(source: str, body: dict[str, Any], **kwargs: Any) -> tuple[dict[str, Any], set[str]]:
    tokenizer = small_tokenizer(source)
    template = ChatTemplate(tokenizer=tokenizer, template_kwargs=kwargs)
    served, ineffective = thinking_arguments(template, Protocol.thinking_request(body))
    return served, {*ineffective}


@pytest.mark.parametrize(("way", "body", "served"), SERVED)
def test_a_request_to_think_sets_the_templates_argument(way: str, body: dict[str, Any], served: dict[str, Any]):
    assert arguments(TURNS + WAYS[way], body) == (served, set())


@pytest.mark.parametrize(("way", "body", "fields"), INEFFECTIVE)
def test_a_request_that_the_template_cannot_serve_is_named(way: str, body: dict[str, Any], fields: set[str]) -> None:
    assert arguments(TURNS + WAYS[way], body) == ({}, fields)


def test_the_runs_argument_is_not_changed_by_a_request() -> None:
    aliases = "{% set thinking = thinking if thinking is defined else enable_thinking %}" + WAYS["off by default"]
    for way, body, kwargs in (
        (aliases, effort("high"), {"enable_thinking": False}),
        (WAYS["any word"], effort("high"), {"reasoning_effort": "low"}),
    ):
        assert arguments(TURNS + way, body, **kwargs) == ({}, {"reasoning_effort"})
    assert arguments(TURNS + WAYS["flag"], OFF, enable_thinking=False) == ({}, set())


PUBLISHED: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    ("qwen3", OFF, {"enable_thinking": False}),
    ("qwen3.8", effort("medium"), {"reasoning_effort": "medium"}),
    ("qwen3.8", effort("minimal"), {"reasoning_effort": "low"}),
    ("glm-4.5", effort("none"), {"enable_thinking": False}),
    ("kimi-k2.5", OFF, {"thinking": False}),
    ("deepseek-v3.1", ADAPTIVE, {"thinking": True}),
    ("deepseek-v4", effort("max"), {"thinking": True, "reasoning_effort": "max"}),
    ("gpt-oss", effort("xhigh"), {"reasoning_effort": "high"}),
    ("nemotron-3-super", effort("low"), {"low_effort": True}),
    ("nemotron-3-ultra", effort("medium"), {"medium_effort": True}),
    ("hunyuan-3", ON, {"reasoning_effort": "high"}),
    ("seed-oss", {"thinking": {"type": "enabled", "budget_tokens": 512}}, {"thinking_budget": 512}),
    ("gemma-4", ON, {"enable_thinking": True}),
    ("smollm3", OFF, {"enable_thinking": False}),
    ("minimax-m2", OFF, None),
    ("llama-3.1", effort("low"), None),
]


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="AGL_SLIME_CHAT_TEMPLATES names no directory of models' own *.jinja files")
@pytest.mark.parametrize(("model", "body", "served"), PUBLISHED)
def test_published_templates_have_these_arguments(model: str, body: dict[str, Any], served: dict[str, Any] | None):
    source = (Path(REAL) / f"{model}.jinja").read_text(encoding="utf-8")
    assert arguments(source, body) == ({}, {*body}) if served is None else arguments(source, body) == (served, set())
