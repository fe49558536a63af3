"""The generator that runs an Agent Lightning agent, over a real buffer."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agl_slime import Generation, SGLangLitAgent
from agl_slime.buffer.generators import agl_generator
from agl_slime.buffer.samples import SampleMaker
from agl_slime.buffer.server import BufferServer
from agl_slime.errors import ConfigError
from tests.buffer.items import Client, settings_for, write_problems
from tests.harness.vocabularies import chat_tokenizer

TOKENIZER = chat_tokenizer("anthropic", "chatml")
ANSWER = (*TOKENIZER.encode("4", add_special_tokens=False), TOKENIZER.eos_token_id)


class Engine:
    async def generate(self, input_ids: Any, sampling: Any, **_: Any) -> Generation:
        assert sampling.max_new_tokens == 16
        return Generation(
            output_ids=ANSWER,
            log_probs=(-0.5,) * len(ANSWER),
            text="4",
            finish_reason="stop",
            prompt_tokens=len(input_ids),
        )


async def run_agent(agent: type[SGLangLitAgent], tmp_path: Path, input_file: str) -> tuple[list[Any], dict[str, Any]]:
    """The items that the buffer then delivers, and its stats. Store, runner, tracer and buffer are real."""
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        data = {
            "remote_engine_url": "http://127.0.0.1:9",
            "remote_buffer_url": server.url,
            "input_file": input_file,
            "num_repeat_per_sample": "2",
            "num_process": 3,
            "sampling_params": {"max_tokens": 16},
        }
        await agl_generator.run_agent(agent(tokenizer=TOKENIZER, client=Engine()), data)
        items = await client.read()
        _, stats = await client.get("/stats")
    return items, stats


async def test_an_agent_lightning_agent_fills_the_buffer_with_the_engines_tokens(tmp_path):
    """The group of a task that fails is left out."""

    class Adder(SGLangLitAgent):
        def compute_reward(self, task: dict[str, Any], response: str) -> float:
            if task["instance_id"] == "math_1":
                raise RuntimeError("the judge is away")
            return 1.0 if response == task["label"] else 0.0

    items, stats = await run_agent(Adder, tmp_path, write_problems(tmp_path, 4))
    assert Counter((entry["instance_id"], entry["raw_reward"]) for entry in items) == {
        ("math_0", 0.0): 2,
        ("math_2", 0.0): 2,
        ("math_3", 1.0): 2,
    }
    assert stats["task_types"]["math"]["groups_refused"] == {"too_few_valid_items": 1}
    for entry in items:
        (sample,) = SampleMaker(masks=None, normalized=False).group([entry])
        assert tuple(sample.tokens[-sample.response_length :]) == ANSWER
        assert sample.rollout_log_probs == [-0.5] * len(ANSWER)
        assert sample.metadata["token_source"] == "engine"


async def test_the_tasks_of_an_agent_need_no_prompt(tmp_path):
    """A task is any JSON that the agent accepts; the buffer passes it unchanged."""
    tasks: list[dict[str, Any]] = []

    class Asker(SGLangLitAgent):
        def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
            return [{"role": "user", "content": task["question"]}]

        def compute_reward(self, task: dict[str, Any], response: str) -> float:
            tasks.append(task)
            if task["question"] == "bad?":
                raise RuntimeError("the judge is away")
            return 1.0

    rows = [{"question": "2+2?"}, {"question": "bad?"}, {"question": "3+1?", "prompt": "plain text"}]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    items, stats = await run_agent(Asker, tmp_path, str(path))
    assert {entry["instance_id"] for entry in items} == {0, 2}
    assert stats["items"]["opened"] == 6
    assert {task.get("prompt") for task in tasks} == {None, "plain text"}


def test_agent_is_taken_from_the_buffers_environment_not_the_request(monkeypatch):
    monkeypatch.delenv("AGL_SLIME_AGENT", raising=False)
    with pytest.raises(ConfigError, match="set AGL_SLIME_AGENT=module:Class"):
        agl_generator.run_rollout({"agent": "os:system"})
