"""Schedulers of agents of more than one turn: new rounds, continuations, how one is named on the command
line, reward functions in the form of ms-swift's ORMs; and many rollouts against a running engine."""

import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.agent import scheduler as scheduler_module
from agl_slime.agent.loading import configure_agent, load_plugins
from agl_slime.agent.outcome import ORM, AsyncORM, orms
from agl_slime.agent.scheduler import MultiTurnScheduler, RolloutInferRequest, register_scheduler
from agl_slime.agent.user_files import import_file
from agl_slime.cli.demo.formats import LookupDemonstrations
from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.errors import ConfigError
from agl_slime.tokens.loading import load_tokenizer
from tests.agent.multi_turn_agents import CALL, TASK, Agent, Played, ToolAgent, rollout
from tests.harness.conversations import ScriptedClient
from tests.harness.engine_servers import Server
from tests.harness.rollouts import run_rollout, run_rollouts
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


async def test_hooks_get_the_request_itself_and_a_step_may_make_a_new_one() -> None:
    calls: list[Any] = []

    class Hooked(MultiTurnScheduler):
        async def on_trajectory_start(self, infer_request: RolloutInferRequest) -> None:
            infer_request.data_dict["opened"] = True

        async def on_turn_end(self, infer_request: RolloutInferRequest, result: Any, current_turn: int) -> None:
            calls.append((current_turn, result.message.content, dict(infer_request.data_dict)))

        async def step(self, infer_request: Any, result: Any, current_turn: int) -> RolloutInferRequest:
            messages = [*infer_request.messages, {"role": "user", "content": "And?"}]
            return RolloutInferRequest(messages=messages, data_dict=infer_request.data_dict)

    assert (await rollout(Agent, ["Two.", "Three."], scheduler=Hooked(max_turns=2))).sample
    columns = {"label": "3", "table": {"kz": "three"}, "opened": True}
    assert calls == [(1, "Two.", columns), (2, "Three.", columns)]


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
        ({"max_turns": 0}, "max_turns of Agent .* got 0"),
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


COLUMNS = {"prompt": "6 times 4?", "problem": "6 * 4", "solution": "24"}
calls: list[tuple[list[str], dict[str, Any]]] = []


class Accuracy(ORM):
    def __call__(self, completions: list[str], **kwargs: Any) -> list[Any]:
        calls.append((completions, kwargs))
        return [float(solution in text) for text, solution in zip(completions, kwargs["solution"], strict=True)]


class Short(AsyncORM):
    async def __call__(self, completions: list[str], **kwargs: Any) -> list[Any]:
        return [0.25 if len(text) < 10 else None for text in completions]


def rounds(completions: list[str], messages: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(messages[0]))]


class Repeat(MultiTurnScheduler):
    def step(self, infer_request: Any, result: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages.append({"role": "user", "content": "Sure?"})
        return {"infer_request": infer_request, "rollout_infos": {"repeated": current_turn}}


async def rewarded(*functions: Any, answers: tuple[str, ...] = ("12.", "24."), turns: int = 2) -> Played:
    return await rollout(
        SGLangLitAgent, answers, "chatml", task=COLUMNS, scheduler=Repeat(max_turns=turns), reward_functions=functions
    )


async def test_a_function_gets_the_last_answer_the_columns_and_the_conversation() -> None:
    calls.clear()
    assert (await rewarded(Accuracy)).sample.reward == 1.0
    ((completions, columns),) = calls
    assert completions == ["24."]
    assert {"problem", "solution", "messages", "is_truncated"} <= columns.keys()
    assert (columns["solution"], columns["is_truncated"]) == (["24"], [True])  # max_turns ended it
    assert columns["rollout_infos"] == [{"repeated": 1}]
    assert [message["content"] for message in columns["messages"][0]] == ["6 times 4?", "12.", "Sure?", "24."]


async def test_several_reward_functions_are_summed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that gives no number for an answer has no part in the sum."""
    monkeypatch.setitem(orms, "by name", Accuracy)
    trajectory = (await rewarded("by name", Short, rounds)).conversion.trajectory
    assert trajectory.rewards == {"reward": 5.25, "by name": 1.0, "Short": 0.25, "rounds": 4.0}
    assert trajectory.reward == 5.25
    played = await rewarded(Accuracy, Short, answers=("It is perhaps 24.",), turns=1)
    assert played.conversion.trajectory.rewards == {"reward": 1.0, "Accuracy": 1.0}


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda completions, **_: 1.0, r"returned 1\.0; expected a list with one number"),
        (lambda completions, **_: [None], "returned None"),
    ],
)
async def test_reward_function_without_a_reward_fails_the_rollout_by_name(function: Any, sentence: str) -> None:
    assert re.search(sentence, (await rewarded(function)).failure)


TURNS = 4
LookupTable = import_file(Path(__file__).parents[2] / "agents" / "lookup_tools.py").LookupTable


class Recorder(SGLangClient):
    """Records the engine's answers by rollout."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.record: dict[str, list[tuple[list[int], Generation]]] = defaultdict(list)

    async def generate(self, input_ids: Any, sampling: SamplingParams, **options: Any) -> Generation:
        generation = await super().generate(input_ids, sampling, **options)
        self.record[str(options["routing_key"])].append((list(input_ids), generation))
        return generation


class Continues(MultiTurnScheduler):
    """An answer without a call is asked for again; every other rollout continues the answer itself."""

    def step(self, infer_request: Any, result: Any, current_turn: int) -> Any:
        if infer_request.data_dict["continues"] and result.finish_reason == "length":
            return infer_request
        infer_request.messages.append({"role": "user", "content": f"Try again, {current_turn}."})
        return infer_request

    def check_finished(self, infer_request: Any, result: Any, current_turn: int) -> bool:
        return current_turn >= TURNS


class LookingAgent(SGLangLitAgent):
    tools = [LookupTable]
    scheduler = Continues
    max_turns = TURNS

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return LookupDemonstrations().prompt(task)

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return float(len(response) % 2)


async def test_no_id_differs_between_the_engines_record_and_the_samples(server: Server, record_property: Any) -> None:
    n, rng = (200 if server.real else 24), random.Random(0)
    tasks = [{**LookupDemonstrations().make_task(rng), "continues": i % 2 == 0} for i in range(n)]
    tokenizer = load_tokenizer(server.policy)
    recorder = Recorder(base_url=server.url, eos_token_ids=(tokenizer.eos_token_id,))
    agent = LookingAgent(tokenizer=tokenizer, client=recorder, sampling=SamplingParams(max_new_tokens=16))
    finished = await run_rollouts(agent, tasks)
    await recorder.aclose()
    prompt_tokens = cached_tokens = 0
    for ended in finished:
        assert ended.failure is None, ended.failure
        record = recorder.record[ended.rollout.rollout_id]
        assert len(record) == TURNS
        conversion = ended.convert(tokenizer)
        turns = [(turn.prompt_ids.tolist(), turn.response_ids.tolist()) for turn in conversion.trajectory.turns]
        assert turns == [(prompt, list(generation.output_ids)) for prompt, generation in record]
        (sample,) = conversion.samples
        assert trained_ids(sample) == [token for _, generation in record for token in generation.output_ids]
        assert sample.tokens == [*record[-1][0], *record[-1][1].output_ids]
        prompt_tokens += sum(len(prompt) for prompt, _ in record)
        cached_tokens += sum(generation.cached_tokens for _, generation in record)
    record_property("multi_turn", f"{n} rollouts, {cached_tokens / prompt_tokens:.0%} of prompts cached")
    if server.real:
        assert cached_tokens / prompt_tokens > 0.5  # all but the last answer and the text after it
