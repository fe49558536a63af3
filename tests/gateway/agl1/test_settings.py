"""What --runners controller takes and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agl_slime.cli.settings import train_config
from agl_slime.errors import ConfigError

_FITS: dict[str, Any] = {"runners": "controller", "tasks": Path("tasks.jsonl"), "agent": "sums:Sums"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_KEY", raising=False)
    monkeypatch.delenv("AGL_CONTROLLER_PYTHON", raising=False)


def test_flags_become_controller_settings() -> None:
    config = train_config(**_FITS, env_map=("QUESTION=input.question", "ALL=input"))
    settings = config.controller.complete(agent=config.agent)
    assert (settings.agent, settings.python) == ("sums:Sums", None)
    assert settings.env_paths == {"QUESTION": "input.question", "ALL": "input"}


def test_the_environment_names_key_and_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_KEY", "secret")
    monkeypatch.setenv("AGL_CONTROLLER_PYTHON", "/opt/agl1/bin/python")
    settings = train_config(**_FITS, controller_host="0.0.0.0").controller.complete(agent="sums:Sums")
    assert (settings.key, settings.python) == ("secret", Path("/opt/agl1/bin/python"))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"tasks": None}, "--tasks"),
        ({"max_attempts": 2}, "--max-attempts 2"),
        ({"multi_turn_scheduler": "x"}, "--multi-turn-scheduler"),
        ({"env_map": ("QUESTION",)}, "env_map QUESTION"),
        ({"env_map": ("a-b=input",)}, "env_map a-b"),
        ({"controller_host": "0.0.0.0"}, "AGL_KEY"),
        ({"controller_port": 70_000}, "^--controller-port must be from 0"),
        ({"agent": "sums.py:Sums", "job_template": Path("job.yaml"), "controller_python": Path("p")}, "Kubernetes"),
        ({"runners": "inproc", "env_map": ("A=input",)}, "--env-map with --runners inproc"),
        ({"runners": "process:2", "controller_port": 80}, "--controller-port with --runners process:2"),
        ({"runners": "controller:2"}, "controller"),
    ],
)
def test_unfitting_settings_are_refused_by_name(more: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        train_config(**{**_FITS, **more})


def test_missing_job_template_is_refused_before_any_start(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "2+2?"}\n' * 4)
    config = train_config(runners="controller", tasks=tasks, job_template=tmp_path / "job.yaml")
    with pytest.raises(ConfigError, match=r"--job-template .*there is no such file"):
        config.check_files()
