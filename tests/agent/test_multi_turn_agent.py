"""Agents of more than one turn by declaration: tools, limits, loss scales, and their traces in the Sample."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.agent.outcome import untrained_turns
from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.errors import ConfigError, ContextOverflowError, EngineServerError
from agl_slime.loop.metrics import collect_metrics
from agl_slime.report.alarms import find_step_alarms
from agl_slime.report.rollouts import describe_group
from agl_slime.support.agl import LLM, Rollout
from agl_slime.tokens.turn import Turn
from agl_slime.types import Sample
from tests.agent.multi_turn_agents import CALL, TASK, Agent, ToolAgent, rollout
from tests.harness.chat_templates import SYSTEM_FIRST
from tests.harness.conversations import ScriptedClient, generation_of
from tests.harness.gateway import WEATHER
from tests.harness.rollouts import run_rollouts
from tests.harness.samples import trained_ids
from tests.harness.vocabularies import chat_tokenizer

BAD_KEY = CALL.replace("kz", "xx")


def group_of(members: Sequence[MemberResult]) -> GroupResult:
    return GroupResult(group_id="g", mode="train", size=len(members), members=tuple(members), ready=True)


@pytest.mark.parametrize("thinking", ["", "<think>\n"])
async def test_tools_are_called_until_an_answer_calls_none(thinking: str) -> None:
    played = await rollout(ToolAgent, [thinking + "Let me see." + CALL + CALL, "Three."])
    sample = played.sample
    assert trained_ids(sample) == played.sampled
    assert '"name": "look"' in played.prompts[0]
    assert played.prompts[1].count("<tool_response>\nthree\n</tool_response>") == 2
    assert (sample.status, sample.metadata["stop_reason"]) == (Sample.Status.COMPLETED, "stop")
    counts = {"malformed": 0, "unknown": 0, "errors": 0, "timeouts": 0}
    assert sample.metadata["tools"] == {"offered": ["look"], "calls": {"look": 2}, **counts}
    assert sample.reward == 1.0


@pytest.mark.parametrize(("tools", "declared"), [([WEATHER], True), (["weather"], False), ({"a": 1}, False)])
async def test_tools_that_only_the_task_declares_are_in_the_prompt(tools: Any, declared: bool) -> None:
    """As in a row of slime's data; their calls are not executed."""
    played = await rollout(Agent, [CALL], task={**TASK, "tools": tools})
    assert played.sample.response.startswith(CALL)
    assert len(played.prompts) == 1
    assert ('"name": "weather"' in played.prompts[0]) is declared


async def test_task_and_prompt_may_be_strings_and_other_prompts_are_refused() -> None:
    class Echo(SGLangLitAgent):
        def build_prompt(self, task: Any) -> str:
            return task

        def compute_reward(self, task: Any, response: str) -> float:
            return float(response == task)

    played = await rollout(Echo, ["hello"], task="hello")
    assert played.sample.reward == 1.0
    assert "<|im_start|>user\nhello<|im_end|>" in played.prompts[0]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "?"}]
    played = await rollout(Echo, ["hello"], SYSTEM_FIRST, task=messages)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in played.prompts[0]  # of a template without developers
    played = await rollout(Echo, [], task={"role": "user"})
    assert "Echo.build_prompt must return chat messages" in played.failure


async def test_a_plain_score_sees_what_the_tools_did() -> None:
    class Look:
        """A tool of one rollout, whose state the reward reads."""

        schema: ClassVar = {"name": "look", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}}

        def __init__(self) -> None:
            self.keys: list[str] = []

        def __call__(self, key: str) -> str:
            self.keys.append(key)
            return TASK["table"][key]

    class ScoreResult(Agent):
        def score(self, task: dict[str, Any], trajectory: Any) -> dict[str, float]:  # type: ignore[override]
            tools = trajectory.metadata["tools"]
            return {"right": len(trajectory.tools["look"].keys), "calls": tools["calls"]["look"], **tools["failed"]}

    played = await rollout(ScoreResult, [CALL + BAD_KEY, "Three."], tools=[Look])
    assert played.conversion.trajectory.rewards == {"right": 2.0, "calls": 2.0, "look": 1.0}


