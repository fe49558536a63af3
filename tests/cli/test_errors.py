"""The command line's answer to flags and files that cannot be used: one sentence that names them, never a
traceback."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agl_slime.cli.main import COMMANDS, main
from agl_slime.support.net import free_port
from agl_slime.types import HAS_SLIME
from tests.harness.engine_faults import Status
from tests.harness.loop_thread import in_thread
from tests.harness.packages import install
from tests.harness.scripted_engine import ScriptedEngine

AGENTS = """
from agl_slime import SGLangLitAgent

class Silent(SGLangLitAgent):
    def compute_reward(self, task, response):
        return 1.0

class Exits(Silent):
    def __init__(self):
        raise SystemExit(0)
"""
Train = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging_unchanged: None) -> Path:
    """The working directory, with agents, tasks and a directory without a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as without the extra
    (tmp_path / "cli_agents.py").write_text(AGENTS)
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "url.toml").write_text('sglang_url = ["http://me:SECRET@H"]')
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "hi"}\n')
    return tmp_path


@pytest.fixture
def train(capsys: pytest.CaptureFixture[str]) -> Train:
    """Runs ``train`` with flags. The exit code and standard error, without the frame that tyro draws; standard output
    has no more than the line of the start."""

    def run(*flags: str) -> tuple[int, str]:
        try:
            code = main(["train", *flags])
        except SystemExit as end:  # how tyro ends
            code = int(end.code or 0)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err + captured.out
        assert captured.out.removeprefix("loading ...\n") == ""
        return code, " ".join(re.sub(r"[╭╮╰╯│─]", " ", captured.err).split())

    return run


SILENT = "--agent cli_agents:Silent"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--num-iterations 0", "--num-iterations must be at least 1, got 0"),
        ("--local.lr -1", "lr must be above 0, got -1.0"),
        ("--trainer tpu", "'tpu'"),
        ("--trainer \x1b[2J", "'\\x1b[2J'"),
        (
            "--sglang-kye SECRET",
            "error: there is no flag --sglang-kye; the nearest is --sglang-url, and train.py",
        ),
        (
            "--local.lrr=SECRET",
            "there is no flag --local.lrr; the nearest is --local.lr, and train.py --help",
        ),
        ("--lr=SECRET", "error: --lr: there is no such flag; give --local.lr"),
        (
            "--seed 1 http://me:SECRET@H",
            "error: http://***@H is neither a flag nor the value of one; see",
        ),
        ("--config missing.toml", "error: --config missing.toml: No such file or directory"),
        ("--agent cli_nowhere:Agent", "there is no module 'cli_nowhere' here; run from the directory that contains it"),
        ("--agent cli_agents:X", "error: --agent cli_agents:X: cli_agents has no class or agent 'X'; it has "),
        ("--agent of:x:.py:Agent", "error: --agent of:x:.py:Agent: there is no file of:x:.py"),  # without emoji
        ("--agent cli_agents:Exits", "Exits() failed"),
        (SILENT, "error: there are no tasks: give --tasks FILE.jsonl, or define make_task(rng) on cli_agents:Silent"),
        (f"{SILENT} --tasks tasks.jsonl", "of 1 none can be held out for validations; give --eval-tasks, or"),
        (f"{SILENT} --tasks tasks.jsonl --eval-interval 0", "--model-path is needed"),
        ("--tasks missing.jsonl", "error: --tasks missing.jsonl: cannot be read (No such file or directory)"),
        ("--tasks deep.jsonl", "error: --tasks deep.jsonl, line 1: not JSON"),
        ("--tasks x.parquet", 'error: --tasks x.parquet: pip install "agl-slime[parquet]" reads parquet files'),
        ("--model-path nowhere", "error: --model-path nowhere: there is no Hugging Face checkpoint (no config.json)"),
        ("--output-dir a\udcff/b", "/a\\udcff/b has bytes that are not UTF-8; choose another path"),
        ("--output-dir exits.py", "output directory exits.py is a file"),
        (
            "--sglang-url http://H/?key=SECRET",
            "the SGLang URL must look like http://127.0.0.1:30000, got 'http://H/?***'",
        ),
        ("--sglang-url H:1?key=SECRET#SECRET", "got 'H:1?***'"),
        ("--eval-sglang-url http://me:SECRET@H/#SECRET --max-staleness 1", "got 'http://***@H/#***'"),
        ("--teacher-url http://H/?key=SECRET", "got 'http://H/?***'"),
        ("--config url.toml", "error: --config url.toml: sglang_url must be a valid string, got ['http://***@H"),
        (
            "--model-path http://me:SEC/RET@H/m",
            "error: --model-path http:/***@H/m: there is no Hugging Face checkpoint",
        ),
        ("--model-path http://H/m?key=SECRET", "error: --model-path http:/H/m?***"),
        ("--tasks https://me:SECRET@H/t.jsonl", "error: --tasks https:/***@H/t.jsonl: cannot be read"),
        ("--agent http://me:SECRET@H/a.py:A", "error: --agent http://***@H/a.py:A: there is no file"),
        ("--sglang-url localhost", "the SGLang URL must look like http://127.0.0.1:30000, got 'localhost'"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named_with_its_value(flags: str, sentence: str, train: Train) -> None:
    code, text = train(*flags.split())
    assert code == 2
    assert sentence in text
    assert not re.search("SECRET|SEC/RET", text)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_of_any_command_is_named_without_its_value(command, capsys):
    with contextlib.suppress(SystemExit):  # of a positional argument that is missing
        assert main([command, "--kye", "SECRET"]) == 2
    text = capsys.readouterr().err
    assert re.search("error: there is no flag --kye; the nearest is --|Missing|Required|0 models are named", text)
    assert "SECRET" not in text


ENGINE = "--model-path . --sglang-url http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("buffer --port PORT", ".*PORT"),
        (f"record {ENGINE} --gateway.port PORT", ".*PORT"),
        (f"gateway {ENGINE} --store-url http://127.0.0.1:1 --gateway.port PORT", ".*PORT"),
        ("record --model-path . --sglang-url http://H/?key=SECRET", r"the SGLang URL must .*, got 'http://H/\?\*\*\*'"),
        (
            f"gateway {ENGINE} --store-url http://me:SECRET@H",
            r"http://\*\*\*@H has a user or password, and there",
        ),
    ],
)
def test_a_servers_port_or_address_that_cannot_be_used_is_one_sentence(command, sentence, monkeypatch, capsys):
    Path("config.json").write_text("{}")
    monkeypatch.setenv("AGL_SLIME_STORE_TOKEN", "SECRET")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(command.replace("PORT", port).split()) in (1, 2)
    assert re.fullmatch(f"error: {sentence.replace('PORT', port)}.*\n", text := capsys.readouterr().err), text
    assert "SECRET" not in text


