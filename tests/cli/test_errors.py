"""What the command line says to flags and files that cannot be used: one sentence that names them, never a
traceback."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agl_slime.cli.main import COMMANDS, main
from tests.harness.engine_faults import Status
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.servers import server_that_answers

AGENTS = """
from agl_slime import SGLangLitAgent

class Silent(SGLangLitAgent):
    def compute_reward(self, task, response):
        return 1.0

class NeedsArguments(Silent):
    def __init__(self, url):
        super().__init__()

class Plain:
    pass

class Exits(Silent):
    def __init__(self):
        raise SystemExit(0)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory with one module of agents; logging as it was before, afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cli_agents.py").write_text(AGENTS)
    yield tmp_path
    root.handlers[:] = handlers
    root.setLevel(level)


def said(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    """The exit code and what was written to standard error, with the frame that tyro draws taken off; nothing goes to
    standard output."""
    try:
        code = main(["train", *flags])
    except SystemExit as end:  # how tyro ends
        code = int(end.code or 0)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    assert captured.out == ""
    return code, " ".join(re.sub(r"[╭╮╰╯│─]", " ", captured.err).split())


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--num-iterations", "0", "--num-iterations must be at least 1, got 0"),
        ("--num-iterations", "many", "--num-iterations"),
        ("--rollout-batch-size", "-4", "--rollout-batch-size must be at least 1, got -4"),
        ("--n-samples-per-prompt", "0", "--n-samples-per-prompt must be at least 1, got 0"),
        ("--n-samples-per-prompt", "1", "nothing to compare"),
        ("--max-new-tokens", "0", "--max-new-tokens must be at least 1, got 0"),
        ("--temperature", "0", "--temperature must be above 0"),
        ("--temperature", "nan", "got nan"),
        ("--temperature", "inf", "got inf"),
        ("--rollout-timeout", "nan", "--rollout-timeout must be above 0 seconds, got nan"),
        ("--rollout-timeout", "-1", "got -1.0"),
        ("--seed", "-1", "--seed must be 0 or more, got -1"),
        ("--eval-interval", "-2", "--eval-interval must be 0 (never) or more, got -2"),
        ("--actor-num-nodes", "0", "--actor-num-nodes must be at least 1, got 0"),
        ("--actor-num-gpus-per-node", "0", "--actor-num-gpus-per-node must be at least 1, got 0"),
        ("--rollout-num-gpus", "-1", "--rollout-num-gpus must be 0 or more, got -1"),
        ("--max-attempts", "0", "--max-attempts must be at least 1, got 0"),
        ("--max-concurrent", "0", "--max-concurrent must be auto, or at least 1, got 0"),
        ("--local.lr", "-1", "lr must be above 0, got -1.0"),
        ("--trainer", "tpu", "'tpu'"),
        ("--agent", "lookup", "expected module:Class"),
        ("--agent", "lookup:X:", "path/to/file.py:Class"),
        ("--unknown-flag", "1", "--unknown-flag"),
        ("--config", "missing.toml", "error: --config missing.toml: No such file or directory"),
    ],
)
def test_a_flag_out_of_range_is_named_with_its_value(
    flag: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = said(capsys, flag, value)
    assert code == 2
    assert says in text


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("cli_nowhere:Agent", "there is no module 'cli_nowhere' here; run from the directory that contains it"),
        ("cli_agents:Agent", "cli_agents has no class or agent 'Agent'; it has Exits, NeedsArguments, Plain, Silent"),
        (
            "cli_agents:Plain",
            "Plain is no agent: derive a class from agl_slime.SGLangLitAgent, or write a function of (task, llm)",
        ),
        (
            "cli_agents:NeedsArguments",
            "NeedsArguments() cannot be made without arguments (missing a required argument: 'url')",
        ),
        ("of:x:.py:Agent", "there is no file of:x:.py"),  # no emoji in what was typed
    ],
)
def test_an_agent_that_cannot_be_used_is_named(path: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "--agent", path)
    assert code == 2
    assert text.startswith(f"error: --agent {path}: ")
    assert says in text


def test_agent_without_tasks_or_demonstrations_is_an_error_with_the_fix(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "--agent", "cli_agents:Silent") == (
        2,
        "error: there are no tasks: give --tasks FILE.jsonl, or define make_task(rng) on cli_agents:Silent",
    )
    (here / "tasks.jsonl").write_text('{"prompt": "hi"}\n')
    code, text = said(capsys, "--agent", "cli_agents:Silent", "--tasks", "tasks.jsonl", "--eval-interval", "0")
    assert (code, text.partition(":")[0]) == (2, "error")
    assert "--model-path is needed" in text


def test_an_agent_that_ends_the_process_is_one_sentence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "exits.py").write_text("import sys\nsys.exit(0)\n")
    for agent, says in (("exits.py:Agent", "importing exits.py failed"), ("cli_agents:Exits", "Exits() failed")):
        code, text = said(capsys, "--agent", agent)
        assert (code, says in text, "SystemExit" in text) == (2, True, True)


def test_tasks_without_validation_tasks_are_not_validated_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "tasks.jsonl").write_text('{"prompt": "hi"}\n')
    code, text = said(capsys, "--agent", "cli_agents:Silent", "--tasks", "tasks.jsonl")
    assert code == 2
    assert "of 1 none can be held out for validations; give --eval-tasks, or --eval-interval 0" in text


