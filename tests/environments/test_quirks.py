"""An environment with rare and allowed properties, and one whole iteration on it."""

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console

from agl_slime.cli.local import run_training
from agl_slime.cli.main import main
from agl_slime.cli.settings import train_config
from agl_slime.support.agl import LLM
from agl_slime.tools.try_agent.command import try_task
from tests.environments.playing import answering_engine, load, on_path, play
from tests.harness.environments import env_python
from tests.harness.loop_thread import in_thread
from tests.programs.environments import quirks

pytestmark = pytest.mark.environments


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    on_path(tmp_path, monkeypatch)
    return quirks.write(tmp_path)


def test_program_sees_no_run_key_and_metric_keeps_its_rewards_name(name, tmp_path, monkeypatch):
    """With the key a program could post rewards, and rewards of single turns are trained."""
    monkeypatch.setenv("AGL_KEY", quirks.KEY)
    monkeypatch.setenv("AGL_ENV_MODEL_KEY", quirks.KEY)
    env = load(name)
    with in_thread(answering_engine(tmp_path / "model", lambda prompt: "four", {})) as engine:
        sampling = {"temperature": 1.0, "max_new_tokens": 32}
        llm = LLM(endpoint=engine.url, model=str(tmp_path / "model"), sampling_parameters=sampling)
        (member,) = play(env, env.tasks[:1], llm, tmp_path / "worker.log")

    assert member.failure is None, member.failure_message
    assert member.rewards["lines"] >= 1, "it reads the environment variables"
    assert member.rewards["keys"] == 0
    assert (member.reward, member.rewards["right"], member.rewards["metric/right"]) == (1.0, 1.0, 3.0)


def test_taskset_that_defaults_to_test_trains_on_its_train_split(name: str) -> None:
    env = load(name)
    assert {task["split"]: task["data_id"][:4] for task in env.tasks} == {"train": "trai"}
    assert {task["split"]: task["data_id"][:4] for task in env.val_tasks or ()} == {"eval": "test"}
    named = load(name, arguments=("--env.taskset.split", "test"), validate=False)
    assert {task["data_id"][:4] for task in named.tasks} == {"test"}, "a named split is taken"


def test_the_files_of_an_iteration_on_an_environment_agree(name, policy_dir, embedded_engine, tmp_path):
    config = train_config(
        env=name,
        env_python=Path(env_python()),
        model_path=policy_dir,
        sglang_url=embedded_engine,
        num_iterations=1,
        rollout_batch_size=2,
        n_samples_per_prompt=4,
        max_new_tokens=8,
        eval_interval=1,
        eval_rollouts=4,
        output_dir=tmp_path / "run",
    )
    out = io.StringIO()
    asyncio.run(run_training(config, console=Console(file=out, width=160)))

    assert "trained: equal" in out.getvalue()
    assert main(["audit", str(tmp_path / "run")]) == 0

    lines: list[str] = []
    for task in range(2):
        settings = {"model": tmp_path / "run", "sglang_url": embedded_engine, "write": lines.append}
        asyncio.run(try_task(None, task, **settings))
    page = "\n".join(lines)
    assert page.count("(test)") == 2, "the tasks that the run held out"
    assert page.count("reward: 1 (right 1, ") == 2
