"""Long sessions of harnesses on templates that write thinking from a field alone: one Sample, and prompts that are the
template's own."""

from __future__ import annotations

from typing import Any

import pytest

from agl_slime.gateway.calls import function_tool
from agl_slime.tokens.forks import ForkReason
from tests.gateway.protocols import ANTHROPIC_TOOL, FUNCTION, assistant, user
from tests.harness.gateway import Case, one_sample, post, serving
from tests.harness.model_templates import MODELS, template_of

TOOL = function_tool("weather", ANTHROPIC_TOOL["description"], ANTHROPIC_TOOL["input_schema"])
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
JSON = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
# as the template writes a call, and as the model does: white space and the order of keys make no fork
CALLS = {"Qwen3.8": (XML, XML), "Nemotron 3 Super": (XML, XML.replace("\n", "", 1))}
CALLS["Kimi K2.5"] = JSON, '<tool_call>{"arguments":{"city":"Rome"},"name":"weather"}</tool_call>'


def thought(number: int) -> str:
    return f"step {number}, é"


def says(model: str, turns: int) -> list[str]:
    """Answers that begin within the thinking that the prompt has opened; every third has two calls."""
    _, call = CALLS[model]
    texts = [f"I look.{call}{call if number % 3 == 2 else ''}" for number in range(turns - 1)]
    return [f"{thought(number)}\n</think>\n\n{text}" for number, text in enumerate([*texts, "Sunny."])]


def in_fields(number: int) -> list[dict[str, Any]]:
    """An answer with calls, and their results, in the fields that the template reads."""
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    calls = [call, call] if number % 3 == 2 else [call]
    answer = assistant("I look.", reasoning_content=thought(number), tool_calls=calls)
    return [answer, *({"role": "tool", "content": f"fine {number}"} for _ in calls)]


def prompts_are_the_templates(case: Case, model: str, histories: list[list[dict[str, Any]]]) -> None:
    written, sampled = CALLS[model]
    one_sample(case, len(histories))
    for turn, messages in zip(case.turns, histories, strict=True):
        text = case.tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, tokenize=False)
        prompt = case.tokenizer.decode(turn.prompt_ids.tolist(), skip_special_tokens=False)
        assert "".join(prompt.split()) == "".join(text.replace(written, sampled).split())


SYSTEM = {"role": "system", "content": "You code."}


@pytest.mark.parametrize("model", CALLS)
@pytest.mark.parametrize("keeps_blocks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_claude_codes_session_of_32_turns_is_one_sample(model: str, keeps_blocks: bool) -> None:
    """With a reminder every ten turns; a client may leave the blocks of thinking out of its history."""
    turns, ways = 32, MODELS[model]
    with serving(*says(model, turns), template=template_of(ways), context_length=60_000) as case:
        history = [user("Weather?")]
        rendered: list[dict[str, Any]] = [SYSTEM, *history]
        histories = []
        fields: Any = {"system": "You code.", "tools": [ANTHROPIC_TOOL], "max_tokens": 500}
        for number in range(turns):
            histories.append([*rendered])
            content = post(case, "messages", messages=history, **fields)["content"]
            assert content[0] == {**content[0], "type": "thinking", "thinking": thought(number)}
            if not keeps_blocks:
                content = [block for block in content if block["type"] != "thinking"]
            calls = [block["id"] for block in content if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call, "content": f"fine {number}"} for call in calls]
            history += [assistant(content), user(results)]
            rendered += in_fields(number)
            if number % 10 == 9:
                history.append({"role": "system", "content": "Keep going."})
                role = "user" if ways.system == "refused" else "system"
                rendered.append({"role": role, "content": "Keep going."})
        prompts_are_the_templates(case, model, histories)


@pytest.mark.parametrize("model", CALLS)
def test_codexs_session_of_12_turns_is_one_sample(model: str) -> None:
    turns = 12
    with serving(*says(model, turns), template=template_of(MODELS[model]), context_length=60_000) as case:
        items: list[dict[str, Any]] = [{"type": "message", **user("Weather?")}]
        rendered: list[dict[str, Any]] = [SYSTEM, user("Weather?")]
        histories = []
        fields: Any = {"instructions": "You code.", "tools": [FUNCTION], "store": False}
        for number in range(turns):
            histories.append([*rendered])
            output = post(case, "responses", input=items, max_output_tokens=500, **fields)["output"]
            calls = [item["call_id"] for item in output if item["type"] == "function_call"]
            items += output
            items += [{"type": "function_call_output", "call_id": call, "output": f"fine {number}"} for call in calls]
            rendered += in_fields(number)
        prompts_are_the_templates(case, model, histories)


@pytest.mark.parametrize(("model", "samples"), [("Nemotron 3 Super", 2), ("Qwen3.8", 1)])
def test_a_second_question_forks_where_the_template_drops_thinking(model: str, samples: int) -> None:
    answers = [*says(model, 1), "more\n</think>\n\nStill."]
    with serving(*answers, template=template_of(MODELS[model]), context_length=60_000) as case:
        question = user("Weather?")
        message = post(case, "chat/completions", messages=[question])["choices"][0]["message"]
        post(case, "chat/completions", messages=[question, message, question])
        assert len(case.segments) == samples
        fork = ForkReason.DROPPED_THINKING if samples == 2 else None
        assert [turn.fork for turn in case.turns] == [None, fork]


def test_run_template_arguments_reach_prompts_and_clients_override_them() -> None:
    source = "{{- 'A=' ~ a ~ ' B=' ~ b ~ ' ' }}" + template_of(MODELS["Qwen2.5"])
    run: Any = {"chat_template_kwargs": {"a": 1, "b": 1}}
    with serving("One.", "Two.", template=source, sampling=run) as case:
        assert "chat_template_kwargs" not in case.llm.sampling_parameters
        post(case, "chat/completions", messages=[user("?")])
        post(case, "chat/completions", messages=[user("?")], chat_template_kwargs={"b": 2})
        texts = [case.tokenizer.decode(turn.prompt_ids.tolist()) for turn in case.turns]
        assert [text.partition("<")[0] for text in texts] == ["A=1 B=1 ", "A=1 B=2 "]
        assert all("chat_template_kwargs" not in str(request.payload) for request in case.engine.received)
