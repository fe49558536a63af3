"""Settings of environments without verifiers: flags and Pythons, splits of tasks, and reasons of failed episodes."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl_slime.cli import wiring
from agl_slime.cli.options import split_env_flags
from agl_slime.cli.settings import TrainConfig, train_config
from agl_slime.environments.environment import PYTHON_VARIABLE, EnvironmentSettings, _split, load_environment
from agl_slime.errors import ConfigError
from agl_slime.gateway.agl1.rollouts import reason_of
from agl_slime.report.files import RunDir, dump
from agl_slime.support.files import write_file
from agl_slime.tools.evaluation import command as evaluation
from agl_slime.tools.evaluation.command import EvalConfig
from agl_slime.tools.evaluation.settings import command_config


@pytest.fixture(autouse=True)
def no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)


def test_environment_flags_are_split_from_the_command_line_in_every_form() -> None:
    line = ["--env", "a", "--env.x.y", "1", "--env.z=2", "--env.@", "f.toml", "--seed", "3", "--env.switch"]
    line += ["--env-tasks", "4"]
    flags, of_env = split_env_flags(line)
    assert flags == ["--env", "a", "--seed", "3", "--env-tasks", "4"]
    assert of_env == ("--env.x.y", "1", "--env.z=2", "@", "f.toml", "--env.switch")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"env": "a", "tasks": Path("t.jsonl")}, "--tasks"),
        ({"env": "a", "agent": "my:Agent"}, "--agent"),
        ({"env": "a", "runners": "ray:2"}, "--runners ray:2 .* process:N"),
        ({"env": "a", "max_attempts": 2}, "--max-attempts"),
        ({"env": "a", "env_tasks": 1}, "--env-tasks must be at least 2"),
        ({"env_tasks": 5}, "--env-tasks"),
        ({"env_arguments": ("--env.x", "1")}, "--env-arguments"),
        ({"env": "a", "env_arguments": ("@", "/dev/stdin")}, "--env.@ /dev/stdin: give a regular file"),
        ({"env": "a", "env_arguments": ("@", "gone.toml")}, "--env.@ gone.toml: give a regular file"),
    ],
)
def test_unfitting_environment_settings_are_refused_by_name(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train_config(**fields)


def test_environment_without_a_python_is_a_config_error_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"--env-python \(AGL_ENV_PYTHON\).*verifiers_env\.sh"):
        load_environment("anything")
    with pytest.raises(ConfigError, match="does not run as a Python"):
        load_environment("anything", python="/nowhere/python")


def test_worker_needs_no_package_of_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without any package finds the worker, nothing else from here, and the modules of its user's path."""
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers/__init__.py").touch()
    (tmp_path / "verifiers/v1.py").write_text("import sys; raise ImportError(sys.path[0])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"pip install verifiers.*AGL_ENV_PYTHON.*verifiers_env\.sh") as raised:
        load_environment("anything", python=python)
    first = str(raised.value).partition("no verifiers (")[2].partition(")")[0]
    assert os.listdir(first) == ["agl_slime"]


def test_an_evaluations_files_have_no_key_of_its_environment(tmp_path: Path) -> None:
    file, arguments = tmp_path / "env.toml", ("--env.judge.api_key", "KEY1", "--env.@")
    identities = []
    for key in ("KEY2", "KEY3"):
        file.write_text(f'env.api_key = "{key}"')
        settings = train_config(env="a", env_arguments=split_env_flags([*arguments, str(file)])[1])
        identities.append(evaluation._environment_identity(settings))
    assert "KEY" not in str(identities)
    assert identities[0] != identities[1]


def test_other_addresses_are_read_with_and_without_a_model() -> None:
    models = ("judge=http://h:1/v1", "user=m/x@https://h/v1")
    addresses = EnvironmentSettings(name="a", python=Path("p"), models=models).served_models
    assert addresses == {"judge": ("judge", "http://h:1/v1"), "user": ("m/x", "https://h/v1")}


def _task(digest: str, idx: int) -> dict[str, Any]:
    return {"digest": digest, "idx": idx}


def _digests(tasks: Any) -> list[str] | None:
    return None if tasks is None else [task["digest"] for task in tasks]


def test_duplicate_tasks_are_held_out_together() -> None:
    tasks = [_task(f"d{number % 10}", number) for number in range(20)]
    for seed in range(20):
        train, out, count, _ = _split({"train": tasks}, seed=seed, held_out=None, validate=True, name="a")
        assert not {*_digests(train)} & {*_digests(out)}
        assert (len(train), len(out or ()), count) == (18, 2, 2)


@pytest.mark.parametrize("validate", [True, False])
def test_task_in_both_splits_is_not_trained(validate: bool) -> None:
    """Without validation, too: a later evaluation has unseen tasks."""
    splits = {"train": [_task("a", 0), _task("b", 1)], "eval": [_task("b", 0)]}
    train, out, count, summary = _split(splits, seed=0, held_out=None, validate=validate, name="a")
    assert (_digests(train), _digests(out), count) == (["a"], ["b"] if validate else None, 0)
    assert "1 left out" in summary


def test_a_failed_episode_is_counted_by_the_type_of_its_error() -> None:
    assert reason_of("environment: TaskError: timed out or so") == "environment_TaskError"
    assert reason_of("timed out after 3 s") == "timeout"
    assert reason_of("the episode is not running") == "agent_lost"


def test_an_environments_run_is_evaluated_with_its_environment() -> None:
    began: dict[str, Any] = {"agent": "tiny", "env": "tiny", "env_python": "/envs/vf/bin/python"}
    began |= {"env_arguments": ["--env.taskset.size", "5"], "runners": "process:2", "trained_models": ["judge"]}
    began |= {"seed": 3}
    settings = evaluation._settings(command_config(EvalConfig, models=(Path("run"),)), began)
    environment = settings.environment
    assert (environment.name, settings.title, settings.loop.seed) == ("tiny", "tiny", 3)
    assert (environment.arguments, settings.runners) == (("--env.taskset.size", "5"), "process:2")
    assert (environment.python, settings.gateway.trained_models) == (Path("/envs/vf/bin/python"), ("judge",))
    settings = evaluation._settings(command_config(EvalConfig, models=(Path("run"),), env="second"), began)
    environment = settings.environment
    assert (environment.name, environment.arguments, settings.gateway.trained_models) == ("second", (), ())
    with pytest.raises(ConfigError, match="--agent"):
        command_config(EvalConfig, models=(Path("run"),), env="second", agent="my:Agent")


def _run_of(directory: Path, *, held_out: int) -> RunDir:
    run = RunDir(directory)
    write_file(run.config, dump({"env": "tiny", "seed": 3, "eval_interval": 10 if held_out else 0}))
    write_file(run.start, dump({"model": "m", "held_out": held_out}))
    return run


def test_evaluation_of_a_run_uses_its_held_out_tasks_for_any_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tasks = [_task(f"d{number}", number) for number in range(50)]

    def environment(config: TrainConfig, *, held_out: int | None = None) -> Any:
        seed = config.loop.seed
        train, out, count, _ = _split({"train": tasks}, seed=seed, held_out=held_out, validate=True, name="a")
        return SimpleNamespace(tasks=train, val_tasks=out, held_out=count)

    monkeypatch.setattr(wiring, "environment_of", environment)
    config = command_config(EvalConfig, models=(tmp_path,), seed=7)
    settings = evaluation._settings(config, {"env": "tiny", "env_python": "python", "seed": 3})
    _, evaluated = evaluation._agent_and_tasks(config, settings, _run_of(tmp_path, held_out=4))
    assert evaluated == _split({"train": tasks}, seed=3, held_out=4, validate=True, name="a")[1]


def test_evaluation_of_a_run_without_held_out_tasks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = SimpleNamespace(tasks=[_task("a", 0)], val_tasks=[_task("b", 1)], held_out=1)
    monkeypatch.setattr(wiring, "environment_of", lambda config, held_out=None: environment)
    config = command_config(EvalConfig, models=(tmp_path,))
    settings = evaluation._settings(config, {"env": "tiny", "env_python": "python", "seed": 3})
    with pytest.raises(ConfigError, match="held out no tasks"):
        evaluation._agent_and_tasks(config, settings, _run_of(tmp_path, held_out=0))
    environment.held_out = 0  # the taskset's own split, which is never trained on
    assert evaluation._agent_and_tasks(config, settings, _run_of(tmp_path, held_out=0))[1] == environment.val_tasks