def test_an_sglang_that_is_away_or_loads_or_has_a_remote_model_is_an_error(train: Train) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    code, text = train("--sglang-url", url)
    assert (code, text.startswith(f"error: no SGLang at {url}: "), "check the URL" in text) == (1, True, True)
    with in_thread(ScriptedEngine(model_path="Qwen/Qwen3-4B")) as engine:
        code, text = train("--sglang-url", engine.url)
        assert (code, "--model-path is needed" in text, "'Qwen/Qwen3-4B'" in text) == (2, True, True)
        engine.always("/model_info", Status(503, "loading the model"))
        code, text = train("--sglang-url", engine.url)
        assert (code, "answers but does not serve" in text, "loading the model" in text) == (1, True, True)


@pytest.mark.skipif(HAS_SLIME, reason="slime is installed here")
def test_slime_that_is_not_installed_is_one_sentence_with_the_fix(train: Train) -> None:
    code, text = train("--rollout-num-gpus", "2", "--sglang-url", "http://127.0.0.1:1", "--", "--lr", "1e-6")
    assert (code, text.splitlines()[0][:21]) == (2, "The trainer is slime:")
    assert "slime is not installed" in text
    assert "git clone https://github.com/THUDM/slime" in text
    assert "--trainer local" in text
    code, text = train("--", "--lr", "1e-6")
    assert (code, "--trainer slime" in text) == (2, True)


def test_the_commands_are_listed_and_an_unknown_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "train" in capsys.readouterr().out
    assert main(["trian"]) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in ("'trian'", *COMMANDS))


@pytest.mark.parametrize("arguments", [["train", "--help"], ["audit", "--help"], ["record", "--help"], []])
def test_closed_stdout_ends_the_command_without_a_traceback(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "agl_slime", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    shell = ["sh", "-c", '"$@" >&-; echo $? >&2; "$@" <&- 2>&-', "sh", *command]
    done = subprocess.run(shell, capture_output=True, text=True, env=environment, check=False)
    assert done.stderr == "error: standard output is closed: redirect it to a file, or to /dev/null\n141\n"
    assert (done.returncode, "usage: " in done.stdout) == (0, True)


TRAINS = """
import asyncio, os, sys
from agl_slime.cli import main
async def training():
    print("iter 1", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("iter 1 of 2", flush=True)
main._train = lambda _: main._run_until_signal(training())
main.run(["train"])
"""


def test_a_run_whose_reader_ends_stops_as_after_ctrl_c() -> None:
    """As ``agl-slime train | head -1``, of which nothing may be written to the pipe for an hour."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", TRAINS], env=environment, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "iter 1\n"
        process.stdout.close()
        assert process.stderr.read() == "Output closed; written files are kept.\n"
        assert process.wait(10) == 141


def test_a_package_adds_a_command_by_an_entry_point(tmp_path, monkeypatch, capsys):
    source = (
        "def longest(first: str, second: str, /, *, at_least: int = 0) -> None:\n"
        "    print(max((text for text in (first, second) if len(text) >= at_least), key=len))\n"
    )
    install(tmp_path, monkeypatch, group="agl_slime.commands", entry="longest = longest_answer:longest", source=source)
    assert main(["longest", "aaa", "bb", "--at-least", "2"]) == 0
    assert capsys.readouterr().out == "aaa\n"
    assert main([]) == 0
    assert "longest            by longest_answer:longest" in capsys.readouterr().out
