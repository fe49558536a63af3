"""Agent Lightning 1.0's API over our store and gateway: states, events, model calls, and refused requests. Odd JSON,
and a great deal of it, is refused before it is queued, and without harm to listings."""

import json
import logging
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import strategies as st

from agl_slime.data.read import read_rollout
from agl_slime.gateway.agl1.settings import ControllerSettings
from agl_slime.runner.controller_process import ControllerProcess
from agl_slime.support.agl import LLM, RolloutConfig
from agl_slime.support.threads import run_blocking
from benchmarks.common import Countdown
from tests.gateway.protocols import events_of, user
from tests.harness.agl1 import Api, serving_api
from tests.harness.examples import ANY_JSON, drawn
from tests.harness.stores import enqueue

JSON = {"type": "json_object"}


@pytest.fixture
def api() -> Iterator[Api]:
    with serving_api("four") as case:
        yield case


def member_of(api: Api, rollout_id: str) -> Any:
    return run_blocking(read_rollout(api.store, rollout_id, tokenizer=api.tokenizer, convert_validation=True))


def succeed(api: Api, rollout_id: str) -> Any:
    """The member of a rollout that its controller ends."""
    for state in ("running", "succeeded"):
        assert api.patch(rollout_id, state=state).status_code == 200
    return member_of(api, rollout_id)


