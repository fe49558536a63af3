"""OpenAI's chat completions through the gateway, by OpenAI's own client."""

from __future__ import annotations

import functools
import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from agl_slime.errors import TraceError
from agl_slime.gateway import sampling
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.tokens import attributes as names
from agl_slime.tokens.converter import convert_trajectory
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.trajectory import Trajectory
from tests.harness.gateway import CALL, CALL_TWO, TEMPLATE, WEATHER, Case, serving, trained_once
from tests.harness.tokenizers import small_tokenizer

HELLO: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]


def client_of(case: Case, **more: Any) -> OpenAI:
    return OpenAI(base_url=case.llm.endpoint, api_key="somebody-elses", **{"max_retries": 0, **more})


def ask(case: Case, messages: list[Any] = HELLO, **how: Any) -> Any:
    return client_of(case).chat.completions.create(model="scripted", messages=messages, **how)


def contains(ids: list[int], part: list[int]) -> bool:
    return any(ids[at : at + len(part)] == part for at in range(len(ids)))


def spaced(function: dict[str, Any]) -> None:
    function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=2)


def test_two_turns_with_tool_calls_are_one_sample() -> None:
    with serving(f"Let me see. {CALL}\n{CALL_TWO}", "Sunny and snow.") as case:
        said = ask(case, tools=[WEATHER]).choices[0]
        assert said.finish_reason == "tool_calls"
        assert said.message.content == "Let me see."
        calls = said.message.tool_calls
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Rome", "Oslo"]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in calls]
        messages = [*HELLO, said.message.model_dump(), *results]
        last = ask(case, messages, tools=[WEATHER])
        assert last.choices[0].message.content == "Sunny and snow."
        assert last.usage.prompt_tokens == len(case.turns[1].prompt_ids)
        first, second = case.turns
        assert second.prompt_ids.tolist()[: first.length] == first.token_ids.tolist()
        assert [len(segment.placements) for segment in case.segments] == [2]
        trained_once(case.turns, case.segments)
        assert json.loads(case.summary[names.TOOLS])["calls"] == {"weather": 2}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(content=None),
        lambda m: m.update(content=[{"type": "text", "text": m["content"] + " \n"}]),
        lambda m: [spaced(call["function"]) for call in m["tool_calls"]],
        lambda m: m.update(reasoning_content="something else", refusal=None, audio=None, name="me"),
    ],
    ids=["dropped", "parts", "serialized", "reasoning"],
)
def test_client_edits_of_an_answers_form_make_no_fork(change: Any) -> None:
    with serving(f"<think>\nhm\n</think>\n\nSee. {CALL}", "Sunny.") as case:
        message = ask(case, tools=[WEATHER]).choices[0].message.model_dump(exclude_none=True)
        assert message["reasoning_content"] == "hm"
        change(message)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "fine"}
        history = [HELLO[0] | {"content": [{"type": "text", "text": "Be brief.\n"}]}, HELLO[1], message, result]
        ask(case, history, tools=[WEATHER])
        assert [turn.fork for turn in case.turns] == [None, None]
        assert len(case.segments) == 1


def test_arguments_that_were_really_changed_are_an_edit() -> None:
    with serving(CALL, "Sunny.") as case:
        message = ask(case, tools=[WEATHER]).choices[0].message.model_dump(exclude_none=True)
        message["tool_calls"][0]["function"]["arguments"] = '{"city": "Bern"}'
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "fine"}
        ask(case, [*HELLO, message, result], tools=[WEATHER])
        assert case.turns[1].fork is ForkReason.EDITED_HISTORY
        assert "Bern" in case.tokenizer.decode(case.turns[1].prompt_ids)
        trained_once(case.turns, case.segments)


