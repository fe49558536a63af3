"""Schedulers in the shapes that ms-swift's own examples have, and, where a checkout of it is named, its examples as
they stand: only the base class is ours."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.rollout import scheduler as ours
from agl_slime.rollout.scheduler import MultiTurnScheduler, RequestConfig, RolloutOutput
from tests.conversations import ScriptedClient
from tests.integration.multi_turn_agents import sampled, trained
from tests.integration.rollouts import run_rollout
from tests.vocabularies import chat_tokenizer

SWIFT = os.environ.get("AGL_SLIME_MS_SWIFT", "")
TASK = {"prompt": "6 times 4?", "solution": "24", "images": ["a.png"], "objects": {"box": [1]}}
ACTION = "Thought: count.\nAction: calculator\nAction Input: 6*4\n"


class Agent(SGLangLitAgent):
    async def score(self, task: dict[str, Any], trajectory: Any) -> float:
        self.trajectory = trajectory
        return 1.0


async def played(scheduler: Any, answers: list[str], template: str = "chatml") -> tuple[Any, Agent, ScriptedClient]:
    tokenizer = chat_tokenizer("anthropic", template)
    client = ScriptedClient(tokenizer, answers)
    agent = Agent(tokenizer=tokenizer, client=client)
    agent.scheduler = scheduler
    finished = await run_rollout(agent, TASK)
    assert finished.failure is None, finished.failure
    assert not client._answers  # each was asked for
    conversion = finished.convert(tokenizer)
    assert trained(conversion.samples) == sampled(client)
    return conversion, agent, client


class OwnRun(MultiTurnScheduler):
    """Asks by itself, a round after the other, and gives an output for each."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> list[RolloutOutput]:
        outputs = []
        for turn in (1, 2):
            response = await self.infer_engine.infer_async(infer_request, RequestConfig(temperature=0.5, max_tokens=40))
            said = response.choices[0]
            infer_request.messages.append({"role": "assistant", "content": said.message.content})
            outputs.append(RolloutOutput(response, list(infer_request.messages), rollout_infos={"turn": turn}))
            infer_request.messages.append({"role": "user", "content": "Sure?"})
        return outputs


async def test_a_run_of_its_own_is_what_runs() -> None:
    conversion, agent, client = await played(OwnRun(), ["Two.", "24."])
    assert len(conversion.samples) == 1  # the second prompt goes on from the first answer
    assert agent.trajectory.metadata["rollout_infos"] == {"turn": 2}
    assert {(s.temperature, s.max_new_tokens) for s in client.sampling} == {(0.5, 40)}


class Continues(MultiTurnScheduler):
    """Runs a tool and writes what it says into the answer, as ms-swift's ToolCallScheduler."""

    ran = 0

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        if "Action:" not in response_choice.message.content:
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        self.ran += 1
        log_probs = self._extract_logprobs_from_choice(response_choice)
        assert len(log_probs) == len(response_choice.token_ids) > 0
        infer_request.messages[-1]["content"] += "Observation: 24\n"
        return {"infer_request": infer_request, "response_token_ids": [*response_choice.token_ids, 1]}


async def test_the_choice_of_a_continuation_has_that_turns_text() -> None:
    scheduler = Continues(max_turns=5)
    _, _, client = await played(scheduler, [ACTION, "Answer: 24."])
    assert scheduler.ran == 1
    assert chat_tokenizer("anthropic", "chatml").decode(client.prompts[1]).endswith(f"{ACTION}Observation: 24\n")


class HooksOnly(MultiTurnScheduler):
    async def on_trajectory_start(self, requests: list[Any]) -> None:
        (request,) = requests
        assert (request.images, request.objects, request.data_dict) == (["a.png"], {"box": [1]}, {"solution": "24"})
        request.messages = [{"role": "user", "content": "You stand in a maze."}]

    async def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.images.append("b.png")
        return {"done": True, "rollout_infos": {"images": infer_request.images}}


async def test_a_scheduler_may_have_hooks_only_and_finds_the_images_of_its_task() -> None:
    _, agent, client = await played(HooksOnly(), ["Left."])
    assert "You stand in a maze." in chat_tokenizer("anthropic", "chatml").decode(client.prompts[0])
    assert agent.trajectory.metadata["rollout_infos"] == {"images": ["a.png", "b.png"]}


async def test_a_run_that_returns_something_else_fails_the_rollout_by_name() -> None:
    class Forgetful(OwnRun):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            await super().run(infer_request, request_config, **kwargs)

    tokenizer = chat_tokenizer("anthropic", "chatml")
    agent = Agent(tokenizer=tokenizer, client=ScriptedClient(tokenizer, ["Two.", "24."]))
    agent.scheduler = Forgetful()
    finished = await run_rollout(agent, TASK)
    assert "Forgetful.run must return a RolloutOutput" in str(finished.failure)


