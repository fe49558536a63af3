"""``agl-slime eval``: the samples are the agent's, what is told follows from them, and a kill costs only what was in
flight."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("torch", reason='the engine needs torch: pip install "agl-slime[local]"')

from agl_slime.cli.evaluate import EvalConfig, prepare, run_evaluation
from agl_slime.cli.settings import command_config
from agl_slime.errors import ConfigError
from agl_slime.report.files import iter_jsonl

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
    """Five tasks whose rewards are 0 1 0 - 0, whatever is answered."""
    (tmp_path / "agents.py").write_text(AGENTS)
    tasks = [json.dumps({"key": "kz", "answer": "72", "n": n}) for n in range(5)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks))
    return {"agent": f"{tmp_path / 'agents.py'}:Picky", "tasks": tmp_path / "tasks.jsonl"}


def test_evaluation_report_follows_from_samples_and_separates_failures(
    picky: dict[str, Any], policy_dir: Path, embedded_engine: str, tmp_path: Path
) -> None:
    found, text = evaluate(policy_dir, sglang_url=embedded_engine, k=2, output_dir=tmp_path / "out", **picky)
    (model,) = found["models"]
    assert (model["samples"], model["failed"], model["failures"]) == (10, 2, {"ValueError": 2})
    assert (model["reward"]["mean"], model["reward"]["tasks"]) == (0.25, 4)
    assert (model["pass@2"]["mean"], model["pass@2"]["tasks"]) == (0.25, 4)
    assert "2 of 10 samples failed" in text
    assert json.loads((tmp_path / "out" / "eval.json").read_text()) == found
    lines = list(iter_jsonl(tmp_path / "out" / "samples-1.jsonl"))
    assert sorted((line["task"], line["sample"]) for line in lines) == [(t, s) for t in range(5) for s in range(2)]
    assert all(line["messages"][0]["role"] == "system" for line in lines if line["reward"] is not None)


def test_samples_that_ended_are_not_taken_again_after_a_torn_line(
    picky: dict[str, Any], policy_dir: Path, embedded_engine: str, tmp_path: Path
) -> None:
    told: dict[str, Any] = {"sglang_url": embedded_engine, "k": 2, "output_dir": tmp_path / "out", **picky}
    whole, _ = evaluate(policy_dir, **told)
    samples = tmp_path / "out" / "samples-1.jsonl"
    lines = samples.read_bytes().splitlines(keepends=True)
    samples.write_bytes(b"".join(lines[:6]) + lines[6][:20])
    again, text = evaluate(policy_dir, **told)
    assert samples.read_bytes().splitlines(keepends=True)[:6] == lines[:6]
    assert "6 of 10 samples" in text
    assert again["models"] == whole["models"]
    pairs = [(line["task"], line["sample"]) for line in iter_jsonl(samples)]
    assert len(pairs) == len({*pairs}) == 10


def test_samples_of_another_evaluation_are_never_mixed_in(
    picky: dict[str, Any], policy_dir: Path, embedded_engine: str, tmp_path: Path
) -> None:
    told: dict[str, Any] = {"sglang_url": embedded_engine, "output_dir": tmp_path / "out", **picky}
    evaluate(policy_dir, **told)
    with pytest.raises(ConfigError, match="temperature"):
        evaluate(policy_dir, temperature=0.5, **told)


JUDGED = """
from agl_slime.cli.demo.agent import LookupAgent
from judging import judge


class Judged(LookupAgent):
    def compute_reward(self, task, response):
        return judge(task)
