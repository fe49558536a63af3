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
from tests.agent.multi_turn_agents import Played, rollout
from tests.harness.samples import trained_ids
from tests.harness.vocabularies import chat_tokenizer

SWIFT = os.environ.get("AGL_SLIME_MS_SWIFT", "")
TASK = {"prompt": "6 times 4?", "solution": "24", "images": ["a.png"], "objects": {"box": [1]}}
ACTION = "Thought: count.\nAction: calculator\nAction Input: 6*4\n"


class Agent(SGLangLitAgent):
    async def score(self, task: dict[str, Any], trajectory: Any) -> float:
        self.trajectory = trajectory
        return 1.0


async def played(scheduler: Any, answers: list[Any]) -> Played:
    result = await rollout(Agent, answers, "chatml", task=TASK, scheduler=scheduler)
    if result.finished.failure is None:
        assert not result.client._answers  # each was asked for
        assert sorted(trained_ids(*result.samples)) == sorted(result.sampled)
    return result


def prompt(*messages: str) -> str:
    """The prompt of a conversation that a user began."""
    turns = [f"<|im_start|>{('user', 'assistant')[n % 2]}\n{text}" for n, text in enumerate(messages)]
    return "<|im_end|>\n".join([*turns, "<|im_start|>assistant\n"] if len(turns) % 2 else turns)


class TwoRounds(MultiTurnScheduler):
    """Has its own ``run`` of two rounds, with an output for each."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> list[RolloutOutput]:
        outputs = []
        for turn in (1, 2):
            response = await self.infer_engine.infer_async(infer_request, RequestConfig(temperature=0.5, max_tokens=40))
            text = response.choices[0].message.content
            infer_request.messages.append({"role": "assistant", "content": text})
            outputs.append(RolloutOutput(response, list(infer_request.messages), rollout_infos={"turn": turn}))
            infer_request.messages.append({"role": "user", "content": "Sure?"})
        return outputs


async def test_schedulers_own_run_has_each_answer_once_in_later_prompts() -> None:
    result = await played(TwoRounds(), ["Two.", "24."])
    assert result.sample  # the second prompt extends the first answer
    assert result.agent.trajectory.metadata["rollout_infos"] == {"turn": 2}
    assert {(s.temperature, s.max_new_tokens) for s in result.client.sampling} == {(0.5, 40)}
    assert result.prompts == [prompt("6 times 4?"), prompt("6 times 4?", "Two.", "Sure?")]

    class Forgetful(TwoRounds):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            await super().run(infer_request, request_config, **kwargs)

    assert "Forgetful.run must return a RolloutOutput" in (await played(Forgetful(), ["Two.", "24."])).failure


class BestOfThree(MultiTurnScheduler):
    """Asks one request three times, one after the other, at the same time or by ``n``, and extends the second."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
        messages, ask = [dict(message) for message in infer_request.messages], self.infer_engine.infer_async
        if self.mode == "n":
            choices = (await ask(infer_request, RequestConfig(n=3))).choices
            assert [choice.index for choice in choices] == [0, 1, 2]
        elif self.mode == "at once":
            answered = await asyncio.gather(*(ask(infer_request, request_config) for _ in range(3)))
            choices = [each.choices[0] for each in answered]
        else:
            choices = [(await ask(infer_request, request_config)).choices[0] for _ in range(3)]
        assert infer_request.messages == messages
        text = choices[1].message.content
        infer_request.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]
        return RolloutOutput(await ask(infer_request, request_config))


@pytest.mark.parametrize("mode", ["one by one", "at once", "n"])
async def test_best_of_three_asks_the_same_prompt_three_times(mode: str) -> None:
    result = await played(BestOfThree(mode), ["Two.", "24.", "Six.", "Yes."])
    assert result.prompts == [prompt("6 times 4?")] * 3 + [prompt("6 times 4?", "24.", "Sure?")]
    assert len(result.samples) == 3  # the last answer extends the second, in one Sample


