"""``--engine sglang``: a Python without SGLang is an error at once, and no server outlives its run. The servers here
stand in for SGLang's start, death and workers; whole runs with the real one are marked ``sglang``."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agl_slime.cli.settings import train_config
from agl_slime.engine.sglang_process import SGLANG_PYTHON, SGLangProcess
from agl_slime.errors import ConfigError, EngineError, EngineTimeoutError
from tests.harness.train_process import train
from tests.harness.waiting import becomes_true

# answers /health like a server that is ready, and has a worker that does not hear SIGTERM
SERVER = """
import http.server, json, os, subprocess, sys
subprocess.Popen(["sh", "-c", "trap '' TERM; while true; do sleep 1; done", sys.argv[0]])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([sys.argv, dict(os.environ)]).encode())
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def a_python(directory: Path, launch: str, *, gpu: bool = False) -> str:
    """A stand-in for a Python with SGLang: it answers ``-c``, the question for a GPU, and runs ``launch`` for
    ``-m sglang.launch_server``."""
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nif [ "$1" = "-c" ]; then echo {gpu}; exit 0; fi\n{launch}\n')
    python.chmod(0o755)
    return str(python)


def serving(directory: Path, *, gpu: bool = False) -> str:
    (directory / "server.py").write_text(SERVER)
    return a_python(directory, f'exec {sys.executable} {directory}/server.py "$@"', gpu=gpu)


def processes_of(directory: Path, within_s: float = 0.0) -> list[psutil.Process]:
    """Processes of the test with this directory that still run after ``within_s`` seconds."""

    def running() -> list[psutil.Process]:
        processes = [process for process in psutil.process_iter(["cmdline"]) if process.pid != os.getpid()]
        return [each for each in processes if any(str(directory) in word for word in each.info["cmdline"] or ())]

    return [] if becomes_true(lambda: not running(), within_s) else running()


@pytest.fixture(autouse=True)
def nothing_outlives_a_test_that_fails(tmp_path: Path) -> Iterator[None]:
    yield
    for process in processes_of(tmp_path):
        process.kill()


@pytest.mark.parametrize("variable", [None, "/nowhere/bin/python", sys.executable])
def test_python_without_sglang_is_refused_before_any_start(variable, tmp_path, monkeypatch):
    monkeypatch.delenv(SGLANG_PYTHON, raising=False)
    if variable is not None:
        monkeypatch.setenv(SGLANG_PYTHON, variable)
    with pytest.raises(ConfigError) as caught:
        train_config(engine="sglang").check_files()
    sentence = str(caught.value)
    named = f"{SGLANG_PYTHON} {variable}: " if variable else f"--engine sglang: {SGLANG_PYTHON} must name "
    assert sentence.startswith(named)
    assert "`bash scripts/sglang_cpu.sh DIR` makes one" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("flags", [("--max-running-requests", "8"), ("--enable-deterministic-inference",)])
