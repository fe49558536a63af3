"""The generator that runs an Agent Lightning agent, over a real buffer."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from agl_slime import Generation, SGLangLitAgent
from agl_slime.buffer.generators import agl_generator
from agl_slime.buffer.samples import SampleMaker
from agl_slime.buffer.server import BufferServer
from agl_slime.errors import ConfigError
from tests.buffer.items import Client, settings_for, write_problems
from tests.harness.vocabularies import chat_tokenizer


async def test_an_agent_lightning_agent_fills_the_buffer_with_the_engines_tokens(tmp_path):
    """Real store, runner, tracer and buffer; only the model is scripted. One task fails: its items say why and its
    group is left out."""
    tokenizer = chat_tokenizer("anthropic", "chatml")
    answer = (*tokenizer.encode("4", add_special_tokens=False), tokenizer.eos_token_id)

    class Engine:
        async def generate(self, input_ids: Any, sampling: Any, **_: Any) -> Generation:
            assert sampling.max_new_tokens == 16
            log_probs = tuple(-0.5 for _ in answer)
            return Generation(
                output_ids=answer, log_probs=log_probs, text="4", finish_reason="stop", prompt_tokens=len(input_ids)
            )

    class Adder(SGLangLitAgent):
        def compute_reward(self, task: dict[str, Any], response: str) -> float:
            if task["instance_id"] == "math_1":
                raise RuntimeError("the judge is away")
            return 1.0 if response == task["label"] else 0.0

    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        data = {
            "remote_engine_url": "http://127.0.0.1:9",
            "remote_buffer_url": server.url,
            "input_file": write_problems(tmp_path, 4),
            "num_repeat_per_sample": "2",
            "num_process": 3,
            "sampling_params": {"max_tokens": 16},
        }
        await agl_generator.run_agent(Adder(tokenizer=tokenizer, client=Engine()), data)
        items = await client.read()
        _, stats = await client.get("/stats")
    assert Counter(entry["instance_id"] for entry in items) == {"math_0": 2, "math_2": 2, "math_3": 2}
    assert stats["task_types"]["math"]["groups_refused"] == {"too_few_valid_items": 1}
    assert {(entry["instance_id"], entry["raw_reward"]) for entry in items} == {
        ("math_0", 0.0),
        ("math_2", 0.0),
        ("math_3", 1.0),
    }
    groups = [SampleMaker(masks=None, normalized=False).group([entry]) for entry in items]
    for (sample,) in groups:
        assert tuple(sample.tokens[-sample.response_length :]) == answer
        assert sample.rollout_log_probs == [-0.5] * len(answer)
        assert sample.metadata["token_source"] == "engine"


async def test_the_tasks_of_an_agent_need_no_prompt(tmp_path):
    """A task is any JSON that the agent accepts; the buffer passes it unchanged."""
    tokenizer = chat_tokenizer("anthropic", "chatml")
    answer = (*tokenizer.encode("4", add_special_tokens=False), tokenizer.eos_token_id)
    tasks: list[dict[str, Any]] = []

    class Engine:
        async def generate(self, input_ids: Any, sampling: Any, **_: Any) -> Generation:
            return Generation(
                output_ids=answer,
                log_probs=(-0.5,) * len(answer),
                text="4",
                finish_reason="stop",
                prompt_tokens=len(input_ids),
            )

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
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        data = {
            "remote_engine_url": "http://127.0.0.1:9",
            "remote_buffer_url": server.url,
            "input_file": str(path),
            "num_repeat_per_sample": "2",
        }
        await agl_generator.run_agent(Asker(tokenizer=tokenizer, client=Engine()), data)
        assert {entry["instance_id"] for entry in await client.read()} == {0, 2}
        _, stats = await client.get("/stats")
    assert stats["items"]["opened"] == 6
    assert {task.get("prompt") for task in tasks} == {None, "plain text"}


def test_agent_is_taken_from_the_buffers_environment_not_the_request(monkeypatch):
    monkeypatch.delenv("AGL_SLIME_AGENT", raising=False)
    with pytest.raises(ConfigError, match="set AGL_SLIME_AGENT=module:Class"):
        agl_generator.run_rollout({"agent": "os:system"})
