"""OpenAI's chat completions through the gateway, by OpenAI's own client."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from agl_slime.errors import ConfigError, TraceError
from agl_slime.gateway.server import PROTOCOLS, Gateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.tokens import attributes as names
from agl_slime.tokens.converter import convert_trajectory
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.turn import Trajectory
from tests.gateway.protocols import Talk, assistant, openai_client, user
from tests.harness.gateway import (
    CALL,
    CALL_TWO,
    TEMPLATE,
    WEATHER,
    Case,
    calling,
    gateway_counts,
    one_sample,
    post,
    serving,
    trained_once,
)
from tests.harness.packages import install
from tests.harness.tokenizers import small_tokenizer

HELLO: list[Any] = [{"role": "system", "content": "Be brief."}, user("Hello?")]


def ask(case: Case, messages: list[Any] = HELLO, *, model: str = "scripted", **fields: Any) -> Any:
    return openai_client(case).chat.completions.create(model=model, messages=messages, **fields)


def contains(ids: list[int], part: list[int]) -> bool:
    return any(ids[start : start + len(part)] == part for start in range(len(ids)))


def spaced(function: dict[str, Any]) -> None:
    function["arguments"] = json.dumps(dict(reversed(json.loads(function["arguments"]).items())), indent=2)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(content=[{"type": "text", "text": m["content"] + " \n"}]),
        lambda m: [spaced(call["function"]) for call in m["tool_calls"]],
        lambda m: m.update(reasoning_content="hm \n", refusal=None, audio=None, name="me"),
    ],
    ids=["parts", "serialized", "reasoning"],
)
def test_client_edits_of_an_answers_form_make_no_fork(change: Any) -> None:
    with serving(f"<think>\nhm\n</think>\n\nSee. {calling('weather', city='Rome', days=2)}", "Sunny.") as case:
        answer = ask(case, tools=[WEATHER])
        message = answer.choices[0].message.model_dump(exclude_none=True)
        assert (message["reasoning_content"], message["content"]) == ("hm", "See.")
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.usage.prompt_tokens == len(case.turns[0].prompt_ids)
        assert json.loads(case.summary[names.TOOLS])["calls"] == {"weather": 1}
        change(message)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "fine"}
        system = HELLO[0] | {"content": [{"type": "text", "text": "Be brief.\n"}]}
        ask(case, [system, HELLO[1], message, result], tools=[WEATHER])
        one_sample(case)


@pytest.mark.parametrize(
    "says", ["Plain words, and more of them.", f"<think>\na b\n</think>\n\nSee. {CALL}\n{CALL_TWO}"]
)
def test_a_stream_adds_up_to_the_answer_without_one(says: str) -> None:
    with serving(says) as case:
        whole = ask(case, tools=[WEATHER], logprobs=True)
        options: Any = {"tools": [WEATHER], "stream_options": {"include_usage": True}}
        with openai_client(case).chat.completions.stream(model="scripted", messages=HELLO, **options) as stream:
            events = list(stream)
            streamed = stream.get_final_completion()
        assert len(events) > 5

        def parts(answer: Any) -> tuple[Any, ...]:
            (choice,) = answer.choices
            calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
            reasoning = choice.message.model_extra.get("reasoning_content")
            return choice.message.content or "", reasoning, calls, choice.finish_reason, answer.usage.completion_tokens

        assert parts(streamed) == parts(whole)
        tokens = whole.choices[0].logprobs.content
        assert "".join(token.token for token in tokens) == says + "<|im_end|>"
        assert [token.logprob for token in tokens] == pytest.approx(case.turns[0].log_probs.tolist())


def test_final_message_is_verbatim_and_history_whitespace_does_not_fork() -> None:
    with serving("one", "two", "three", "four", "five", "six") as case:
        ask(case, [user("2+2=")])
        ask(case, [user("2+2= ")])
        ask(case, [user("2+2= "), assistant("two"), user("And?")])
        ask(case, [user("2+2=\n"), assistant("one"), user("And?")])
        ask(case, [user("Say."), assistant("A:")])
        ask(case, [user("Say."), assistant("A: ")])
        prompts = [case.tokenizer.decode(turn.prompt_ids) for turn in case.turns]
        assert ["2+2= " in text for text in prompts] == [False, True, True, False, False, False]
        assert prompts[-2].endswith("A:")
        assert prompts[-1].endswith("A: ")
        assert [len(segment.placements) for segment in case.segments] == [2, 2, 1, 1]


def test_the_runs_sampling_is_imposed_and_counted() -> None:
    with serving("hello") as case:
        ask(case, temperature=0.0, top_p=0.5, seed=3, max_tokens=7, stop=["zzz"])
        ask(case, temperature=1.0, max_completion_tokens=100_000)
        first, second = (payload["sampling_params"] for payload in case.payloads)
        assert (first["temperature"], first["top_p"], first["max_new_tokens"], first["stop"]) == (1.0, 1.0, 7, ["zzz"])
        assert second["max_new_tokens"] == 256
        counts = gateway_counts(case)
        assert [counts.get(f"overridden/{name}") for name in ("temperature", "top_p", "seed", "max_tokens")] == [1] * 4


@pytest.mark.parametrize(("constraints", "obeyed", "trained"), [("mask", True, 1), ("drop", False, 2)])
def test_constrained_tokens_are_never_trained(constraints: Any, obeyed: bool, trained: int) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    with serving("{}", "done", settings=GatewaySettings(constraints=constraints)) as case:
        ask(case, response_format=schema)
        first = tuple(case.turns)
        ask(case, [*HELLO, assistant("{}"), user("So?")])
        assert ("json_schema" in case.payloads[0]["sampling_params"]) is obeyed
        assert sum(len(segment.placements) for segment in case.segments) == trained
        trained_once(case.turns, case.segments)
    if constraints == "mask":
        trajectory = Trajectory(rollout_id="ro-1", attempt_id="at-1", task={}, turns=first, reward=1.0)
        with pytest.raises(TraceError, match=r"not trained \(constrained\); --constraints drop samples them freely"):
            convert_trajectory(trajectory, untrained_turns=[0])


def test_forced_call_uses_the_models_grammar_or_is_refused() -> None:
    with serving(CALL, settings=GatewaySettings(constraints="mask")) as case:
        choice: Any = {"type": "function", "function": {"name": "weather"}}
        assert ask(case, tools=[WEATHER], tool_choice=choice).choices[0].message.tool_calls
        tag = json.loads(case.payloads[0]["sampling_params"]["structural_tag"])
        assert tag["format"]["tags"][0]["begin"] == '<tool_call>\n{"name": "weather", "arguments": '
        assert case.turns[0].untrained == "constrained"
        choice = {"type": "function", "function": {"name": "tides"}}
        refused = post(case, "chat/completions", status=400, messages=HELLO, tools=[WEATHER], tool_choice=choice)
        assert "names none of the tools" in refused["error"]["message"]
    with serving("{}", settings=GatewaySettings(constraints="refuse")) as case:
        for fields in ({"response_format": {"type": "json_object"}}, {"tools": [WEATHER], "tool_choice": "required"}):
            refused = post(case, "chat/completions", status=400, messages=HELLO, **fields)
            assert "under a constraint" in refused["error"]["message"] or "tool_choice" in refused["error"]["message"]
        assert not case.payloads


def test_agents_that_look_for_llm_find_the_model_and_lists_have_it_once() -> None:
    with serving("ok") as case:
        resources: Any = case.resources  # type: ignore[attr-defined]
        assert resources["llm"] is resources["main_llm"]
        assert [*resources] == ["main_llm"]
        with pytest.raises(KeyError, match="judge"):
            resources["judge"]


def test_siblings_with_the_same_words_and_other_tokens_are_not_guessed() -> None:
    """Three answers with the same words; the first two have the same tokens."""
    tokenizer = small_tokenizer(TEMPLATE)
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    canonical, split, letters = (
        [number for piece in pieces for number in encode(piece)]
        for pieces in (["template"], ["t", "emplate"], list("template"))
    )
    with serving(split, split, letters, "more", tokenizer=tokenizer) as case:
        assert [choice.message.content for choice in ask(case, n=3).choices] == ["template"] * 3
        sampled = {tuple(turn.response_ids.tolist()[:-1]) for turn in case.turns}
        assert len({*sampled, tuple(canonical)}) == 3
        ask(case, [*HELLO, assistant("template"), user("And?")])
        history = case.turns[3].prompt_ids.tolist()
        assert contains(history, canonical)
        assert not any(contains(history, [*ids]) for ids in sampled)
        assert case.turns[3].fork is ForkReason.EDITED_HISTORY
        trained_once(case.turns, case.segments)


def test_a_judge_is_answered_and_not_trained() -> None:
    settings = GatewaySettings(untrained_models=("gpt-judge",))
    with serving("hello", "0.5", "0.7", settings=settings, judge=True) as case:
        ask(case)
        assert ask(case, model="gpt-judge", temperature=0.0).choices[0].message.content == "0.5"
        judge = case.resources["judge"]  # type: ignore[attr-defined]
        body = {"model": "m", "messages": HELLO, "temperature": 0.25}
        httpx.post(f"{judge.endpoint}/chat/completions", json=body).raise_for_status()
        assert [turn.untrained for turn in case.turns] == ["", "role:gpt-judge", "role:judge"]
        assert [payload["sampling_params"]["temperature"] for payload in case.payloads] == [1.0, 0.0, 0.25]
        trained_once(case.turns, case.segments)


def test_named_model_role_is_trained_and_response_ids_match_their_protocol() -> None:
    settings = GatewaySettings(trained_models=("planner",))
    with serving("plan", "code", "more", settings=settings, judge=True) as case:
        ids = [ask(case, model=model, temperature=0.0).id for model in ("planner", "m")]
        ids.append(post(case, "responses", input="And?")["id"])
        assert [turn.untrained for turn in case.turns] == ["", "", ""]
        assert [span.attributes[names.ROLE] for span in case.spans] == ["planner", "main_llm", "main_llm"]
        assert json.loads(case.summary[names.ROLES]) == ["main_llm", "judge", "planner"]
        assert [span.attributes[names.RESPONSE_ID] for span in case.spans] == ids
        assert [id.partition("-")[0].partition("_")[0] for id in ids] == ["chatcmpl", "chatcmpl", "resp"]
        assert {payload["sampling_params"]["temperature"] for payload in case.payloads} == {1.0}


def test_a_summary_of_the_context_is_a_compaction_and_other_tools_an_edit() -> None:
    with serving("one", "two", "three", "four", "five") as case:
        talk = Talk(case, "chat/completions")
        for messages in (HELLO, [user("And?")], [user("And?")]):
            talk.ask(*messages)
        post(case, "chat/completions", messages=[*HELLO, user("So far: one, two, three.")])
        talk.ask(user("And?"), tools=[WEATHER])
        assert [turn.fork for turn in case.turns[3:]] == [ForkReason.COMPACTION, ForkReason.EDITED_HISTORY]
        trained_once(case.turns, case.segments)


def test_a_package_adds_a_protocol_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The protocol is docs/any-agent.md's own: two turns of a conversation are one Sample."""
    page = (Path(__file__).parents[2] / "docs/any-agent.md").read_text()
    (example,) = re.findall(r"```python\n(# ollama_protocol.*?)```", page, re.DOTALL)
    monkeypatch.setattr("agl_slime.gateway.server.PROTOCOLS", {**PROTOCOLS})
    with monkeypatch.context() as installed:
        entry = "/api/chat = ollama_protocol:OllamaChat"
        install(tmp_path / "a", installed, group="agl_slime.protocols", entry=entry, source=example)
        with serving("Four.", "Five.") as case:
            first = post(case, "api/chat", messages=HELLO, keep_alive="5m")
            assert first["message"] == {"role": "assistant", "content": "Four."}
            post(case, "api/chat", messages=[*HELLO, first["message"], user("And?")])
            one_sample(case)
    for number, (entry, problem) in enumerate(
        [("/chat/completions = fine:Fine", "not served yet"), ("/other = fine:absent", "cannot be loaded")]
    ):
        with monkeypatch.context() as installed:
            source = "from agl_slime.gateway.chat import ChatCompletions as Fine"
            install(tmp_path / str(number), installed, group="agl_slime.protocols", entry=entry, source=source)
            with pytest.raises(ConfigError, match=problem):
                Gateway()
