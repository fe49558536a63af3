"""``agl-slime doctor`` says of each thing whether it works here and, where it does not, what to do."""

from __future__ import annotations

import importlib.metadata
import socket
from pathlib import Path

import pytest

from agl_slime.cli import doctor
from agl_slime.cli.doctor import Line, examine, used
from agl_slime.cli.main import main
from agl_slime.engine.sglang_process import SGLANG_PYTHON
from agl_slime.errors import MissingDependencyError


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def lines(url: str | None = None) -> dict[str, Line]:
    return {line.name: line for line in examine(sglang_url=url)}


def test_a_machine_that_can_train_has_nothing_that_fails() -> None:
    found = lines()
    assert [line for line in found.values() if line.verdict == "FAIL"] == []
    assert found["Agent Lightning"].text.startswith(importlib.metadata.version("agentlightning"))
    assert "python train.py will serve with the embedded engine" in used([*found.values()])


@pytest.mark.parametrize(
    ("package", "version", "name", "says"),
    [
        ("torch", None, "torch", 'pip install "agl-slime[local]"'),
        ("agentlightning", "1.0.2", "Agent Lightning", 'install 0.3: pip install "agentlightning<1"'),
        ("agentlightning", None, "Agent Lightning", 'pip install "agentlightning>=0.3,<1"'),
    ],
)  # fmt: skip
def test_missing_prerequisite_fails_with_the_fix(
    package: str, version: str | None, name: str, says: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    known = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda one: version if one == package else known(one))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("FAIL")]
    assert f" {name} " in line
    assert says in line
    assert f"will not run: see {name} above" in said


def test_server_is_probed_at_the_given_url() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert lines(url)["--sglang-url"].verdict == "ok"
    assert (line := lines(url)["--sglang-url"]).verdict == "--"
    assert "cannot be reached" in line.text


def test_python_without_sglang_is_reported_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SGLANG_PYTHON, str(tmp_path / "none"))
    assert (line := lines()["SGLang"]).verdict == "--"
    assert "scripts/sglang_cpu.sh" in line.text


def test_an_error_at_the_start_points_to_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise MissingDependencyError("--model smollm2 needs gguf")

    monkeypatch.setattr("agl_slime.cli.models.smollm2_directory", lambda: None)
    monkeypatch.setattr("agl_slime.cli.models.require_gguf", missing)
    assert main(["train", "--model", "smollm2"]) == 2
    assert "`agl-slime doctor` checks" in capsys.readouterr().err
