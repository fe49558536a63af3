"""The directory of a run after a start that fails, after a refused resume, and after the same command a second time."""

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.errors import AglSlimeError, ConfigError
from agl_slime.support.files import LOCK
from agl_slime.train.local.settings import LocalTrainerSettings
from tests.harness import training
from tests.harness.engine_servers import engine_in_thread

pytestmark = training.needs_torch


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    with engine_in_thread(LOOKUP_POLICY) as url, pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETTINGS, "sglang_url", url)
        yield


SETTINGS: dict[str, Any] = {"rollout_batch_size": 1, "n_samples_per_prompt": 2, "eval_interval": 0}


def train(directory: Path | None, num_iterations: int = 1, **settings: Any) -> str:
    """The output of a run of two rollouts an iteration."""
    settings = {**SETTINGS, "model_path": LOOKUP_POLICY, **settings}
    return training.train(output_dir=directory, num_iterations=num_iterations, **settings)


def content(directory: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != LOCK]
    return {str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A model whose weights cannot be read."""
    model = Path(shutil.copytree(LOOKUP_POLICY, tmp_path / "broken"))
    (model / "model.safetensors").write_bytes(b"nothing")
    return model


def test_a_start_that_fails_leaves_nothing_and_the_corrected_command_works(tmp_path, broken, monkeypatch):
    run = tmp_path / "runs" / "new"
    with pytest.raises(AglSlimeError):
        train(run, model_path=broken)
    assert not run.parent.exists()
    run.mkdir(parents=True)
    (run / "notes.txt").write_text("mine")
    for model in (broken, tmp_path / "none"):
        with pytest.raises(AglSlimeError):
            train(run, model_path=model)
        assert os.listdir(run) == ["notes.txt"]
    monkeypatch.chdir(tmp_path)  # a run without a name makes its directory here
    with pytest.raises(AglSlimeError):
        train(None, model_path=broken)
    assert os.listdir(tmp_path / "runs") == ["new"]
    assert "finished" in train(run)


def test_a_finished_run_is_replaced_by_name_only(tmp_path: Path, broken: Path, caplog: pytest.LogCaptureFixture):
    run = tmp_path / "run"
    train(run)
    files = content(run)
    slower = {"local": LocalTrainerSettings(lr=1e-5)}
    refused = [
        ({}, "holds this run already: .* --resume, .* --overwrite, .* --output-dir$"),
        (slower, r"holds a run with other settings \(local\.lr\): .* --resume, .* --overwrite"),
        ({"resume": True, **slower}, "has finished its 1 iterations"),
        ({"resume": True, "seed": 3, **slower}, "began with seed 0"),
        ({"overwrite": True, "model_path": broken}, None),
        ({"overwrite": True, "model_path": tmp_path / "none"}, "no Hugging Face checkpoint"),
    ]
    for settings, sentence in refused:
        with pytest.raises(AglSlimeError, match=sentence):
            train(run, **settings)
        assert content(run) == files
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        train(run, 2, resume=True, **slower)
    assert "These settings have changed since the run began: local.lr." in caplog.text
    train(run, overwrite=True)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1


def test_missing_ledger_is_refused_before_any_file_is_cut(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run)
    for path in run.glob("ledger.sqlite*"):
        path.unlink()
    files = content(run)
    sentence = r"ledger\.sqlite is missing or has no record of the checkpoint of iteration 1"
    with pytest.raises(ConfigError, match=sentence):
        train(run, 2, resume=True)
    assert content(run) == files


@pytest.mark.parametrize("named", [True, False])
def test_a_resume_with_another_model_at_the_same_path_is_refused(tmp_path: Path, named: bool) -> None:
    from safetensors.torch import load_file, save_file

    model, run = Path(shutil.copytree(LOOKUP_POLICY, tmp_path / "model")), tmp_path / "run"
    train(run, model_path=model)
    weights = {name: tensor * 1.01 for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    files = content(run)
    resume: dict[str, Any] = {"model_path": model if named else None, "resume": True}
    with pytest.raises(ConfigError, match=r"model\.safetensors: not as in the model that the run in .* began with"):
        train(run, 2, **resume)
    assert content(run) == files
    shutil.copyfile(LOOKUP_POLICY / "model.safetensors", model / "model.safetensors")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError, match=r": chat_template\.jinja: not as in the model"):
        train(run, 2, **resume)
    shutil.copyfile(LOOKUP_POLICY / "chat_template.jinja", model / "chat_template.jinja")
    (model / "notes.txt").write_text("no part of the model")
    train(run, 2, **resume)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_run_that_trained_nothing_names_no_model(tmp_path: Path) -> None:
    agent, run = tmp_path / "never.py", tmp_path / "run"
    agent.write_text(
        "from agl_slime.cli.demo.agent import LookupAgent\n"
        "class Never(LookupAgent):\n"
        "    def compute_reward(self, task, response):\n"
        "        raise RuntimeError('no judge today')\n"
    )
    with pytest.raises(AglSlimeError, match="no judge today"):
        train(run, agent=f"{agent}:Never")
    summary = json.loads((run / "summary.json").read_text())
    assert "model" not in summary["files"]
    assert f"nothing was trained: {run / 'model'} has the weights that the run began with" in summary["notes"]
