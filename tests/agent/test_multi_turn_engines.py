"""Many multi-turn rollouts against a running engine: the trained ids are the engine's, to the last one.

On the embedded engine, and under the marker ``sglang`` on a real SGLang, where the prefix cache has to hit as well.
"""

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

from agl_slime import SGLangLitAgent
from agl_slime.agent.by_file import import_file
from agl_slime.agent.scheduler import MultiTurnScheduler
from agl_slime.cli.demo.formats import LookupDemonstrations
from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.tokens.loading import load_tokenizer
from tests.harness.engine_servers import Server
from tests.harness.rollouts import run_rollouts
from tests.harness.samples import trained_ids

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


class Agent(SGLangLitAgent):
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
    agent = Agent(tokenizer=tokenizer, client=recorder, sampling=SamplingParams(max_new_tokens=16))
    finished = await run_rollouts(agent, tasks)
    await recorder.aclose()
    prompt_tokens = cached_tokens = 0
    for rollout in finished:
        assert rollout.failure is None, rollout.failure
        record = recorder.record[rollout.rollout.rollout_id]
        assert len(record) == TURNS
        conversion = rollout.convert(tokenizer)
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
