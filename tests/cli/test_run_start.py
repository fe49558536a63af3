"""The model, the tasks and the directory that a run begins with, and that it has when it is resumed."""

import asyncio
import json
import logging
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agl_slime.cli import local
from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.cli.models import check_tokenizer
from agl_slime.cli.settings import train_config
from agl_slime.cli.start import find_start, run_directory, set_aside, split_tasks
from agl_slime.cli.wiring import RunInputs
from agl_slime.engine.client.describe import EngineDescription
from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.report.files import RunDir
from agl_slime.tokens.loading import load_tokenizer


def served(path: Path, version: str) -> EngineDescription:
    return EngineDescription(base_url="http://x:1", model_path=str(path), weight_version=version)


def start(described: EngineDescription | None = None, *, held_out: int = 0, **settings: Any) -> Path:
    """The model that a run begins with."""
    config = train_config(**settings)
    with run_directory(config) as pending:
        parts, console = RunInputs(tasks=[{}], held_out=held_out), Console(quiet=True)
        begins = asyncio.run(find_start(config, parts, pending.run, described, console))
        pending.begin(begins.record)
        return begins.model


def test_a_resumed_run_uses_its_first_model(tmp_path: Path) -> None:
    model = Path(shutil.copytree(LOOKUP_POLICY, tmp_path / "model"))
    settings: dict[str, Any] = {"output_dir": tmp_path / "run", "sglang_url": "http://x:1"}
    with pytest.raises(ConfigError, match=r"version '7', which were pushed to it; name the model to start from"):
        start(served(LOOKUP_POLICY, "7"), **settings)
    assert start(served(model, "default"), **settings) == model
    settings["resume"] = True
    assert start(served(LOOKUP_POLICY, "12"), **settings) == model  # the engine names the run's last push
    with pytest.raises(ConfigError, match=f"began with the model at {model}: leave --model-path out"):
        start(**settings, model_path=LOOKUP_POLICY)
    shutil.rmtree(model)
    with pytest.raises(ConfigError, match="which no longer exists"):
        start(served(LOOKUP_POLICY, "12"), **settings)


def test_tasks_that_changed_under_the_same_name_are_noticed_on_resume(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("tasks", "eval_tasks")}
    text = '{"prompt": "a"}\n{"prompt": "b"}\n'
    for file in files.values():
        file.write_text(text)
    settings: dict[str, Any] = {"output_dir": tmp_path / "run", "model_path": LOOKUP_POLICY, **files}
    start(**settings)
    assert start(**settings, resume=True) == LOOKUP_POLICY.resolve()
    for name, file in files.items():
        file.write_text('{"prompt": "b"}\n{"prompt": "a"}\n')
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(ConfigError, match=f"^{flag} {file}: not the tasks that the run in .* began with"):
            start(**settings, resume=True)
        file.write_text(text)


def _occupy(path: Path, connection: Any) -> None:
    with run_directory(train_config(output_dir=path)):
        connection.send(os.getpid())
        connection.recv()


def test_a_directory_has_one_run_at_a_time(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    owner = multiprocessing.get_context("spawn").Process(target=_occupy, args=(tmp_path, theirs))
    owner.start()
    try:
        assert ours.poll(60)
        pid = ours.recv()
        (tmp_path / "metrics.jsonl").write_text("theirs")
        for flags in ({}, {"overwrite": True}, {"resume": True}):
            with (
                pytest.raises(ConfigError, match=f"in use by process {pid} "),
                run_directory(train_config(output_dir=tmp_path, **flags)),
            ):
                pass
        assert (tmp_path / "metrics.jsonl").read_text() == "theirs"
    finally:
        owner.kill()
        owner.join()
    with run_directory(train_config(output_dir=tmp_path, overwrite=True)) as pending:  # a killed owner has no lock
        assert pending.run.path == tmp_path


@pytest.mark.parametrize(
    "changed", [{"agent": "b:B"}, {"seed": 2}, {"tasks": Path("b.jsonl")}, {"eval_tasks": Path("b.jsonl")}]
)
def test_other_tasks_are_refused_when_a_run_is_resumed(changed: dict[str, Any], tmp_path: Path) -> None:
    settings = {"output_dir": tmp_path, "tasks": Path("a.jsonl"), "eval_tasks": Path("a.jsonl"), "seed": 1}
    with run_directory(train_config(**settings)) as pending:
        pending.begin()
    for _ in range(2):  # a refused resume writes nothing down
        with (
            pytest.raises(ConfigError, match=f"began with {next(iter(changed))} "),
            run_directory(train_config(**{**settings, **changed}, resume=True)),
        ):
            pass
    with run_directory(train_config(**settings, resume=True, num_iterations=99)):
        pass


def test_validation_never_draws_training_tasks(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f'{{"n": {n}}}\n' for n in range(25)))
    settings: dict[str, Any] = {"tasks": file, "output_dir": tmp_path / "run", "model_path": LOOKUP_POLICY}
    tasks, val_tasks, held_out = split_tasks(train_config(**settings))
    assert val_tasks is not None
    assert (len(tasks), len(val_tasks), held_out) == (23, 2, 2)
    assert sorted(task["n"] for task in tasks + val_tasks) == list(range(25))
    assert split_tasks(train_config(**settings, eval_interval=0))[::2] == ([{"n": n} for n in range(25)], 0)
    start(**settings, held_out=held_out)
    # a resumed run trains on the same tasks, with or without validations
    assert split_tasks(train_config(**settings, resume=True, eval_interval=0))[0] == tasks
    assert split_tasks(train_config(**settings, resume=True))[:2] == (tasks, val_tasks)


def test_files_of_a_run_without_a_checkpoint_are_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDir(tmp_path)
    for n in (1, 2):
        run.metrics.write_text(f"metrics {n}")
        run.checkpoints.mkdir()
        with caplog.at_level(logging.WARNING):
            set_aside(run)
        assert f"begins again; its earlier files are in {tmp_path}/before-{n}" in caplog.text
        assert not run.metrics.exists()
        assert (tmp_path / f"before-{n}" / "metrics.jsonl").read_text() == f"metrics {n}"
    caplog.clear()
    set_aside(run)
    assert not caplog.text


@pytest.mark.parametrize("missing", ["torch", "safetensors"])
def test_training_needs_both_of_its_packages(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(MissingDependencyError, match=r"pip install \"agl-slime\[local\]\""):
        local._require_torch()


def test_a_model_without_a_usable_tokenizer_is_refused(tmp_path: Path) -> None:
    bare, small = (Path(shutil.copytree(LOOKUP_POLICY, tmp_path / name)) for name in ("bare", "small"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": 200}))
    faults = {bare: "has no tokenizer", small: "up to id 453, and its config.json a vocabulary of 200"}
    for model, sentence in faults.items():
        with pytest.raises(ConfigError, match=f"^--model-path {model}: .*{sentence}"):
            check_tokenizer(model, load_tokenizer(model))
    check_tokenizer(LOOKUP_POLICY, load_tokenizer(LOOKUP_POLICY))
