"""A whole loop whose controller and agents do what they should not: each costs its rollout, which has one outcome, and
nothing else."""

from __future__ import annotations

import http.client
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from agl_slime.data.read import collect
from agl_slime.gateway.agl1.settings import PYTHON_VARIABLE, ControllerSettings
from agl_slime.runner import controller as controllers
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.controller import ControllerPool
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
from benchmarks.common import Countdown
from tests.harness.agl1 import local_controller
from tests.harness.gateway import TEMPLATE, engine_saying
from tests.harness.loop import LoopCase, hello_engine
from tests.harness.loop_thread import in_thread
from tests.harness.servers import free_port
from tests.harness.tokenizers import small_tokenizer

AGENT = ControllerSettings(agent="agl1_agents:TwoTurns", env_map=("QUESTION=input.question",))


class Played:
    """A controller and an agent in one, that do as they are told."""

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
        self._noted(self._http.post(self.call, json={"messages": [{"role": "user", "content": "hello?"}]}))

    def reward(self, value: str) -> None:
        body = '{"event_type": "reward", "data": {"value": VALUE}}'.replace("VALUE", value)
        self._noted(self._http.post(f"/api/rollouts/{self.rollout_id}/attempt/0/events", content=body))

    def good(self) -> None:
        self.patch("running")
        self.ask()
        self.reward("1.0")
        self.patch("succeeded")

    def rewards_after_its_end(self) -> None:
        self.good()
        self.reward("0.0")

    def ten_rewards(self) -> None:
        self.patch("running")
        self.ask()
        for n in range(1, 11):
            self.reward(str(n / 10))
        self.patch("succeeded")

    def a_reward_that_is_nan(self) -> None:
        self.patch("running")
        self.ask()
        self.reward("NaN")
        self.patch("succeeded")

    def a_reward_that_is_a_string(self) -> None:
        self.patch("running")
        self.ask()
        self.reward('"1.0"')
        self.patch("succeeded")

    def patched_twice(self) -> None:
        self.patch("running")
        self.patch("running")
        self.ask()
        self.reward("1.0")
        self.patch("succeeded")
        self.patch("failed", "subprocess exited with code 1")

    def patched_in_the_wrong_order(self) -> None:
        self.patch("succeeded")
        self.good()

    def ends_twice(self) -> None:
        self.patch("running")
        self.ask()
        self.patch("failed", "local subprocess is not running")
        self.reward("1.0")
        self.patch("succeeded")

    def killed_in_a_stream(self) -> None:
        self.patch("running")
        url = self._http.base_url
        connection = http.client.HTTPConnection(url.host, url.port, timeout=30)
        body = {"messages": [{"role": "user", "content": "hello?"}], "stream": True}
        connection.request("POST", self.call, json.dumps(body), {"Content-Type": "application/json"})
        assert connection.getresponse().read(1)
        connection.close()
        self.patch("failed", "subprocess exited with code -9")

    def never_ends(self) -> None:
        """As an agent that hangs under a controller that has hung as well; it comes back too late."""
        self.patch("running")
        self.ask()
        running = self._http.get
        while running(f"/api/rollouts/{self.rollout_id}").json()["rollout"]["status"]["state"] == "running":
            pass
        self.reward("1.0")
        self.patch("succeeded")


@contextmanager
def playing(url: str, fault: str) -> Iterator[list[Played]]:
    """Somebody who takes rollouts as a controller does: the first one goes wrong, the others well."""
    played: list[Played] = []
    stop = threading.Event()

    def work() -> None:
        with httpx.Client(base_url=url, timeout=20) as client:
            while not stop.wait(0.01):
                with suppress(httpx.TransportError):  # it does not listen yet, or no more
                    for rollout in client.get("/api/rollouts?state_in=queuing").json():
                        played.append(Played(client, rollout["rollout_id"]))
                        getattr(played[-1], fault if len(played) == 1 else "good")()

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
        ("rewards_after_its_end", [410], None),
        ("ten_rewards", [], None),
        ("a_reward_that_is_nan", [422], "no_reward"),
        ("a_reward_that_is_a_string", [422], "no_reward"),
        ("patched_twice", [409, 409], None),
        ("patched_in_the_wrong_order", [409], None),
        ("ends_twice", [410, 409], "agent_lost"),
        ("killed_in_a_stream", [], "agent_failed"),
        ("never_ends", [410, 409], "timeout"),
    ],
)
def test_agent_fault_fails_its_rollout_only_with_one_outcome(
    fault: str, refused: list[int], failure: str | None, tmp_path: Path
) -> None:
    small_tokenizer().save_pretrained(tmp_path)
    plan = RunnerPlan(kind="controller", controller=ControllerSettings(agent="an:Agent", port=(port := free_port())))
    sizes: dict[str, Any] = {"rollout_batch_size": 1, "n_samples_per_prompt": 4}
    limit_s = 2.5 if failure == "timeout" else 60.0
    with (
        hello_engine(token_s=0.05 if fault == "killed_in_a_stream" else 0.0) as engine,
        LoopCase(
            agent=None, url=engine.url, model=str(tmp_path), runners=plan, rollout_timeout_s=limit_s, **sizes
        ) as case,
        playing(f"http://127.0.0.1:{port}", fault) as played,
    ):
        case.loop.run()
        case.check_ledger()
        ends = [event.rollout_id for event in case.recorder.rollouts]
        assert sorted(ends) == sorted(one.rollout_id for one in played)
        assert [one.refused for one in played] == [refused, [], [], []]
        assert case.reasons == ({} if failure is None else {failure: 1})
        [[group]] = case.trainer.batches
        assert [sample.reward for sample in group] == [1.0] * (4 if failure is None else 3)


