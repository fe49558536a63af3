"""``agl-slime doctor``: whether each dependency works here, and the fix where it does not."""

import importlib.metadata
import socket
import sys
from pathlib import Path

import pytest

from agl_slime.cli.main import main
from agl_slime.engine.sglang_process import SGLANG_PYTHON
from agl_slime.runner.controller_process import PYTHON_VARIABLE
from agl_slime.support.net import free_port
from agl_slime.tools.doctor import command as doctor
from agl_slime.tools.doctor.command import Line, examine, used


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def examined(url: str | None = None) -> dict[str, Line]:
    return {line.name: line for line in examine(sglang_url=url)}


def test_a_machine_that_can_train_has_nothing_that_fails() -> None:
    lines = examined()
    assert [line for line in lines.values() if line.verdict == "FAIL"] == []
    assert lines["Agent Lightning"].text.startswith(importlib.metadata.version("agentlightning"))
    assert "python train.py will serve with the embedded engine" in used([*lines.values()])


@pytest.mark.parametrize(
    ("package", "version", "name", "fix"),
    [
        ("torch", None, "torch", 'pip install "agl-slime[local]"'),
        ("agentlightning", "1.0.2", "Agent Lightning", 'install 0.3: pip install "agentlightning<1"'),
        ("agentlightning", None, "Agent Lightning", 'pip install "agentlightning>=0.3,<1"'),
    ],
)
def test_missing_prerequisite_fails_with_the_fix(package, version, name, fix, monkeypatch, capsys):
    version_of = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda module: version if module == package else version_of(module))
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    (line,) = [line for line in output.splitlines() if line.startswith("FAIL")]
    assert f" {name} " in line
    assert fix in line
    assert f"will not run: see {name} above" in output


def test_the_engine_s_address_and_python_are_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert examined(url)["--sglang-url"].verdict == "ok"
    monkeypatch.setenv(SGLANG_PYTHON, str(tmp_path / "none"))
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)  # with Agent Lightning 0.3
    lines = examined(f"http://127.0.0.1:{free_port()}")
    texts = {"--sglang-url": "cannot be reached", "SGLang": "scripts/sglang_cpu.sh"}
    for name, text in {**texts, "Agent Lightning 1.0": "which has no controller"}.items():
        assert lines[name].verdict == "--"
        assert text in lines[name].text
