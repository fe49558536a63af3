"""Agents of more than one turn by declaration: tools, limits, loss scales, and what the Sample says about each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.errors import ContextOverflowError, EngineServerError
from agl_slime.loop.metrics import collect_metrics
from agl_slime.report.alarms import find_step_alarms
from agl_slime.report.rollouts import describe_group
from agl_slime.support.agl import LLM, Rollout
from agl_slime.types import Sample
from tests.agent.multi_turn_agents import CALL, TASK, Agent, ToolAgent, rollout, sampled
from tests.harness.conversations import ScriptedClient, generation_of
from tests.harness.gateway import WEATHER
from tests.harness.rollouts import run_rollout, run_rollouts
from tests.harness.samples import trained_ids
from tests.harness.vocabularies import chat_tokenizer


async def test_tools_are_called_until_an_answer_calls_none() -> None:
    finished, client = await rollout(ToolAgent, ["Let me see." + CALL + CALL, "Three."])
    assert finished.failure is None
    tokenizer = chat_tokenizer("anthropic", "groups_tools")
    (sample,) = finished.convert(tokenizer).samples
    assert trained_ids(sample) == sampled(client)
    assert '"name": "look"' in tokenizer.decode(client.prompts[0])
    assert tokenizer.decode(client.prompts[1]).count("<tool_response>\nthree\n</tool_response>") == 2
    assert sample.status == Sample.Status.COMPLETED
    assert sample.metadata["stop_reason"] == "stop"
    assert sample.metadata["tools"] == {
        "offered": ["look"],
        "calls": {"look": 2},
        "malformed": 0,
        "unknown": 0,
        "errors": 0,
        "timeouts": 0,
    }
    assert sample.reward == 1.0


@pytest.mark.parametrize(("tools", "declared"), [([WEATHER], True), (["weather"], False), ({"a": 1}, False)])
async def test_tools_that_only_the_task_declares_are_in_the_prompt(tools: Any, declared: bool) -> None:
    """As in a row of slime's data; their calls are not executed."""
    tokenizer = chat_tokenizer("anthropic", "groups_tools")
    client = ScriptedClient(tokenizer, [CALL])
    finished = await run_rollout(Agent(tokenizer=tokenizer, client=client), {**TASK, "tools": tools})
    assert finished.failure is None
    (sample,) = finished.convert(tokenizer).samples
    assert ('"name": "weather"' in tokenizer.decode(client.prompts[0])) is declared
    assert len(client.prompts) == 1
    assert sample.response.startswith(CALL)


async def test_a_task_may_be_a_string() -> None:
    class Echo(SGLangLitAgent):
        def build_prompt(self, task: Any) -> str:
            return task

        def compute_reward(self, task: Any, response: str) -> float:
            return float(response == task)

    tokenizer = chat_tokenizer("anthropic", "groups_tools")
    finished = await run_rollout(Echo(tokenizer=tokenizer, client=ScriptedClient(tokenizer, ["hello"])), "hello")
    assert finished.failure is None
    assert finished.convert(tokenizer).samples[0].reward == 1.0


async def test_a_plain_score_sees_what_the_tools_did() -> None:
    class Look:
        """A tool of one rollout, whose state the reward reads."""

        schema: ClassVar = {"name": "look", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}}

        def __init__(self) -> None:
            self.keys: list[str] = []

        def __call__(self, key: str) -> str:
            self.keys.append(key)
            return TASK["table"][key]

    class Scored(Agent):
        def score(self, task: dict[str, Any], trajectory: Any) -> dict[str, float]:  # type: ignore[override]
            tools = trajectory.metadata["tools"]
            return {"right": len(trajectory.tools["look"].keys), "calls": tools["calls"]["look"], **tools["failed"]}

    answers = [CALL + CALL.replace("kz", "xx"), "Three."]
    finished, _ = await rollout(Scored, answers, tools=[Look])
    rewards = finished.convert(chat_tokenizer("anthropic", "groups_tools")).trajectory.rewards
    assert rewards == {"right": 2.0, "calls": 2.0, "look": 1.0}


