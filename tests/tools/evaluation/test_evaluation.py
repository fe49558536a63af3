"""``agl-slime eval``: samples are the agent's, the report follows from them, a kill costs only samples in flight."""

import asyncio
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agl_slime.errors import ConfigError, LoopError
from agl_slime.report.files import iter_jsonl
from agl_slime.support.intervals import estimate
from agl_slime.tools.evaluation.command import EvalConfig, prepare, run_evaluation
from agl_slime.tools.evaluation.settings import command_config
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.training import needs_torch

pytestmark = needs_torch

AGENTS = '''
from agl_slime.cli.demo.agent import LookupAgent


class Picky(LookupAgent):
    """Answers earn by their task and nothing else; the judge of one task is broken."""

    def compute_reward(self, task, response):
        if task["n"] == 3:
            raise ValueError("the judge is broken")
        return float(task["n"] % 2)
'''


def evaluate(*models: Path, **settings: Any) -> tuple[dict[str, Any], str]:
    out = io.StringIO()
    config = command_config(EvalConfig, models=models, **settings)
    return asyncio.run(run_evaluation(config, console=Console(file=out, width=200))), out.getvalue()


@pytest.fixture
def picky(tmp_path: Path) -> dict[str, Any]:
    """Five tasks whose rewards are 0 1 0 - 0, whatever the answers."""
    (tmp_path / "agents.py").write_text(AGENTS)
    tasks = [json.dumps({"key": "kz", "answer": "72", "n": n}) for n in range(5)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks))
    return {"agent": f"{tmp_path / 'agents.py'}:Picky", "tasks": tmp_path / "tasks.jsonl"}


def test_evaluation_report_follows_from_samples_and_separates_failures(picky, policy_dir, embedded_engine, tmp_path):
    """A second evaluation after a torn line repeats no sample; a password of the address is nowhere written."""
    url = embedded_engine.replace("//", "//me:pa55@")
    settings: dict[str, Any] = {"k": 2, "output_dir": tmp_path / "out", **picky}
    report, text = evaluate(policy_dir, sglang_url=url, **settings)
    (model,) = report["models"]
    assert (model["samples"], model["failed"], model["failures"]) == (10, 2, {"ValueError": 2})
    assert (model["reward"]["mean"], model["reward"]["tasks"]) == (0.25, 4)
    assert (model["pass@2"]["mean"], model["pass@2"]["tasks"]) == (0.25, 4)
    assert "2 of 10 samples failed" in text
    assert json.loads((tmp_path / "out" / "eval.json").read_text()) == report
    samples = tmp_path / "out" / "samples-1.jsonl"
    assert sorted((line["task"], line["sample"]) for line in iter_jsonl(samples)) == [
        (task, sample) for task in range(5) for sample in range(2)
    ]
    assert all(line["messages"][0]["role"] == "system" for line in iter_jsonl(samples) if line["reward"] is not None)

    lines = samples.read_bytes().splitlines(keepends=True)
    samples.write_bytes(b"".join(lines[:6]) + lines[6][:20])
    resumed, text = evaluate(policy_dir, sglang_url=url.replace("pa55", "changed"), **settings)
    assert "6 of 10 samples" in text
    assert samples.read_bytes().splitlines(keepends=True)[:6] == lines[:6]
    assert resumed["models"] == report["models"]
    pairs = [(line["task"], line["sample"]) for line in iter_jsonl(samples)]
    assert len(pairs) == len({*pairs}) == 10
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert [path.name for path in files if b"pa55" in path.read_bytes()] == []
    with pytest.raises(ConfigError, match="temperature"):  # samples of another evaluation are never mixed in
        evaluate(policy_dir, sglang_url=url, temperature=0.5, **settings)
    with (tmp_path / "agents.py").open("a") as file:
        file.write("\n# another reward\n")
    with pytest.raises(ConfigError, match="agent_source"):
        evaluate(policy_dir, sglang_url=url, **settings)