@pytest.mark.parametrize(
    "says", ["Plain words, and more of them.", f"<think>\na b\n</think>\n\nSee. {CALL}\n{CALL_TWO}"]
)
def test_a_stream_adds_up_to_the_answer_without_one(says: str) -> None:
    with serving(says) as case:
        whole = ask(case, tools=[WEATHER], logprobs=True)
        how: Any = {"tools": [WEATHER], "stream_options": {"include_usage": True}}
        with client_of(case).chat.completions.stream(model="scripted", messages=HELLO, **how) as stream:
            events = list(stream)
            streamed = stream.get_final_completion()
        one, other = whole.choices[0].message, streamed.choices[0].message
        assert (one.content or "") == (other.content or "")
        assert one.model_extra.get("reasoning_content") == other.model_extra.get("reasoning_content")
        names_of = [[(c.function.name, c.function.arguments) for c in m.tool_calls or []] for m in (one, other)]
        assert names_of[0] == names_of[1]
        assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason
        assert streamed.usage.completion_tokens == whole.usage.completion_tokens
        assert len(events) > 5
        tokens = whole.choices[0].logprobs.content
        assert "".join(token.token for token in tokens) == says + "<|im_end|>"
        assert [token.logprob for token in tokens] == pytest.approx(case.turns[0].log_probs.tolist())


def test_a_stream_begins_before_the_answer_has_ended() -> None:
    with serving("one two three four five six", token_s=0.05) as case:
        for chunk in client_of(case).chat.completions.create(model="m", messages=HELLO, stream=True):
            if chunk.choices[0].delta.content:
                break
        assert not case.spans
        assert case.engine.running == 1


def test_several_choices_are_branches_of_one_prompt() -> None:
    with serving("one", "two", "three", "four") as case:
        said = ask(case, n=3)
        assert sorted(choice.message.content for choice in said.choices) == ["one", "three", "two"]
        ask(case, [*HELLO, {"role": "assistant", "content": "two"}, {"role": "user", "content": "And?"}])
        assert len(case.turns) == 4
        assert len(case.segments) == 3
        trained_once(case.turns, case.segments)


def test_final_message_is_verbatim_and_history_whitespace_does_not_fork() -> None:
    def to(text: str, *then: str) -> list[Any]:
        roles = ("user", "assistant", "user")
        return [{"role": role, "content": said} for role, said in zip(roles, (text, *then), strict=False)]

    with serving("one", "two", "three", "four", "five", "six") as case:
        prompts = [to("2+2="), to("2+2= "), to("2+2= ", "two", "And?"), to("2+2=\n", "one", "And?")]
        prompts += [to("Say.", "A:"), to("Say.", "A: ")]
        for messages in prompts:
            ask(case, messages)
        asked = [case.tokenizer.decode(turn.prompt_ids) for turn in case.turns]
        assert ["2+2= " in text for text in asked] == [False, True, True, False, False, False]
        assert asked[-2].endswith("A:")
        assert asked[-1].endswith("A: ")
        assert [len(segment.placements) for segment in case.segments] == [2, 2, 1, 1]


def test_the_runs_sampling_is_imposed_and_counted() -> None:
    with serving("hello") as case:
        ask(case, temperature=0.0, top_p=0.5, seed=3, max_tokens=7, stop=["zzz"])
        ask(case, temperature=1.0, max_completion_tokens=100_000)
        first, second = (payload["sampling_params"] for payload in case.payloads)
        assert (first["temperature"], first["top_p"], first["max_new_tokens"], first["stop"]) == (1.0, 1.0, 7, ["zzz"])
        assert second["max_new_tokens"] == 256
        seen = json.loads(case.summary[names.GATEWAY])
        wanted = ("temperature", "top_p", "seed", "max_tokens")
        assert [seen.get(f"overridden/{name}") for name in wanted] == [1, 1, 1, 1]


@pytest.mark.parametrize(("constraints", "obeyed", "trained"), [("mask", True, 1), ("drop", False, 2)])
def test_constrained_tokens_are_never_trained(constraints: Any, obeyed: bool, trained: int) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    with serving("{}", "done", settings=GatewaySettings(constraints=constraints)) as case:
        ask(case, response_format=schema)
        ask(case, [*HELLO, {"role": "assistant", "content": "{}"}, {"role": "user", "content": "So?"}])
        assert ("json_schema" in case.payloads[0]["sampling_params"]) is obeyed
        assert sum(len(segment.placements) for segment in case.segments) == trained
        trained_once(case.turns, case.segments)


