"""What an environment may do and few do, and one whole iteration on one."""

from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from agl_slime.cli.chat import ChatConfig
from agl_slime.cli.local import run_training
from agl_slime.cli.main import main
from agl_slime.cli.settings import command_config, train_config
from agl_slime.data.read import collect
from agl_slime.environments.environment import load_environment
from agl_slime.errors import ConfigError
from agl_slime.runner.controller import ControllerPool
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
from tests.harness.environments import env_python
from tests.harness.gateway import TEMPLATE, engine_saying
from tests.harness.loop_thread import in_thread
from tests.harness.tokenizers import small_tokenizer
from tests.programs.environments import quirks
from tests.tools.chat.test_chat import talk

pytestmark = pytest.mark.environments


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    return quirks.write(tmp_path)


def test_program_sees_no_run_key_and_metric_keeps_its_rewards_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the key a program could post rewards, and those of single turns are trained."""
    monkeypatch.setenv("AGL_KEY", quirks.KEY)
    monkeypatch.setenv("AGL_ENV_MODEL_KEY", quirks.KEY)
    env, store, tokenizer = load_environment(name, python=env_python()), BridgeStore(), small_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "model")
    with in_thread(engine_saying(tokenizer, ["four"])) as engine:
        sampling = {"temperature": 1.0, "max_new_tokens": 32}
        llm = LLM(endpoint=engine.url, model=str(tmp_path / "model"), sampling_parameters=sampling)
        run_blocking(store.add_resources({"main_llm": llm}))
        rollout_id = run_blocking(store.enqueue_rollout(input=env.tasks[0], mode="train")).rollout_id
        with ControllerPool(plan=env.plan(log=(log := tmp_path / "worker.log")), store=store):
            assert run_blocking(store.wait_for_rollouts(rollout_ids=[rollout_id], timeout=120)), log.read_text()
    member = run_blocking(collect(store, rollout_id))

    assert member.failure is None, member.failure_message
    assert member.rewards["lines_seen"] >= 1, "it has seen an environment"
    assert member.rewards["keys_seen"] == 0
    assert (member.reward, member.rewards["right"], member.rewards["metric/right"]) == (1.0, 1.0, 3.0)


def test_taskset_that_defaults_to_test_trains_on_its_train_split(name: str) -> None:
    env = load_environment(name, python=env_python())
    assert {task["split"]: task["data_id"][:4] for task in env.tasks} == {"train": "trai"}
    assert {task["split"]: task["data_id"][:4] for task in env.val_tasks or ()} == {"eval": "test"}
    named = load_environment(name, python=env_python(), arguments=("--env.taskset.split", "test"), validate=False)
    assert {task["data_id"][:4] for task in named.tasks} == {"test"}, "who names a split gets it"


def test_the_files_of_an_iteration_on_an_environment_agree(
    name: str, policy_dir: Path, embedded_engine: str, tmp_path: Path
) -> None:
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

    chat = {"model": tmp_path / "run", "sglang_url": embedded_engine}
    shown = talk(command_config(ChatConfig, **chat, tasks=True), "", "/bye")
    assert shown.count("(test)") == 2, "what the run held out"
    assert shown.count("reward: 1 (right 1, ") == 2
    with pytest.raises(ConfigError, match="give --tasks"):
        talk(command_config(ChatConfig, **chat), "hello")