def post_event(api: Api, rollout_id: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    return api.http.post(f"/api/rollouts/{rollout_id}/attempt/0/events", content=content)


def test_a_rollout_from_the_queue_to_its_sample(api: Api) -> None:
    rollout = api.create(metadata={"batch_idx": 3})
    assert [entry["rollout_id"] for entry in api.http.get("/api/rollouts?state_in=queuing").json()] == [rollout]
    assert api.patch(rollout, state="running", last_attempt_id="0").json()["status"]["state"] == "running"
    answer = api.ask(rollout).json()
    [choice] = answer["choices"]
    assert choice["message"]["content"] == "four"
    assert api.reward(rollout, 0.5, reason="close").status_code == 200
    assert api.patch(rollout, state="succeeded").json()["status"]["state"] == "succeeded"
    member = member_of(api, rollout)
    (sample,) = member.samples
    assert member.reward == 0.5
    assert sample.tokens == answer["prompt_token_ids"] + choice["token_ids"]
    assert sample.loss_mask == [1] * len(choice["token_ids"])
    log_probs = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert sample.rollout_log_probs == pytest.approx(log_probs)
    call, reward = api.events(rollout, format="triplet")
    assert call["data"]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert call["data"]["response_token_ids"] == choice["token_ids"]
    assert len(call["data"]["response_log_probs"]) == len(choice["token_ids"])
    assert reward["data"] == {"value": 0.5, "reason": "close"}
    item = {"rollout_id": rollout, "state": "succeeded", "data_id": "", "is_train": True}
    page = api.http.get("/api/rollouts/terminal").json()
    assert page == {"items": [item], "next_after": 1, "total_terminal": 1}


def test_the_first_call_may_come_before_the_controller_says_running(api: Api) -> None:
    rollout = api.create()
    assert api.ask(rollout).status_code == 200
    assert api.state(rollout) == "running"
    assert api.patch(rollout, state="running", last_attempt_id="0").status_code == 200
    assert api.patch(rollout, state="running", last_attempt_id="0").status_code == 409


def test_invalid_transitions_and_states_are_refused_and_change_nothing(api: Api) -> None:
    for states, invalid in (
        ([], "succeeded"),
        ([], "queuing"),
        (["running"], "queuing"),
        (["running", "succeeded"], "failed"),
        (["running", "failed"], "succeeded"),
        (["failed"], "running"),
    ):
        rollout = api.create()
        for state in states:
            assert api.patch(rollout, state=state).status_code == 200
        assert api.patch(rollout, state=invalid).status_code == 409, (states, invalid)
        assert api.state(rollout) == (states[-1] if states else "queuing")
    rollout = api.create()
    for status in ({"state": "cancelled"}, {"cancel_requested": True}, {"state": 3}, {"error_message": ["x"]}):
        assert api.patch(rollout, **status).status_code == 422
    assert api.state(rollout) == "queuing"


def test_a_reward_that_is_no_number_is_refused_where_it_comes_in(api: Api) -> None:
    rollout = api.create()
    api.ask(rollout)
    for value in ('"1.0"', "null", "true", "[1.0]", "{}", '{"a": "b"}', "NaN", "Infinity", "-Infinity"):
        answer = post_event(api, rollout, f'{{"event_type": "reward", "data": {{"value": {value}}}}}')
        assert answer.status_code == 422, value
        assert value in ("NaN", "Infinity", "-Infinity") or "reward" in answer.text or "value" in answer.text
    assert succeed(api, rollout).failure == "no_reward"  # no default is filled in


def test_of_several_rewards_the_last_counts_and_names_are_kept(api: Api) -> None:
    rollout = api.create()
    api.ask(rollout)
    api.reward(rollout, 0.0)
    api.reward(rollout, {"correct": 1.0, "format": 0.25})
    member = succeed(api, rollout)
    assert member.reward == 1.0
    assert {name: member.rewards[name] for name in ("correct", "format")} == {"correct": 1.0, "format": 0.25}


def test_the_reward_of_one_answer_is_that_turns(api: Api) -> None:
    rollout = api.create()
    first = api.ask(rollout).json()
    messages = [user("2+2?"), first["choices"][0]["message"], user("Are you sure?")]
    second = api.ask(rollout, messages=messages).json()
    assert second["prompt_token_ids"][: len(first["prompt_token_ids"])] == first["prompt_token_ids"]
    api.reward(rollout, 1.0, response_id=first["id"])
    api.reward(rollout, 0.0, response_id=second["id"])
    api.reward(rollout, 0.5)
    member = succeed(api, rollout)
    assert member.failure is None
    assert sorted(sample.reward for sample in member.samples) == [0.0, 1.0]


def test_controllers_error_message_is_the_failure_reason(api: Api) -> None:
    reasons = {
        "subprocess exited with code 1": "agent_failed",
        "local subprocess timed out": "timeout",
        "local subprocess is not running": "agent_lost",
        "Job disappeared": "agent_lost",
        "Job failed: BackoffLimitExceeded": "agent_failed",
        "something of a controller to come": "controller",
    }
    for message, reason in reasons.items():
        rollout = api.create()
        api.ask(rollout)
        api.patch(rollout, state="running")
        api.patch(rollout, state="failed", error_message=message)
        member = member_of(api, rollout)
        assert (member.failure, member.failure_message, member.turns) == (reason, message, 1)


def test_each_protocol_is_served_and_returns_ids_where_it_can(api: Api) -> None:
    prompt = api.tokenizer.encode("2+2?")
    choice = api.ask(api.create(), path="openai/v1/completions", prompt=prompt).json()["choices"][0]
    assert choice["prompt_token_ids"] == prompt
    assert api.tokenizer.decode(choice["token_ids"]).startswith("four")
    assert choice["logprobs"]["token_logprobs"]
    rollout = api.create()
    [chunk] = [event for event in events_of(api.ask(rollout, stream=True)) if "prompt_token_ids" in event]
    [triplet] = api.events(rollout, format="triplet")
    assert chunk["choices"][0]["token_ids"] == triplet["data"]["response_token_ids"]
    for path, body in {"openai/v1/responses": {"input": "2+2?"}, "anthropic/v1/messages": {"max_tokens": 64}}.items():
        rollout = api.create()
        assert "four" in api.ask(rollout, path=path, **body).text
        assert [event["event_type"] for event in api.events(rollout)] == ["model_request"]


def test_refused_model_call_is_an_event_without_a_turn_and_32_are_kept(api: Api) -> None:
    rollout = api.create()
    assert api.ask(rollout, max_tokens="many").status_code == 400
    (event,) = api.events(rollout, event_type="model_request")
    assert (event["data"]["http_status"], event["data"]["status"]) == (400, "error")
    assert "max_tokens" in event["data"]["response"]["error"]["message"]
    (triplet,) = api.events(rollout, format="triplet")
    assert triplet["data"]["response_token_ids"] == []
    assert (triplet["data"]["http_status"], triplet["data"]["status"]) == (400, "error")
    for _ in range(40):
        api.ask(rollout, max_tokens="many")
    assert len(api.events(rollout, event_type="model_request")) == 32
    assert api.ask(rollout).status_code == 200
    assert api.reward(rollout, 1.0).status_code == 200
    member = succeed(api, rollout)
    assert (member.failure, member.turns) == (None, 1)


def test_controller_gets_the_rollouts_time_limit_in_whole_seconds(api: Api) -> None:
    limit = RolloutConfig(timeout_seconds=41.5)
    rollout = run_blocking(api.store.enqueue_rollout(input={}, mode="train", config=limit)).rollout_id
    config = api.http.get(f"/api/rollouts/{rollout}").json()["rollout"]["config"]
    assert config["timeout_seconds"] == 42  # not before the run's limit


def test_validation_is_of_mode_val_and_of_no_other(api: Api) -> None:
    rollout = api.create(is_train=False)
    assert api.ask(rollout, mode="train").status_code == 404
    assert api.ask(rollout, mode="val").status_code == 200


def test_calls_wait_while_they_are_paused(api: Api) -> None:
    rollout = api.create()
    pause = {"retry_after_seconds": 9, "reason": "sync"}
    assert api.http.post("/proxy/pause", json=pause).json()["paused"] is True
    refused = api.ask(rollout)
    assert (refused.status_code, refused.headers["Retry-After"], refused.headers["X-Agl-Paused"]) == (429, "9", "true")
    assert api.http.get("/proxy/state").json() == {"paused": True, **pause, "inflight": 0}
    api.http.post("/proxy/resume")
    assert api.ask(rollout).status_code == 200


def test_a_known_id_gives_back_the_rollout_that_is_there(api: Api) -> None:
    assert api.create(rollout_id="mine") == "mine"
    api.ask("mine")
    [rollout] = api.http.post("/api/rollouts", json=[{"rollout_id": "mine", "input": "new"}]).json()
    assert (rollout["input"], rollout["status"]["state"]) == ({"question": "2+2?"}, "running")


def test_a_deleted_rollout_is_cancelled_and_gone(api: Api) -> None:
    rollout = api.create()
    api.ask(rollout)
    for _ in range(2):
        assert api.http.delete(f"/api/rollouts/{rollout}").status_code == 204
    assert api.http.get(f"/api/rollouts/{rollout}").status_code == 404
    assert api.http.get("/api/rollouts?state_in=queuing&state_in=running").json() == []
    assert member_of(api, rollout).failure == "cancelled"


def test_nothing_but_health_is_open_without_the_key(api: Api) -> None:
    bare, queue = httpx.Client(base_url=api.gateway.url), "/api/rollouts?state_in=queuing"
    assert bare.get("/healthz").json() == {"status": "ok"}
    for method, path in (("GET", queue), ("POST", "/api/rollouts"), ("POST", "/proxy/pause")):
        assert bare.request(method, path).status_code == 401
    assert bare.get(queue, headers={"x-api-key": "the-key"}).status_code == 200


JUNK: list[tuple[str, str, str | None, int]] = [
    ("GET", "/api/rollouts", None, 422),
    ("GET", "/api/rollouts?state_in=ended", None, 422),
    ("POST", "/api/rollouts", '[{"input": 1, "rollout_id": "a/b"}]', 422),
    ("POST", "/api/rollouts", '[{"input": 1, "config": {"timeout_seconds": 1e400}}]', 422),
    ("POST", "/api/rollouts", '["\\ud800"]', 422),
    ("POST", "/api/rollouts/nobody/attempt/0/events", '{"event_type": "reward", "data": {"value": 1}}', 404),
    ("POST", "/api/models", '[{"model": "other", "endpoint": "http://elsewhere/v1"}]', 409),
    ("POST", "/proxy/pause", '{"retry_after_seconds": -1}', 422),
    ("POST", "/proxy/rollout/nobody/attempt/0/mode/train/openai/v1/chat/completions", "{}", 404),
]


def test_junk_is_refused_in_a_typed_way(api: Api) -> None:
    for method, path, body, status in JUNK:
        answer = api.http.request(method, path, content=body)
        assert answer.status_code == status, (method, path, body)
        assert answer.json()


CALL = "/proxy/rollout/{}/attempt/0/mode/train/openai/v1/chat/completions".format
QUESTION = {"model": "auto", "messages": [user("2+2?")]}


def test_second_controller_cannot_change_a_rollout_of_the_first(api: Api) -> None:
    rollout = api.create()
    first, second = "/controller/a", "/controller/b"
    for address in (first, second):  # the rollout is in both lists
        assert api.http.get(f"{address}/api/rollouts?state_in=queuing").json()

    def patch(controller: str, **status: str) -> int:
        return api.http.patch(f"{controller}/api/rollouts/{rollout}", json={"status": status}).status_code

    def reward(controller: str, value: float) -> int:
        event = {"event_type": "reward", "data": {"value": value}}
        return api.http.post(f"{controller}/api/rollouts/{rollout}/attempt/0/events", json=event).status_code

    assert patch(first, state="running", last_attempt_id="0") == 200
    assert patch(second, state="running", last_attempt_id="0") == 409
    assert api.http.post(f"{second}{CALL(rollout)}", json=QUESTION).status_code == 409
    assert reward(second, 0.25) == 409
    # 1.0's controller fails rollouts that are listed as running and that it does not run: they are not listed
    listed = "/api/rollouts?state_in=queuing&state_in=running"
    assert api.http.get(f"{second}{listed}").json() == api.http.get(listed).json() == []
    assert [entry["rollout_id"] for entry in api.http.get(f"{first}{listed}").json()] == [rollout]
    assert patch(second, state="failed", error_message="subprocess exited with code 1") == 409
    assert api.http.post(f"{first}{CALL(rollout)}", json=QUESTION).status_code == 200
    assert reward(first, 1.0) == 200
    assert patch(first, state="succeeded") == 200
    member = member_of(api, rollout)
    assert (member.reward, member.turns) == (1.0, 1)


def test_a_rollout_that_is_tried_again_begins_under_any_controller(api: Api) -> None:
    [rollout] = run_blocking(enqueue(api.store, 1, max_attempts=2))
    for controller, end in (("a", "failed"), ("b", "succeeded")):
        for state in ("running", end):
            address = f"/controller/{controller}/api/rollouts/{rollout}"
            assert api.http.patch(address, json={"status": {"state": state}}).status_code == 200, state


def test_lost_controller_fails_its_running_rollouts_and_refuses_new_calls(api: Api) -> None:
    runs, waits = api.create(), api.create()
    ended = Countdown(1)
    api.store.subscribe_finished(ended.down)
    calls = [f"/controller/a{CALL(rollout)}" for rollout in (runs, waits)]
    assert api.http.post(calls[0], json=QUESTION).status_code == 200
    api.gateway.fail_rollouts_of("a")
    assert ended.zero.wait(10)
    assert member_of(api, runs).failure == "agent_lost"
    assert [api.http.post(call, json=QUESTION).status_code for call in calls] == [410, 410]
    assert api.state(waits) == "queuing"


def test_the_engines_password_is_not_shown_to_agents(api: Api) -> None:
    endpoint = api.engine.url.replace("//", "//me:hidden@")
    run_blocking(api.store.add_resources({"main_llm": LLM(endpoint=endpoint, model="scripted")}))
    [model] = api.http.get("/api/models").json()
    assert model["endpoint"] == endpoint.replace("me:hidden", "***")
    assert api.http.post("/api/models", json=[model]).status_code == 201
    refused = api.http.post("/api/models", json=[{**model, "endpoint": "http://me:hidden@elsewhere"}])
    assert (refused.status_code, "hidden" in refused.text) == (409, False)


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def queued(api: Api) -> list[str]:
    answer = api.http.get("/api/rollouts", params={"state_in": ["queuing", "running"], "limit": 1000})
    assert answer.status_code == 200, answer.text
    return [rollout["rollout_id"] for rollout in answer.json()]


ODD = [
    ('"metadata": {"batch_idx": "x"}', "batch_idx"),
    ('"metadata": {"sample_idx_in_batch": [1]}', "sample_idx_in_batch"),
    (f'"metadata": {{"batch_idx": {2**64}}}', "batch_idx"),
    ('"metadata": {"agl1.config": 7}', "agl1.config"),
    (f'"metadata": {deep(300)}', "250 deep"),
    (f'"input": {deep(300)}', "250 deep"),
    ('"config": {"local": {"env_map": {"A": 1}}}', "env_map"),
]


def test_odd_fields_of_a_rollout_are_refused_before_it_is_queued(api: Api) -> None:
    good = api.create()
    for fields, name in ODD:
        answer = api.http.post("/api/rollouts", content=f'[{{"input": {{"q": 1}}, {fields}}}]')
        assert (answer.status_code, name in answer.text) == (422, True), answer.text
    too_many = api.http.post("/api/rollouts", json=[{"input": 1}] * 10_001)
    assert too_many.status_code == 422
    assert too_many.json() == {"detail": "the body has 10001 rollouts; send at most 10000 in one request"}
    assert queued(api) == [good]


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object with some of the fields, or any JSON."""
    return st.fixed_dictionaries({}, optional=fields) | ANY_JSON


METADATA = st.dictionaries(st.sampled_from(["batch_idx", "sample_idx_in_batch", "agl1.config", "other"]), ANY_JSON)
CONFIG = optional(timeout_seconds=ANY_JSON, local=ANY_JSON, k8s=ANY_JSON)
ROLLOUT = {"metadata": METADATA | ANY_JSON, "is_train": ANY_JSON, "rollout_id": ANY_JSON, "config": CONFIG}
CREATES = st.lists(st.fixed_dictionaries({"input": ANY_JSON}, optional=ROLLOUT), max_size=2)
CHOICES = st.lists(optional(token_ids=ANY_JSON, prompt_token_ids=ANY_JSON), max_size=2) | ANY_JSON
RESPONSE = optional(prompt_token_ids=st.lists(ANY_JSON, max_size=2) | ANY_JSON, choices=CHOICES)
REWARD = st.fixed_dictionaries({"value": ANY_JSON}, optional={"response_id": ANY_JSON, "role": ANY_JSON})
EVENTS = st.fixed_dictionaries(
    {
        "event_type": st.sampled_from(["model_request", "reward", "mine"]) | ANY_JSON,
        "data": optional(response=RESPONSE, server=ANY_JSON) | REWARD,
    }
)


def test_whatever_is_created_is_refused_or_listed(api: Api) -> None:
    created = set[str]()
    for body in drawn(CREATES | ANY_JSON, 300):
        answer = api.http.post("/api/rollouts", content=body)
        assert answer.status_code in (201, 422), (body, answer.text)
        if answer.status_code == 201:
            created |= {rollout["rollout_id"] for rollout in answer.json()}
        assert set(queued(api)) == created, body


@pytest.mark.parametrize("number", [2**63, 2**64, -(2**70), 10**310])
def test_integers_beyond_64_bits_stay_exact_in_tasks_and_events(api: Api, number: int) -> None:
    [rollout] = api.http.post("/api/rollouts", json=[{"input": {"n": number}, "metadata": {"n": [number]}}]).json()
    assert (rollout["input"]["n"], rollout["metadata"]["n"]) == (number, [number])
    assert queued(api) == [rollout["rollout_id"]]
    assert post_event(api, rollout["rollout_id"], json.dumps({"event_type": "mine", "data": {"n": number}})).is_success
    assert api.events(rollout["rollout_id"])[0]["data"] == {"n": number}
    refused = api.reward(rollout["rollout_id"], number)
    assert (refused.status_code, "1e+18" in refused.text) == (422, True)


def test_whatever_is_posted_as_an_event_can_be_read_again(api: Api) -> None:
    for body in drawn(EVENTS | ANY_JSON, 300):
        rollout = api.create()
        answer = post_event(api, rollout, body)
        assert answer.status_code in (200, 422), (body, answer.text)
        taken = int(answer.status_code == 200)
        for query in ({}, {"format": "triplet"}):
            read = api.http.get(f"/api/rollouts/{rollout}/events", params=query)
            assert (read.status_code, len(read.json())) == (200, taken), (body, read.text)


def test_posted_calls_without_token_ids_stay_beside_each_other(api: Api) -> None:
    """As 1.0 has it: calls with the same prompt are one call that was repeated; a call without a prompt is not."""
    rollout = api.create()
    for ids in ([1, 2], [[1]], [{"a": 1}], {"a": 1}, 7, None, [1, 2], [True], []):
        data = {"response": {"prompt_token_ids": ids, "choices": [{"token_ids": ids}]}}
        assert post_event(api, rollout, {"event_type": "model_request", "data": data}).status_code == 200
    triplets = [event["data"] for event in api.events(rollout, format="triplet")]
    for name in ("prompt_token_ids", "response_token_ids"):
        assert [triplet[name] for triplet in triplets] == [[], [], [], [], [], [1, 2], [], []]


@pytest.mark.parametrize("stream", [False, True])
def test_triplets_have_the_tokens_that_are_trained(api: Api, stream: bool) -> None:
    """Each of several answers to a prompt; no judge's, no constrained one, no posted copy of a call."""
    api.gateway.settings = replace(api.gateway.settings, untrained_models=("judge",), constraints="mask")
    rollout, free = api.create(), {"model": "auto"}
    for text, more in {"a": free, "b": {"n": 4}, "c": {"model": "judge"}, "d": {"response_format": JSON}}.items():
        assert api.ask(rollout, messages=[user(text)], stream=stream, **more).status_code == 200
    ids = api.events(rollout)[0]["data"]["response"]["prompt_token_ids"]
    copy = {"response": {"prompt_token_ids": ids, "choices": [{"token_ids": [1]}]}}
    post_event(api, rollout, {"event_type": "model_request", "data": copy})
    calls = [event["data"] for event in api.events(rollout, format="triplet")]
    api.reward(rollout, 1.0)
    samples = succeed(api, rollout).samples
    assert len(samples) == 5
    tokens = sorted(call["prompt_token_ids"] + call["response_token_ids"] for call in calls)
    assert tokens == sorted(sample.tokens for sample in samples)
    assert sum(len(call["response_log_probs"]) for call in calls) == sum(sum(sample.loss_mask) for sample in samples)


@pytest.mark.parametrize("odd", [{"batch_idx": "x"}, {"agl1.config": 7}, {"mine": {1, 2}}])
def test_listing_skips_rollouts_that_it_cannot_serialize(api: Api, odd: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Such a rollout comes into the store past the API; it fails, and its group is not waited for."""
    llm = LLM(endpoint=api.engine.url, model="scripted")
    run_blocking(api.store.add_resources({"main_llm": llm}))
    lost = [run_blocking(api.store.enqueue_rollout(input={"q": 1}, metadata=odd)).rollout_id for _ in range(2)]
    good = api.create()
    with caplog.at_level(logging.WARNING):
        assert queued(api) == [good]
        assert queued(api) == [good]
    assert api.gateway.rollouts.unreadable == 2
    [warning] = [record.getMessage() for record in caplog.records if "cannot be shown" in record.getMessage()]
    assert lost[0] in warning
    ends = [run_blocking(read_rollout(api.store, rollout)) for rollout in lost]
    assert [end.failure if end is not None else "" for end in ends] == ["not_showable"] * 2
    assert api.http.get(f"/api/rollouts/{lost[0]}").status_code == 409
    assert api.create() in queued(api)


def test_others_are_served_while_thousands_of_rollouts_are_created(api: Api) -> None:
    looking, creating, ended, served = Countdown(1), Countdown(1), threading.Event(), [0]

    def look() -> None:
        with httpx.Client(base_url=str(api.http.base_url), timeout=60) as client:
            while not ended.is_set():
                assert client.get("/healthz").status_code == 200
                served[0] += not ended.is_set() and creating.zero.is_set()
                looking.down()

    thread = threading.Thread(target=look)
    thread.start()
    assert looking.zero.wait(20)
    enqueue = api.store.enqueue_as

    async def counted(*args: Any, **fields: Any) -> Any:
        creating.down()
        return await enqueue(*args, **fields)

    api.store.enqueue_as = counted  # type: ignore[method-assign]
    answer = api.http.post("/api/rollouts", json=[{"input": {"text": "x" * 50}}] * 4_000, timeout=120)
    ended.set()
    thread.join()
    assert (answer.status_code, len(answer.json())) == (201, 4_000)
    assert served[0] >= 5, "one in 800 rollouts"


def test_key_is_in_no_command_line(tmp_path: Path) -> None:
    """Of the supervisor, and of the controller, here a program that takes its place."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nread never < $0.pipe\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    os.mkfifo(tmp_path / "python.pipe")
    key = "a-key-of-the-run"
    child = ControllerProcess(ControllerSettings(agent="an:Agent", python=python, key=key), url="http://127.0.0.1:9")
    child.start()
    try:
        assert child.pid is not None
        supervisor = psutil.Process(child.pid)
        family = [supervisor, *supervisor.children(recursive=True)]
        assert len(family) == 2
        assert all(key not in " ".join(process.cmdline()) for process in family)
        assert family[1].environ()["AGL_KEY"] == key
    finally:
        child.stop()
