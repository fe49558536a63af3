"""Settings of --runners controller, accepted and refused."""

import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from agl_slime.cli.settings import train_config
from agl_slime.errors import ConfigError
from agl_slime.gateway.agl1.settings import ControllerSettings
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.controller import ControllerPool
from agl_slime.runner.controller_process import check_python
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.threads import run_blocking
from tests.harness.agl1 import serving_api

_FITS: dict[str, Any] = {"runners": "controller", "tasks": Path("tasks.jsonl"), "agent": "sums:Sums"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_KEY", raising=False)
    monkeypatch.delenv("AGL_CONTROLLER_PYTHON", raising=False)


def test_flags_and_environment_become_controller_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = train_config(**_FITS, env_map=("QUESTION=input.question", "ALL=input"))
    settings = config.controller.complete(agent=config.agent)
    assert (settings.agent, settings.python) == ("sums:Sums", None)
    assert settings.env_paths == {"QUESTION": "input.question", "ALL": "input"}
    monkeypatch.setenv("AGL_KEY", "secret")
    monkeypatch.setenv("AGL_CONTROLLER_PYTHON", "/opt/agl1/bin/python")
    settings = train_config(**_FITS, controller_host="0.0.0.0").controller.complete(agent="sums:Sums")
    assert (settings.key, settings.python) == ("secret", Path("/opt/agl1/bin/python"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tasks": None}, "--tasks"),
        ({"max_attempts": 2}, "--max-attempts 2"),
        ({"multi_turn_scheduler": "x"}, "--multi-turn-scheduler"),
        ({"env_map": ("QUESTION",)}, "env_map QUESTION"),
        ({"controller_host": "0.0.0.0"}, "AGL_KEY"),
        ({"controller_port": 70_000}, "^--controller-port must be from 0"),
        ({"agent": "sums.py:Sums", "job_template": Path("job.yaml"), "controller_python": Path("p")}, "Kubernetes"),
        ({"runners": "inproc", "env_map": ("A=input",)}, "--env-map with --runners inproc"),
        ({"runners": "controller:2"}, "controller"),
    ],
)
def test_unfitting_settings_are_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        train_config(**{**_FITS, **changes})


def test_missing_job_template_is_refused_before_any_start(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "2+2?"}\n' * 4)
    config = train_config(runners="controller", tasks=tasks, job_template=tmp_path / "job.yaml")
    with pytest.raises(ConfigError, match=r"--job-template .*there is no such file"):
        config.check_files()


def test_without_a_key_this_machine_is_served_and_no_other() -> None:
    with serving_api("four", key=None) as api:
        assert api.http.get("/api/rollouts?state_in=queuing").status_code == 200
    with pytest.raises(ConfigError, match="AGL_KEY"):
        ControllerSettings(agent="a:B", host="0.0.0.0")


def test_a_python_without_a_controller_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not run as a Python"):
        check_python(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"its agentlightning is 0\.3\.\d+, which has no controller"):
        check_python(Path(sys.executable))


def test_a_job_template_is_in_the_config_that_controllers_read(tmp_path: Path) -> None:
    template, store = tmp_path / "job.yaml", BridgeStore()
    template.write_text("kind: Job\n")
    plan = RunnerPlan(kind="controller", controller=ControllerSettings(job_template=template))
    with ControllerPool(plan=plan, store=store) as pool:
        rollout = run_blocking(store.enqueue_rollout(input={}, mode="train")).rollout_id
        config = httpx.get(f"{pool.url}/api/rollouts/{rollout}").json()["rollout"]["config"]
        assert config["k8s"]["job_template"] == "kind: Job\n"
        assert "runner_type=k8s" in pool.command