"""


def test_a_changed_reward_or_template_is_another_evaluation(
    policy_dir: Path, embedded_engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command each time; the reward's function stands in a file that the agent's imports."""
    agent, judging, model = tmp_path / "judged.py", tmp_path / "judging.py", tmp_path / "model"
    agent.write_text(JUDGED)
    judging.write_text("def judge(task):\n    return 0.25\n")
    shutil.copytree(policy_dir, model)
    (tmp_path / "tasks.jsonl").write_text('{"key": "kz", "answer": "72"}\n' * 2)
    monkeypatch.chdir(tmp_path)

    def again() -> tuple[float, str, int]:
        for name in [name for name in sys.modules if name == "judging" or "by_file.judged" in name]:
            monkeypatch.delitem(sys.modules, name)
        told = {"agent": f"{agent}:Judged", "tasks": tmp_path / "tasks.jsonl", "sglang_url": embedded_engine}
        found, text = evaluate(model, **told)
        return found["models"][0]["reward"]["mean"], text, len([*(tmp_path / "evals").iterdir()])

    reward, text, directories = again()
    assert (reward, "0 new samples" in text, directories) == (0.25, False, 1)
    reward, text, directories = again()
    assert (reward, directories) == (0.25, 1)
    assert "0 new samples: the figures are of 2 earlier samples" in text
    os.utime(model / "model.safetensors", (1, 1))  # as a copy of the model has
    assert again()[1:] == (text, 1)

    judging.write_text("def judge(task):\n    return 0.750\n")  # a compiled file is stale by size, and seconds
    reward, text, directories = again()
    assert (reward, "0 new samples" in text, directories) == (0.75, False, 2)

    config = model / "tokenizer_config.json"
    with (model / "chat_template.jinja").open("a") as template:
        template.write("{# changed #}")
    assert again()[2] == 3
    config.write_text(json.dumps({**json.loads(config.read_text()), "clean_up_tokenization_spaces": False}))
    assert again()[2] == 4
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    before = (model / "model.safetensors").stat()
    (model / "model.safetensors").write_bytes(weights)
    os.utime(model / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert again()[2] == 5


async def test_evaluation_uses_the_runs_template_arguments(
    policy_dir: Path, tmp_path: Path, picky: dict[str, Any]
) -> None:
    shutil.copytree(policy_dir, tmp_path / "run" / "model")
    settings = {"chat_template_kwargs": '{"preserve_thinking": true}', "later_systems": "first"}
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
    ready = await prepare(command_config(EvalConfig, models=(tmp_path / "run",), **picky))
    expected = {"chat_template_kwargs": {"preserve_thinking": True}, "later_systems": "first"}
    assert ready.settings.template == expected
    ready = await prepare(
        command_config(EvalConfig, models=(tmp_path / "run",), chat_template_kwargs='{"a": 1}', **picky)
    )
    assert ready.settings.template == {**expected, "chat_template_kwargs": {"a": 1}}


def test_a_password_in_an_address_is_used_and_not_written(
    picky: dict[str, Any], policy_dir: Path, embedded_engine: str, tmp_path: Path
) -> None:
    told: dict[str, Any] = {"output_dir": tmp_path / "out", **picky}
    url = embedded_engine.replace("//", "//me:pa55@")
    found, text = evaluate(policy_dir, sglang_url=url, **told)
    assert found["models"][0]["samples"] == 5
    assert "pa55" not in text
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert [path.name for path in files if b"pa55" in path.read_bytes()] == []
    _, text = evaluate(policy_dir, sglang_url=url.replace("pa55", "changed"), **told)
    assert "0 new samples" in text


def test_samples_of_an_agent_that_has_changed_are_not_mixed_in(
    picky: dict[str, Any], policy_dir: Path, embedded_engine: str, tmp_path: Path
) -> None:
    told: dict[str, Any] = {"sglang_url": embedded_engine, "output_dir": tmp_path / "out", **picky}
    evaluate(policy_dir, **told)
    with (tmp_path / "agents.py").open("a") as file:
        file.write("\n# another reward\n")
    with pytest.raises(ConfigError, match="agent_source"):
        evaluate(policy_dir, **told)


@pytest.mark.slow
def test_model_against_itself_gains_and_loses_as_its_samples_do(policy_dir: Path, tmp_path: Path) -> None:
    found, _ = evaluate(policy_dir, policy_dir, n_tasks=12, k=1, output_dir=tmp_path / "out")
    rewards = [
        {line["task"]: line["reward"] for line in iter_jsonl(tmp_path / "out" / f"samples-{number}.jsonl")}
        for number in (1, 2)
    ]
    assert [len(own) for own in rewards] == [12, 12]
    differences = [rewards[1][task] - rewards[0][task] for task in range(12)]
    assert found["difference"]["reward"]["mean"] == pytest.approx(np.mean(differences))
    assert found["difference"]["gained"] == [task for task in range(12) if differences[task] > 0]


@pytest.mark.slow
def test_killed_evaluation_resumes(policy_dir: Path, tmp_path: Path) -> None:
    flags = ["--n-tasks", "64", "--k", "4", "--max-concurrent", "4", "--output-dir", str(tmp_path / "out")]
    command = [sys.executable, "-m", "agl_slime.cli.main", "eval", str(policy_dir), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "of 256 samples" in line and not line.startswith(f"{policy_dir.name}: 0 "):
                break
        os.killpg(process.pid, signal.SIGKILL)
    samples = tmp_path / "out" / "samples-1.jsonl"
    kept = [line["rollout_id"] for line in iter_jsonl(samples)]
    assert 0 < len(kept) < 256
    found, _ = evaluate(policy_dir, n_tasks=64, k=4, max_concurrent=4, output_dir=tmp_path / "out")
    lines = list(iter_jsonl(samples))
    assert [line["rollout_id"] for line in lines[: len(kept)]] == kept
    assert len({(line["task"], line["sample"]) for line in lines}) == len(lines) == found["models"][0]["samples"] == 256
