"""Multi-turn schedulers as ms-swift documents them: one test per sentence that says something."""

from __future__ import annotations

import asyncio
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
from examples.math_retry import CONTINUATION_TIP, TIP, MathAgent, MathContinuation, MathNewRound, boxed, is_right
from tests.harness.conversations import ScriptedClient
from tests.harness.rollouts import run_rollout, run_rollouts
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
    scheduler: Any,
    answers: list[str],
    agent_class: type[SGLangLitAgent] = MathAgent,
    template: str = "chatml",
    **options: Any,
) -> Any:
    tokenizer = chat_tokenizer("anthropic", template)
    client = ScriptedClient(tokenizer, answers)
    agent = agent_class(tokenizer=tokenizer, client=client)
    agent.scheduler = scheduler
    for name, value in options.items():
        setattr(agent, name, value)
    finished = await run_rollout(agent, TASK)
    assert finished.failure is None, finished.failure
    return finished.convert(tokenizer), client, tokenizer


def choice(text: str, finish_reason: str = "stop") -> RolloutResponseChoice:
    return RolloutResponseChoice(
        index=0, message=ChatMessage(role="assistant", content=text, tool_calls=None), finish_reason=finish_reason
    )


def test_base_scheduler_has_no_step_and_takes_max_turns_first() -> None:
    with pytest.raises(NotImplementedError, match="MultiTurnScheduler must implement step"):
        MultiTurnScheduler().step(RolloutInferRequest(messages=[]), choice("x"), 1)
    assert Twice(3, "more", other=1).max_turns == 3
    assert Twice().max_turns is None


def test_check_finished_stops_on_truncation_and_at_max_turns() -> None:
    request = RolloutInferRequest(messages=[{"role": "user", "content": "?"}])
    assert Twice(3).check_finished(request, choice("x", "length"), 1) is True
    assert request.stop_reason is StopReason.LENGTH
    assert Twice(3).check_finished(request, choice("x"), 2) is False
    assert Twice(3).check_finished(request, choice("x"), 3) is True
    assert request.stop_reason is StopReason.MAX_TURNS
    assert Twice().check_finished(request, choice("x"), 1000) is False


async def test_step_and_check_finished_get_their_documented_arguments() -> None:
    seen: list[Any] = []

    class Looking(Twice):
        def check_finished(
            self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
        ) -> bool:
            seen.append((infer_request, [dict(m) for m in infer_request.messages], result, current_turn))
            return super().check_finished(infer_request, result, current_turn)

    await played(Looking(2), [WRONG, RIGHT])
    (request, messages, result, turn), (_, later, last, second) = seen
    assert (turn, second) == (1, 2)  # rounds count from 1
    assert messages[-1] == {"role": "assistant", "content": WRONG}  # the history has the model's answer already
    assert [message["role"] for message in later] == ["user", "assistant", "user", "assistant"]
    assert request.data_dict == TASK  # the other columns
    assert (request.images, request.audios, request.videos, request.tools, request.objects) == ([], [], [], None, {})
    assert (result.index, result.message.role, result.message.content, result.finish_reason) == (
        0,
        "assistant",
        WRONG,
        "stop",
    )
    assert last.messages is not None  # copied when the rollout ended
    assert last.messages[-1]["content"] == RIGHT
    assert result.messages is None


async def test_new_round_is_one_sample_whose_inserted_text_is_masked() -> None:
    conversion, client, tokenizer = await played(MathNewRound(max_turns=3), [WRONG, RIGHT])
    assert tokenizer.decode(client.prompts[1]).endswith(
        f"{WRONG}<|im_end|>\n<|im_start|>user\n{TIP}<|im_end|>\n<|im_start|>assistant\n"
    )
    (sample,) = conversion.samples
    assert (sample.reward, sample.metadata["stop_reason"], len(conversion.trajectory.turns)) == (1.0, "stop", 2)
    assert tokenizer.decode(trained_ids(sample)) == f"{WRONG}<|im_end|>{RIGHT}<|im_end|>"


async def test_continuation() -> None:
    conversion, client, tokenizer = await played(MathContinuation(max_turns=3), [WRONG, RIGHT.removeprefix("<think>")])
    # back in the thinking, with a doubt, and the model goes on from there within the same answer
    assert tokenizer.decode(client.prompts[1]).endswith(f"<|im_start|>assistant\n<think>\nHm, 12.{CONTINUATION_TIP}")
    assert sum(conversion.forks.values()) == 1
    assert conversion.samples[-1].reward == 1.0
    sampled = sorted(token for generation in client.generations for token in generation.output_ids)
    trained = sorted(trained_ids(*conversion.samples))
    assert trained == sampled
    doubt = tokenizer.encode(CONTINUATION_TIP, add_special_tokens=False)
    assert not any(trained_run(s) & set(zip(*[doubt[i:] for i in range(4)], strict=False)) for s in conversion.samples)


