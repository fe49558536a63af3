"""Agents of more than one turn by declaration: tools, schedulers, limits, and what the Sample says about each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.errors import ConfigError, ContextOverflowError, EngineServerError
from agl_slime.rollout import scheduler as scheduler_module
from agl_slime.rollout import session as session_module
from agl_slime.rollout.loading import configure_agent, load_plugins
from agl_slime.rollout.scheduler import (
    MultiTurnScheduler,
    RolloutInferRequest,
    RolloutResponseChoice,
    register_scheduler,
)
from agl_slime.support.agl import LLM, Rollout
from agl_slime.types import Sample
from tests.conversations import ScriptedClient, generation_of
from tests.integration.rollouts import Finished, run_rollout, run_rollouts
from tests.vocabularies import chat_tokenizer

TASK = {"prompt": "How many?", "label": "3", "table": {"kz": "three"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"key": "kz"}}\n</tool_call>'


class Agent(SGLangLitAgent):
    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return float("three" in response.lower())


class ToolAgent(Agent):
    def build_tools(self, task: dict[str, Any]) -> Sequence[Any]:
        def look(key: str) -> str:
            """Look a key up."""
            return task["table"][key]

        return [look]


async def rollout(
    agent_class: type[Agent], answers: list[Any], template: str = "groups_tools", **declared: Any
) -> tuple[Finished, ScriptedClient]:
    tokenizer = chat_tokenizer("anthropic", template)
    client = ScriptedClient(tokenizer, answers)
    agent = agent_class(tokenizer=tokenizer, client=client)
    for name, value in declared.items():
        setattr(agent, name, value)
    return await run_rollout(agent, TASK), client


def sampled(client: ScriptedClient) -> list[int]:
    return [token for generation in client.generations for token in generation.output_ids]


def trained(samples: list[Sample]) -> list[int]:
    return [t for s in samples for t, m in zip(s.tokens[-s.response_length :], s.loss_mask or [], strict=True) if m]


async def test_tools_are_called_until_an_answer_calls_none() -> None:
    finished, client = await rollout(ToolAgent, ["Let me see." + CALL + CALL, "Three."])
    assert finished.failure is None
    tokenizer = chat_tokenizer("anthropic", "groups_tools")
    (sample,) = finished.convert(tokenizer).samples
    assert trained([sample]) == sampled(client)
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
    assert trained([sample]) == sampled(client)


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
    assert trained([sample]) == sampled(client)
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


# -- schedulers ------------------------------------------------------------------------------------------------------


class Retry(MultiTurnScheduler):
    """New round: told that it is wrong; or continuation, when the task says so."""

    def check_finished(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> bool:
        return "three" in result.message.content.lower() or super().check_finished(infer_request, result, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> RolloutInferRequest:
        infer_request.messages.append({"role": "user", "content": "Wrong."})
        return infer_request


class GoOn(Retry):
    def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> RolloutInferRequest:
        infer_request.messages[-1]["content"] += " But wait,"
        return infer_request


async def test_a_new_round_is_one_sample() -> None:
    finished, client = await rollout(Agent, ["Two.", "Four.", "Three."], scheduler=Retry(max_turns=5))
    conversion = finished.convert(chat_tokenizer("anthropic", "groups_tools"))
    (sample,) = conversion.samples
    assert len(conversion.trajectory.turns) == 3
    assert trained([sample]) == sampled(client)
    assert sample.metadata["stop_reason"] == "stop"


async def test_a_continuation_is_one_message_and_trains_each_token_once() -> None:
    finished, client = await rollout(Agent, ["Two.", "three."], scheduler=GoOn(max_turns=5))
    tokenizer = chat_tokenizer("anthropic", "groups_tools")
    samples = finished.convert(tokenizer).samples
    assert tokenizer.decode(client.prompts[1]).endswith("<|im_start|>assistant\nTwo. But wait,")
    assert sorted(trained(samples)) == sorted(sampled(client))
    assert len(samples) == 2  # the first answer ended with a stop token, which the continued one does not have


async def test_the_reward_of_a_continued_answer_sees_all_of_it() -> None:
    seen: list[Any] = []

    class Judged(Agent):
        async def score(self, task: dict[str, Any], trajectory: Any) -> float:
            seen.append((trajectory.response, [message["content"] for message in trajectory.messages]))
            return 1.0

    await rollout(Judged, ["Two.", " three."], scheduler=GoOn(max_turns=5))
    assert seen == [("Two. But wait, three.", ["How many?", "Two. But wait, three."])]


async def test_turns_that_are_used_up_and_answers_that_are_cut_off_end_a_scheduled_rollout() -> None:
    finished, _ = await rollout(Agent, ["Two.", "Four."], scheduler=Retry, max_turns=2)
    (sample,) = finished.convert(chat_tokenizer("anthropic", "groups_tools")).samples
    assert (sample.metadata["stop_reason"], sample.status) == ("max_turns", Sample.Status.TRUNCATED)
    finished, _ = await rollout(Agent, ["Two " * 100, "never asked"], scheduler=Retry(max_turns=5))
    (sample,) = finished.convert(chat_tokenizer("anthropic", "groups_tools")).samples
    assert sample.metadata["stop_reason"] == "length"


async def test_hooks_are_awaited_and_a_request_may_be_a_new_one() -> None:
    seen: list[Any] = []

    class Hooked(MultiTurnScheduler):
        async def on_trajectory_start(self, infer_request: RolloutInferRequest) -> None:
            infer_request.data_dict["opened"] = True
            seen.append(("start", dict(infer_request.data_dict), len(infer_request.messages)))

        async def on_turn_end(
            self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
        ) -> None:
            seen.append(
                (current_turn, result.message.content, infer_request.messages[-1]["role"], len(result.logprobs or []))
            )

        async def step(
            self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
        ) -> RolloutInferRequest:
            messages = [*infer_request.messages, {"role": "user", "content": "And?"}]
            return RolloutInferRequest(messages=messages, data_dict=infer_request.data_dict)

    finished, client = await rollout(Agent, ["Two.", "Three."], scheduler=Hooked(max_turns=2))
    lengths = [len(generation.output_ids) for generation in client.generations]
    assert seen == [
        ("start", {"label": "3", "table": {"kz": "three"}, "opened": True}, 1),
        (1, "Two.", "assistant", lengths[0]),
        (2, "Three.", "assistant", lengths[1]),
    ]
    assert finished.failure is None


async def test_tools_and_a_scheduler_work_together() -> None:
    finished, client = await rollout(ToolAgent, [CALL, "Two.", CALL, "Three."], scheduler=Retry(max_turns=6))
    (sample,) = finished.convert(chat_tokenizer("anthropic", "groups_tools")).samples
    assert trained([sample]) == sampled(client)
    assert sample.metadata["tools"]["calls"] == {"look": 2}


# -- users' code off the loop (fault 27) -----------------------------------------------------------------------------


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


async def test_prompts_tools_and_their_constructors_run_off_the_loop_of_all_rollouts() -> None:
    """For fault 27."""
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
    """For fault 27: whatever happens."""

    class Declared(SlowAgent):
        pass

    for name in ("build_prompt", "build_tools"):
        if name in declared:
            setattr(Declared, name, staticmethod(declared.pop(name)))
    await rollout(Declared, answers, **declared)
    assert Box.made
    assert not Box.open


async def test_tools_are_closed_when_a_rollout_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """For fault 27."""
    tokenizer = chat_tokenizer("anthropic", "groups_tools")
    monkeypatch.setattr(Box, "hangs", True)
    monkeypatch.setattr(session_module, "get_active_tracer", lambda: Mock())
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
    """For fault 27."""

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
    assert trained([sample]) == list(client.generations[-1].output_ids)
    assert sample.response_length == len(client.generations[-1].output_ids)
    assert sample.metadata["untrained_turns"] == [0, 1]


async def test_a_custom_loss_scale_sees_the_messages() -> None:
    def without_calls(messages: list[dict[str, Any]], turn: int, turns: int) -> float:
        return 0 if "<tool_call>" in messages[-1]["content"] else 1

    finished, client = await rollout(ToolAgent, ["Let me see." + CALL, "Three."], loss_scale=without_calls)
    (sample,) = finished.convert(chat_tokenizer("anthropic", "groups_tools")).samples
    assert trained([sample]) == list(client.generations[1].output_ids)


async def test_a_loss_scale_that_is_a_weight_fails_the_rollout() -> None:
    finished, _ = await rollout(Agent, ["Three."], loss_scale=lambda messages, turn, turns: 0.5)
    assert finished.failure is not None
    assert "must return 0 or 1" in finished.failure[1]


# -- from the command line
# ---------------------------------------------------------------------------------------------------------------------

PLUGIN = """
from agl_slime.rollout.scheduler import MultiTurnScheduler, register_scheduler

