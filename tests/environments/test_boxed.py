"""A run whose agents are programs, each in a sandbox that a flag of the run names."""

import asyncio
import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from agl_slime.cli.local import run_training
from agl_slime.cli.main import main
from agl_slime.cli.settings import train_config
from agl_slime.errors import ConfigError
from tests.environments.playing import load, needs_bubblewrap, on_path
from tests.harness.environments import env_python
from tests.programs.environments import boxed

pytestmark = [pytest.mark.environments, needs_bubblewrap]
RUNTIME = ("--env.agent.runtime.type", "bubblewrap")


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    on_path(tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    private = tmp_path / "private"
    private.touch()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield boxed.write(tmp_path, port=listening.getsockname()[1], private=private)


def test_boxed_programs_have_no_network_and_run_files_agree(name, policy_dir, embedded_engine, tmp_path):
    run = tmp_path / "run"
    config = train_config(
        env=name,
        env_python=Path(env_python()),
        env_arguments=(*RUNTIME, "--env.agent.runtime.memory=1", "--env.agent.runtime.processes", "32"),
        model_path=policy_dir,
        sglang_url=embedded_engine,
        num_iterations=1,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        max_new_tokens=8,
        eval_interval=0,
        keep_rollouts="all",
        output_dir=run,
    )
    out = io.StringIO()
    asyncio.run(run_training(config, console=Console(file=out, width=160)))

    assert "trained: equal" in out.getvalue()
    assert main(["audit", str(run)]) == 0
    rollouts = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert rollouts
    for rollout in rollouts:
        assert (rollout["rewards"]["reached"], rollout["rewards"]["private"]) == (0.0, 0.0), rollout
        assert rollout["rewards"]["processes"] <= 4, "it sees the processes of its box"
        record = json.loads((run / rollout["trace"]).read_text())
        assert record["traces"][0]["rewards"]["odd"]["score"] == rollout["reward"]
    assert len(list((run / "environment").iterdir())) == 4
    assert (tmp_path / "cache" / "agl-slime" / "programs").is_dir()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "bubblewrap"),
        ((*RUNTIME, "--env.agent.runtime.allow", '["example.org"]'), "take a container runtime"),
        ((*RUNTIME, "--env.agent.runtime.memory", "much"), "memory"),
        (("--env.judge.runtime.type", "bubblewrap"), "the agents of tiny_boxed are agent"),
    ],
)
def test_a_sandbox_that_cannot_be_is_one_sentence(name: str, arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(name, arguments=arguments)
