"""The recipes of ``examples/slime`` and slime's installation: shells and YAML read them, and the page names each."""

import asyncio
import importlib
import os
import re
import runpy
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
SCRIPTS = sorted([*(ROOT / "examples").rglob("*.sh"), *RECIPES.glob("*.sbatch")])
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


SGLANG = {"constraints-slime.txt": ("0.5.15.post1", "2.6.1"), "constraints-slime-0.5.23.txt": ("0.5.23", "2.8.0")}

# Stands for python3 -m pip: notes its arguments, and lists the files before, after, … in turn.
PIP = """#!/bin/sh
shift 2
cd "{directory}"
if [ "$1" = list ]; then cat list && [ -f next ] && mv next list; exit 0; fi
echo "$@" >> calls
"""


def test_the_requirements_are_up_to_date():
    made = runpy.run_path(str(ROOT / "scripts" / "slime_requirements.py"))
    expected = "\n".join([made["HEADER"], *made["lines"]()]) + "\n"
    assert (ROOT / "requirements-slime.txt").read_text() == expected, "run SLIME_DIR=… scripts/pins.sh slime"
    assert not {"litellm", "agentlightning", "agentops"} & {*expected.split()}


def test_lists_of_pins_have_sglangs_versions():
    for file, (version, openai) in SGLANG.items():
        lines = (ROOT / file).read_text().splitlines()
        assert {f"sglang=={version}", f"openai=={openai}"} <= {*lines}
        assert [line for line in lines if line.startswith("mcp==1.")]
        assert not [line for line in lines if line.startswith(("litellm", "agl-slime", "agentlightning"))]
        assert file in (ROOT / ".ci" / "nightly").read_text()
        assert lines[0].startswith("# For Python 3.12 only.")  # as pip compile resolves in pins.sh


@pytest.mark.parametrize("openai", ["2.6.1", "3.57.0", None])
def test_a_package_that_moved_ends_the_installation(openai: str | None, tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(PIP.format(directory=tmp_path))
    python.chmod(0o755)
    (tmp_path / "list").write_text("agl-slime==0.0.9\nopenai==2.6.1\nrich==15.0.0\n")
    line = f"openai=={openai}\n" if openai else ""
    (tmp_path / "next").write_text(f"agl-slime==0.1.0\nagentops==0.4.21\n{line}rich==15.0.0\n")
    command, environment = ["bash", str(ROOT / "scripts/install_in_slime.sh"), "--quiet"], {"PYTHON": str(python)}
    finished = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    needs, packages = (tmp_path / "calls").read_text().splitlines()
    assert re.fullmatch("install --quiet -c .* -r requirements-slime.txt", needs)
    assert packages == "install --quiet --no-deps agentlightning==0.3.0 agentops==0.4.21 ."
    error = "" if openai == "2.6.1" else "No longer at its version: openai==2.6.1\n"
    assert (finished.returncode, finished.stderr) == (1 if error else 0, error)