@pytest.mark.parametrize("flag", ["--tasks", "--eval-tasks"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("", "contains no tasks"),
        ('{"a": 1}\n{"a"\n', "line 2: not JSON"),
        ("[1]\n", "line 1: expected an object"),
        ("[" * 100_000, "line 1: not JSON"),
    ],
)
def test_a_task_file_that_cannot_be_used_is_named(
    flag: str, content: str | None, says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (here / "tasks.jsonl").write_text(content)
    code, text = said(capsys, flag, "tasks.jsonl")
    assert code == 2
    assert text.startswith(f"error: {flag} tasks.jsonl")
    assert says in text


def test_a_model_path_that_is_missing_or_no_checkpoint_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("nowhere", str(here)):
        code, text = said(capsys, "--model-path", path)
        assert code == 2
        assert (
            text == f"error: --model-path {path}: there is no Hugging Face checkpoint (no config.json); "
            "leave the flag out for the tiny policy"
        )


def test_a_checkpoint_without_a_tokenizer_is_one_sentence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text("{}")
    assert main(["train", "--model-path", "model"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: no tokenizer can be loaded from {str(here / 'model')!r}: ")
    assert captured.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["model.safetensors", "config.json"])
def test_a_checkpoint_without_weights_is_one_sentence(
    broken: str, policy_dir: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(policy_dir, here / "model")
    if broken == "config.json":
        (here / "model" / broken).write_text("not json")
    else:
        (here / "model" / broken).unlink()
    assert main(["train", "--model-path", "model"]) in (1, 2)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert str(here / "model") in captured.err
    assert "please report it" not in captured.err


def test_an_output_directory_of_another_run_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "out").mkdir()
    (here / "out" / "config.json").write_text(json.dumps({"seed": 3}))
    code, text = said(capsys, "--output-dir", "out")
    assert code == 2
    assert "output directory out holds a run with other settings" in text
    assert "--overwrite" in text
    (here / "file").write_text("")
    code, text = said(capsys, "--output-dir", "file")
    assert (code, "output directory file is a file" in text) == (2, True)


def test_unreachable_sglang_url_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused for certain
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        code, text = said(capsys, "--sglang-url", url)
    assert code == 1
    assert text.startswith(f"error: no SGLang at {url}: ")
    assert "check the URL" in text


def test_malformed_sglang_url_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "--sglang-url", "localhost")
    assert (code, text) == (2, "error: the SGLang URL must look like http://127.0.0.1:30000, got 'localhost'")


@pytest.mark.parametrize(
    ("status", "body", "content_type"),
    [
        (200, b"<html><head><title>Welcome to nginx!</title></head><body>It works!</body></html>", "text/html"),
        (404, b'{"detail": "Not Found"}', "application/json"),
        (
            404,
            b"<!DOCTYPE HTML><html><title>Error response</title><body><p>Error code: 404</p></body></html>",
            "text/html",
        ),
        (200, b'{"hello": "world"}', "application/json"),
        (200, b"", "text/plain"),
    ],
)
def test_another_server_at_the_url_is_not_taken_for_sglang(
    status: int, body: bytes, content_type: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server_that_answers(status, body, content_type) as url:
        code, text = said(capsys, "--sglang-url", url)
    assert code == 1
    assert text.startswith(f"error: {url} answers but ")
    assert "SGLang" in text
    assert text.endswith("check the port")
    assert "<p>" not in text
    assert len(text) < 500


def test_sglang_that_is_still_loading_is_an_error_with_its_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(ScriptedEngine()) as engine:
        engine.always("/model_info", Status(503, "loading the model"))
        code, text = said(capsys, "--sglang-url", engine.url)
        assert (code, "answers but does not serve" in text) == (1, True)
        assert "loading the model" in text


def test_a_model_that_is_not_on_this_machine_needs_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(ScriptedEngine(model_path="Qwen/Qwen3-4B")) as engine:
        code, text = said(capsys, "--sglang-url", engine.url)
    assert code == 2
    assert "--model-path is needed" in text
    assert "'Qwen/Qwen3-4B'" in text


def test_slime_that_is_not_installed_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    from agl_slime.types import HAS_SLIME

    if HAS_SLIME:
        pytest.skip("slime is installed here")
    code, text = said(capsys, "--trainer", "slime")
    assert code == 2
    assert "slime is not installed" in text
    assert "--trainer local" in text


def test_the_documented_flags_are_all_taken(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {"--actor-num-nodes": 1, "--actor-num-gpus-per-node": 2, "--rollout-num-gpus": 2, "--num-iterations": 3}
    numbers |= {"--rollout-batch-size": 8, "--n-samples-per-prompt": 4}
    flags = [word for flag, number in numbers.items() for word in (flag, str(number))]
    flags += ["--model-path", "nowhere", "--sglang-url", "http://127.0.0.1:1"]
    code, text = said(capsys, *flags, "--trainer", "slime")
    assert code == 2
    assert text.startswith("error: --model-path nowhere")  # all were parsed
    code, text = said(capsys, *flags)
    assert code == 2
    assert "--actor-num-gpus-per-node with --trainer local: only slime uses it" in text


def test_help_names_every_documented_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        "--model-path",
        "--sglang-url",
        "--actor-num-nodes",
        "--actor-num-gpus-per-node",
        "--rollout-num-gpus",
        "--num-iterations",
        "--rollout-batch-size",
        "--n-samples-per-prompt",
        "--agent",
        "--tasks",
        "--trainer",
        "--output-dir",
        "--seed",
        "--eval-interval",
    ):
        assert f"{flag} " in text


def test_the_commands_are_listed_and_an_unknown_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "train" in capsys.readouterr().out
    assert main(["trian"]) == 2
    said = capsys.readouterr().err
    assert "'trian'" in said
    assert all(command in said for command in COMMANDS)


@pytest.mark.parametrize("arguments", [["train", "--help"], ["--help"], ["audit", "--help"]])
def test_closed_stdout_ends_the_command_without_a_traceback(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "agl_slime.cli.main", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141
