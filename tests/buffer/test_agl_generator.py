"""The generator that runs an Agent Lightning agent, over a real buffer."""

import json
import time
from collections import Counter
from typing import Any

import pytest

from agl_slime import Generation, SGLangLitAgent
from agl_slime.buffer.client import read_rows
from agl_slime.buffer.generators import agl_generator
from agl_slime.buffer.generators.base_generator import boxed_reward
from agl_slime.buffer.samples import SampleMaker
from agl_slime.buffer.server import BufferServer
from agl_slime.errors import ConfigError
from tests.buffer.items import Client, settings_for
from tests.harness.vocabularies import chat_tokenizer

TOKENIZER = chat_tokenizer("anthropic", "chatml")
ANSWER = (*TOKENIZER.encode("4", add_special_tokens=False), TOKENIZER.eos_token_id)


class Engine:
    def __init__(self) -> None:
        self.seeds: list[int] = []

    async def generate(self, input_ids: Any, sampling: Any, **_: Any) -> Generation:
        assert sampling.max_new_tokens == 16
        self.seeds.append(sampling.extra["sampling_seed"])
        return Generation(
            output_ids=ANSWER,
            log_probs=(-0.5,) * len(ANSWER),
            text="4",
            finish_reason="stop",
            prompt_tokens=len(input_ids),
        )


class Asker(SGLangLitAgent):
    tasks: list[dict[str, Any]] = []

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": task["question"]}]

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        self.tasks.append(task)
        if task["question"] == "bad?":
            raise RuntimeError("the judge is away")
        return 1.0 if response == task.get("label") else 0.0


async def test_an_agent_lightning_agent_fills_the_buffer_with_the_engines_tokens(tmp_path):
    """Store, runner, tracer and buffer are real. A task is any JSON that the agent accepts, and is passed unchanged;
    the group of one that fails is left out."""
    rows = [{"question": "2+2?", "label": "4"}, {"question": "bad?"}, {"question": "3+2?", "prompt": "plain text"}]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data: dict[str, Any] = {"remote_engine_url": "http://127.0.0.1:9", "input_file": str(path), "num_process": 3}
    data |= {"num_repeat_per_sample": "2", "sampling_params": {"max_tokens": 16}}
    seeds = []
    for seed in (1, 1, 2):
        engine = Engine()
        async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
            asker = Asker(tokenizer=TOKENIZER, client=engine)
            await agl_generator.run_agent(asker, {**data, "remote_buffer_url": server.url, "seed": seed})
            items = await client.read()
            _, stats = await client.get("/stats")
        seeds.append({*engine.seeds})
    assert seeds[0] == seeds[1]
    assert len(seeds[0]) == 6
    assert not seeds[0] & seeds[2]
    assert Counter((entry["instance_id"], entry["raw_reward"]) for entry in items) == {(0, 1.0): 2, (2, 0.0): 2}
    assert stats["task_types"]["math"]["groups_refused"] == {"too_few_valid_items": 1}
    assert stats["items"]["opened"] == 6
    assert {task.get("prompt") for task in Asker.tasks} == {None, "plain text"}
    for entry in items:
        (sample,) = SampleMaker(masks=None, normalized=False).group([entry])
        assert tuple(sample.tokens[-sample.response_length :]) == ANSWER
        assert sample.rollout_log_probs == [-0.5] * len(ANSWER)
        assert sample.metadata["token_source"] == "engine"


def test_agent_is_taken_from_the_buffers_environment_not_the_request(monkeypatch):
    monkeypatch.delenv("AGL_SLIME_AGENT", raising=False)
    with pytest.raises(ConfigError, match="set AGL_SLIME_AGENT=module:Class"):
        agl_generator.run_rollout({"agent": "os:system"})


@pytest.mark.parametrize("instance_id", ["123456789012345678901234567890", "NaN", "[1]", r'"x\ud83d"', "1.5", "true"])
def test_an_instance_id_that_names_nothing_is_refused_by_its_row(tmp_path, instance_id):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "0"}\n{"instance_id": null, "prompt": "1"}\n{"instance_id": 7.0, "prompt": "2"}\n')
    assert [row["instance_id"] for row in read_rows(path)] == [0, 1, 7]
    path.write_text(path.read_text() + f'{{"instance_id": {instance_id}, "prompt": "2"}}\n')
    with pytest.raises(ConfigError, match=r"the instance_id of row 3 is .*give a text or a 64-bit integer"):
        read_rows(path)


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"\boxed{42.0}", "42", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{-\dfrac{3}{4}}", "-3/4", 1.0),
        (r"\boxed{50\%}", r"\frac12", 0.0),
        (r"\boxed{50\%}", "1/2", 1.0),
        (r"\boxed{ (1, 2) }", "(1,2)", 1.0),
        (r"\boxed{\text{Tuesday}}", "Tuesday", 1.0),
        (r"\boxed{x^2}", r"\boxed{x^{2}}", 0.0),
        (r"\boxed{4}", r"the answer is \boxed{4}", 1.0),
        ("42", "42", 0.0),
        (r"\boxed{}", "42", 0.0),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}", "0.5", 1.0),  # the last complete box counts
        (r"\boxed{7} and then \boxed{unfinished", "7", 1.0),
        (r"\boxed{1/0}", "42", 0.0),
        (r"\boxed{1,2}", "12", 0.0),  # a comma separates thousands or two numbers
        (r"\boxed{1,2}", "1, 2", 1.0),
        (r"\boxed{12,34}", "1234", 0.0),
        (r"\boxed{-1,234,567.5}", "-1234567.5", 1.0),
        (r"\boxed{1{,}234}", "1234", 1.0),
        (r"\boxed{1e3}", "1000", 1.0),
        (r"\boxed{1e10000000}", "1e10000000", 1.0),
    ],
)
def test_numbers_are_compared_as_numbers_and_the_rest_as_text(response, label, reward):
    assert boxed_reward(response, label) == reward


@pytest.mark.parametrize(
    "answer",
    [
        r"\boxed{1e10000000}",
        r"\boxed{-1e-99999999}",
        r"\boxed{1/1e10000000}",
        rf"\boxed{{{'9' * 200_000}}}",
        "\\boxed{" * 20_000,
    ],
)
def test_no_answer_holds_the_process(answer):
    """An exponent of seven digits must not be expanded."""
    began = time.process_time()
    assert boxed_reward(answer, "42") == 0.0
    assert time.process_time() - began < 1