async def test_malformed_unknown_and_failing_calls_are_counted_and_seen() -> None:
    unknown, broken = CALL.replace("look", "seek"), "<tool_call>{</tool_call>"
    failing = CALL.replace("kz", "xx")
    finished, client = await rollout(ToolAgent, [CALL + broken, unknown, failing, "Three."])
    tokenizer = chat_tokenizer("anthropic", "groups_tools")
    (sample,) = finished.convert(tokenizer).samples
    counts = sample.metadata["tools"]
    assert (counts["malformed"], counts["unknown"], counts["errors"], counts["calls"]) == (1, 1, 1, {"look": 2})
    last = tokenizer.decode(client.prompts[-1])
    assert "there is no tool named 'seek'" in last
    assert "Error: KeyError: 'xx'" in last
    assert trained_ids(sample) == sampled(client)


async def test_always_failing_tool_raises_an_alarm_with_its_exception() -> None:
    def look(key: str) -> str:
        """Look a key up."""
        raise ConnectionError(f"no such host for {key}")

    finished, _ = await rollout(Agent, [CALL + CALL, CALL.replace("key", "kee"), "Three."], tools=[look])
    samples = finished.convert(chat_tokenizer("anthropic", "groups_tools")).samples
    counts = samples[0].metadata["tools"]
    assert (counts["calls"], counts["errors"], counts["failed"]) == ({"look": 3}, 3, {"look": 2})  # one is the model's
    assert counts["failures"] == {"look": "Error: ConnectionError: no such host for kz"}
    members = tuple(
        MemberResult(rollout_id=f"r{n}", group_id="g", samples=tuple(samples), reward=1.0) for n in range(6)
    )
    group = GroupResult(group_id="g", mode="train", size=6, members=members, ready=True)
    metrics = collect_metrics([group], collect_s=1.0)
    assert (metrics["tools/calls"], metrics["tools/errors"]) == (18, 18)
    line = describe_group(group, collected=1)
    assert line["tools"]["failed"] == {"look": 12}
    assert find_step_alarms([line], best=None) == []  # a third of its calls did not reach it
    good = await rollout(Agent, [CALL + CALL, "Three."], tools=[look])
    samples = good[0].convert(chat_tokenizer("anthropic", "groups_tools")).samples
    members = tuple(replace(member, samples=tuple(samples)) for member in members)
    [alarm] = find_step_alarms([describe_group(replace(group, members=members), collected=1)], best=None)
    assert alarm.text == "12 of 12 calls of tool 'look' failed: ConnectionError: no such host for kz"


async def test_a_later_named_reward_that_is_none_does_not_fail_the_rollout() -> None:
    class Judged(Agent):
        def compute_reward(self, task: dict[str, Any], response: str) -> Any:
            return {"right": 1.0, "judge": None, "format": 0.5}

    finished, _ = await rollout(Judged, ["Three."])
    assert finished.failure is None
    converted = finished.convert(chat_tokenizer("anthropic", "groups_tools"))
    (sample,) = converted.samples
    assert (sample.reward, sample.metadata["rewards_missing"]) == (1.0, ["judge"])
    rewards = {"right": 1.0, "format": 0.5}
    member = MemberResult(rollout_id="r", group_id="g", samples=(sample,), reward=1.0, rewards=rewards)
    group = GroupResult(group_id="g", mode="train", size=1, members=(member,), ready=True)
    metrics = collect_metrics([group], collect_s=1.0)
    assert metrics["reward/judge/missing"] == 1
    assert {name for name in metrics if name.startswith("reward/")} == {
        "reward/right",
        "reward/format",
        "reward/judge/missing",
    }