def test_constraint_handling_is_explained_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for constraints, said in (("drop", "sampled freely and trained"), ("mask", "NOT trained")):
        sampling._explain_once.cache_clear()
        caplog.clear()
        with serving("{}", settings=GatewaySettings(constraints=constraints)) as case:  # type: ignore[arg-type]
            for _ in range(2):
                ask(case, response_format={"type": "json_object"})
        [record] = [record for record in caplog.records if record.name == sampling.__name__]
        told = record.getMessage()
        assert said in told
        assert all(choice in told for choice in ("response_format", "drop", "mask", "refuse", f"it is {constraints}"))


def test_a_rollout_of_which_nothing_may_be_trained_says_why() -> None:
    with serving("{}", settings=GatewaySettings(constraints="mask")) as case:
        ask(case, response_format={"type": "json_object"})
        trajectory = Trajectory(rollout_id="ro-1", attempt_id="at-1", task={}, turns=tuple(case.turns), reward=1.0)
        with pytest.raises(TraceError, match=r"not trained \(constrained\); --constraints drop samples them freely"):
            convert_trajectory(trajectory, untrained_turns=[0])


def test_a_refusal_that_a_client_may_swallow_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with serving("ok") as case:
        for _ in range(2):
            with pytest.raises(openai.BadRequestError):
                ask(case, extra_body={"telekinesis": 1})
        said = [record.getMessage() for record in caplog.records if "telekinesis" in record.getMessage()]
        assert said == [
            "Rollout ro-1: a request was refused with 400: telekinesis is not supported here. Further requests like it "
            "are counted, not logged."
        ]


def test_agents_that_look_for_llm_find_the_model_and_lists_have_it_once() -> None:
    with serving("ok") as case:
        resources: Any = case.resources  # type: ignore[attr-defined]
        assert resources["llm"] is resources["main_llm"]
        assert [*resources] == ["main_llm"]
        with pytest.raises(KeyError, match="other"):
            resources["other"]


def test_a_constraint_can_be_refused() -> None:
    with serving("{}", settings=GatewaySettings(constraints="refuse")) as case:
        with pytest.raises(openai.BadRequestError, match="under a constraint"):
            ask(case, response_format={"type": "json_object"})
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            ask(case, tools=[WEATHER], tool_choice="required")
        assert not case.payloads


def test_forced_call_uses_the_grammar_of_the_models_format() -> None:
    with serving(CALL, settings=GatewaySettings(constraints="mask")) as case:
        choice: Any = {"type": "function", "function": {"name": "weather"}}
        assert ask(case, tools=[WEATHER], tool_choice=choice).choices[0].message.tool_calls
        tag = json.loads(case.payloads[0]["sampling_params"]["structural_tag"])
        assert tag["format"]["tags"][0]["begin"] == '<tool_call>\n{"name": "weather", "arguments": '
        assert case.turns[0].untrained == "constrained"
        with pytest.raises(openai.BadRequestError, match="names none of the tools"):
            ask(case, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "other"}})


def test_client_retry_gets_the_answer_that_was_sampled() -> None:
    with serving("first", "second") as case:
        body = {"model": "m", "messages": HELLO}
        url = f"{case.llm.endpoint}/chat/completions"
        first = httpx.post(url, json=body)
        again = httpx.post(url, json=body, headers={"x-stainless-retry-count": "1"})
        other = httpx.post(url, json=body)
        texts = [answer.json()["choices"][0]["message"]["content"] for answer in (first, again, other)]
        assert texts == ["first", "first", "second"]
        assert first.json() == again.json()
        assert len(case.turns) == 2


def test_siblings_with_the_same_words_and_other_tokens_are_not_guessed() -> None:
    tokenizer = small_tokenizer(TEMPLATE)
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    canonical, *others = (
        [number for piece in pieces for number in encode(piece)]
        for pieces in (["template"], ["t", "emplate"], list("template"))
    )
    with serving(*others, "more", tokenizer=tokenizer) as case:
        answers = ask(case, n=2).choices
        assert [answer.message.content for answer in answers] == ["template", "template"]
        sampled = [turn.response_ids.tolist()[:-1] for turn in case.turns]
        assert len({*map(tuple, sampled), tuple(canonical)}) == 3
        ask(case, [*HELLO, {"role": "assistant", "content": "template"}, {"role": "user", "content": "And?"}])
        history = case.turns[2].prompt_ids.tolist()
        assert contains(history, canonical)
        assert not any(contains(history, ids) for ids in sampled)
        assert [len(segment.placements) for segment in case.segments] == [1, 1, 1]
        trained_once(case.turns, case.segments)


