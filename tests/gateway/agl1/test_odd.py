"""Odd JSON, and a great deal of it, at Agent Lightning 1.0's API: refused before it is queued, and without harm to
listings."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agl_slime.data.read import collect
from agl_slime.gateway.agl1.settings import ControllerSettings
from agl_slime.runner.controller_process import ControllerProcess
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
from benchmarks.common import Countdown
from tests.harness.agl1 import Api, serving_api
from tests.harness.examples import examples


@pytest.fixture
def api() -> Iterator[Api]:
    with serving_api() as case:
        yield case


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def queued(api: Api) -> list[str]:
    answer = api.http.get("/api/rollouts", params={"state_in": ["queuing", "running"], "limit": 1000})
    assert answer.status_code == 200, answer.text
    return [rollout["rollout_id"] for rollout in answer.json()]


def post_event(api: Api, rollout_id: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    return api.http.post(f"/api/rollouts/{rollout_id}/attempt/0/events", content=content)


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


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


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


def drawn(strategy: st.SearchStrategy[Any]) -> list[bytes]:
    """Bodies, drawn before the first is sent: hypothesis would replay them to a server with other rollouts."""
    bodies: list[bytes] = []

    @settings(max_examples=examples(300), deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(strategy)
    def draw(body: Any) -> None:
        bodies.append(json.dumps(body).encode())

    draw()
    return bodies


def test_whatever_is_created_is_refused_or_listed(api: Api) -> None:
    created = set[str]()
    for body in drawn(CREATES | ANY_JSON):
        answer = api.http.post("/api/rollouts", content=body)
        assert answer.status_code in (201, 422), (body, answer.text)
        if answer.status_code == 201:
            created |= {rollout["rollout_id"] for rollout in answer.json()}
        assert set(queued(api)) == created, body


def test_whatever_is_posted_as_an_event_can_be_read_again(api: Api) -> None:
    for body in drawn(EVENTS | ANY_JSON):
        rollout = api.create()
        answer = post_event(api, rollout, body)
        assert answer.status_code in (200, 422), (body, answer.text)
        taken = int(answer.status_code == 200)
        for query in ({}, {"format": "triplet"}):
            read = api.http.get(f"/api/rollouts/{rollout}/events", params=query)
            assert (read.status_code, len(read.json())) == (200, taken), (body, read.text)


def test_event_data_nested_too_deep_is_a_422_that_says_so(api: Api) -> None:
    rollout = api.create()
    for levels in (253, 255, 900, 1100, 100_000):
        answer = post_event(api, rollout, f'{{"event_type": "mine", "data": {deep(levels)}}}')
        assert answer.status_code == 422, answer.text
        assert "250 deep" in answer.text or "depth limit" in answer.text, "orjson's words beyond 1,024"
    assert api.events(rollout) == []


def test_posted_calls_without_token_ids_stay_beside_each_other(api: Api) -> None:
    """As 1.0 has it: calls with the same prompt are one call that was repeated; a call without a prompt is not."""
    rollout = api.create()
    for ids in ([1, 2], [[1]], [{"a": 1}], {"a": 1}, 7, None, [1, 2], [True], []):
        data = {"response": {"prompt_token_ids": ids, "choices": [{"token_ids": ids}]}}
        assert post_event(api, rollout, {"event_type": "model_request", "data": data}).status_code == 200
    triplets = [event["data"] for event in api.events(rollout, format="triplet")]
    for name in ("prompt_token_ids", "response_token_ids"):
        assert [triplet[name] for triplet in triplets] == [[], [], [], [], [], [1, 2], [], []]


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
    ends = [run_blocking(collect(api.store, rollout)) for rollout in lost]
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
