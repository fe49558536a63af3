"""The recipes of ``examples/slime``: shells and YAML can read them, the page names each, and the agent in containers
works with any program that is called like docker."""

import asyncio
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import agentlightning as agl
import pytest
import yaml

from tests.harness.waiting import until

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "slime"
SCRIPTS = sorted([*RECIPES.glob("*.sh"), *RECIPES.glob("*.sbatch")])
ENGINE = """#!/bin/sh
if [ "$1" = kill ]; then echo "$2" >> {directory}/killed; exec kill "$(cat {directory}/pid)"; fi
echo "$@" >> {directory}/arguments
echo $$ > {directory}/pid
exec {python} {directory}/program.py
"""


def test_bash_and_shellcheck_read_the_recipes() -> None:
    assert SCRIPTS
    for script in SCRIPTS:
        assert script.stat().st_mode & 0o111, f"{script} is not executable"
        subprocess.run(["bash", "-n", str(script)], check=True)
    if checker := shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck"):
        subprocess.run([checker, *map(str, SCRIPTS)], check=True)


def test_options_of_slurm_are_directly_below_the_first_line() -> None:
    lines = (RECIPES / "run_agent.sbatch").read_text().splitlines()
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert options == [*range(1, len(options) + 1)] != [], "Slurm stops reading them at the first command"


def test_the_ray_job_has_four_nodes_that_are_alike() -> None:
    job = yaml.safe_load((RECIPES / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert 1 + workers["replicas"] == 4
    assert head["template"] == workers["template"]
    pod = head["template"]["spec"]
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    gpus = pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert [group["rayStartParams"]["num-gpus"] for group in (head, workers)] == [str(gpus)] * 2


def test_the_page_names_every_recipe() -> None:
    page = (ROOT / "docs" / "slime-8-gpus.md").read_text()
    files = [path.name for path in RECIPES.iterdir() if path.is_file() and path.name != "trainer_fit.py"]
    assert len(files) >= 9
    assert [name for name in files if not re.search(rf"\b{re.escape(name)}\b", page)] == []


@pytest.fixture
def containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the agent, with a program in docker's place that runs program.py."""
    engine = tmp_path / "engine"
    engine.write_text(ENGINE.format(directory=tmp_path, python=sys.executable))
    engine.chmod(0o755)
    monkeypatch.setenv("AGENT_ENGINE", str(engine))
    monkeypatch.setenv("AGENT_IMAGE", "image")
    monkeypatch.syspath_prepend(RECIPES)
    monkeypatch.delitem(sys.modules, "container_agent", raising=False)
    return importlib.import_module("container_agent")


def rollout() -> agl.Rollout:
    return agl.Rollout(rollout_id="ro-1", input={}, start_time=0.0)


LLM = agl.LLM(endpoint="http://127.0.0.1:9/rollout/ro-1/v1", model="policy", api_key="the-secret")
ECHO = """
import json, os, sys
task = json.loads(sys.stdin.readline())
print("thinking")
print(task["question"], os.environ["OPENAI_BASE_URL"], os.environ["ANTHROPIC_BASE_URL"], os.environ["OPENAI_API_KEY"])
"""


async def test_the_program_finds_the_gateway_and_its_last_line_counts(containers: Any, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ECHO)
    expected = "2? http://127.0.0.1:9/rollout/ro-1/v1 http://127.0.0.1:9/rollout/ro-1 the-secret"
    for label, reward in ((expected, 1.0), ("another", 0.0)):
        task = {"question": "2?", "label": label}
        assert await containers.answer.rollout_async(task, {"main_llm": LLM}, rollout()) == reward
    (tmp_path / "program.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="ended with 3"):
        await containers.answer.rollout_async({"label": ""}, {"main_llm": LLM}, rollout())
    arguments = (tmp_path / "arguments").read_text()
    assert "--name agl-ro-1 " in arguments
    assert "the-secret" not in arguments  # every user of the machine reads command lines


async def test_a_container_is_killed_at_the_time_limit(containers: Any, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"open({str(tmp_path / 'up')!r}, 'w').close()\nimport time; time.sleep(600)")
    running = asyncio.ensure_future(containers.answer.rollout_async({}, {"main_llm": LLM}, rollout()))
    await until((tmp_path / "up").exists)  # the program runs
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (tmp_path / "killed").read_text() == "agl-ro-1\n"
