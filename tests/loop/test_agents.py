"""Agents that misbehave: one counted outcome per rollout, no invented reward, no hang."""

import asyncio
import functools
import math
import random
import re
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agl_slime.agent.loading import configure_agent
from agl_slime.data.results import Outcome
from agl_slime.data.source import GroupSource
from agl_slime.errors import ConfigError
from agl_slime.events import Warning
from agl_slime.loop.settings import LoopState
from agl_slime.report.files import RunDir
from agl_slime.report.rollouts import RolloutWriter
from agl_slime.runner.base import RunnerPlan, RunnerSettings
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import emit_reward
from tests.harness.loop import PATIENT, HelloAgent, LoopCase, threads_of_ours
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer
from tests.loop.failed_run import failed_run


def fails_for_ada(fault: Any) -> Any:
    """A judge that gives 1.0, and for Ada the result or exception of ``fault``."""

    def judge(task: dict[str, Any], response: str) -> Any:
        return fault() if task["name"] == "Ada" else 1.0

    return judge


def raises(error: BaseException) -> Any:
    def fault() -> Any:
        raise error

    return fault


@pytest.mark.parametrize(
    ("fault", "reason", "detail"),
    [
        (raises(ValueError("no such city")), "ValueError", "no such city"),
        (raises(SystemExit(3)), "SystemExit", "SystemExit(3)"),
        (lambda: None, "no_reward", "HelloAgent.compute_reward returned None; expected a number."),
        (lambda: math.nan, "bad_reward", "HelloAgent.compute_reward returned nan; a reward must be a finite number"),
        (lambda: -math.inf, "bad_reward", "-inf"),
        (lambda: "0.7", "bad_reward", "'0.7' of type str"),
        (lambda: {"correct": math.nan}, "bad_reward", "['correct']"),
        (lambda: {"correct": 1.0, 1: 0.5}, "bad_reward", "HelloAgent.compute_reward has a reward named 1;"),
        (
            lambda: emit_reward({1: 0.5}, primary_key=1),
            "bad_reward",
            "emit_reward has a reward named 1; a name must be ",
        ),
    ],
    ids=["raises", "exits", "None", "NaN", "inf", "string", "named NaN", "number as name", "number as name emitted"],
)
def test_a_judge_that_misbehaves_fails_its_rollouts_and_no_others(fault, reason, detail, engine):
    with LoopCase(agent=HelloAgent(judge=fails_for_ada(fault)), url=engine.url, rollout_batch_size=4) as case:
        result = case.loop.run()
        case.check_ledger()
    [metrics] = case.recorder.metrics
    assert case.reasons == {reason: 2}
    numbers = {"count": 8, "failed": 2, "groups_ready": 3, "groups_dropped": 1}
    assert {name: metrics[f"rollout/{name}"] for name in numbers} == numbers
    assert metrics["rollout/reward_mean"] == 1.0  # a missing reward is no 0
    assert result.reward_means == (1.0,)
    assert case.recorder.end.reason == "finished"
    failed = [rollout for rollout in case.recorder.rollouts if rollout.outcome == "failed"]
    assert [(rollout.reason, rollout.reward) for rollout in failed] == [(reason, None)] * 2
    assert [len(group) for group in case.trainer.batches[0]] == [2, 2, 2]
    assert case.source.ledger.counts().reasons == {(Outcome.FAILED, reason): 2, (Outcome.TRAINED, ""): 6}
    assert threads_of_ours() == []

    case, text = failed_run(engine, agent=HelloAgent(judge=lambda task, response: fault()))
    assert text.startswith(f"iteration 1: all 4 rollouts failed: 4 x {reason} (")
    assert detail in text
    assert case.trainer.batches == []


def test_a_declared_reward_that_the_first_reward_has_not_ends_the_run(engine: ScriptedEngine) -> None:
    """At once, and not after the rollouts of the iteration, of which one waits for the end."""
    released = threading.Event()

    def judge(task: dict[str, Any], response: str) -> dict[str, float]:
        if task["name"] == "Ada":
            released.wait(60)
        return {"score": 1.0, "format": 0.0}

    source = GroupSource(store=BridgeStore(), tokenizer=small_tokenizer(), settings=PATIENT, reward_key="call")
    began = time.monotonic()
    try:
        _, text = failed_run(engine, agent=HelloAgent(judge=judge), source=source, rollout_batch_size=4)
    finally:
        released.set()
    assert "the rollout has no reward named 'call', only format, score: declare one of these as the reward" in text
    assert time.monotonic() - began < 15


def search(query: str) -> str:
    return query


class TwoArguments:
    def __init__(self, task: Any, index: Any) -> None: ...

    def __call__(self) -> None: ...


class Unnamed:
    schema: ClassVar[dict[str, Any]] = {"description": "without a name"}

    def __call__(self) -> None: ...