def test_equal_tasks_are_one_task_and_samples_have_seeds_of_their_own(picky, policy_dir, tmp_path):
    """Also the samples that a second command takes; with another seed of the run they are others."""
    picky["tasks"].write_text("".join(f'{{"key": "kz", "answer": "72", "n": {n % 3}}}\n' for n in range(12)))
    with in_thread(ScriptedEngine(vocab_size=460)) as engine:
        settings: dict[str, Any] = {"k": 2, "sglang_url": engine.url, "output_dir": tmp_path / "out", **picky}
        report, text = evaluate(policy_dir, **settings)
        first = engine.seeds
        samples = tmp_path / "out" / "samples-1.jsonl"
        samples.write_bytes(b"".join(samples.read_bytes().splitlines(keepends=True)[:7]))
        assert evaluate(policy_dir, **settings)[0] == report
        again = engine.seeds[len(first) :]
        evaluate(policy_dir, **settings | {"output_dir": tmp_path / "other", "seed": 5})
        others = engine.seeds[len(first) + len(again) :]
    assert len({*first}) == len(first) == len({*others}) == len(others) == 24
    assert len({*again}) == len(again) == 17
    assert {*again} < {*first}
    assert not {*first} & {*others}
    (model,) = report["models"]
    expected = estimate([0.0, 1.0, 0.0])
    assert expected is not None
    assert (report["tasks"], model["reward"], model["pass@2"]["mean"]) == (3, vars(expected), pytest.approx(1 / 3))
    assert "3 tasks in 12 draws, 2 samples of each; [95 % interval over tasks]" in text


JUDGED = """
from agl_slime.cli.demo.agent import LookupAgent
from judging import judge


class Judged(LookupAgent):
    def compute_reward(self, task, response):
        return judge(task)
"""


def test_a_changed_reward_or_template_is_another_evaluation(policy_dir, embedded_engine, tmp_path, monkeypatch):
    """The same command each time; the reward's function stands in a file that the agent's imports."""
    agent, judging, model = tmp_path / "judged.py", tmp_path / "judging.py", tmp_path / "model"
    agent.write_text(JUDGED)
    judging.write_text("def judge(task):\n    return 0.25\n")
    shutil.copytree(policy_dir, model)
    (tmp_path / "tasks.jsonl").write_text('{"key": "kz", "answer": "72"}\n' * 2)
    monkeypatch.chdir(tmp_path)

    def command() -> tuple[float, bool, int]:
        """The reward, whether all samples are earlier ones, and the number of evaluations."""
        for name in [name for name in sys.modules if name == "judging" or "user_files.judged" in name]:
            monkeypatch.delitem(sys.modules, name)
        flags = {"agent": f"{agent}:Judged", "tasks": tmp_path / "tasks.jsonl", "sglang_url": embedded_engine}
        report, text = evaluate(model, **flags)
        earlier = "0 new samples: the figures are of 2 earlier samples" in text
        return report["models"][0]["reward"]["mean"], earlier, len([*(tmp_path / "evals").iterdir()])

    weights = model / "model.safetensors"
    assert command() == (0.25, False, 1)
    os.utime(weights, (1, 1))  # as a copy of the model has
    assert command() == (0.25, True, 1)
    judging.write_text("def judge(task):\n    return 0.750\n")  # a compiled file is stale by size, and seconds
    assert command() == (0.75, False, 2)
    with (model / "chat_template.jinja").open("a") as template:
        template.write("{# changed #}")
    assert command()[2] == 3
    content, times = bytearray(weights.read_bytes()), weights.stat()
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert command()[2] == 4


async def test_evaluation_uses_the_runs_template_arguments_and_sampling(policy_dir, tmp_path, picky):
    shutil.copytree(policy_dir, tmp_path / "run" / "model")
    settings = {"chat_template_kwargs": '{"preserve_thinking": true}', "later_systems": "first"}
    settings |= {"eval_sampling": '{"temperature": 0, "max_new_tokens": 9}'}
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
    for flags, expected in (({}, {"preserve_thinking": True}), ({"chat_template_kwargs": '{"a": 1}'}, {"a": 1})):
        ready = await prepare(command_config(EvalConfig, models=(tmp_path / "run",), **flags, **picky))
        assert ready.settings.template == {"chat_template_kwargs": expected, "later_systems": "first"}
        assert ready.sampling == {"temperature": 0, "max_new_tokens": 9}


def test_an_evaluation_without_a_reward_or_a_task_fails(policy_dir, embedded_engine, tmp_path, picky):
    (tmp_path / "tasks.jsonl").write_text('{"key": "kz", "answer": "72", "n": 3}\n' * 2)
    settings = {"sglang_url": embedded_engine, "output_dir": tmp_path / "out"}
    with pytest.raises(LoopError, match="all 2 samples failed, most with ValueError"):
        evaluate(policy_dir, **picky, **settings)
    assert json.loads((tmp_path / "out" / "eval.json").read_text())["models"][0]["failed"] == 2
    agent = tmp_path / "careless.py"
    agent.write_text(f"{AGENTS}\n    def make_task(self, rng):\n        return {{}}['key']\n")
    with pytest.raises(
        ConfigError, match=r"make_task of .*:Picky failed with KeyError: 'key' \(careless.py, line 14\)"
    ):
        evaluate(policy_dir, agent=f"{agent}:Picky", sglang_url=embedded_engine)
