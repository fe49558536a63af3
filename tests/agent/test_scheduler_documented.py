"""Multi-turn schedulers as ms-swift documents them: one test per sentence that says something."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.agent.scheduler import (
    ChatMessage,
    MultiTurnScheduler,
    RolloutInferRequest,
    RolloutResponseChoice,
    StopReason,
)
from agl_slime.errors import ContextOverflowError, EngineServerError
from agl_slime.tokens.trajectory import Trajectory
from examples.math_retry import CONTINUATION_TIP, TIP, MathAgent, MathContinuation, MathNewRound
from tests.agent.multi_turn_agents import Played, rollout
from tests.harness.conversations import ScriptedClient
from tests.harness.rollouts import run_rollouts
from tests.harness.samples import trained_ids
from tests.harness.vocabularies import chat_tokenizer

TASK = {"problem": "6 times 4?", "solution": "\\boxed{24}", "images_path": "none"}
WRONG, RIGHT = "<think>\nHm, 12.\n</think>\n\nIt is \\boxed{12}.", "<think>\n6 * 4.\n</think>\n\nIt is \\boxed{24}."
REPOSITORY = Path(__file__).resolve().parents[2]


class Twice(MultiTurnScheduler):
    def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> RolloutInferRequest:
        infer_request.messages.append({"role": "user", "content": "Again."})
        return infer_request


async def played(
    scheduler: Any, answers: list[Any], agent_class: type[SGLangLitAgent] = MathAgent, **attributes: Any
) -> Played:
    return await rollout(agent_class, answers, "chatml", task=TASK, scheduler=scheduler, **attributes)


def choice(text: str, finish_reason: str = "stop") -> RolloutResponseChoice:
    return RolloutResponseChoice(
        index=0, message=ChatMessage(role="assistant", content=text, tool_calls=None), finish_reason=finish_reason
    )


def test_base_scheduler_has_no_step_and_takes_max_turns_first() -> None:
    with pytest.raises(NotImplementedError, match="MultiTurnScheduler must implement step"):
        MultiTurnScheduler().step(RolloutInferRequest(messages=[]), choice("x"), 1)
    assert Twice(3, "more", other=1).max_turns == 3
    assert Twice().max_turns is None
    request = RolloutInferRequest(messages=[{"role": "user", "content": "?"}])
    assert Twice(3).check_finished(request, choice("x", "length"), 1) is True
    assert request.stop_reason is StopReason.LENGTH
    assert Twice(3).check_finished(request, choice("x"), 2) is False
    assert Twice(3).check_finished(request, choice("x"), 3) is True
    assert request.stop_reason is StopReason.MAX_TURNS
    assert Twice().check_finished(request, choice("x"), 1000) is False


async def test_step_and_check_finished_get_their_documented_arguments() -> None:
    calls: list[Any] = []

    class Checked(Twice):
        def check_finished(self, infer_request: Any, result: Any, current_turn: int) -> bool:
            calls.append((infer_request, [dict(m) for m in infer_request.messages], result, current_turn))
            return super().check_finished(infer_request, result, current_turn)

    await played(Checked(2), [WRONG, RIGHT])
    (request, messages, result, turn), (_, later, last, second) = calls
    assert (turn, second) == (1, 2)  # rounds count from 1
    assert messages[-1] == {"role": "assistant", "content": WRONG}  # the history has the model's answer already
    assert [message["role"] for message in later] == ["user", "assistant", "user", "assistant"]
    assert request.data_dict == TASK  # the other columns
    assert (request.images, request.audios, request.videos, request.tools, request.objects) == ([], [], [], None, {})
    message = result.message
    assert (result.index, message.role, message.content, result.finish_reason) == (0, "assistant", WRONG, "stop")
    assert last.messages is not None  # copied when the rollout ended
    assert last.messages[-1]["content"] == RIGHT
    assert result.messages is None


async def test_new_round_is_one_sample_whose_inserted_text_is_masked() -> None:
    result = await played(MathNewRound(max_turns=3), [WRONG, RIGHT])
    prompt = f"{WRONG}<|im_end|>\n<|im_start|>user\n{TIP}<|im_end|>\n<|im_start|>assistant\n"
    assert result.prompts[1].endswith(prompt)
    assert (result.sample.reward, result.sample.metadata["stop_reason"]) == (1.0, "stop")
    assert result.tokenizer.decode(trained_ids(result.sample)) == f"{WRONG}<|im_end|>{RIGHT}<|im_end|>"


async def test_continuation() -> None:
    result = await played(MathContinuation(max_turns=3), [WRONG, RIGHT.removeprefix("<think>")])
    # back in the thinking, with a doubt, from which the model continues within the same answer
    assert result.prompts[1].endswith(f"<|im_start|>assistant\n<think>\nHm, 12.{CONTINUATION_TIP}")
    assert sum(result.conversion.forks.values()) == 1
    assert result.samples[-1].reward == 1.0
    assert sorted(trained_ids(*result.samples)) == sorted(result.sampled)
    doubt = result.tokenizer.encode(CONTINUATION_TIP, add_special_tokens=False)
    fours = set(zip(*[doubt[i:] for i in range(4)], strict=False))
    assert not any(trained_run(sample) & fours for sample in result.samples)


def trained_run(sample: Any) -> set[tuple[int, ...]]:
    """Every four trained tokens in a row."""
    pairs = list(zip(sample.tokens[-sample.response_length :], sample.loss_mask or [], strict=True))
    return {tuple(t for t, _ in pairs[i : i + 4]) for i in range(len(pairs) - 3) if all(m for _, m in pairs[i : i + 4])}


# -- as ms-swift's users write schedulers today ----------------------------------------------------------------------


class Environment(MultiTurnScheduler):
    """A gym as in ms-swift: hooks with lists, state by the request's uuid, ``step`` with a dict."""

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, **kwargs: Any) -> None:
        super().__init__(infer_engine, max_turns, **kwargs)
        self.envs: dict[str, int] = {}
        self.events: list[Any] = []
        self.fails_at: str | None = None

    def _fail(self, place: str) -> None:
        if self.fails_at and place in self.fails_at.split(", "):
            raise RuntimeError(f"failed at {place}")

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        for request in requests:
            self.envs[request.uuid] = 0
            request.messages = [{"role": "user", "content": "The first observation."}]
            self.events.append(("start", len(requests)))
        self._fail("start")

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: RolloutResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        self.envs[infer_request.uuid] += 1
        self._fail("turn")
        assert len(response_choice.token_ids) == len(response_choice.logprobs["content"])
        done = "24" in response_choice.message.content
        return {"done": done, "rollout_infos": {"total_reward": self.envs[infer_request.uuid], "gym_done": done}}

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        return not self.envs  # done, if a hook returns it, decides

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        self._fail("step")
        infer_request.messages.append({"role": "user", "content": f"Observation {current_turn}."})
        ids = [*response_choice.token_ids, *self.tokenizer.encode("more")]
        return {
            "infer_request": infer_request,
            "response_token_ids": ids,
            "response_loss_mask": [1] * len(ids),
            "rollout_infos": {"steps": current_turn},
        }

    async def on_trajectory_end(self, requests: list[RolloutInferRequest], error: BaseException | None = None) -> None:
        for request in requests:
            self.envs.pop(request.uuid)
            self.events.append(("end", request.messages[-1]["content"], type(error).__name__))
        self._fail("end")