class Listed:
    schema: ClassVar[dict[str, Any]] = {"name": "listed", "parameters": {"properties": ["query"]}}

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("attribute", "value", "sentence"),
    [
        ("loss_scale", "lastround", "loss_scale must be 'default', 'last_round' or a function, got 'lastround'"),
        ("reward_functions", ["acuracy"], "there is no reward function 'acuracy'; there are "),
        ("reward_functions", [0.5], "reward_functions has 0.5: give classes, functions, or registered names"),
        ("scheduler", "twice", "there is no scheduler 'twice'; there are "),
        ("tool_parser", "hermess", "there is no tool parser 'hermess'; there are "),
        ("reward_functions", "accuracy", "reward_functions of HelloAgent must be a list or tuple, got 'accuracy'"),
        ("max_turns", 0, "max_turns of HelloAgent must be at least 1, got 0"),
        ("max_turns", 1.5, "max_turns of HelloAgent must be an integer, got 1.5"),
        ("max_trajectory_tokens", "4k", "max_trajectory_tokens of HelloAgent must be an integer, got '4k'"),
        ("max_tool_result_chars", True, "max_tool_result_chars of HelloAgent must be an integer, got True"),
        ("tool_timeout_s", None, "tool_timeout_s of HelloAgent must be a number, got None"),
        ("stop_on_tool_error", "no", "stop_on_tool_error of HelloAgent must be True or False, got 'no'"),
        (
            "template_kwargs",
            {"tokenize": True},
            "template_kwargs of HelloAgent has 'tokenize', which is no argument of ",
        ),
        ("template_kwargs", {1: 2}, "template_kwargs of HelloAgent has 1, which is no argument of a chat template"),
        ("template_kwargs", "x", "template_kwargs of HelloAgent must be a dict, got 'x'"),
        (
            "template_kwargs",
            {"chat_template": "\n{% bad"},
            "chat_template of template_kwargs of HelloAgent is no Jinja ",
        ),
        (
            "template_kwargs",
            {"chat_template": 3},
            "chat_template of template_kwargs of HelloAgent is no Jinja template",
        ),
        ("image_settings", {"max_images": 2}, "image_settings of HelloAgent must be ImageSettings, got {'max_images"),
        ("tools", "search", "tools of HelloAgent must be a list or tuple, got 'search'"),
        ("tools", {"search": search}, "tools of HelloAgent must be a list or tuple, got {'search': "),
        ("tools", ["search"], "a tool must be a function, a class or a callable object with a schema, got 'search'"),
        ("tools", [lambda: "found"], "a tool must be a function with a name, got <function <lambda>"),
        ("tools", [functools.partial(search, "x")], "a tool must be a function, a class or a callable object with a "),
        ("tools", [search, search], "there are two tools named 'search'; names must differ"),
        ("tools", [TwoArguments], "the constructor of tool TwoArguments must take the task or nothing"),
        ("tools", [int], "tool int cannot be called; give its class a __call__"),
        ("tools", [Unnamed], "the schema of a tool must have name, description and parameters, got {'description'"),
        ("tools", [Listed()], "the schema of a tool must have name, description and parameters, got {'name'"),
        ("reward_functions", [TwoArguments], "reward_functions has <class .*TwoArguments'>: give "),
        ("reward_functions", [lambda completions: [1]], "reward_functions has .*must take completions and "),
        ("loss_scale", lambda messages: 1, "loss_scale must be 'default', 'last_round' or a function, got <function"),
        ("scheduler", 5, "scheduler of HelloAgent must be a MultiTurnScheduler, its class or registered name, got 5"),
        ("chat_api", "http://x", "chat_api of HelloAgent must be a ChatApi, got 'http://x'"),
        ("partial", True, "partial of HelloAgent must be PartialRollouts, got True"),
        ("_sampling", {"temperature": 1}, "sampling of HelloAgent must be SamplingParams, got {'temperature': 1}"),
        ("run", 5, "run of HelloAgent must be a method, got 5"),
        ("compute_reward", lambda response: 1.0, r"compute_reward\(response\) of HelloAgent must take 2 arguments"),
        ("build_prompt", lambda: "Hi", r"build_prompt\(\) of HelloAgent must take 1 argument"),
    ],
)
def test_an_agent_that_no_rollout_could_use_is_refused_at_the_start(attribute, value, sentence, engine):
    agent = HelloAgent()
    setattr(agent, attribute, value)
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        configure_agent(agent)
    case, text = failed_run(engine, agent=agent)
    assert re.search(f"^The runner could not start: {sentence}", text)
    assert case.recorder.rollouts == []


def test_an_agent_that_hangs_in_a_thread_is_given_up_at_its_time_limit(engine: ScriptedEngine) -> None:
    released = threading.Event()
    judge, began = fails_for_ada(lambda: released.wait(60)), time.monotonic()
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


