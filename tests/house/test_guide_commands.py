"""Commands of README and guides run in a directory like a clone, with tiny settings added at the end; a command that
cannot run on a laptop without network is listed with the reason."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from agl_slime.support.agl_types import LLM
from agl_slime.tools.record.recorder import RecordGateway
from tests.house.test_docs import PAGES, ROOT, commands

ELSEWHERE = {
    r"smollm2": "fetches 93 MB from the package registry: tests marked real_model",
    r"--trainer slime|launch_server|HOST:": "needs servers of slime, SGLang or a store on other hosts",
    r"--engine sglang": "needs a real SGLang: tests marked sglang",
    r"--runners controller": "needs Agent Lightning 1.0: tests marked controller",
    r"--runners ray": "needs Ray and its hosts: tests marked ray",
    r"--env ": "needs a Python with verifiers: tests marked environments",
    r"--local\.device cuda": "needs a GPU; never run",
    r"\[--token": "needs the address of a store; tests/gateway/test_store.py starts it",
    r"my\.agents:": "a module of the reader's; test_multi_turn_schedulers has such a scheduler",
    r"lookup_openai|my_agent.py:answer": "needs OpenAI's client: tests marked clients",
    r"lora-rank": "needs peft: tests/train/local/test_lora.py",
    r"--to parquet": "needs pyarrow: test_export",
    r"rehearse": "needs slime's sources: tests/tools/rehearse/test_slime.py",
    r"--teacher-url": "needs servers of teachers: test_teacher",
    r"--without ro-": "names a rollout of the page's run: tests/tools/forensics/test_replay.py",
    r"agl-slime onset": "needs a run of eight iterations: test_onset",
    r"agl-slime record": "needs a running SGLang: tests/tools/record/test_record.py",
    r"replay DUMP": "reads what slime has written: tests/tools/forensics/test_replay_slime.py",
    r"autopsy DUMP": "reads what slime has written: test_autopsy",
    r"view DIR --follow --tokenizer|report DIR$": "reads what slime has written: tests/tools/slime_dumps",
}
"""A pattern of commands, and why they do not run here."""

SERVES = re.compile(r"agl-slime (view|buffer)\b")  # until Ctrl-C
TINY = "--num-iterations 1 --rollout-batch-size 2 --n-samples-per-prompt 8 --eval-interval 0"
MY_AGENT = """
from agl_slime import SGLangLitAgent

class MyAgent(SGLangLitAgent):
    def make_task(self, rng) -> dict:
        return {"prompt": "kz?", "label": rng.choice("ab")}

    def compute_reward(self, task: dict, response: str) -> float:
        return 1.0 if response.strip() == task["label"] else 0.0
"""


def test_every_reason_not_to_run_a_command_has_a_command() -> None:
    written = [command for page in PAGES for command in commands(page)]
    assert [pattern for pattern in ELSEWHERE if not any(re.search(pattern, command) for command in written)] == []


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory, policy_dir: Path) -> Path:
    """A directory for the guides' commands: the clone's files, a finished run, a model, tasks."""
    place = tmp_path_factory.mktemp("clone")
    for name in ("agents", "examples", "train.py"):
        (place / name).symlink_to(ROOT / name)
    shutil.copytree(policy_dir, place / "MODEL")
    for name in ("my_agent.py", "agents.py"):
        (place / name).write_text(MY_AGENT)
    (place / "shop_agent.py").write_text(
        re.findall(r"```python\n(.*?)```", (ROOT / "docs/tiny-policy.md").read_text(), re.DOTALL)[0]
    )
    (place / "my.py").write_text("def reward(rollout):\n    return len(rollout['turns'])\n")
    tasks = [json.dumps({"prompt": f"{n}?", "label": "a"}) for n in range(20)]
    (place / "tasks.jsonl").write_text("\n".join(tasks))
    (place / "data").mkdir()
    (place / "data" / "dapo-math-17k.jsonl").write_text('{"prompt": "1 + 1?", "label": "2"}\n')
    made = f"python train.py --output-dir {place}/RUN --keep-rollouts all {TINY} --rollout-batch-size 8"
    done = run(made, place)
    assert done.returncode == 0, done.stderr
    for name in ("RUN_DIR", "RUN_A", "RUN_B"):
        shutil.copytree(place / "RUN", place / name)
    return place


@cache  # a command that stands on several pages runs once
def run(command: str, place: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    here = {"python": [sys.executable], "agl-slime": [sys.executable, "-m", "agl_slime"]}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TERM": "dumb"}
    with subprocess.Popen(
        [*here[words[0]], *words[1:]],
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output = ""
            if SERVES.match(command):
                assert process.stdout is not None
                for line in process.stdout:
                    output += line
                    if "http://" in line:
                        process.send_signal(signal.SIGINT)
                        break
            output += process.communicate(timeout=300)[0]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(words, process.returncode, output, output)


def as_run_here(command: str, *, engine: str, openai: str) -> str:
    """The command with this machine's addresses and paths, and tiny settings."""
    command = re.sub(r"\[(.*?)\]", r"\1", command)
    for theirs, ours in {
        "http://127.0.0.1:30000": engine,
        "https://host/v1": openai,
        "/path/to/model": "MODEL",
        "/data": "data",
        "--output-dir RUN": "--output-dir A_NEW_RUN",
        "--step 12": "--step 1",
    }.items():
        command = command.replace(theirs, ours)
    if command.startswith(("python train.py", "agl-slime train")):
        return f"{command} {TINY} --num-iterations {2 if '--resume' in command else 1}"
    if SERVES.match(command):
        return f"{command} --port 0"
    return f"{command} --n-tasks 2" if " eval " in command else command


@pytest.mark.slow
def test_the_commands_of_every_page_run_as_they_stand(clone: Path, embedded_engine: str, tmp_path: Path) -> None:
    failed = []
    llm = LLM(endpoint=embedded_engine, model=str(clone / "MODEL"), sampling_parameters={})
    with RecordGateway(directory=tmp_path, llm=llm) as gateway:
        addresses = {"engine": embedded_engine, "openai": f"{gateway.rollouts_url}/all/v1"}
        for command in (command for page in PAGES for command in commands(page)):
            if not any(re.search(pattern, command) for pattern in ELSEWHERE):
                done = run(as_run_here(command, **addresses), clone)
                if done.returncode not in ((0, 130) if SERVES.match(command) else (0,)):
                    failed.append(f"{command}: exit code {done.returncode}\n{done.stdout[-2000:]}")
    assert not failed, "\n\n".join(failed)