class Infos(MathAgent):
    infos: Any = None

    async def score(self, task: dict[str, Any], trajectory: Trajectory) -> float:
        type(self).infos = trajectory.metadata["rollout_infos"]
        return 1.0


async def test_an_environment_as_in_ms_swift() -> None:
    """Its fields are lists and dicts; ``done`` and ``infos`` come from the step, and the end hook runs."""
    scheduler = Environment(max_turns=5)
    result = await played(scheduler, [WRONG, WRONG, RIGHT, "never asked"], Infos)
    assert scheduler.max_turns == 5
    assert scheduler.events == [("start", 1), ("end", RIGHT, "NoneType")]
    assert not scheduler.envs
    assert Infos.infos == {"total_reward": 3, "gym_done": True, "steps": 2}
    assert "The first observation." in result.prompts[0]
    assert "Observation 2." in result.prompts[2]
    assert result.sample.metadata["stop_reason"] == "stop"
    assert trained_ids(result.sample) == result.sampled


async def test_a_limit_ends_a_rollout_whatever_the_scheduler_says() -> None:
    scheduler = Environment(max_turns=2)
    result = await played(scheduler, [WRONG, WRONG, "never asked"], Infos)
    assert (len(result.conversion.trajectory.turns), result.sample.metadata["stop_reason"]) == (2, "max_turns")
    assert scheduler.events[-1] == ("end", WRONG, "NoneType")
    scheduler = Environment()
    assert (await played(scheduler, [WRONG, ContextOverflowError("full")], Infos)).sample
    assert scheduler.events[-1] == ("end", "Observation 1.", "NoneType")


@pytest.mark.parametrize("place", ["start", "turn", "step", "end", "engine", "step, end"])
async def test_environment_is_closed_when_any_hook_fails(place: str) -> None:
    """The first error is the rollout's, if the end hook fails too."""
    scheduler = Environment(max_turns=5)
    scheduler.fails_at = place
    result = await played(scheduler, [EngineServerError("failed at engine")] if place == "engine" else [WRONG, RIGHT])
    assert f"failed at {place.partition(',')[0]}" in result.failure
    assert not scheduler.envs
    error = {"end": "NoneType", "engine": "EngineServerError"}.get(place, "RuntimeError")
    assert scheduler.events[-1][2] == error


async def test_a_sync_scheduler_runs_off_the_loop_of_all_rollouts() -> None:
    """Slow hooks of two rollouts run at the same time, and on no event loop."""
    together = threading.Barrier(2)
    called: set[str] = set()

    def slow(name: str) -> Any:
        method = getattr(Twice, name)

        @functools.wraps(method)
        def hook(self: Any, first: Any, *arguments: Any, **options: Any) -> Any:
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            together.wait(20)
            called.add(name)
            return None if name.startswith("on_") else method(self, first, *arguments, **options)

        return hook

    names = ("on_trajectory_start", "on_turn_end", "check_finished", "step", "on_trajectory_end")
    scheduler = type("Slow", (Twice,), {name: slow(name) for name in names})(max_turns=2)
    tokenizer = chat_tokenizer("anthropic", "chatml")
    agent = MathAgent(tokenizer=tokenizer, client=ScriptedClient(tokenizer, [WRONG] * 4))
    agent.scheduler = scheduler
    finished = await run_rollouts(agent, [TASK, TASK])
    assert [rollout.failure for rollout in finished] == [None, None]
    assert called == set(names)


async def test_a_step_that_returns_something_else_fails_the_rollout_by_name() -> None:
    class Wrong(Twice):
        def step(self, infer_request: Any, result: Any, current_turn: int) -> Any:
            return {"messages": []}

    assert "Wrong.step" in (await played(Wrong(max_turns=2), [WRONG])).failure


@pytest.mark.slow
def test_the_example_runs_as_it_stands() -> None:
    command, environment = [sys.executable, "examples/math_retry.py"], {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "new round: finished False" in done.stdout
    assert CONTINUATION_TIP in done.stdout