def test_a_store_that_does_not_answer_suspends_no_time_limit(engine: ScriptedEngine) -> None:
    in_time, cancelled = list[bool](), threading.Event()

    class Hanging(BridgeStore):
        async def add_many_spans(self, spans: Any) -> Any:
            in_time.append(await asyncio.to_thread(cancelled.wait, 10))
            return await super().add_many_spans(spans)

    async def hangs(task: dict[str, Any], response: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    runners = RunnerPlan(settings=RunnerSettings(poll_interval_s=0.01, flush_interval_s=0.02))
    agent = HelloAgent(judge=hangs)
    failed_run(engine, "4 x timeout", agent=agent, store=Hanging(), runners=runners, rollout_timeout_s=0.5)
    assert len(in_time) > 4  # while the agents ran, too
    assert all(in_time)


def test_every_reason_is_named_in_one_short_line_when_all_fail(engine: ScriptedEngine) -> None:
    def judge(task: dict[str, Any], response: str) -> Any:
        if task["name"] == "Grace":
            raise RuntimeError("first line\n" + "x" * 10_000)
        return {"Ada": None, "Alan": math.nan}[task["name"]]

    _, text = failed_run(
        engine, "^iteration 1: all 8 rollouts failed: ", agent=HelloAgent(judge=judge), rollout_batch_size=4
    )
    assert "2 x bad_reward (" in text
    assert "2 x no_reward (HelloAgent.compute_reward returned None" in text
    assert "2 x RuntimeError (first line xxx" in text
    assert re.search(r"2 x KeyError \('Edsger' \(test_agents\.py, line \d+\)\)", text)
    assert "\n" not in text
    assert "x" * 300 not in text


def test_groups_too_small_to_train_on_stop_the_run_after_a_few_iterations(engine: ScriptedEngine) -> None:
    lock, calls = threading.Lock(), 0

    def every_second(task: dict[str, Any], response: str) -> float | None:
        nonlocal calls
        with lock:
            calls += 1
            return 1.0 if calls % 2 else None

    case, text = failed_run(
        engine,
        r"iteration 3: no group was fit to train on in 3 iterations in a row \(1 of 2 rollouts succeeded",
        agent=HelloAgent(judge=every_second),
        rollout_batch_size=1,
        num_iterations=10,
        max_empty_iterations=3,
    )
    assert "2 are needed" in text
    assert "1 x no_reward" in text
    assert [metrics["iteration"] for metrics in case.recorder.metrics] == [1, 2]
    assert case.trainer.batches == []


def test_an_agent_that_emits_a_reward_and_raises_has_failed(engine: ScriptedEngine) -> None:
    class EmitsThenRaises(HelloAgent):
        async def run(self, task: Any, session: Any) -> None:
            await session.ask()
            emit_reward(0.5)
            raise OSError("the tool server went away")

    case, _ = failed_run(engine, r"4 x OSError \(the tool server went away \(test_agents", agent=EmitsThenRaises())
    assert [rollout.reward for rollout in case.recorder.rollouts] == [None] * 4


def test_validation_rollouts_that_fail_do_not_stop_the_run(engine: ScriptedEngine) -> None:
    class FailsInValidation(HelloAgent):
        async def validation_rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
            raise RuntimeError("no validation today")

    def make_task(rng: random.Random) -> dict[str, Any]:
        return {"prompt": "say hello", "n": rng.random()}

    settings: dict[str, Any] = {"tasks": make_task, "eval_interval": 1, "eval_rollouts": 3}
    with LoopCase(agent=FailsInValidation(), url=engine.url, **settings) as case:
        case.loop.run()
        case.check_ledger()
        rollouts = asyncio.run(case.store.query_rollouts())  # type: ignore[arg-type]
    drawn = [{rollout.input["n"] for rollout in rollouts if rollout.mode == mode} for mode in ("train", "val")]
    assert [len(numbers) for numbers in (*drawn, drawn[0] | drawn[1])] == [2, 3, 5]  # held out is held out
    [metrics] = case.recorder.metrics
    assert (metrics["val/count"], metrics["val/failed"], metrics["val/reward_mean"]) == (3, 3, None)
    assert (metrics["val/start_count"], metrics["val/start_failed/RuntimeError"]) == (3, 3)
    first, last = [warning for warning in case.recorder.events_of(Warning) if warning.key == "validation_failed"]
    reason = "3 of 3 rollouts failed, and its mean leaves them out: 3 x RuntimeError (no validation today"
    assert first.text.startswith(f"validation before the first iteration: {reason}")
    assert last.text.startswith(f"validation after iteration 1: {reason}")
    assert metrics["rollout/failed"] == 0


def test_identical_answers_raise_an_alarm_unless_all_earn_the_best_reward(tmp_path: Path, engine: ScriptedEngine):
    """The scripted engine has one answer, so nothing can be learned unless it is already the best one."""

    def alarms(name: str, reward_of: Any, **settings: Any) -> list[str]:
        texts: list[str] = []
        writer = RolloutWriter(RunDir(tmp_path / name), warn=lambda text, key: texts.append(text))
        agent = HelloAgent(judge=lambda task, response: float(reward_of(task)))
        with LoopCase(agent=agent, url=engine.url, on_event=writer.handle, rollout_batch_size=8, **settings) as case:
            case.loop.run()
        writer.close()
        return [text for text in texts if "all answers are token-identical" in text]

    assert alarms("a", lambda task: task["name"] == "Ada")
    assert not alarms("b", lambda task: 1)
    # a resumed run remembers the best reward
    assert not alarms("c", lambda task: 0.5)
    assert alarms("b", lambda task: 0.5, num_iterations=3, start=LoopState(iteration=2, reward_means=(1.0, 1.0)))
