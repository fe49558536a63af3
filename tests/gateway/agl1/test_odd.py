"""Odd JSON, and a great deal of it, at Agent Lightning 1.0's API: refused before it is queued, and nobody's listing
suffers from it."""

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
    return [one["rollout_id"] for one in answer.json()]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ('"metadata": {"batch_idx": "x"}', "batch_idx"),
        ('"metadata": {"batch_idx": 1.5}', "batch_idx"),
        ('"metadata": {"sample_idx_in_batch": [1]}', "sample_idx_in_batch"),
        (f'"metadata": {{"batch_idx": {2**64}}}', "batch_idx"),
        ('"metadata": {"agl1.config": 7}', "agl1.config"),
        ('"metadata": {"agl1.config": {"local": 7}}', "agl1.config"),
        ('"metadata": 7', "metadata"),
        (f'"metadata": {deep(300)}', "250 deep"),
        (f'"input": {deep(300)}', "250 deep"),
        ('"config": {"local": {"env_map": {"A": 1}}}', "env_map"),
    ],
)
def test_odd_fields_of_a_rollout_are_refused_before_it_is_queued(api: Api, fields: str, named: str) -> None:
    good = api.create()
    body = f'[{{"input": {{"q": 1}}, {fields}}}]'
    answer = api.http.post("/api/rollouts", content=body)
    assert (answer.status_code, named in answer.text) == (422, True), answer.text
    assert queued(api) == [good]


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
METADATA = st.dictionaries(st.sampled_from(["batch_idx", "sample_idx_in_batch", "agl1.config", "other"]), ANY_JSON)
CREATES = st.lists(
    st.fixed_dictionaries(
        {"input": ANY_JSON},
        optional={
            "metadata": METADATA | ANY_JSON,
            "is_train": ANY_JSON,
            "rollout_id": ANY_JSON,
            "config": st.fixed_dictionaries(
                {}, optional={"timeout_seconds": ANY_JSON, "local": ANY_JSON, "k8s": ANY_JSON}
            )
            | ANY_JSON,
        },
    ),
    max_size=2,
)
RESPONSES = st.fixed_dictionaries(
    {},
    optional={
        "prompt_token_ids": st.lists(ANY_JSON, max_size=2) | ANY_JSON,
        "choices": st.lists(
            st.fixed_dictionaries({}, optional={"token_ids": ANY_JSON, "prompt_token_ids": ANY_JSON}) | ANY_JSON,
            max_size=2,
        )
        | ANY_JSON,
    },
)
EVENTS = st.fixed_dictionaries(
    {
        "event_type": st.sampled_from(["model_request", "reward", "mine"]) | ANY_JSON,
        "data": st.fixed_dictionaries({}, optional={"response": RESPONSES | ANY_JSON, "server": ANY_JSON})
        | st.fixed_dictionaries({"value": ANY_JSON}, optional={"response_id": ANY_JSON, "role": ANY_JSON})
        | ANY_JSON,
    }
)


