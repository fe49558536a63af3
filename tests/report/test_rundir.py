"""The run directory: refusals, settings and files."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agl_slime.errors import ConfigError
from agl_slime.report import RunDir, open_run_dir
from agl_slime.report.files import check_run_dir

SETTINGS = {"agent": "a:A", "seed": 0, "trainer": {"lr": 5e-4, "clip": 0.2}}


def fill(run: RunDir) -> None:
    run.metrics.write_text('{"iteration": 1}\n')
    run.checkpoints.mkdir()
    (run.checkpoints / "state.json").write_text("x")
    (run.path / "notes.txt").write_text("mine")


def test_default_name_is_time_and_agent_and_never_taken_twice(tmp_path: Path) -> None:
    runs = [
        open_run_dir(None, agent="my.agents:Look up/Agent", settings=SETTINGS, root=tmp_path / "runs") for _ in range(3)
    ]
    assert len({run.path for run in runs}) == 3
    for run in runs:
        assert run.path.parent == tmp_path / "runs"
        assert run.path.name[:15].replace("-", "").isdigit()
        assert "-Look-up-Agent" in run.path.name
        assert json.loads(run.config.read_text()) == SETTINGS


def test_secrets_of_settings_are_not_written(tmp_path: Path) -> None:
    @dataclass
    class Settings:
        path: Path
        url: str
        api_key: str = "sk-1"
        max_new_tokens: int = 5
        nested: dict[str, object] | None = None

    nested = {"password": "p", "auth_token": None, "judges": ["j=http://hidden@h/k/hidden?hidden"]}
    settings = Settings(Path("x"), "http://me:hidden@host:30000/v1", nested=nested)
    run = open_run_dir(tmp_path, agent="a", settings=settings)
    assert json.loads(run.config.read_text()) == {
        "path": "x",
        "url": "http://***@host:30000/v1",
        "api_key": "(not written)",
        "max_new_tokens": 5,
        "nested": {"password": "(not written)", "auth_token": None, "judges": ["j=http://***@h/k/***?***"]},
    }
    changed = replace(settings, url="http://me:changed@host:30000/v1")
    assert open_run_dir(tmp_path, agent="a", settings=changed, resume=True).changed == ()
    assert settings.url == "http://me:hidden@host:30000/v1"


def test_overwrite_replaces_the_reports_only(tmp_path: Path) -> None:
    fill(open_run_dir(tmp_path, agent="a", settings=SETTINGS))
    for settings in (SETTINGS, {**SETTINGS, "seed": 1}):
        run = open_run_dir(tmp_path, agent="a", settings=settings, overwrite=True)
        assert sorted(os.listdir(tmp_path)) == ["config.json", "notes.txt"]
        assert json.loads(run.config.read_text()) == settings
        run.metrics.write_text("{}")


def test_a_run_is_not_replaced_without_a_word(tmp_path: Path) -> None:
    run = open_run_dir(tmp_path, agent="a", settings=SETTINGS)
    open_run_dir(tmp_path, agent="a", settings=SETTINGS)  # nothing was written yet
    fill(run)
    changed = {**SETTINGS, "seed": 1, "trainer": {"lr": 1e-3, "clip": 0.2}}
    again = r"holds this run already: .* --resume, .* --overwrite, .* --output-dir$"
    for settings, sentence in ((SETTINGS, again), (changed, r"\(seed, trainer\.lr\)")):
        with pytest.raises(ConfigError, match=sentence):
            open_run_dir(tmp_path, agent="a", settings=settings)
    assert json.loads(run.config.read_text()) == SETTINGS
    assert run.metrics.read_text() == '{"iteration": 1}\n'
    assert (run.checkpoints / "state.json").exists()


def test_nothing_is_written_before_a_run_begins(tmp_path: Path) -> None:
    pending = check_run_dir(tmp_path / "run", settings=SETTINGS)
    assert os.listdir(tmp_path) == []
    pending.begin({"model": "m"})
    assert sorted(os.listdir(tmp_path / "run")) == ["config.json", "start.json"]
    fill(pending.run)
    for flags in ({"resume": True}, {"overwrite": True}):
        second = check_run_dir(tmp_path / "run", settings={**SETTINGS, "seed": 1}, **flags)
        assert json.loads(second.run.config.read_text()) == SETTINGS
        assert second.run.metrics.exists()


def test_resume_keeps_the_reports_and_lists_changed_settings(tmp_path: Path) -> None:
    fill(open_run_dir(tmp_path, agent="a", settings=SETTINGS))
    longer = {**SETTINGS, "num_iterations": 80, "resume": True}
    run = open_run_dir(tmp_path, agent="a", settings=longer, resume=True)
    assert run.changed == ("num_iterations",)
    assert run.metrics.exists()
    assert json.loads(run.config.read_text()) == longer


def test_resume_needs_a_run_and_no_foreign_file_is_replaced(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run to resume"):
        open_run_dir(tmp_path / "none", agent="a", settings=SETTINGS, resume=True)
    assert os.listdir(tmp_path) == []
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "interview.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"holds model but no config\.json"):
        open_run_dir(tmp_path, agent="a", settings=SETTINGS)
    assert (tmp_path / "model" / "interview.txt").exists()


def test_paths_that_cannot_be_used_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; choose another path"):
        open_run_dir(tmp_path / "file", agent="a", settings=SETTINGS)
    for path, root in ((tmp_path / "file" / "run", None), (None, tmp_path / "file")):
        with pytest.raises(ConfigError, match=r"cannot be (written|made): .*; choose another with --output-dir"):
            open_run_dir(path, agent="a", settings=SETTINGS, **({"root": root} if root else {}))


def test_a_broken_config_is_refused_unless_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"seed"')
    with pytest.raises(ConfigError, match=r"config\.json is not a JSON object"):
        open_run_dir(tmp_path, agent="a", settings=SETTINGS)
    assert open_run_dir(tmp_path, agent="a", settings=SETTINGS, overwrite=True).config.exists()
