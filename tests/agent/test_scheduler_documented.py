"""Multi-turn schedulers as ms-swift documents them, and in the shapes that its examples have."""

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
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    RolloutResponseChoice,
    StopReason,
)
from agl_slime.errors import ContextOverflowError, EngineServerError
from agl_slime.tokens.turn import Trajectory
from examples.math_retry import CONTINUATION_TIP, TIP, MathAgent, MathContinuation, MathNewRound
from tests.agent.multi_turn_agents import Played, rollout
from tests.harness.conversations import ScriptedClient
from tests.harness.rollouts import run_rollouts
from tests.harness.samples import trained_ids
from tests.harness.vocabularies import chat_tokenizer

COLUMNS = {"problem": "6 times 4?", "solution": "\\boxed{24}", "images_path": "none"}
TASK = {**COLUMNS, "images": ["a.png"], "objects": {"box": [1]}}
WRONG, RIGHT = "<think>\nHm, 12.\n</think>\n\nIt is \\boxed{12}.", "<think>\n6 * 4.\n</think>\n\nIt is \\boxed{24}."
QUESTION = "6 times 4?\nPut the final answer into \\boxed{}."
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


def test_base_scheduler_has_no_step_and_takes_max_turns_first() -> None:
    request = RolloutInferRequest(messages=[{"role": "user", "content": "?"}])
    stopped, cut = (RolloutResponseChoice(0, ChatMessage("assistant", "x"), reason) for reason in ("stop", "length"))
    with pytest.raises(NotImplementedError, match="MultiTurnScheduler must implement step"):
        MultiTurnScheduler().step(request, stopped, 1)
    assert Twice(3, "more", other=1).max_turns == 3
    assert Twice().max_turns is None
    assert Twice(3).check_finished(request, cut, 1) is True
    assert request.stop_reason is StopReason.LENGTH
    assert [Twice(3).check_finished(request, stopped, turn) for turn in (2, 3)] == [False, True]
    assert request.stop_reason is StopReason.MAX_TURNS
    assert Twice().check_finished(request, stopped, 1000) is False


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
    assert request.data_dict == COLUMNS  # the other columns
    assert (request.images, request.objects) == (["a.png"], {"box": [1]})
    assert (request.audios, request.videos, request.tools) == ([], [], None)
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
    assert sorted(trained_ids(*result.samples)) == sorted(result.sampled)  # and so nothing of the doubt


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
        log_probs = self._extract_logprobs_from_choice(response_choice)
        assert len(response_choice.token_ids) == len(log_probs) > 0
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


# -- schedulers with a ``run`` of their own ---------------------------------------------------------------------------


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
    result = await played(TwoRounds(), ["Two.", "24."], Infos)
    assert result.sample  # the second prompt extends the first answer
    assert Infos.infos == {"turn": 2}
    assert {(s.temperature, s.max_new_tokens) for s in result.client.sampling} == {(0.5, 40)}
    assert result.prompts == [prompt(QUESTION), prompt(QUESTION, "Two.", "Sure?")]

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
    assert sorted(trained_ids(*result.samples)) == sorted(result.sampled)
    assert result.prompts == [prompt(QUESTION)] * 3 + [prompt(QUESTION, "24.", "Sure?")]
    assert len(result.samples) == 3  # the last answer extends the second, in one Sample


async def test_an_answer_that_fails_leaves_the_conversation() -> None:
    class Retries(MultiTurnScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
            with pytest.raises(EngineServerError):
                await self.infer_engine.infer_async(infer_request, request_config)
            return RolloutOutput(await self.infer_engine.infer_async(infer_request, request_config))

    result = await played(Retries(), [EngineServerError("broken"), "24."])
    assert result.prompts == [prompt(QUESTION)] * 2
    assert result.sample


@pytest.mark.slow
def test_the_example_runs_as_it_stands() -> None:
    command, environment = [sys.executable, "examples/math_retry.py"], {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "new round: finished False" in done.stdout
    assert CONTINUATION_TIP in done.stdout