@register_scheduler("plugged_in")
class PluggedIn(MultiTurnScheduler):
    def step(self, infer_request, result, current_turn):
        infer_request.messages.append({"role": "user", "content": "Again."})
        return infer_request
"""


async def test_a_scheduler_from_a_file_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scheduler_module.schedulers, "plugged_in", list)  # taken out again at the end
    del scheduler_module.schedulers["plugged_in"]
    file = tmp_path / "plugin.py"
    file.write_text(PLUGIN)
    tokenizer = chat_tokenizer("anthropic", "chatml")
    client = ScriptedClient(tokenizer, ["Two.", "Three."])
    agent = Agent(tokenizer=tokenizer, client=client)
    configure_agent(agent, scheduler="plugged_in", max_turns=2, plugins=[file])
    assert load_plugins([file]) == load_plugins([str(file)])  # run once
    finished = await run_rollout(agent, TASK)
    assert len(finished.convert(tokenizer).trajectory.turns) == 2
    assert "Again." in tokenizer.decode(client.prompts[1])


def test_what_cannot_be_configured_is_one_sentence(tmp_path: Path) -> None:
    class OwnRun(Agent):
        async def run(self, task: Any, session: Any) -> None:
            await session.ask()

    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"scheduler": "nowhere"}, "nowhere"),
        ({"max_turns": 0}, "--max-turns .* got 0"),
        ({"plugins": [tmp_path / "missing.py"]}, "missing.py"),
        ({"plugins": [broken]}, "broken.py .*ZeroDivisionError"),
    ]
    for options, words in cases:
        with pytest.raises(ConfigError, match=words):
            configure_agent(Agent(), **options)
    with pytest.raises(ConfigError, match="OwnRun"):
        configure_agent(OwnRun(), scheduler="any")
    with pytest.raises(ConfigError, match="object"):
        configure_agent(object(), scheduler="any")
    configure_agent(object(), max_turns=2)  # the gateway counts the turns of agents that are not ours


def test_a_registered_name_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scheduler_module.schedulers, "mine", list)  # taken out again at the end
    del scheduler_module.schedulers["mine"]
    register_scheduler("mine")(Retry)
    with pytest.raises(ConfigError, match="'mine'"):
        register_scheduler("mine")(Retry)