async def test_malformed_unknown_and_failing_calls_are_counted_and_in_the_prompt() -> None:
    unknown, broken = CALL.replace("look", "seek"), "<tool_call>{</tool_call>"
    played = await rollout(ToolAgent, [CALL + broken, unknown, BAD_KEY, "Three."])
    counts = played.sample.metadata["tools"]
    assert (counts["malformed"], counts["unknown"], counts["errors"], counts["calls"]) == (1, 1, 1, {"look": 2})
    assert counts["example"] == broken
    assert "there is no tool named 'seek'" in played.prompts[-1]
    assert "Error: KeyError: 'xx'" in played.prompts[-1]
    assert trained_ids(played.sample) == played.sampled


async def test_always_failing_tool_raises_an_alarm_with_its_exception() -> None:
    def look(key: str) -> str:
        """Look a key up."""
        raise ConnectionError(f"no such host for {key}")

    async def group(*answers: str) -> GroupResult:
        samples = tuple((await rollout(Agent, [*answers, "Three."], tools=[look])).samples)
        return group_of([MemberResult(rollout_id=f"r{n}", group_id="g", samples=samples, reward=1.0) for n in range(6)])

    partly = await group(CALL + CALL, CALL.replace("key", "kee"), f"Then {CALL[:-9]}")
    counts = partly.members[0].samples[0].metadata["tools"]
    assert (counts["calls"], counts["errors"], counts["failed"]) == ({"look": 3}, 3, {"look": 2})  # one is the model's
    assert counts["failures"] == {"look": "Error: ConnectionError: no such host for kz"}
    metrics = collect_metrics([partly], collect_s=1.0)
    assert (metrics["tools/calls"], metrics["tools/errors"]) == (18, 18)
    line = describe_group(partly, collected=1)
    assert (line["tools"]["failed"], line["tools"]["example"]) == ({"look": 12}, CALL[:-9])
    assert find_step_alarms([line], best=None) == []  # a third of its calls did not reach it
    [alarm] = find_step_alarms([describe_group(await group(CALL + CALL), collected=1)], best=None)
    assert alarm.text == "12 of 12 calls of tool 'look' failed: ConnectionError: no such host for kz"


async def test_a_later_named_reward_that_is_none_does_not_fail_the_rollout() -> None:
    class Judged(Agent):
        def compute_reward(self, task: dict[str, Any], response: str) -> Any:
            return {"right": 1.0, "judge": None, "format": 0.5}

    sample = (await rollout(Judged, ["Three."])).sample
    assert (sample.reward, sample.metadata["rewards_missing"]) == (1.0, ["judge"])
    rewards = {"right": 1.0, "format": 0.5}
    member = MemberResult(rollout_id="r", group_id="g", samples=(sample,), reward=1.0, rewards=rewards)
    metrics = collect_metrics([group_of([member])], collect_s=1.0)
    assert metrics["reward/judge/missing"] == 1
    names = {name for name in metrics if name.startswith("reward/")}
    assert names == {"reward/right", "reward/format", "reward/judge/missing"}


@pytest.mark.parametrize(
    ("answers", "attributes", "stop_reason", "turns", "status"),
    [
        ([CALL, CALL, "Three."], {"max_turns": 2}, "max_turns", 2, Sample.Status.TRUNCATED),
        ([CALL, "Three."], {"max_turns": 2}, "stop", 2, Sample.Status.COMPLETED),
        ([CALL + " and so on" * 100, "never asked"], {}, "length", 1, Sample.Status.TRUNCATED),
        ([CALL, "three " * 100], {"max_trajectory_tokens": 170}, "length", 2, Sample.Status.TRUNCATED),
        ([CALL, CALL, CALL, CALL, CALL], {"max_trajectory_tokens": 150}, "length", 2, Sample.Status.TRUNCATED),
        ([CALL, ContextOverflowError("full")], {}, "context_overflow", 1, Sample.Status.TRUNCATED),
        ([CALL, "aborted", "never asked"], {}, "aborted", 2, Sample.Status.TRUNCATED),
        ([BAD_KEY, "Three."], {"stop_on_tool_error": True}, "tool_error", 1, Sample.Status.COMPLETED),
    ],
)
async def test_why_a_rollout_stopped_is_typed(answers, attributes, stop_reason, turns, status):
    aborted = generation_of(chat_tokenizer("anthropic", "groups_tools"), "Thr", finish="abort")
    played = await rollout(ToolAgent, [aborted if answer == "aborted" else answer for answer in answers], **attributes)
    sample = played.sample
    assert (sample.metadata["stop_reason"], sample.status) == (stop_reason, status)
    assert len(played.conversion.trajectory.turns) == turns
    assert trained_ids(sample) == played.sampled
    assert len(sample.tokens) <= attributes.get("max_trajectory_tokens", len(sample.tokens))
    if stop_reason == "length" and turns == 1:
        assert sample.metadata["tools"]["calls"] == {}  # calls in a truncated answer are not made


