"""Schedulers of agents of more than one turn: new rounds, continuations, and how one is named on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agl_slime.agent import scheduler as scheduler_module
from agl_slime.agent.loading import configure_agent, load_plugins
from agl_slime.agent.scheduler import (
    MultiTurnScheduler,
    RolloutInferRequest,
    RolloutResponseChoice,
    register_scheduler,
)
from agl_slime.errors import ConfigError
from tests.agent.multi_turn_agents import CALL, TASK, Agent, ToolAgent, rollout
from tests.harness.conversations import ScriptedClient
from tests.harness.rollouts import run_rollout
from tests.harness.samples import trained_ids
from tests.harness.vocabularies import chat_tokenizer


class Retry(MultiTurnScheduler):
    """Asks in a new round until the answer is right."""

    def check_finished(self, infer_request: Any, result: Any, current_turn: int) -> bool:
        return "three" in result.message.content.lower() or super().check_finished(infer_request, result, current_turn)

    def step(self, infer_request: Any, result: Any, current_turn: int) -> RolloutInferRequest:
        infer_request.messages.append({"role": "user", "content": "Wrong."})
        return infer_request


@pytest.mark.parametrize("scheduler", [None, Retry(max_turns=5)])
async def test_the_answer_of_the_dataset_is_not_in_the_prompt(scheduler: Any) -> None:
    messages = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "It is three."}]
    played = await rollout(Agent, ["Three."], task={"messages": messages, "label": "3"}, scheduler=scheduler)
    assert played.sample
    assert played.prompts[0].endswith("user\nHow many?<|im_end|>\n<|im_start|>assistant\n")
    assert len(messages) == 2  # the task itself is left as it is


async def test_the_reward_of_a_continued_answer_sees_all_of_it() -> None:
    class Continue(Retry):
        def check_finished(self, infer_request: Any, result: Any, current_turn: int) -> bool:
            texts.append(result.message.content)
            return super().check_finished(infer_request, result, current_turn)

        def step(self, infer_request: Any, result: Any, current_turn: int) -> RolloutInferRequest:
            infer_request.messages[-1]["content"] += " But wait,"
            return infer_request

    scored: list[Any] = []
    texts: list[str] = []

    class Judged(Agent):
        async def score(self, task: dict[str, Any], trajectory: Any) -> float:
            scored.append((trajectory.response, [message["content"] for message in trajectory.messages]))
            return 1.0

    await rollout(Judged, ["Two.", " three."], scheduler=Continue(max_turns=5))
    assert texts == ["Two.", " three."]  # a choice has its turn's text
    assert scored == [("Two. But wait, three.", ["How many?", "Two. But wait, three."])]


async def test_hooks_are_awaited_and_a_request_may_be_a_new_one() -> None:
    calls: list[Any] = []

    class Hooked(MultiTurnScheduler):
        async def on_trajectory_start(self, infer_request: RolloutInferRequest) -> None:
            infer_request.data_dict["opened"] = True
            calls.append(("start", dict(infer_request.data_dict), len(infer_request.messages)))

        async def on_turn_end(
            self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
        ) -> None:
            role = infer_request.messages[-1]["role"]
            calls.append((current_turn, result.message.content, role, len(result.token_ids)))

        async def step(self, infer_request: Any, result: Any, current_turn: int) -> RolloutInferRequest:
            messages = [*infer_request.messages, {"role": "user", "content": "And?"}]
            return RolloutInferRequest(messages=messages, data_dict=infer_request.data_dict)

    played = await rollout(Agent, ["Two.", "Three."], scheduler=Hooked(max_turns=2))
    lengths = [len(generation.output_ids) for generation in played.client.generations]
    assert calls == [
        ("start", {"label": "3", "table": {"kz": "three"}, "opened": True}, 1),
        (1, "Two.", "assistant", lengths[0]),
        (2, "Three.", "assistant", lengths[1]),
    ]
    assert played.sample


async def test_tools_limits_and_a_scheduler_work_together() -> None:
    played = await rollout(ToolAgent, [CALL, "Two.", CALL, "Three."], scheduler=Retry(max_turns=6))
    assert trained_ids(played.sample) == played.sampled
    assert played.sample.metadata["tools"]["calls"] == {"look": 2}
    played = await rollout(Agent, ["Two.", "Four."], scheduler=Retry, max_turns=2)
    assert played.sample.metadata["stop_reason"] == "max_turns"
    played = await rollout(Agent, ["Two " * 100, "never asked"], scheduler=Retry(max_turns=5))
    assert played.sample.metadata["stop_reason"] == "length"


# -- from the command line --------------------------------------------------------------------------------------------

PLUGIN = """
from agl_slime.agent.scheduler import MultiTurnScheduler, register_scheduler

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
    with pytest.raises(ConfigError, match="'plugged_in'"):
        register_scheduler("plugged_in")(Retry)


def test_invalid_agent_configuration_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    class Runs(Agent):
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
    for options, sentence in cases:
        with pytest.raises(ConfigError, match=sentence):
            configure_agent(Agent(), **options)
    with pytest.raises(ConfigError, match="Runs"):
        configure_agent(Runs(), scheduler="any")
    with pytest.raises(ConfigError, match="object"):
        configure_agent(object(), scheduler="any")
    configure_agent(object(), max_turns=2)  # the gateway counts the turns of agents that are not ours