@pytest.mark.parametrize(
    ("answers", "declared", "stop_reason", "turns", "status"),
    [
        ([CALL, CALL, "Three."], {"max_turns": 2}, "max_turns", 2, Sample.Status.TRUNCATED),
        ([CALL, "Three."], {"max_turns": 2}, "stop", 2, Sample.Status.COMPLETED),
        (["Three " * 100], {}, "length", 1, Sample.Status.TRUNCATED),
        ([CALL, "three " * 100], {"max_trajectory_tokens": 170}, "length", 2, Sample.Status.TRUNCATED),
        ([CALL, CALL, CALL, CALL, CALL], {"max_trajectory_tokens": 150}, "length", 2, Sample.Status.TRUNCATED),
        ([CALL, ContextOverflowError("full")], {}, "context_overflow", 1, Sample.Status.TRUNCATED),
        ([CALL.replace("kz", "xx"), "Three."], {"stop_on_tool_error": True}, "tool_error", 1, Sample.Status.COMPLETED),
    ],
)
async def test_why_a_rollout_stopped_is_typed(
    answers: list[Any], declared: dict[str, Any], stop_reason: str, turns: int | None, status: Any
) -> None:
    finished, client = await rollout(ToolAgent, answers, **declared)
    assert finished.failure is None
    conversion = finished.convert(chat_tokenizer("anthropic", "groups_tools"))
    (sample,) = conversion.samples
    assert sample.metadata["stop_reason"] == stop_reason
    assert sample.status == status
    assert turns is None or len(conversion.trajectory.turns) == turns
    assert trained_ids(sample) == sampled(client)
    limit = declared.get("max_trajectory_tokens")
    assert limit is None or len(sample.tokens) <= limit


async def test_calls_in_an_answer_that_is_cut_off_are_not_made() -> None:
    finished, _ = await rollout(ToolAgent, [CALL + " and so on" * 100, "never asked"])
    (sample,) = finished.convert(chat_tokenizer("anthropic", "groups_tools")).samples
    assert sample.metadata["stop_reason"] == "length"
    assert sample.metadata["tools"]["calls"] == {}


async def test_an_answer_that_stays_aborted_ends_the_rollout() -> None:
    tokenizer = chat_tokenizer("anthropic", "groups_tools")
    finished, _ = await rollout(ToolAgent, [CALL, generation_of(tokenizer, "Thr", finish="abort"), "never asked"])
    (sample,) = finished.convert(tokenizer).samples
    assert sample.metadata["stop_reason"] == "aborted"
    assert sample.status == Sample.Status.TRUNCATED


async def test_a_task_that_does_not_fit_fails_and_is_not_trained() -> None:
    finished, _ = await rollout(Agent, [ContextOverflowError("the prompt has 9 tokens")])
    assert finished.failure is not None
    assert "the prompt has 9 tokens" in finished.failure[1]
    finished, _ = await rollout(Agent, ["never asked"], max_trajectory_tokens=3)
    assert finished.failure is not None
    assert "max_trajectory_tokens is 3" in finished.failure[1]


# -- users' code off the loop ----------------------------------------------------------------------------------------


class Box:
    """A tool with a sandbox; ``open`` are those that were not closed."""

    open: set[int] = set()
    made: list[int] = []
    called = asyncio.Event()
    hangs = False
    schema = {"name": "look", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}}

    def __init__(self, task: dict[str, Any]) -> None:
        off_the_loop()
        self.open.add(id(self))
        self.made.append(id(self))

    async def __call__(self, key: str) -> str:
        self.called.set()
        if self.hangs:
            await asyncio.Event().wait()
        return "three"

    async def aclose(self) -> None:
        self.open.remove(id(self))


def off_the_loop() -> None:
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


class SlowAgent(Agent):
    tools = [Box]
    together: threading.Barrier | None = None

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        off_the_loop()
        if self.together is not None:
            self.together.wait(20)  # every rollout's at the same time
        return super().build_prompt(task)

    def build_tools(self, task: dict[str, Any]) -> Sequence[Any]:
        off_the_loop()
        return super().build_tools(task)


@pytest.fixture(autouse=True)
def _boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("open", set()), ("made", []), ("called", asyncio.Event())):
        monkeypatch.setattr(Box, name, value)


async def test_prompts_tools_and_tool_constructors_run_off_the_event_loop() -> None:
    tokenizer = chat_tokenizer("anthropic", "groups_tools")
    agent = SlowAgent(tokenizer=tokenizer, client=ScriptedClient(tokenizer, ["Three.", "Three."]))
    agent.together = threading.Barrier(2)
    finished = await run_rollouts(agent, [TASK, TASK])
    assert [rollout.failure for rollout in finished] == [None, None]
    assert (len(Box.made), Box.open) == (2, set())