async def test_a_task_that_does_not_fit_fails_and_is_not_trained() -> None:
    played = await rollout(Agent, [ContextOverflowError("the prompt has 9 tokens")])
    assert "the prompt has 9 tokens" in played.failure
    played = await rollout(Agent, ["never asked"], max_trajectory_tokens=3)
    assert "max_trajectory_tokens is 3" in played.failure


# -- users' code off the loop ----------------------------------------------------------------------------------------


class Box:
    """A tool with a sandbox; ``open`` has the ids of the objects that were not closed."""

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
        ([CALL, "Three."], {"compute_reward": lambda self, task, response: 1 / 0}),
        ([CALL, "Three."], {"build_prompt": lambda self, task: 1 / 0}),
        ([CALL, CALL], {"max_turns": 1}),
        (["never asked"], {"build_tools": lambda self, task: [Box, Box]}),
    ],
    ids=["fine", "engine", "reward", "prompt", "limit", "names"],
)
async def test_tools_are_closed_at_the_end_of_a_rollout(answers: list[Any], declared: dict[str, Any]) -> None:
    """Whether the rollout succeeds or fails in any of these places."""
    await rollout(type("Declared", (SlowAgent,), declared), answers)
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
    shared = await asyncio.to_thread(Box, TASK)
    assert (await rollout(Agent, [CALL, "Three."], tools=[shared])).sample
    assert Box.open == {id(shared)}


async def test_loss_scales_choose_the_trained_answers_by_their_messages() -> None:
    played = await rollout(ToolAgent, [CALL, CALL, "Three."], loss_scale="last_round")
    last = list(played.client.generations[-1].output_ids)
    assert trained_ids(played.sample) == last
    assert played.sample.response_length == len(last)
    assert played.sample.metadata["untrained_turns"] == [0, 1]

    def without_calls(messages: list[dict[str, Any]], turn: int, turns: int) -> float:
        return 0 if "<tool_call>" in messages[-1]["content"] else 1

    played = await rollout(ToolAgent, ["Let me see." + CALL, "Three."], loss_scale=without_calls)
    assert trained_ids(played.sample) == list(played.client.generations[1].output_ids)
    played = await rollout(Agent, ["Three."], loss_scale=lambda messages, turn, turns: 0.5)
    assert "must return 0 or 1" in played.failure


def turns(*responses: list[int]) -> list[Turn]:
    return [
        Turn(prompt_ids=[1], response_ids=ids, text=f"answer {n}", messages=[{"role": "user", "content": "?"}])
        for n, ids in enumerate(responses)
    ]


def test_an_answer_without_tokens_is_no_round() -> None:
    assert untrained_turns("last_round", turns([1], [2], [])) == (0,)
    assert untrained_turns("last_round", []) == ()


def test_weights_nothing_at_all_and_other_values_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"got 0\.5 for answer 1"):
        untrained_turns(lambda messages, turn, turns: 0.5, turns([1]))
    with pytest.raises(ConfigError, match="all 2 answers"):
        untrained_turns(lambda messages, turn, turns: 0, turns([1], [2]))
    bad: Any = "first_round"
    with pytest.raises(ConfigError, match="got 'first_round'"):
        untrained_turns(bad, turns([1]))
