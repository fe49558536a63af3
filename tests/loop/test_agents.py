"""What the loop makes of agents that misbehave: one counted outcome per rollout, no invented reward, no hang."""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from agl_slime.data.results import Outcome
from agl_slime.errors import LoopError
from agl_slime.events import Warning
from agl_slime.support.agl import LitAgent, emit_reward
from tests.harness.loop import TASKS, HelloAgent, LoopCase, hello_engine, threads_of_ours
from tests.harness.scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with hello_engine() as engine:
        yield engine


def fails_for_ada(fault: Any) -> Any:
    """A judge that gives 1.0, and for Ada whatever ``fault`` returns or raises."""

    def judge(task: dict[str, Any], response: str) -> Any:
        return fault() if task["name"] == "Ada" else 1.0

    return judge


def raises(error: BaseException) -> Any:
    def fault() -> Any:
        raise error

    return fault


class NoReward(LitAgent[Any]):
    """Written for stock Agent Lightning: forgets the reward of Ada's."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
        return None if task["name"] == "Ada" else 1.0


@pytest.mark.parametrize(
    ("fault", "reason", "says"),
    [
        (raises(ValueError("no such city")), "ValueError", "no such city"),
        (raises(KeyError("label")), "KeyError", "label"),
        (raises(SystemExit(3)), "SystemExit", "SystemExit(3)"),
        (lambda: None, "no_reward", "HelloAgent.compute_reward returned None; expected a number."),
        (lambda: math.nan, "bad_reward", "HelloAgent.compute_reward returned nan; a reward must be a finite number."),
        (lambda: -math.inf, "bad_reward", "-inf"),
        (lambda: "0.7", "bad_reward", "'0.7' of type str"),
        (lambda: {"correct": math.nan}, "bad_reward", "['correct']"),
        (lambda: [1.0], "bad_reward", "list"),
    ],
    ids=["raises", "KeyError", "exits", "None", "NaN", "inf", "string", "named NaN", "list"],
)
def test_a_judge_that_misbehaves_fails_its_rollouts_and_no_others(
    fault: Any, reason: str, says: str, engine: ScriptedEngine
) -> None:
    with LoopCase(agent=HelloAgent(judge=fails_for_ada(fault)), url=engine.url, rollout_batch_size=4) as case:
        result = case.loop.run()
        case.check_ledger()
    [metrics] = case.recorder.metrics
    assert case.reasons == {reason: 2}
    assert (
        metrics["rollout/count"],
        metrics["rollout/failed"],
        metrics["rollout/groups_ready"],
        metrics["rollout/groups_dropped"],
    ) == (8, 2, 3, 1)
    assert metrics["rollout/reward_mean"] == 1.0  # over those that have one: nothing counts as 0
    assert result.reward_means == (1.0,)
    assert case.recorder.end.reason == "finished"
    failed = [rollout for rollout in case.recorder.rollouts if rollout.outcome == "failed"]
    assert [(rollout.reason, rollout.reward) for rollout in failed] == [(reason, None)] * 2
    assert [len(group) for group in case.trainer.batches[0]] == [2, 2, 2]
    assert case.source.ledger.counts().reasons == {(Outcome.FAILED, reason): 2, (Outcome.TRAINED, ""): 6}
    assert threads_of_ours() == []
    with LoopCase(agent=HelloAgent(judge=lambda task, response: fault()), url=engine.url) as case:
        with pytest.raises(LoopError) as caught:
            case.loop.run()
        case.check_ledger()
    assert str(caught.value).startswith(f"iteration 1: all 4 rollouts failed: 4 x {reason} (")
    assert says in str(caught.value)
    assert case.trainer.batches == []
    assert case.recorder.end.reason == str(caught.value)
    assert threads_of_ours() == []


def test_an_agent_without_any_reward_is_no_zero(engine: ScriptedEngine) -> None:
    with LoopCase(agent=NoReward(), url=engine.url, rollout_batch_size=4) as case, pytest.raises(LoopError) as caught:
        # this agent calls no model either: nothing of it can be trained on
        case.loop.run()
    assert "6 x no_turns" in str(caught.value)
    assert "2 x no_reward (the rollout has no reward" in str(caught.value)


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_an_agent_that_hangs_is_given_up_at_its_time_limit(kind: str, engine: ScriptedEngine) -> None:
    released = threading.Event()

    async def hang_async() -> float:
        await asyncio.sleep(3600)
        return 1.0

    def hang_in_a_thread() -> float:
        released.wait(60)
        return 1.0

    judge = fails_for_ada(hang_async if kind == "async" else hang_in_a_thread)
    began = time.monotonic()
    with LoopCase(agent=HelloAgent(judge=judge), url=engine.url, rollout_batch_size=4, rollout_timeout_s=1.5) as case:
        try:
            case.loop.run()
        finally:
            released.set()
        case.check_ledger()
    assert case.reasons == {"timeout": 2}
    assert case.recorder.metrics[0]["rollout/groups_ready"] == 3
    assert time.monotonic() - began < 15
    assert threads_of_ours() == []


def test_every_reason_is_named_when_all_fail_for_different_ones(engine: ScriptedEngine) -> None:
    def judge(task: dict[str, Any], response: str) -> Any:
        return {"Ada": None, "Alan": math.nan, "Grace": "good"}[task["name"]]

    with (
        LoopCase(agent=HelloAgent(judge=judge), url=engine.url, rollout_batch_size=4) as case,
        pytest.raises(LoopError) as caught,
    ):
        case.loop.run()
    text = str(caught.value)
    assert text.startswith("iteration 1: all 8 rollouts failed: 4 x bad_reward (")
    assert "2 x no_reward (HelloAgent.compute_reward returned None" in text
    assert re.search(r"2 x KeyError \('Edsger' \(test_agents\.py, line \d+\)\)", text)
    assert "\n" not in text


def test_messages_of_failures_stay_one_line_and_short(engine: ScriptedEngine) -> None:
    def judge(task: dict[str, Any], response: str) -> float:
        raise RuntimeError("first line\n" + "x" * 10_000)

    with LoopCase(agent=HelloAgent(judge=judge), url=engine.url) as case, pytest.raises(LoopError) as caught:
        case.loop.run()
    text = str(caught.value)
    assert text.startswith("iteration 1: all 4 rollouts failed: 4 x RuntimeError (first line xxx")
    assert "\n" not in text[:1000]
    assert len(text) < 400


def test_groups_too_small_to_train_on_stop_the_run_after_a_few_iterations(engine: ScriptedEngine) -> None:
    lock, calls = threading.Lock(), 0

    def every_second(task: dict[str, Any], response: str) -> float | None:
        nonlocal calls
        with lock:
            calls += 1
            return 1.0 if calls % 2 else None

    with LoopCase(
        agent=HelloAgent(judge=every_second),
        url=engine.url,
        rollout_batch_size=1,
        num_iterations=10,
        max_empty_iterations=3,
    ) as case:
        with pytest.raises(
            LoopError,
            match=r"iteration 3: no group was fit to train on in 3 iterations in a row \(1 of 2 rollouts succeeded",
        ) as caught:
            case.loop.run()
        case.check_ledger()
    assert "2 are needed" in str(caught.value)
    assert "1 x no_reward" in str(caught.value)
    assert [metrics["iteration"] for metrics in case.recorder.metrics] == [1, 2]
    assert case.trainer.batches == []


def test_a_rollout_that_is_tried_again_counts_once(engine: ScriptedEngine) -> None:
    lock, tries = threading.Lock(), {}

    def judge(task: dict[str, Any], response: str) -> float:
        with lock:
            tries[task["name"]] = tries.get(task["name"], 0) + 1
            if tries[task["name"]] % 2:
                raise ConnectionError("judge is busy")
        return 1.0

    with LoopCase(
        agent=HelloAgent(judge=judge), url=engine.url, n_samples_per_prompt=1, rollout_batch_size=4, max_attempts=2
    ) as case:
        case.loop.run()
        case.check_ledger()
    assert set(tries.values()) == {2}
    assert case.reasons == {}
    assert len(case.recorder.rollouts) == 4
    assert case.source.ledger.counts().closed == {Outcome.TRAINED: 4}


def test_an_agent_that_emits_a_reward_and_raises_has_failed(engine: ScriptedEngine) -> None:
    class EmitsThenRaises(HelloAgent):
        async def run(self, task: Any, session: Any) -> None:
            await session.ask()
            emit_reward(0.5)
            raise OSError("the tool server went away")

    with (
        LoopCase(agent=EmitsThenRaises(), url=engine.url) as case,
        pytest.raises(LoopError, match=r"4 x OSError \(the tool server went away \(test_agents"),
    ):
        case.loop.run()
    assert [rollout.reward for rollout in case.recorder.rollouts] == [None] * 4


def test_validation_rollouts_that_fail_do_not_stop_the_run(engine: ScriptedEngine) -> None:
    def make_task(rng: Any) -> dict[str, Any]:
        return TASKS[rng.randrange(4)]

    class FailsInValidation(HelloAgent):
        async def validation_rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
            raise RuntimeError("no validation today")

    with LoopCase(agent=FailsInValidation(), url=engine.url, tasks=make_task, eval_interval=1, eval_rollouts=3) as case:
        case.loop.run()
        case.check_ledger()
    [metrics] = case.recorder.metrics
    assert (metrics["val/count"], metrics["val/failed"], metrics["val/reward_mean"]) == (3, 3, None)
    assert (metrics["val/start_count"], metrics["val/start_failed/RuntimeError"]) == (3, 3)
    first, last = [warning for warning in case.recorder.events_of(Warning) if warning.key == "validation_failed"]
    why = "3 of 3 rollouts failed, and its mean leaves them out: 3 x RuntimeError (no validation today"
    assert first.text.startswith(f"validation before the first iteration: {why}")
    assert last.text.startswith(f"validation after iteration 1: {why}")
    assert metrics["rollout/failed"] == 0
