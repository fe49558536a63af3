"""The directory of a run: what a start that fails, a refused resume and the same command again leave in it."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("torch", reason='training needs torch: pip install "agl-slime[local]"')

from safetensors.torch import load_file, save_file

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.cli.local import run_training
from agl_slime.cli.settings import train_config
from agl_slime.errors import AglSlimeError, ConfigError
from agl_slime.support.files import LOCK
from agl_slime.train.local.settings import LocalTrainerSettings
from tests.harness.engine_servers import engine_in_thread


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with engine_in_thread(LOOKUP_POLICY) as url:
        yield url


async def train(directory: Path | None, url: str, **settings: Any) -> str:
    """What a run of two rollouts an iteration shows."""
    small: dict[str, Any] = {"rollout_batch_size": 1, "n_samples_per_prompt": 2, "eval_interval": 0}
    config = train_config(output_dir=directory, sglang_url=url, **{"model_path": LOOKUP_POLICY, **small, **settings})
    out = io.StringIO()
    await run_training(config, console=Console(file=out, width=200))
    return out.getvalue()


def content(directory: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != LOCK]
    return {str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def without_weights(directory: Path) -> Path:
    """A model whose weights cannot be read."""
    model = Path(shutil.copytree(LOOKUP_POLICY, directory / "broken"))
    (model / "model.safetensors").write_bytes(b"nothing")
    return model


async def test_a_start_that_fails_leaves_nothing_and_the_corrected_command_works(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = without_weights(tmp_path)
    run = tmp_path / "runs" / "new"
    with pytest.raises(AglSlimeError):
        await train(run, engine, model_path=broken, num_iterations=1)
    assert not run.parent.exists()
    run.mkdir(parents=True)
    (run / "notes.txt").write_text("mine")
    for settings in ({"model_path": broken}, {"model_path": tmp_path / "none"}):
        with pytest.raises(AglSlimeError):
            await train(run, engine, **settings, num_iterations=1)
        assert os.listdir(run) == ["notes.txt"]
    monkeypatch.chdir(tmp_path)  # where a run without a name makes one of its own
    with pytest.raises(AglSlimeError):
        await train(None, engine, model_path=broken, num_iterations=1)
    assert os.listdir(tmp_path / "runs") == ["new"]
    assert "finished" in await train(run, engine, num_iterations=1)


async def test_a_finished_run_is_replaced_by_name_only(
    tmp_path: Path, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    await train(run, engine, num_iterations=1)
    before = content(run)
    slower = {"local": LocalTrainerSettings(lr=1e-5)}
    refused = [
        ({}, "holds this run already: .* --resume, .* --overwrite, .* --output-dir$"),
        (slower, r"holds a run with other settings \(local\.lr\): .* --resume, .* --overwrite"),
        ({"resume": True, **slower}, "has finished its 1 iterations"),
        ({"resume": True, "seed": 3, **slower}, "began with seed 0"),
        ({"overwrite": True, "model_path": without_weights(tmp_path)}, None),
        ({"overwrite": True, "model_path": tmp_path / "none"}, "no Hugging Face checkpoint"),
    ]
    for settings, why in refused:
        with pytest.raises(AglSlimeError, match=why):
            await train(run, engine, num_iterations=1, **settings)
        assert content(run) == before
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        await train(run, engine, num_iterations=2, resume=True, **slower)
    assert "These settings have changed since the run began: local.lr." in caplog.text
    await train(run, engine, num_iterations=1, overwrite=True)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1


async def test_missing_ledger_is_refused_before_any_file_is_cut(tmp_path: Path, engine: str) -> None:
    run = tmp_path / "run"
    await train(run, engine, num_iterations=1)
    for path in run.glob("ledger.sqlite*"):
        path.unlink()
    before = content(run)
    with pytest.raises(
        ConfigError, match=r"ledger\.sqlite is missing or has no record of the checkpoint of iteration 1"
    ):
        await train(run, engine, num_iterations=2, resume=True)
    assert content(run) == before


@pytest.mark.parametrize("named", [True, False])
async def test_a_resume_with_another_model_at_the_same_path_is_refused(
    tmp_path: Path, engine: str, named: bool
) -> None:
    model, run = Path(shutil.copytree(LOOKUP_POLICY, tmp_path / "model")), tmp_path / "run"
    await train(run, engine, model_path=model, num_iterations=1)
    weights = load_file(model / "model.safetensors")
    changed = {name: tensor * 1.01 for name, tensor in weights.items()}
    save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
    before = content(run)
    again: dict[str, Any] = {"model_path": model if named else None, "num_iterations": 2, "resume": True}
    with pytest.raises(ConfigError, match=r"model\.safetensors: not as in the model that the run in .* began with"):
        await train(run, engine, **again)
    assert content(run) == before
    shutil.copyfile(LOOKUP_POLICY / "model.safetensors", model / "model.safetensors")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError, match=r": chat_template\.jinja: not as in the model"):
        await train(run, engine, **again)
    shutil.copyfile(LOOKUP_POLICY / "chat_template.jinja", model / "chat_template.jinja")
    (model / "notes.txt").write_text("no part of the model")
    await train(run, engine, **again)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


async def test_a_run_that_trained_nothing_names_no_model(tmp_path: Path, engine: str) -> None:
    agent = tmp_path / "never.py"
    agent.write_text(
        "from agl_slime.cli.demo.agent import LookupAgent\n"
        "class Never(LookupAgent):\n"
        "    def compute_reward(self, task, response):\n"
        "        raise RuntimeError('no judge today')\n"
    )
    with pytest.raises(AglSlimeError, match="no judge today"):
        await train(tmp_path / "run", engine, agent=f"{agent}:Never", num_iterations=1)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "model" not in summary["files"]
    why = f"nothing was trained: {tmp_path / 'run' / 'model'} has the weights that the run began with"
    assert why in summary["notes"]
    await train(tmp_path / "other", engine, num_iterations=1)
    summary = json.loads((tmp_path / "other" / "summary.json").read_text())
    assert summary["files"]["model"] == str(tmp_path / "other" / "model")
