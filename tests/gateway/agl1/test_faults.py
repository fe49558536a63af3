"""A whole loop whose controller and agents misbehave: each fault costs its rollout, which has one outcome, and nothing
else."""

import http.client
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

from agl_slime.gateway.agl1.settings import ControllerSettings
from agl_slime.runner import controller as controllers
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.controller import ControllerPool
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.net import free_port
from agl_slime.support.threads import run_blocking
from benchmarks.common import Countdown
from tests.harness.gateway import BODY
from tests.harness.loop import LoopCase, hello_engine
from tests.harness.tokenizers import small_tokenizer


class Played:
    """A controller and an agent in one, that follow a script."""

    def __init__(self, http: httpx.Client, rollout_id: str) -> None:
        self._http, self.rollout_id = http, rollout_id
        self.refused: list[int] = []

    def _noted(self, answer: httpx.Response) -> None:
        if answer.status_code >= 300:
            self.refused.append(answer.status_code)

    def patch(self, state: str, error: str | None = None) -> None:
        status = {"state": state, **({"error_message": error} if error else {})}
        self._noted(self._http.patch(f"/api/rollouts/{self.rollout_id}", json={"status": status}))

    @property
    def call(self) -> str:
        return f"/proxy/rollout/{self.rollout_id}/attempt/0/mode/train/openai/v1/chat/completions"

    def ask(self) -> None:
        self._noted(self._http.post(self.call, json=BODY))

    def reward(self, value: str) -> None:
        body = '{"event_type": "reward", "data": {"value": VALUE}}'.replace("VALUE", value)
        self._noted(self._http.post(f"/api/rollouts/{self.rollout_id}/attempt/0/events", content=body))

    def stream(self) -> None:
        url = self._http.base_url
        connection = http.client.HTTPConnection(url.host, url.port, timeout=30)
        body = json.dumps({**BODY, "stream": True})
        connection.request("POST", self.call, body, {"Content-Type": "application/json"})
        assert connection.getresponse().read(1)
        connection.close()

    def hang(self) -> None:
        """As an agent that hangs under a controller that has hung as well; it comes back too late."""
        while self._http.get(f"/api/rollouts/{self.rollout_id}").json()["rollout"]["status"]["state"] == "running":
            pass

    def play(self, script: str) -> None:
        for step in script.split(", "):
            name, *arguments = step.split(maxsplit=2)
            getattr(self, name)(*arguments)


GOOD = "patch running, ask, reward 1.0, patch succeeded"
FAULTS = {
    "rewards_after_its_end": f"{GOOD}, ask, reward 0.0",
    "a_reward_that_is_nan": GOOD.replace("1.0", "NaN"),
    "ends_twice": GOOD.replace("reward", "patch failed local subprocess is not running, reward"),
    "killed_in_a_stream": "patch running, stream, patch failed subprocess exited with code -9",
    "never_ends": GOOD.replace("reward", "hang, reward"),
}


@contextmanager
def playing(url: str, fault: str) -> Iterator[list[Played]]:
    """A client that takes rollouts as a controller does: the first goes wrong, all others go well."""
    played: list[Played] = []
    stop = threading.Event()

    def work() -> None:
        with httpx.Client(base_url=url, timeout=20) as client:
            while not stop.wait(0.01):
                with suppress(httpx.TransportError):  # the server does not listen before the run, or after it
                    for rollout in client.get("/api/rollouts?state_in=queuing").json():
                        played.append(Played(client, rollout["rollout_id"]))
                        played[-1].play(FAULTS[fault] if len(played) == 1 else GOOD)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield played
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    ("fault", "refused", "failure"),
    [
        ("rewards_after_its_end", [410, 410], None),
        ("a_reward_that_is_nan", [422], "no_reward"),
        ("ends_twice", [410, 409], "agent_lost"),
        ("killed_in_a_stream", [], "agent_failed"),
        ("never_ends", [410, 409], "timeout"),
    ],
)
def test_agent_fault_fails_its_rollout_only_with_one_outcome(fault, refused, failure, tmp_path):
    small_tokenizer().save_pretrained(tmp_path)
    plan = RunnerPlan(kind="controller", controller=ControllerSettings(agent="an:Agent", port=(port := free_port())))
    options: dict[str, Any] = {"rollout_batch_size": 1, "n_samples_per_prompt": 4}
    options["rollout_timeout_s"] = 2.5 if failure == "timeout" else 60.0
    with (
        hello_engine(token_s=0.05 if fault == "killed_in_a_stream" else 0.0) as engine,
        LoopCase(agent=None, url=engine.url, model=str(tmp_path), runners=plan, **options) as case,
        playing(f"http://127.0.0.1:{port}", fault) as played,
    ):
        case.loop.run()
        case.check_ledger()
        ends = [event.rollout_id for event in case.recorder.rollouts]
        assert sorted(ends) == sorted(rollout.rollout_id for rollout in played)
        assert [rollout.refused for rollout in played] == [refused, [], [], []]
        assert case.reasons == ({} if failure is None else {failure: 1})
        [[group]] = case.trainer.batches
        assert [sample.reward for sample in group] == [1.0] * (4 if failure is None else 3)


def test_missing_controller_is_warned_about_once_with_the_fix(monkeypatch, caplog):
    monkeypatch.setattr(controllers, "_NO_CONTROLLER_S", 0.05)
    monkeypatch.setattr(controllers, "_POLL_S", 0.005)
    looks = Countdown(100)

    class Watched(BridgeStore):
        def waiting(self, limit: int) -> list[Any]:
            looks.down()
            return super().waiting(limit)

    store = Watched()
    run_blocking(store.enqueue_rollout(input={"question": "2+2?"}, mode="train"))
    settings = ControllerSettings(agent="agl1_agents:TwoTurns", env_map=("QUESTION=input.question",))
    pool = ControllerPool(plan=RunnerPlan(kind="controller", controller=settings), store=store)
    with caplog.at_level(logging.WARNING), pool:
        assert looks.zero.wait(20)
        assert pool.failure is None
        monkeypatch.undo()
    [warning] = [record.getMessage() for record in caplog.records if "has asked for a rollout" in record.getMessage()]
    assert f"agl-controller runner_type=local agl_server.url={pool.gateway.url}" in warning