def test_a_judge_is_answered_and_not_trained() -> None:
    settings = GatewaySettings(untrained_models=("gpt-judge",))
    with serving("hello", "0.5", "0.7", settings=settings, judge=True) as case:
        ask(case)
        by_model = client_of(case).chat.completions.create(model="gpt-judge", messages=HELLO, temperature=0.0)
        judge = case.resources["judge"]  # type: ignore[attr-defined]
        by_address = OpenAI(base_url=judge.endpoint, api_key=judge.api_key, max_retries=0)
        by_address.chat.completions.create(model="m", messages=HELLO, temperature=0.25)
        assert by_model.choices[0].message.content == "0.5"
        assert [turn.untrained for turn in case.turns] == ["", "role:gpt-judge", "role:judge"]
        assert [payload["sampling_params"]["temperature"] for payload in case.payloads] == [1.0, 0.0, 0.25]
        trained_once(case.turns, case.segments)


def test_named_model_role_is_trained_and_response_ids_match_their_protocol() -> None:
    settings = GatewaySettings(trained_models=("planner",))
    with serving("plan", "code", "more", settings=settings, judge=True) as case:
        create = client_of(case).chat.completions.create
        ids = [create(model=model, messages=HELLO, temperature=0.0).id for model in ("planner", "m")]
        ids.append(client_of(case).responses.create(model="m", input="And?").id)
        assert [turn.untrained for turn in case.turns] == ["", "", ""]
        assert [span.attributes[names.ROLE] for span in case.spans] == ["planner", "main_llm", "main_llm"]
        assert json.loads(case.summary[names.ROLES]) == ["main_llm", "judge", "planner"]
        assert [span.attributes[names.RESPONSE_ID] for span in case.spans] == ids
        assert [id.partition("-")[0].partition("_")[0] for id in ids] == ["chatcmpl", "chatcmpl", "resp"]
        assert {payload["sampling_params"]["temperature"] for payload in case.payloads} == {1.0}


def test_a_template_that_drops_thinking_forks_as_that() -> None:
    drops = TEMPLATE.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}")
    with serving("<think>\nhm\n</think>\n\nFine.", "Good.", template=drops) as case:
        message = ask(case).choices[0].message
        assert message.content == "Fine."
        ask(case, [*HELLO, {"role": "assistant", "content": "Fine."}, {"role": "user", "content": "And?"}])
        assert case.turns[1].fork is ForkReason.DROPPED_THINKING
        trained_once(case.turns, case.segments)


def test_a_summary_of_the_context_is_a_compaction_and_other_tools_an_edit() -> None:
    with serving("one", "two", "three", "four", "five") as case:
        history = list(HELLO)
        for _ in range(3):
            history.append({"role": "assistant", "content": ask(case, history).choices[0].message.content})
            history.append({"role": "user", "content": "And?"})
        ask(case, [*HELLO, {"role": "user", "content": "So far: one, two, three."}])
        ask(case, history, tools=[WEATHER])
        assert [turn.fork for turn in case.turns[3:]] == [ForkReason.COMPACTION, ForkReason.EDITED_HISTORY]
        trained_once(case.turns, case.segments)


@pytest.mark.parametrize(("branches", "untrained"), [("all", None), ("used", [0]), ("last", [0])])
def test_answers_that_were_thrown_away(branches: Any, untrained: list[int] | None) -> None:
    with serving("bad", "good", "end", settings=GatewaySettings(branches=branches)) as case:
        ask(case)
        ask(case)  # the same again: the first answer was not liked
        ask(case, [*HELLO, {"role": "assistant", "content": "good"}, {"role": "user", "content": "And?"}])
        assert json.loads(case.summary.get(names.UNTRAINED_TURNS, "null")) == untrained
