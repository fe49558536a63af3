"""Long sessions of harnesses on templates that write thinking from a field alone: one Sample, and prompts that are the
template's own."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from agl_slime.gateway.calls import function_tool
from agl_slime.tokens.forks import ForkReason
from tests.harness.gateway import WEATHER, Case, serving, trained_once
from tests.harness.model_templates import MODELS, template_of

PARAMETERS = WEATHER["function"]["parameters"]
TOOL = function_tool("weather", "", PARAMETERS)
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
JSON = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
# as the template writes a call, and as the model does: other white space and another order of keys are no fork
CALLS = {"Qwen3.8": (XML, XML), "Nemotron 3 Super": (XML, XML.replace("\n", "", 1))}
CALLS["Kimi K2.5"] = JSON, '<tool_call>{"arguments":{"city":"Rome"},"name":"weather"}</tool_call>'


def post(case: Case, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{case.llm.endpoint}{path}", json={"model": "m", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def thought(number: int) -> str:
    return f"step {number}, é"


def says(model: str, turns: int) -> list[str]:
    """Answers that begin within the thinking that the prompt has opened; every third has two calls."""
    _, call = CALLS[model]
    calls = [f"I look.{call}{call if number % 3 == 2 else ''}" for number in range(turns - 1)]
    return [f"{thought(number)}\n</think>\n\n{said}" for number, said in enumerate([*calls, "Sunny."])]


def in_fields(number: int) -> list[dict[str, Any]]:
    """What an answer with calls and their results are to the template."""
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    calls = [call, call] if number % 3 == 2 else [call]
    answer = {"role": "assistant", "content": "I look.", "reasoning_content": thought(number), "tool_calls": calls}
    return [answer, *({"role": "tool", "content": f"fine {number}"} for _ in calls)]


def prompts_are_the_templates(case: Case, model: str, asked: list[list[dict[str, Any]]]) -> None:
    written, sampled = CALLS[model]
    assert len(case.turns) == len(asked)
    for turn, messages in zip(case.turns, asked, strict=True):
        text = case.tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, tokenize=False)
        prompt = case.tokenizer.decode(turn.prompt_ids.tolist(), skip_special_tokens=False)
        assert "".join(prompt.split()) == "".join(text.replace(written, sampled).split())


@pytest.mark.parametrize("model", CALLS)
@pytest.mark.parametrize("keeps_blocks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_claude_codes_session_of_47_turns_is_one_sample(model: str, keeps_blocks: bool) -> None:
    """With a reminder every ten turns; a client may leave the blocks of thinking out of its history."""
    turns, ways = 47, MODELS[model]
    with serving(*says(model, turns), template=template_of(ways), context_length=60_000) as case:
        history: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
        shown: list[dict[str, Any]] = [{"role": "system", "content": "You code."}, *history]
        asked = []
        how: Any = {"system": "You code.", "tools": [{"name": "weather", "input_schema": PARAMETERS}]}
        for number in range(turns):
            asked.append([*shown])
            content = post(case, "/messages", messages=history, max_tokens=500, **how)["content"]
            assert content[0] == {**content[0], "type": "thinking", "thinking": thought(number)}
            if not keeps_blocks:
                content = [block for block in content if block["type"] != "thinking"]
            calls = [block["id"] for block in content if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call, "content": f"fine {number}"} for call in calls]
            history += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
            shown += in_fields(number)
            if number % 10 == 9:
                history.append({"role": "system", "content": "Keep going."})
                shown.append({"role": "user" if ways.system == "refused" else "system", "content": "Keep going."})
        assert len(case.segments) == 1
        trained_once(case.turns, case.segments)
        prompts_are_the_templates(case, model, asked)


@pytest.mark.parametrize("model", CALLS)
def test_codexs_session_of_32_turns_is_one_sample(model: str) -> None:
    turns = 32
    with serving(*says(model, turns), template=template_of(MODELS[model]), context_length=60_000) as case:
        items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": "Weather?"}]
        shown: list[dict[str, Any]] = [
            {"role": "system", "content": "You code."},
            {"role": "user", "content": "Weather?"},
        ]
        asked = []
        tools = [{"type": "function", "name": "weather", "description": "", "parameters": PARAMETERS}]
        how: Any = {"instructions": "You code.", "tools": tools, "store": False}
        for number in range(turns):
            asked.append([*shown])
            output = post(case, "/responses", input=items, max_output_tokens=500, **how)["output"]
            calls = [item["call_id"] for item in output if item["type"] == "function_call"]
            items += output
            items += [{"type": "function_call_output", "call_id": call, "output": f"fine {number}"} for call in calls]
            shown += in_fields(number)
        assert len(case.segments) == 1
        trained_once(case.turns, case.segments)
        prompts_are_the_templates(case, model, asked)


@pytest.mark.parametrize(("model", "samples"), [("Nemotron 3 Super", 2), ("Qwen3.8", 1)])
def test_a_second_question_forks_where_the_template_drops_thinking(model: str, samples: int) -> None:
    with serving(
        *says(model, 1), "more\n</think>\n\nStill.", template=template_of(MODELS[model]), context_length=60_000
    ) as case:
        asked = [{"role": "user", "content": "Weather?"}]
        said = post(case, "/chat/completions", messages=asked)["choices"][0]["message"]
        post(case, "/chat/completions", messages=[*asked, said, *asked])
        assert len(case.segments) == samples
        fork = ForkReason.DROPPED_THINKING if samples == 2 else None
        assert [turn.fork for turn in case.turns] == [None, fork]


def test_run_template_arguments_reach_prompts_and_clients_override_them() -> None:
    source = "{{- 'A=' ~ a ~ ' B=' ~ b ~ ' ' }}" + template_of(MODELS["Qwen2.5"])
    run: Any = {"chat_template_kwargs": {"a": 1, "b": 1}}
    with serving("One.", "Two.", template=source, sampling=run) as case:
        asked = [{"role": "user", "content": "?"}]
        assert "chat_template_kwargs" not in case.llm.sampling_parameters
        post(case, "/chat/completions", messages=asked)
        post(case, "/chat/completions", messages=asked, chat_template_kwargs={"b": 2})
        texts = [case.tokenizer.decode(turn.prompt_ids.tolist()) for turn in case.turns]
        assert [text.partition("<")[0] for text in texts] == ["A=1 B=1 ", "A=1 B=2 "]
        assert all("chat_template_kwargs" not in str(one.payload) for one in case.engine.received)