def drawn(strategy: st.SearchStrategy[Any]) -> list[bytes]:
    """Drawn before anything is sent: hypothesis has no say in what one server has seen before."""
    bodies: list[bytes] = []

    @settings(max_examples=examples(300), deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(strategy)
    def draw(body: Any) -> None:
        bodies.append(json.dumps(body).encode())

    draw()
    return bodies


def test_whatever_is_created_is_refused_or_listed(api: Api) -> None:
    there = set[str]()
    for body in drawn(CREATES | ANY_JSON):
        answer = api.http.post("/api/rollouts", content=body)
        assert answer.status_code in (201, 422), (body, answer.text)
        if answer.status_code == 201:
            there |= {one["rollout_id"] for one in answer.json()}
        assert set(queued(api)) == there, body


def test_whatever_is_posted_as_an_event_can_be_read_again(api: Api) -> None:
    for body in drawn(EVENTS | ANY_JSON):
        rollout = api.create()
        answer = api.http.post(f"/api/rollouts/{rollout}/attempt/0/events", content=body)
        assert answer.status_code in (200, 422), (body, answer.text)
        taken = int(answer.status_code == 200)
        for query in ({}, {"format": "triplet"}):
            read = api.http.get(f"/api/rollouts/{rollout}/events", params=query)
            assert (read.status_code, len(read.json())) == (200, taken), (body, read.text)


@pytest.mark.parametrize("levels", [253, 254, 255, 300, 900, 1100, 100_000])
def test_event_data_nested_too_deep_is_a_422_that_says_so(api: Api, levels: int) -> None:
    rollout = api.create()
    body = f'{{"event_type": "mine", "data": {deep(levels)}}}'
    answer = api.http.post(f"/api/rollouts/{rollout}/attempt/0/events", content=body)
    assert answer.status_code == 422, answer.text
    assert "250 deep" in answer.text or "depth limit" in answer.text, "orjson's own words beyond 1,024"
    assert api.events(rollout) == []


def test_posted_calls_without_token_ids_stay_beside_each_other(api: Api) -> None:
    """As 1.0 has it: calls with the same prompt are one that was sent again, and a call without a prompt is none."""
    rollout = api.create()
    for ids in ([1, 2], [[1]], [{"a": 1}], {"a": 1}, 7, None, [1, 2], [True], []):
        data = {"response": {"prompt_token_ids": ids, "choices": [{"token_ids": ids}]}}
        event = {"event_type": "model_request", "data": data}
        assert api.http.post(f"/api/rollouts/{rollout}/attempt/0/events", json=event).status_code == 200
    triplets = [event["data"] for event in api.events(rollout, format="triplet")]
    assert [one["prompt_token_ids"] for one in triplets] == [[], [], [], [], [], [1, 2], [], []]
    assert [one["response_token_ids"] for one in triplets] == [[], [], [], [], [], [1, 2], [], []]


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
    [said] = [record.getMessage() for record in caplog.records if "cannot be shown" in record.getMessage()]
    assert lost[0] in said
    ends = [run_blocking(collect(api.store, one)) for one in lost]
    assert [end.failure if end is not None else "" for end in ends] == ["not_showable"] * 2
    assert api.http.get(f"/api/rollouts/{lost[0]}").status_code == 409
    assert api.create() in queued(api)


def test_more_rollouts_than_one_request_may_create_are_a_422(api: Api) -> None:
    answer = api.http.post("/api/rollouts", json=[{"input": 1}] * 10_001)
    assert answer.status_code == 422
    assert answer.json() == {"detail": "the body has 10001 rollouts; send at most 10000 in one request"}
    assert queued(api) == []


def test_others_are_served_while_thousands_of_rollouts_are_created(api: Api) -> None:
    first, ended = Countdown(1), threading.Event()
    began, served = Countdown(1), [0]

    def look() -> None:
        with httpx.Client(base_url=str(api.http.base_url), timeout=60) as client:
            while not ended.is_set():
                assert client.get("/healthz").status_code == 200
                served[0] += not ended.is_set() and began.zero.is_set()
                first.down()

    looking = threading.Thread(target=look)
    looking.start()
    assert first.zero.wait(20)
    enqueue = api.store.enqueue_as

    async def counted(*args: Any, **named: Any) -> Any:
        began.down()
        return await enqueue(*args, **named)

    api.store.enqueue_as = counted  # type: ignore[method-assign]
    answer = api.http.post("/api/rollouts", json=[{"input": {"text": "x" * 50}}] * 8_000, timeout=120)
    ended.set()
    looking.join()
    assert (answer.status_code, len(answer.json())) == (201, 8_000)
    assert served[0] >= 10, "one in 800 rollouts"


def test_key_is_in_no_command_line(tmp_path: Path) -> None:
    """Of the process that stands over the controller, and of the controller, here a program that takes its place."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nread never < $0.pipe\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    os.mkfifo(tmp_path / "python.pipe")
    key = "a-key-of-the-run"
    child = ControllerProcess(ControllerSettings(agent="an:Agent", python=python, key=key), url="http://127.0.0.1:9")
    child.start()
    try:
        assert child.pid is not None
        above = psutil.Process(child.pid)
        family = [above, *above.children(recursive=True)]
        assert len(family) == 2
        assert all(key not in " ".join(each.cmdline()) for each in family)
        assert family[1].environ()["AGL_KEY"] == key
    finally:
        child.stop()