def test_controller_gets_the_rollouts_time_limit_in_whole_seconds(tmp_path: Path) -> None:
    small_tokenizer().save_pretrained(tmp_path)
    plan = RunnerPlan(kind="controller", controller=ControllerSettings(agent="an:Agent", port=(port := free_port())))
    told: list[int] = []

    class Looks(Played):
        def looks(self) -> None:
            told.append(
                self._http.get(f"/api/rollouts/{self.rollout_id}").json()["rollout"]["config"]["timeout_seconds"]
            )
            self.good()

    with (
        hello_engine() as engine,
        LoopCase(agent=None, url=engine.url, model=str(tmp_path), runners=plan, rollout_timeout_s=41.5) as case,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(f"{__name__}.Played", Looks)
        with playing(f"http://127.0.0.1:{port}", "looks"):
            case.loop.run()
    assert told == [42]  # whole seconds, and not before our own limit


@pytest.mark.parametrize("started", [False, True])
def test_missing_controller_is_warned_about_once_with_the_fix(
    started: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(controllers, "_NO_CONTROLLER_S", 0.05)
    monkeypatch.setattr(controllers, "_POLL_S", 0.005)
    looks = Countdown(100)

    class Watched(BridgeStore):
        def waiting(self, limit: int) -> list[Any]:
            looks.down()
            return super().waiting(limit)

    store = Watched()
    run_blocking(store.enqueue_rollout(input={"question": "2+2?"}, mode="train"))
    pool = ControllerPool(plan=RunnerPlan(kind="controller", controller=AGENT), store=store)
    with caplog.at_level(logging.WARNING), pool:
        if started:
            monkeypatch.setattr(pool._supervisor, "places", 1)
        assert looks.zero.wait(20)
        assert pool.failure is None
        monkeypatch.undo()
    said = [record.getMessage() for record in caplog.records if "has asked for a rollout" in record.getMessage()]
    fix = f"start one: agl-controller runner_type=local agl_server.url={pool.gateway.url}"
    if started:
        fix = "the one that this run started has not begun; its output is in the run's controller.log"
    assert said == [f"No controller has asked for a rollout in 0.05 s; {fix}"]


# -- the unmodified controller -----------------------------------------------------------------------------------


@pytest.mark.controller
@pytest.mark.skipif(not os.environ.get(PYTHON_VARIABLE), reason=f"{PYTHON_VARIABLE} names no Python of 1.x")
def test_two_controllers_with_names_share_a_run(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "model")
    store = BridgeStore()
    settings = ControllerSettings(agent="agl1_agents:TwoTurns", env_map=("QUESTION=input.q", "LABEL=input.a"))
    pool = ControllerPool(plan=RunnerPlan(kind="controller", controller=settings), store=store)
    with in_thread(engine_saying(tokenizer, ["four"])) as engine, pool:
        llm = LLM(endpoint=engine.url, model=str(tmp_path / "model"), sampling_parameters={"max_new_tokens": 32})
        run_blocking(store.add_resources({"main_llm": llm}))
        task = {"q": "2+2?", "a": "four"}
        ids = [run_blocking(store.enqueue_rollout(input=task, mode="train")).rollout_id for _ in range(16)]
        here = Path(__file__).parents[2] / "programs" / "agents"
        url, logs = f"{pool.gateway.url}/controller", [tmp_path / "a.log", tmp_path / "b.log"]
        with local_controller(f"{url}/a", logs[0], paths=here), local_controller(f"{url}/b", logs[1], paths=here):
            ended = run_blocking(store.wait_for_rollouts(rollout_ids=ids, timeout=120))
        assert len(ended) == len(ids), "\n".join(log.read_text() for log in logs)
        members: list[Any] = [run_blocking(collect(store, rollout_id)) for rollout_id in ids]
        workers = {run_blocking(store.get_latest_attempt(one)).worker_id for one in ids}  # type: ignore[union-attr]
    assert [(member.failure, member.reward, member.turns) for member in members] == [(None, 1.0, 2)] * len(ids)
    assert workers == {"agl-controller/a", "agl-controller/b"}