@pytest.mark.parametrize(
    ("answers", "declared"),
    [
        ([CALL, "Three."], {}),
        ([EngineServerError("down")], {}),
        ([CALL, "Three."], {"compute_reward": lambda task, response: 1 / 0}),
        ([CALL, "Three."], {"build_prompt": lambda task: 1 / 0}),
        ([CALL, CALL], {"max_turns": 1}),
        (["never asked"], {"build_tools": lambda task: [Box, Box]}),
    ],
    ids=["fine", "engine", "reward", "prompt", "limit", "names"],
)
async def test_tools_are_closed_at_the_end_of_a_rollout(answers: list[Any], declared: dict[str, Any]) -> None:
    """Whether the rollout succeeds or fails in any of these places."""

    class Declared(SlowAgent):
        pass

    for name in ("build_prompt", "build_tools"):
        if name in declared:
            setattr(Declared, name, staticmethod(declared.pop(name)))
    await rollout(Declared, answers, **declared)
    assert Box.made
    assert not Box.open


async def test_tools_are_closed_when_a_rollout_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat_tokenizer("anthropic", "groups_tools")
    monkeypatch.setattr(Box, "hangs", True)
    monkeypatch.setattr("agl_slime.support.agl.get_active_tracer", lambda: Mock())
    agent = SlowAgent(tokenizer=tokenizer, client=ScriptedClient(tokenizer, [CALL]))
    resources: Any = {"main_llm": LLM(endpoint="http://127.0.0.1:1", model="none")}
    running = asyncio.create_task(
        agent.rollout_async(TASK, resources, Rollout(rollout_id="r", input=TASK, start_time=0.0))
    )
    await asyncio.wait_for(Box.called.wait(), 20)
    assert Box.open
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not Box.open


async def test_a_tool_that_all_rollouts_share_stays_open() -> None:
    class Shared(Box):
        def __init__(self) -> None:
            self.closed = 0

        async def aclose(self) -> None:
            self.closed += 1

    shared = Shared()
    finished, _ = await rollout(Agent, [CALL, "Three."], tools=[shared])
    assert finished.failure is None
    assert shared.closed == 0


# -- loss scale ------------------------------------------------------------------------------------------------------


async def test_last_round_trains_the_last_answer_only() -> None:
    finished, client = await rollout(ToolAgent, [CALL, CALL, "Three."], loss_scale="last_round")
    (sample,) = finished.convert(chat_tokenizer("anthropic", "groups_tools")).samples
    assert trained_ids(sample) == list(client.generations[-1].output_ids)
    assert sample.response_length == len(client.generations[-1].output_ids)
    assert sample.metadata["untrained_turns"] == [0, 1]


async def test_a_custom_loss_scale_sees_the_messages() -> None:
    def without_calls(messages: list[dict[str, Any]], turn: int, turns: int) -> float:
        return 0 if "<tool_call>" in messages[-1]["content"] else 1

    finished, client = await rollout(ToolAgent, ["Let me see." + CALL, "Three."], loss_scale=without_calls)
    (sample,) = finished.convert(chat_tokenizer("anthropic", "groups_tools")).samples
    assert trained_ids(sample) == list(client.generations[1].output_ids)


async def test_a_loss_scale_that_is_a_weight_fails_the_rollout() -> None:
    finished, _ = await rollout(Agent, ["Three."], loss_scale=lambda messages, turn, turns: 0.5)
    assert finished.failure is not None
    assert "must return 0 or 1" in finished.failure[1]


async def test_prompt_may_be_a_string_and_other_types_are_refused() -> None:
    class Asking(Agent):
        asked: Any = "How many?"

        def build_prompt(self, task: dict[str, Any]) -> Any:
            return self.asked

    finished, client = await rollout(Asking, ["Three."])
    assert finished.failure is None
    text = chat_tokenizer("anthropic", "groups_tools").decode(client.prompts[0])
    assert "<|im_start|>user\nHow many?<|im_end|>" in text
    finished, _ = await rollout(Asking, [], asked={"role": "user"})
    assert "Asking.build_prompt must return chat messages" in str(finished.failure)
