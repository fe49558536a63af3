"""Schedulers in the shapes that ms-swift's own examples have, and, where a checkout of it is named, its examples as
they stand: only the base class is ours."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.agent import scheduler as ours
from agl_slime.agent.orm import ORM
from agl_slime.agent.scheduler import (
    ChatCompletionResponse,
    ChatMessage,
    MultiTurnScheduler,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    RolloutResponseChoice,
)
from agl_slime.errors import EngineServerError
from tests.agent.multi_turn_agents import sampled
from tests.harness.conversations import ScriptedClient
from tests.harness.rollouts import run_rollout
from tests.harness.samples import trained_ids
from tests.harness.vocabularies import chat_tokenizer

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
    assert sorted(trained_ids(*conversion.samples)) == sorted(sampled(client))
    return conversion, agent, client


def prompts_of(client: ScriptedClient) -> list[str]:
    return [chat_tokenizer("anthropic", "chatml").decode(prompt) for prompt in client.prompts]


def prompt(*messages: str) -> str:
    """A conversation that a user began, as the model is asked to go on with it."""
    turns = [f"<|im_start|>{('user', 'assistant')[at % 2]}\n{text}" for at, text in enumerate(messages)]
    return "<|im_end|>\n".join([*turns, "<|im_start|>assistant\n"] if len(turns) % 2 else turns)


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


async def test_schedulers_own_run_has_each_answer_once_in_later_prompts() -> None:
    conversion, agent, client = await played(OwnRun(), ["Two.", "24."])
    assert len(conversion.samples) == 1  # the second prompt goes on from the first answer
    assert agent.trajectory.metadata["rollout_infos"] == {"turn": 2}
    assert {(s.temperature, s.max_new_tokens) for s in client.sampling} == {(0.5, 40)}
    assert prompts_of(client) == [prompt("6 times 4?"), prompt("6 times 4?", "Two.", "Sure?")]


class BestOfThree(MultiTurnScheduler):
    """Asks one request three times, one after the other, at the same time or by ``n``, and goes on from the second."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
        before, ask = [dict(message) for message in infer_request.messages], self.infer_engine.infer_async
        if self.how == "n":
            choices = (await ask(infer_request, RequestConfig(n=3))).choices
            assert [choice.index for choice in choices] == [0, 1, 2]
        elif self.how == "at once":
            answered = await asyncio.gather(*(ask(infer_request, request_config) for _ in range(3)))
            choices = [each.choices[0] for each in answered]
        else:
            choices = [(await ask(infer_request, request_config)).choices[0] for _ in range(3)]
        assert infer_request.messages == before
        text = choices[1].message.content
        infer_request.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]
        return RolloutOutput(await ask(infer_request, request_config))


@pytest.mark.parametrize("how", ["one by one", "at once", "n"])
async def test_best_of_three_asks_the_same_prompt_three_times(how: str) -> None:
    conversion, _, client = await played(BestOfThree(how), ["Two.", "24.", "Six.", "Yes."])
    assert prompts_of(client) == [prompt("6 times 4?")] * 3 + [prompt("6 times 4?", "24.", "Sure?")]
    assert len(conversion.samples) == 3  # the last answer goes on from the second, in one Sample


async def test_an_answer_that_cannot_be_had_leaves_the_conversation() -> None:
    class Again(MultiTurnScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
            with pytest.raises(EngineServerError):
                await self.infer_engine.infer_async(infer_request, request_config)
            return RolloutOutput(await self.infer_engine.infer_async(infer_request, request_config))

    tokenizer = chat_tokenizer("anthropic", "chatml")
    client = ScriptedClient(tokenizer, [EngineServerError("broken"), "24."])
    agent = Agent(tokenizer=tokenizer, client=client)
    agent.scheduler = Again()
    assert (await run_rollout(agent, TASK)).failure is None
    assert prompts_of(client) == [prompt("6 times 4?")] * 2


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


def remove_response(messages: list[dict[str, Any]]) -> None:
    if messages[-1]["role"] == "assistant":
        messages.pop()


def examples_over(*bases: str) -> dict[str, Any]:
    """The classes of ms-swift's examples, over our base class, or over ``bases`` of ms-swift's own."""
    space: dict[str, Any] = {**vars(ours), "RolloutOutput": RolloutOutput, "multi_turns": {}, "re": re, "envs": {}}
    space |= {"ABC": object, "remove_response": remove_response, "ChatCompletionResponseChoice": None}
    plugin = "examples/train/grpo/plugin"
    sources = [("swift/rollout/multi_turn.py", (*bases, "ThinkingModelTips", "MathTips", "GYM"))]
    sources += [(f"{plugin}/plugin.py", ("ToolCall",)), (f"{plugin}/deepeyes/deepeyes_plugin.py", ("VisualToolBox",))]
    exec("from typing import *\nimport asyncio, json\nfrom copy import deepcopy\nfrom math import *", space)
    for file, wanted in sources:
        text = (Path(SWIFT) / file).read_text(encoding="utf-8")
        for found in re.finditer(r"^(?:class (\w+)Scheduler|def extract_action)\(.*?(?=^\S)", text, re.M | re.S):
            if found[1] is None or found[1] in wanted:
                exec(found[0].replace("-> Env", "-> Any").replace("Dict[str, Env]", "dict"), space)
    for file in ("tree_rollout.py", "tree_rollout_plugin.py"):  # the second imports the first and its base class
        text = (Path(SWIFT) / plugin / "treepo" / file).read_text(encoding="utf-8")
        exec(re.sub(r"^from (?:swift|tree_rollout|modelscope)[^(\n]*(?:\([^)]*\))?.*$", "", text, flags=re.M), space)
    return space


@pytest.fixture(scope="module")
def stubs() -> Iterator[None]:
    if not SWIFT:
        pytest.skip("AGL_SLIME_MS_SWIFT names no checkout of ms-swift")
    pytest.importorskip("torch")  # of the tree rollout, before anything is a stub
    names = ["swift", "swift.infer_engine", "swift.infer_engine.protocol", "swift.rewards", "swift.rewards.orm"]
    names += ["swift.template", "swift.utils", "swift.rollout", "swift.rollout.gym_env", "qwen_vl_utils"]
    held = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: Module(name) for name in names})
    sys.modules["swift.infer_engine.protocol"].__dict__.update(vars(ours))
    right: Any = type("MathAccuracy", (), {"__call__": lambda _, said, wanted: [float(wanted[0] in said[0])]})
    sys.modules["swift.rewards.orm"].MathAccuracy = right  # type: ignore[attr-defined]
    yield
    for name, module in held.items():
        sys.modules.pop(name) if module is None else sys.modules.update({name: module})


