"""Agent Lightning 1.0's API with its model calls in several processes: the same answers, and what a dead one costs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_slime.datasource.read import collect
from agl_slime.gateway.front import worker_of
from agl_slime.support.threads import run_blocking
from tests.agl1_cases import Api, serving_api

pytestmark = pytest.mark.slow


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with serving_api("four", workers_of=tmp_path) as case:
        yield case


def home(rollout: str) -> int:
    return worker_of(f"/proxy/rollout/{rollout}/attempt/0".encode(), 2)


def two_turns(api: Api, rollout: str) -> Any:
    """The answer to the second."""
    said = api.ask(rollout).json()["choices"][0]["message"]["content"]
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": said}]
    return api.ask(rollout, messages=[*messages, {"role": "user", "content": "Sure?"}])


def member_of(api: Api, rollout: str) -> Any:
    return run_blocking(collect(api.store, rollout, tokenizer=api.tokenizer))


def test_rollouts_in_both_workers_become_samples(api: Api) -> None:
    rollouts = [api.create() for _ in range(8)]
    assert {home(rollout) for rollout in rollouts} == {0, 1}
    for rollout in rollouts:
        assert api.patch(rollout, state="running", last_attempt_id="0").status_code == 200
        assert two_turns(api, rollout).status_code == 200
        assert api.ask(rollout, path="anthropic/v1/messages", max_tokens=8).status_code == 200
        assert api.ask(rollout, mode="val").json()["error"]["code"] == "unknown_rollout"
        assert api.reward(rollout, 0.5).status_code == 200
        assert api.patch(rollout, state="succeeded").status_code == 200
        assert api.ask(rollout).status_code == 410
        member = member_of(api, rollout)
        assert (member.failure, member.reward, member.turns) == (None, 0.5, 3)
        assert sum(sum(sample.loss_mask) for sample in member.samples) == member.sampled_tokens
    assert [event["event_type"] for event in api.events(rollouts[0])] == ["model_request"] * 3 + ["reward"]


def test_a_dead_worker_costs_its_rollouts_and_no_others(api: Api) -> None:
    rollouts = [api.create() for _ in range(8)]
    for rollout in rollouts:
        assert api.ask(rollout).status_code == 200
    front = api.gateway.front
    assert front is not None
    os.kill(front.pids()[0], signal.SIGKILL)
    for rollout in rollouts:
        answer = two_turns(api, rollout) if home(rollout) == 1 else api.ask(rollout)
        if answer.status_code == 503:  # it was dying
            assert answer.json()["error"]["code"] == "gateway_worker_lost"
            answer = api.ask(rollout)
        if home(rollout) == 1:
            assert answer.status_code == 200
            assert api.reward(rollout, 1.0).status_code == 200
            assert api.patch(rollout, state="succeeded").status_code == 200
            assert member_of(api, rollout).failure is None
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (410, "attempt_lost")
            assert api.patch(rollout, state="failed", error_message="exited with code 1").status_code == 200
            assert member_of(api, rollout).failure == "agent_failed"


def test_request_in_flight_at_the_rollouts_end_is_cut_off_with_410(api: Api) -> None:
    api.engine.latency_s = 30.0  # longer than this test
    rollout, answers = api.create(), []
    asking = threading.Thread(target=lambda: answers.append(api.ask(rollout)))
    asking.start()
    while not api.engine.running:
        asking.join(0.02)
    state = api.http.get("/proxy/state").json()
    assert (state["paused"], state["inflight"]) == (False, 1)
    assert api.patch(rollout, state="running", last_attempt_id="0").status_code == 200
    assert api.patch(rollout, state="failed", error_message="timed out").status_code == 200
    asking.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (410, "rollout_ended")
    assert member_of(api, rollout).failure == "timeout"


def test_model_calls_that_are_paused_are_refused_for_all_workers(api: Api) -> None:
    rollouts = [api.create() for _ in range(8)]
    assert api.ask(rollouts[0]).status_code == 200
    assert api.http.post("/proxy/pause", json={"retry_after_seconds": 3}).json()["paused"]
    for rollout in rollouts:
        answer = api.ask(rollout)
        assert (answer.status_code, answer.headers["X-Agl-Paused"]) == (429, "true")
    assert api.patch(rollouts[0], state="running", last_attempt_id="0").status_code == 200
    assert api.patch(rollouts[0], state="succeeded").status_code == 200  # rollouts end meanwhile
    assert not api.http.post("/proxy/resume").json()["paused"]
    assert api.ask(rollouts[1]).status_code == 200


def test_the_key_and_the_controller_are_asked_for_in_the_workers_too(api: Api) -> None:
    rollout = api.create()
    address = f"/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1/chat/completions"
    body = {"model": "auto", "messages": [{"role": "user", "content": "2+2?"}]}
    wrong = {"Authorization": "Bearer wrong"}
    assert api.http.post(address, json=body, headers=wrong).status_code == 401
    assert api.http.post(f"/controller/one{address}", json=body).status_code == 200
    assert api.http.post(f"/controller/two{address}", json=body).json()["error"]["code"] == "other_controller"
    assert api.http.delete(f"/rollout/{rollout}/attempt/0", headers=wrong).status_code == 401
    assert api.http.post(f"/controller/one{address}", json=body).status_code == 200