async def test_an_answer_that_fails_leaves_the_conversation() -> None:
    class Retries(MultiTurnScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
            with pytest.raises(EngineServerError):
                await self.infer_engine.infer_async(infer_request, request_config)
            return RolloutOutput(await self.infer_engine.infer_async(infer_request, request_config))

    result = await played(Retries(), [EngineServerError("broken"), "24."])
    assert result.prompts == [prompt("6 times 4?")] * 2
    assert result.sample


class Continues(MultiTurnScheduler):
    """Runs a tool and writes its result into the answer, as ms-swift's ToolCallScheduler."""

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
    result = await played(scheduler, [ACTION, "Answer: 24."])
    assert scheduler.ran == 1
    assert result.prompts[1].endswith(f"{ACTION}Observation: 24\n")


class HooksOnly(MultiTurnScheduler):
    async def on_trajectory_start(self, requests: list[Any]) -> None:
        (request,) = requests
        assert (request.images, request.objects, request.data_dict) == (["a.png"], {"box": [1]}, {"solution": "24"})
        request.messages = [{"role": "user", "content": "You stand in a maze."}]

    async def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.images.append("b.png")
        return {"done": True, "rollout_infos": {"images": infer_request.images}}


async def test_a_scheduler_may_have_hooks_only_and_finds_the_images_of_its_task() -> None:
    result = await played(HooksOnly(), ["Left."])
    assert "You stand in a maze." in result.prompts[0]
    assert result.agent.trajectory.metadata["rollout_infos"] == {"images": ["a.png", "b.png"]}


# -- ms-swift's own files ---------------------------------------------------------------------------------------------


class Module(ModuleType):
    """A module that the examples import and do not use here."""

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
    sources = [("swift/rollout/multi_turn.py", (*bases, "ThinkingModelTips", "MathTips"))]
    sources += [(f"{plugin}/plugin.py", ("ToolCall",))]
    exec("from typing import *\nimport asyncio, json\nfrom copy import deepcopy\nfrom math import *", space)
    for file, names in sources:
        text = (Path(SWIFT) / file).read_text(encoding="utf-8")
        for match in re.finditer(r"^(?:class (\w+)Scheduler|def extract_action)\(.*?(?=^\S)", text, re.M | re.S):
            if match[1] is None or match[1] in names:
                exec(match[0].replace("-> Env", "-> Any").replace("Dict[str, Env]", "dict"), space)
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
    modules = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: Module(name) for name in names})
    sys.modules["swift.infer_engine.protocol"].__dict__.update(vars(ours))
    right: Any = type("MathAccuracy", (), {"__call__": lambda _, texts, solutions: [float(solutions[0] in texts[0])]})
    sys.modules["swift.rewards.orm"].MathAccuracy = right  # type: ignore[attr-defined]
    yield
    for name, module in modules.items():
        sys.modules.pop(name) if module is None else sys.modules.update({name: module})


class Engine:
    """An engine for ms-swift's base class; keeps the messages of each request."""

    def __init__(self, answers: list[str]) -> None:
        self.answers, self.contents = [*answers], []
        self.tokenizer = chat_tokenizer("anthropic", "chatml")

    async def infer_async(self, request: Any, config: Any, **_: Any) -> Any:
        self.contents.append([message["content"] for message in copy.deepcopy(request.messages)])
        text, ids = self.answers[0], self.tokenizer.encode(self.answers.pop(0), add_special_tokens=False)
        entries: Any = {"content": [{"logprob": -((n % 9) + 1) / 16} for n in range(len(ids))]}
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
    result = await played(examples_over()[f"{name}Scheduler"](max_turns=3), answers[: len(engine.contents)])
    assert result.prompts == [prompt(*contents) for contents in engine.contents]
    assert len(engine.contents) == 2 or len(outputs) >= 8