@pytest.fixture(scope="module")
def swift(stubs: None) -> dict[str, Any]:
    return examples_over()


class Engine:
    """What ms-swift's base class asks; keeps the messages that it was asked with."""

    def __init__(self, answers: list[str]) -> None:
        self.answers, self.asked = [*answers], []
        self.tokenizer = chat_tokenizer("anthropic", "chatml")

    async def infer_async(self, request: Any, config: Any, **_: Any) -> Any:
        self.asked.append([message["content"] for message in copy.deepcopy(request.messages)])
        text, ids = self.answers[0], self.tokenizer.encode(self.answers.pop(0), add_special_tokens=False)
        entries: Any = {"content": [{"logprob": -((at % 9) + 1) / 16} for at in range(len(ids))]}
        choice = RolloutResponseChoice(0, ChatMessage("assistant", text), "stop", entries, token_ids=ids)
        return ChatCompletionResponse([choice])


WRONG, RIGHT = "<think>\n12?\n</think>\n\n12.", "<think>\n24.\n</think>\n\n24."
BOXED = ["Hm.", "Perhaps \\boxed{1}.", "No.", "Well, \\boxed{2}."] * 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("ThinkingModelTips", [WRONG, RIGHT]),
        ("ThinkingModelTips", [WRONG, WRONG]),
        ("MathTips", ["<think>\nHm, 12.</think>", " 24."]),
        ("ToolCall", [ACTION, "It is 24."]),
        ("TreeRollout", BOXED),
    ],
)
async def test_prompts_equal_those_of_ms_swifts_base_class(name: str, answers: list[str], stubs: None) -> None:
    theirs = examples_over("Rollout", "MultiTurn")[f"{name}Scheduler"]
    assert not issubclass(theirs, MultiTurnScheduler)
    engine = Engine(answers)
    request = RolloutInferRequest([{"role": "user", "content": TASK["prompt"]}], data_dict={"solution": "24"})
    random.seed(1)
    outputs = await theirs(engine, 3).run(request, RequestConfig())
    random.seed(1)
    _, _, client = await played(examples_over()[f"{name}Scheduler"](max_turns=3), answers[: len(engine.asked)])
    assert prompts_of(client) == [prompt(*contents) for contents in engine.asked]
    assert len(engine.asked) == 2 or len(outputs) >= 8


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


@pytest.mark.slow
async def test_a_reward_function_of_ms_swift(stubs: None) -> None:
    space: dict[str, Any] = {"ORM": ORM, "re": re}
    text = (Path(SWIFT) / "examples/train/grpo/plugin/plugin.py").read_text(encoding="utf-8")
    found = re.search(r"^class CountdownORM\(.*?(?=^\S)", text, re.M | re.S)
    assert found is not None
    exec("from typing import *\n" + found[0], space)
    tokenizer = chat_tokenizer("anthropic", "chatml")
    agent = SGLangLitAgent(tokenizer=tokenizer, client=ScriptedClient(tokenizer, ["<answer>(6+2)*3</answer>"]))
    agent.reward_functions = [space["CountdownORM"]]
    finished = await run_rollout(agent, {"prompt": "Make 24.", "target": 24, "nums": [6, 2, 3]})
    assert finished.convert(tokenizer).samples[0].reward == 1.0