# -- ms-swift's own files ---------------------------------------------------------------------------------------------


class Module(ModuleType):
    """What the examples import and do not use here."""

    def __getattr__(self, name: str) -> Any:
        return type(name, (), {})


@pytest.fixture(scope="module")
def swift() -> Iterator[dict[str, Any]]:
    """The classes of ms-swift's examples, over our base class."""
    if not SWIFT:
        pytest.skip("AGL_SLIME_MS_SWIFT names no checkout of ms-swift")
    names = ["swift", "swift.infer_engine", "swift.infer_engine.protocol", "swift.rewards", "swift.rewards.orm"]
    names += ["swift.template", "swift.utils", "swift.rollout", "swift.rollout.gym_env", "qwen_vl_utils"]
    held = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: Module(name) for name in names})
    sys.modules["swift.infer_engine.protocol"].__dict__.update(vars(ours))
    right: Any = type("MathAccuracy", (), {"__call__": lambda _, said, wanted: [float(wanted[0] in said[0])]})
    sys.modules["swift.rewards.orm"].MathAccuracy = right  # type: ignore[attr-defined]
    space: dict[str, Any] = {**vars(ours), "RolloutOutput": RolloutOutput, "multi_turns": {}, "re": re, "envs": {}}
    sources = [("swift/rollout/multi_turn.py", ("ThinkingModelTips", "MathTips", "GYM"))]
    sources += [("examples/train/grpo/plugin/plugin.py", ("ToolCall",))]
    sources += [("examples/train/grpo/plugin/deepeyes/deepeyes_plugin.py", ("VisualToolBox",))]
    exec("from typing import *\nimport asyncio, json\nfrom copy import deepcopy\nfrom math import *", space)
    for file, wanted in sources:
        text = (Path(SWIFT) / file).read_text(encoding="utf-8")
        for found in re.finditer(r"^(?:class (\w+)Scheduler|def extract_action)\(.*?(?=^\S)", text, re.M | re.S):
            if found[1] is None or found[1] in wanted:
                exec(found[0].replace("-> Env", "-> Any").replace("Dict[str, Env]", "dict"), space)
    yield space
    for name, module in held.items():
        sys.modules.pop(name) if module is None else sys.modules.update({name: module})


@pytest.mark.slow
async def test_math_tips(swift: dict[str, Any]) -> None:
    _, _, client = await played(swift["MathTipsScheduler"](max_turns=3), ["<think>\nHm, 12.</think>", " 24."])
    assert len(client.prompts) == 2


@pytest.mark.slow
async def test_thinking_model_tips(swift: dict[str, Any]) -> None:
    scheduler = swift["ThinkingModelTipsScheduler"](max_turns=3)
    _, agent, _ = await played(scheduler, ["<think>\n12?\n</think>\n\n12.", "<think>\n24.\n</think>\n\n24."])
    assert agent.trajectory.metadata["rollout_infos"] == {"num_turns": 2}


@pytest.mark.slow
async def test_tool_calls(swift: dict[str, Any]) -> None:
    _, agent, _ = await played(swift["ToolCallScheduler"](max_turns=5), [ACTION, "It is 24."])
    assert agent.trajectory.metadata["rollout_infos"] == {"tool_results": "Result: 24", "num_turns": 1}


@pytest.mark.slow
async def test_a_tool_that_looks_at_images(swift: dict[str, Any]) -> None:
    call = '<tool_call>{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0, 0, 1, 1]}}</tool_call>'
    _, agent, _ = await played(swift["VisualToolBoxScheduler"](max_turns=5), [call, "<answer>24</answer>"])
    assert agent.trajectory.metadata["rollout_infos"] == {"images": ["a.png"]}


@pytest.mark.slow
async def test_an_environment(swift: dict[str, Any]) -> None:
    class Maze:
        def __init__(self, config: Any) -> None: ...

        async def reset(self, request: Any) -> tuple[str, dict[str, Any], str]:
            return "Where to?", {}, "You stand in a maze."

        async def step(self, messages: Any) -> tuple[str, float, bool, dict[str, Any]]:
            return "A wall.", 0.5, "Left" in messages[-1]["content"], {}

        async def close(self) -> None: ...

    swift["envs"]["maze"] = Maze
    conversion, agent, _ = await played(swift["GYMScheduler"](max_turns=5, gym_env="maze"), ["Right.", "Left."])
    assert len(conversion.samples) == 1
    assert agent.trajectory.metadata["rollout_infos"]["step_rewards"] == [0.5, 0.5]