def test_it_is_served_until_it_is_stopped_and_its_workers_end_with_it(flags, gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/of/this/environment", *sys.path]))
    engine = SGLangProcess(tmp_path, python=serving(tmp_path, gpu=gpu), random_seed=7, flags=flags)
    with engine:
        with urllib.request.urlopen(engine.url, timeout=10) as answer:
            command, environment = json.loads(answer.read())
        assert engine.alive
        assert engine.summary == f"SGLang serves {tmp_path} on {'a GPU' if gpu else 'the CPU'}"
        assert len(processes_of(tmp_path)) == 3  # the supervisor, the server and its worker
    assert processes_of(tmp_path, 1.0) == []
    assert "/of/this/environment" not in environment.get("PYTHONPATH", "")
    assert ("--device" in command, "sglang_cpu" in environment.get("PYTHONPATH", "")) == (not gpu, not gpu)
    assert [word for flag, word in itertools.pairwise(command) if flag == "--random-seed"][-1] == "7"
    seeded = len(flags) == 1 and not gpu
    end = command[: -6 if seeded else None]
    assert end[-len(flags) :] == [*flags]  # the last word is theirs
    assert command[len(end) : len(end) + 2] == ["--attention-backend", "triton"] * seeded  # no other has seeds
    assert ("TRITON_INTERPRET" in environment) == seeded


@pytest.mark.parametrize("start", ["ready", "before"])
def test_killed_server_is_named_by_signal_and_memory(start: str, tmp_path: Path) -> None:
    killed = "killed by signal 9, most often for memory; last output: "
    if start == "before":
        with pytest.raises(EngineError, match=f"SGLang for .* has ended: {killed}"):
            SGLangProcess(tmp_path, python=a_python(tmp_path, "kill -9 $$")).start()
        return
    with SGLangProcess(tmp_path, python=serving(tmp_path)) as engine:
        (server,) = [one for one in processes_of(tmp_path) if "--port" in one.info["cmdline"]]
        server.kill()
        assert engine.wait(20) == 137
        assert engine.ending().startswith(killed)


def test_sglang_that_is_never_ready_is_killed(tmp_path: Path) -> None:
    python = a_python(tmp_path, "trap '' TERM; while true; do sleep 1; done")
    engine = SGLangProcess(tmp_path, python=python, log=tmp_path / "sglang.log", start_timeout_s=0.7)
    with pytest.raises(EngineTimeoutError, match=r"^SGLang for .* was not ready within 0\.7 s"):
        engine.start()
    assert processes_of(tmp_path, 1.0) == []


def test_server_whose_starter_died_during_the_start_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agl_slime.engine.sglang_process", "--python", serving(tmp_path, gpu=True)]
    command += ["--model-path", str(tmp_path), "--random-seed", "0", "--parent-pid", str(os.getpid())]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
    assert process.stdout is not None
    process.stdout.close()  # as of a run that is killed just before the server answers
    try:
        process.wait(120)
        assert processes_of(tmp_path, 20.0) == []
        assert "BrokenPipeError" in (tmp_path / "log").read_text()
    finally:
        process.kill()


@pytest.mark.parametrize("killed", ["starter", "supervisor"])
def test_kill_9_leaves_no_server(killed: str, tmp_path: Path) -> None:
    program = (
        "from agl_slime.engine.sglang_process import *\n"
        "here = Path(input())\n"
        "engine = SGLangProcess(here, python=str(here / 'python'), log=here / 'log')\n"
        "print(engine.start().pid, flush=True)\n"
        "input()\n"
        "assert not engine.alive\n"
        "engine.stop()\n"
        "input()\n"
    )
    serving(tmp_path)
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdin is not None
            parent.stdin.write(f"{tmp_path}\n")
            parent.stdin.flush()
            supervisor = psutil.Process(int(parent.stdout.readline()))
            if killed == "supervisor":
                supervisor.kill()
                parent.stdin.write("\n")
                parent.stdin.flush()
            else:
                parent.send_signal(signal.SIGKILL)
            assert processes_of(tmp_path, 8.0) == []
        finally:
            parent.kill()


@pytest.mark.sglang
@pytest.mark.parametrize("cause", ["the last iteration", "Ctrl-C", "kill -9", "the server dies"])
def test_a_real_sglang_ends_with_its_run(cause: str, policy_dir: Path, tmp_path: Path) -> None:
    if not os.environ.get(SGLANG_PYTHON):
        pytest.skip(f"{SGLANG_PYTHON} does not name a Python with SGLang; scripts/sglang_cpu.sh sets one up")
    iterations = 3 if cause == "the last iteration" else 1000
    flags = ("--engine", "sglang", "--model-path", policy_dir, "--output-dir", tmp_path)
    with train(*flags, "--num-iterations", str(iterations), "--eval-interval", "0") as run:
        run.until(f"iter 1/{iterations}", 240.0)
        children = run.children()
        assert any("sglang" in child.name() for child in children)
        if cause == "the server dies":
            next(child for child in children if child.name() == "sglang::scheduler").kill()
        elif cause != "the last iteration":
            run.process.send_signal(signal.SIGINT if cause == "Ctrl-C" else signal.SIGKILL)
        code, _ = run.end(120.0)
        assert code == {"the last iteration": 0, "Ctrl-C": 130, "kill -9": -9, "the server dies": 1}[cause], run.text
        _, alive = psutil.wait_procs(children, timeout=8.0)
        assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    if cause == "the server dies":
        assert re.search("error: SGLang has died: .*; last output: ", run.text)
    elif cause == "the last iteration":
        assert [line for line in run.lines if line.startswith("starting")] == ["starting SGLang ..."]
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [row["iteration"] for row in rows] == [1, 2, 3]
        # engine and trainer have the same weights after each sync
        assert all(row["train/logprob_diff_max"] < 1e-4 for row in rows)
        assert "sglang" in (tmp_path / "sglang.log").read_text().lower()
