"""Requests as harnesses send them to models whose chat template takes one system message, raises an error, or writes
thinking from a field alone: long sessions are one Sample, and their prompts are the template's."""

from typing import Any

import httpx
import pytest

from tests.gateway.protocols import ANTHROPIC_TOOL, CHATS, STREAMED, Talk, body_of, user
from tests.harness.chat_templates import TAKES_TURNS
from tests.harness.gateway import gateway_counts, one_sample, post, prompts, serving
from tests.harness.model_templates import MODELS, template_of

XML_CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
USER = user("Weather?")


@pytest.mark.parametrize("path", CHATS)
def test_template_error_is_a_400_with_the_templates_message(path: str) -> None:
    with serving("Hello.", template=TAKES_TURNS) as case:
        for stream in (False, True):
            error = post(case, path, status=400, **body_of(path, [USER, USER], stream=stream))["error"]
            assert error["type"] == "invalid_request_error"
            assert "Conversation roles must alternate" in error["message"]
        post(case, path, **body_of(path, [USER]))
        assert len(case.turns) == 1


JSON_CALL = '<tool_call>{"arguments":{"city":"Rome"},"name":"weather"}</tool_call>'
# as the model writes a call: the template's white space and order of keys make no fork
CALLS = {"Qwen3.8": XML_CALL, "Nemotron 3 Super": XML_CALL.replace("\n", "", 1), "Kimi K2.5": JSON_CALL}
CALLS["Gemma 4"] = JSON_CALL  # whose template moves the content behind the results


def thought(number: int) -> str:
    return f"step {number}, é"


def says(model: str, turns: int) -> list[str]:
    """Answers that begin within the thinking that the prompt has opened, if it does; every third has two calls."""
    call, opening = CALLS[model], "<think>\n" * (not MODELS[model].opening)
    texts = [f"I look.{call}{call if number % 3 == 2 else ''}" for number in range(turns - 1)]
    return [f"{opening}{thought(number)}\n</think>\n\n{text}" for number, text in enumerate([*texts, "Sunny."])]


@pytest.mark.parametrize("model", CALLS)
@pytest.mark.parametrize("keeps_blocks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_claude_codes_session_of_32_turns_is_one_sample(model: str, keeps_blocks: bool) -> None:
    """With a reminder every ten turns; a client may leave the blocks of thinking out of its history."""
    turns = 32
    with serving(*says(model, turns), template=template_of(MODELS[model]), context_length=60_000) as case:
        fields: Any = {"system": "You code.", "tools": [ANTHROPIC_TOOL]}
        talk, items = Talk(case, "messages", **fields), [user("Weather?")]
        for number in range(turns):
            content = talk.ask(*items)
            assert content[0] == {**content[0], "type": "thinking", "thinking": thought(number)}
            if not keeps_blocks:
                talk.history[-1]["content"] = [block for block in content if block["type"] != "thinking"]
            items = talk.results(f"fine {number}")
            if number % 10 == 9:
                items.append({"role": "system", "content": "Keep going."})
        one_sample(case, turns)
        count = post(case, "messages/count_tokens", messages=talk.history[:-1], **fields)["input_tokens"]
        assert count == len(case.turns[-1].prompt_ids)
        last = case.tokenizer.decode(case.turns[-1].prompt_ids.tolist(), skip_special_tokens=False)
        assert [last.count(text) for text in (CALLS[model], "Keep going.")] == [turns - 1 + turns // 3, turns // 10]


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


EFFORTS: dict[str, dict[str, Any]] = {
    "chat/completions": {"reasoning_effort": "minimal"},
    "responses": {"reasoning": {"effort": "minimal", "summary": "auto"}},
    "messages": {"output_config": {"effort": "minimal"}},
    "completions": {"reasoning_effort": "minimal"},
}


@STREAMED
@pytest.mark.parametrize("path", CHATS)
def test_an_effort_is_the_templates_nearest_in_each_prompt(path: str, streamed: bool) -> None:
    source = "{{- 'effort=' ~ (reasoning_effort or 'medium') ~ ' ' }}" + template_of(MODELS["Qwen2.5"])
    with serving("One.", "Two.", template=source) as case:
        talk = Talk(case, path, **EFFORTS[path])
        talk.ask(user("?"))
        body = body_of(path, [*talk.history, user("And?")], stream=streamed, **EFFORTS[path])
        httpx.post(f"{case.llm.endpoint}/{path}", json=body).raise_for_status()
        assert [text.partition("<")[0] for text in prompts(case)] == ["effort=low "] * 2
        one_sample(case)
        assert not {f"overridden/{name}" for name in EFFORTS[path]} & gateway_counts(case).keys()


@STREAMED
@pytest.mark.parametrize("path", EFFORTS)
def test_an_effort_without_an_argument_is_counted_as_overridden(path: str, streamed: bool) -> None:
    (field,) = EFFORTS[path]
    plain, decided = template_of(MODELS["Qwen2.5"]), {"chat_template_kwargs": {"reasoning_effort": "high"}}
    for source, run in ((plain, {}), ("{{- reasoning_effort }}" + plain, decided)):
        with serving("One.", template=source, sampling=run) as case:
            body = body_of(path, [user("?")], stream=streamed, **EFFORTS[path])
            httpx.post(f"{case.llm.endpoint}/{path}", json=body).raise_for_status()
            assert gateway_counts(case)[f"overridden/{field}"] == 1
