"""Ctrl-C, SIGTERM and SIGKILL on a real ``python train.py``: it ends within seconds, leaves no process and keeps the
written files.

Starting one takes ten seconds, most of them imports, so those tests are ``slow``; Ctrl-C in an iteration is sent to the
test's own process, and each signal in each phase by ``tests.programs.end_train``.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from agl_slime.cli.main import main
from agl_slime.report.files import RunDir, read_state
from tests.harness.loop import threads_of_ours
from tests.harness.train_process import children as children_of
from tests.harness.train_process import train, watches
from tests.harness.waiting import becomes_true

WITHIN_S = 5.0  # of Ctrl-C, as the documentation promises
LONG = ("--num-iterations", "1000", "--eval-interval", "0")


def gone(processes: list[psutil.Process], within_s: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return not [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def check_metrics(directory: Path, at_least: int = 1) -> None:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= at_least


def check_interrupted(directory: Path, text: str) -> None:
    """The run's own report of the interrupt, and one end for each rollout."""
    assert "stopped: interrupted" in text
    check_metrics(directory, at_least=2)
    assert read_state(RunDir(directory)).word == "stopped"
    summary = json.loads((directory / "summary.json").read_text())
    ledger = summary["ledger"]
    assert summary["reason"] == "interrupted"
    assert ledger["open"] == 0
    assert ledger["opened"] == sum(count for name, count in ledger.items() if name != "opened")


@pytest.mark.usefixtures("logging_unchanged")
def test_ctrl_c_in_this_process(policy_dir, tmp_path, monkeypatch, capsys):
    """Between two rewards of the third iteration, with the engine in its own process as ever."""
    pytest.importorskip("torch", reason='training needs torch: pip install "agl-slime[local]"')
    from agl_slime.cli.demo.agent import LookupAgent

    rewards = itertools.count()
    interrupted: list[float] = []
    engines: list[psutil.Process] = []
    old_children = psutil.Process().children()
    reward = LookupAgent.compute_reward

    def compute_reward(self: LookupAgent, task: dict[str, Any], response: str) -> float:
        if next(rewards) == 2 * 64 + 20:
            children = psutil.Process().children()
            engines.extend(child for child in children if child not in old_children and not watches(child))
            interrupted.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
        return reward(self, task, response)

    monkeypatch.setattr(LookupAgent, "compute_reward", compute_reward)
    flags = ("--model-path", policy_dir, "--output-dir", tmp_path / "out", "--eval-interval", 0, "--view", "lines")
    code = main(["train", *map(str, flags)])
    ended = time.monotonic()
    output = capsys.readouterr()
    assert (code, "Traceback" in output.out + output.err) == (130, False), output
    assert ended - interrupted[0] < WITHIN_S, output
    [engine] = engines
    assert gone([engine], 1.0)
    assert output.err == "Interrupted; written files are kept.\n"
    assert f"to go on: agl-slime train --resume --output-dir {tmp_path / 'out'}" in output.out.splitlines()
    assert threads_of_ours() == []
    check_interrupted(tmp_path / "out", output.out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "imports_s"), [(signal.SIGINT, None), (signal.SIGTERM, None), (signal.SIGINT, 0.5), (signal.SIGINT, 2.0)]
)
def test_a_signal_while_it_imports_or_starts(number: signal.Signals, imports_s: float | None, tmp_path: Path) -> None:
    children: list[psutil.Process] = []
    with train("--output-dir", tmp_path / "out") as run:
        if imports_s is not None:
            time.sleep(imports_s)  # it prints nothing yet that could be waited for
        else:
            run.until("starting the embedded engine")
            assert becomes_true(run.children, 10)
            children = run.children()
        run.process.send_signal(number)
        code, took = run.end()
        assert (code, "Traceback" in run.text) == (130, False), run.text
        assert took < WITHIN_S, run.text
        assert gone(children, 1.0)
    assert imports_s is not None or run.lines[-1] == "Interrupted; written files are kept."


@pytest.mark.parametrize("program", ["agl_slime.__main__", "train"])
def test_interrupt_during_the_first_imports_ends_without_a_traceback(program: str) -> None:
    code = (
        "import os, runpy, signal, sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        name == 'rich' and os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        f"runpy.run_module({program!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "train"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["run", "engine"])
def test_kill_9_of_the_run_or_its_engine_ends_both(victim: str, policy_dir: Path, tmp_path: Path) -> None:
    with train("--model-path", policy_dir, "--output-dir", tmp_path / "out", *LONG) as run:
        run.until("iter 1/1000")
        [engine] = run.children()
        (run.process if victim == "run" else engine).kill()
        code, took = run.end()
        assert (code, "Traceback" in run.text) == (-signal.SIGKILL if victim == "run" else 1, False), run.text
        assert took < 20
        assert gone([engine], 5.0)
    check_metrics(tmp_path / "out")
    if victim == "run":
        assert read_state(RunDir(tmp_path / "out")).word == "killed"
    else:
        assert run.lines[-1].startswith("error: ")
        assert "embedded engine has died" in run.lines[-1]


BACKTRACKING = """
import itertools, re
from pathlib import Path
from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.runner.base import RunnerSettings

RunnerSettings.__init__.__kwdefaults__["stuck_after_s"] = 4.0  # the least limit
rewards = itertools.count()

class Agent(LookupAgent):
    def compute_reward(self, task, response):
        if next(rewards) >= 70 and not Path(__file__).with_name("repaired").exists():
            re.match(r"(a+)+$", "a" * 40 + "b")
        return super().compute_reward(task, response)
"""


@pytest.mark.slow
def test_a_reward_that_blocks_the_interpreter_ends_a_run_that_can_go_on(policy_dir: Path, tmp_path: Path) -> None:
    agent, out = tmp_path / "agent.py", tmp_path / "out"
    agent.write_text(BACKTRACKING)
    flags = ["--eval-interval", "0", "--save-interval", "1", "--num-iterations", "3", "--rollout-timeout", "6"]
    with train("--model-path", policy_dir, "--output-dir", out, "--agent", f"{agent}:Agent", *flags) as run:
        run.until("No Python code runs now: compute_reward() of rollout ro-")
        everyone = children_of(run.process)
        assert len(run.children()) == 1
        assert len(everyone) == 2
        assert run.end()[0] == -signal.SIGKILL
        assert gone(everyone, 10.0)
    assert run.lines[-1].startswith("error: killed after 6 s: compute_reward() of rollout ro-")
    assert f" at {agent}:13 holds the interpreter lock; " in run.lines[-1]
    assert run.text.count("holds the interpreter lock") == 2
    assert read_state(RunDir(out)).word == "killed"
    (tmp_path / "repaired").touch()
    with train("--resume", "--output-dir", out) as run:
        assert run.end(within_s=120.0)[0] == 0, run.text
    check_metrics(out, at_least=3)