def trained_run(sample: Any) -> set[tuple[int, ...]]:
    """Every four trained tokens in a row."""
    pairs = list(zip(sample.tokens[-sample.response_length :], sample.loss_mask or [], strict=True))
    return {tuple(t for t, _ in pairs[i : i + 4]) for i in range(len(pairs) - 3) if all(m for _, m in pairs[i : i + 4])}


async def test_the_reward_may_look_at_all_messages() -> None:
    seen: list[Any] = []

    class Judged(MathAgent):
        async def score(self, task: dict[str, Any], trajectory: Trajectory) -> float:
            seen.append(
                (trajectory.response, [message["role"] for message in trajectory.messages], trajectory.truncated)
            )
            return 0.0

    await played(MathNewRound(max_turns=2), [WRONG, WRONG], Judged)
    # the response is the final round's, the messages are the whole dialogue, and whether it was cut off is told
    assert seen == [(WRONG, ["user", "assistant", "user", "assistant"], True)]


# -- as ms-swift's users write schedulers today ----------------------------------------------------------------------


class Environment(MultiTurnScheduler):
    """A gym as in ms-swift: hooks with lists, state by the request's uuid, ``step`` with a dict."""

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, **kwargs: Any) -> None:
        super().__init__(infer_engine, max_turns, **kwargs)
        self.envs: dict[str, int] = {}
        self.seen: list[Any] = []
        self.fails_at: str | None = None

    def _at(self, place: str) -> None:
        if self.fails_at == place:
            raise RuntimeError(f"failed at {place}")

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        for request in requests:
            self.envs[request.uuid] = 0
            request.messages = [{"role": "user", "content": "The first observation."}]
            self.seen.append(("start", len(requests)))
        self._at("start")

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: RolloutResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        self.envs[infer_request.uuid] += 1
        self._at("turn")
        assert len(response_choice.token_ids) == len(response_choice.logprobs["content"])
        done = "24" in response_choice.message.content
        return {"done": done, "rollout_infos": {"total_reward": self.envs[infer_request.uuid], "gym_done": done}}

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: RolloutResponseChoice, current_turn: int
    ) -> bool:
        return not self.envs  # done, where it is said, decides

    def step(
        self, infer_request: RolloutInferRequest, response_choice: RolloutResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        self._at("step")
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
            self.seen.append(("end", request.messages[-1]["content"], type(error).__name__))
        self._at("end")


class Infos(MathAgent):
    infos: Any = None

    async def score(self, task: dict[str, Any], trajectory: Trajectory) -> float:
        type(self).infos = trajectory.metadata["rollout_infos"]
        return 1.0


async def test_an_environment_as_in_ms_swift() -> None:
    """Its fields are lists and dicts; ``done`` and ``infos`` come from the step, and the end hook runs."""
    scheduler = Environment(max_turns=5)
    conversion, client, tokenizer = await played(scheduler, [WRONG, WRONG, RIGHT, "never asked"], Infos)
    assert scheduler.max_turns == 5
    assert scheduler.seen == [("start", 1), ("end", RIGHT, "NoneType")]
    assert not scheduler.envs
    assert Infos.infos == {"total_reward": 3, "gym_done": True, "steps": 2}
    assert "The first observation." in tokenizer.decode(client.prompts[0])
    assert "Observation 2." in tokenizer.decode(client.prompts[2])
    (sample,) = conversion.samples
    assert sample.metadata["stop_reason"] == "stop"
    trained = trained_ids(sample)
    assert trained == [token for generation in client.generations for token in generation.output_ids]


async def test_max_turns_ends_a_rollout_whatever_the_scheduler_says() -> None:
    scheduler = Environment(max_turns=2)
    conversion, _, _ = await played(scheduler, [WRONG, WRONG, "never asked"], Infos)
    assert (len(conversion.trajectory.turns), conversion.samples[0].metadata["stop_reason"]) == (2, "max_turns")
    assert scheduler.seen[-1] == ("end", WRONG, "NoneType")


@pytest.mark.parametrize("place", ["start", "turn", "step", "end", "engine"])
async def test_environment_is_closed_when_any_hook_fails(place: str) -> None:
    scheduler = Environment(max_turns=5)
    scheduler.fails_at = place
    tokenizer = chat_tokenizer("anthropic", "chatml")
    answers: list[Any] = [EngineServerError("failed at engine")] if place == "engine" else [WRONG, RIGHT]
    agent = MathAgent(tokenizer=tokenizer, client=ScriptedClient(tokenizer, answers))
    agent.scheduler = scheduler
    finished = await run_rollout(agent, TASK)
    assert finished.failure is not None
    assert f"failed at {place}" in finished.failure[1]
    assert not scheduler.envs
    error = {"end": "NoneType", "engine": "EngineServerError"}.get(place, "RuntimeError")
    assert scheduler.seen[-1][2] == error


async def test_rollout_error_is_kept_when_its_end_hook_fails_too() -> None:
    class Both(Environment):
        def _at(self, place: str) -> None:
            if place in ("step", "end"):
                raise RuntimeError(f"failed at {place}")

    tokenizer = chat_tokenizer("anthropic", "chatml")
    agent = MathAgent(tokenizer=tokenizer, client=ScriptedClient(tokenizer, [WRONG]))
    agent.scheduler = Both()
    finished = await run_rollout(agent, TASK)
    assert finished.failure is not None
    assert "failed at step" in finished.failure[1]


async def test_a_limit_is_no_error_at_the_end() -> None:
    scheduler = Environment()
    tokenizer = chat_tokenizer("anthropic", "chatml")
    agent = Infos(tokenizer=tokenizer, client=ScriptedClient(tokenizer, [WRONG, ContextOverflowError("full")]))
    agent.scheduler = scheduler
    finished = await run_rollout(agent, TASK)
    assert finished.failure is None
    assert scheduler.seen[-1] == ("end", "Observation 1.", "NoneType")


async def test_a_sync_scheduler_runs_off_the_loop_of_all_rollouts() -> None:
    """Slow hooks of two rollouts run at the same time, and on no event loop."""
    together = threading.Barrier(2)
    hooks: set[str] = set()

    class Slow(Twice):
        def note(self, hook: str) -> None:
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            together.wait(20)
            hooks.add(hook)

        def on_trajectory_start(self, requests: Any) -> None:  # type: ignore[override]
            assert isinstance(requests, list)
            self.note("start")

        def on_turn_end(self, infer_request: Any, result: Any, current_turn: int) -> None:  # type: ignore[override]
            self.note("turn")

        def check_finished(self, infer_request: Any, result: Any, current_turn: int) -> bool:
            self.note("check")
            return super().check_finished(infer_request, result, current_turn)

        def step(self, infer_request: Any, result: Any, current_turn: int) -> Any:
            self.note("step")
            return super().step(infer_request, result, current_turn)

        def on_trajectory_end(self, requests: Any, error: Any = None) -> None:  # type: ignore[override]
            self.note("end")

    tokenizer = chat_tokenizer("anthropic", "chatml")
    agent = MathAgent(tokenizer=tokenizer, client=ScriptedClient(tokenizer, [WRONG] * 4))
    agent.scheduler = Slow(max_turns=2)
    finished = await run_rollouts(agent, [TASK, TASK])
    assert [rollout.failure for rollout in finished] == [None, None]
    assert hooks == {"start", "turn", "check", "step", "end"}


async def test_a_step_that_returns_something_else_fails_the_rollout_by_name() -> None:
    class Wrong(Twice):
        def step(self, infer_request: Any, result: Any, current_turn: int) -> Any:
            return {"messages": []}

    tokenizer = chat_tokenizer("anthropic", "chatml")
    agent = MathAgent(tokenizer=tokenizer, client=ScriptedClient(tokenizer, [WRONG]))
    agent.scheduler = Wrong(max_turns=2)
    finished = await run_rollout(agent, TASK)
    assert finished.failure is not None
    assert "Wrong.step" in finished.failure[1]


def test_boxes_are_read_with_their_braces() -> None:
    assert boxed("so \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert boxed("\\boxed{1} or \\boxed{2}") == "2"
    assert boxed("\\boxed{1") is None
    assert is_right("\\boxed{12.0}", {"solution": "The value is \\boxed{12}."})
    assert is_right("\\boxed{1,200}", {"solution": "1200"})
    assert not is_right("12", {"solution": "12"})


@pytest.mark.slow
def test_the_example_runs_as_it_stands() -> None:
    command, environment = [sys.executable, "examples/math_retry.py"], {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "new round: finished False" in done.stdout
    assert CONTINUATION_TIP in done.stdout
