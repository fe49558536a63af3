"""Names of code and files that do not resolve, and the nearest ones that do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agl_slime.tools.rehearse.names import near_file, unresolved, unresolved_elsewhere


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory, which has a class ``Agent``."""
    (tmp_path / "my_rehearsed_agents.py").write_text("class Agent: ...\n")
    (tmp_path / "my_broken_agents.py").write_text("raise RuntimeError('no GPU')\n")
    (tmp_path / "my_program.py").write_text("raise SystemExit(2)\n")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "inner.py").write_text("import none_of_this\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rehearsed_agents"


def test_an_existing_name_resolves(module: str) -> None:
    for code in (f"{module}:Agent", f"{module}.Agent", f"{module}.py:Agent", "agl_slime.AGLDataSource"):
        assert unresolved(code) is None


@pytest.mark.parametrize(
    ("code", "why", "near"),
    [
        ("my_rehearsd_agents:Agnt", "ModuleNotFoundError: No module named", "my_rehearsed_agents:Agent"),
        ("my_rehearsed_agents.py:Agnt", "AttributeError: module", "my_rehearsed_agents.py:Agent"),
        ("my_rehearsd_agents.py:Agent", "ConfigError: there is no file", "my_rehearsed_agents.py:Agent"),
        ("agl_slime.slime_hoks.generate_rolout", "AttributeError", "agl_slime.slime_hooks.generate_rollout"),
        ("my_rehearsed_agents:Judge", "AttributeError", ""),
        ("my_package.inner.generate", "ModuleNotFoundError: No module named 'none_of_this'", ""),
        ("my_broken_agents.py:Agent", "RuntimeError: no GPU", ""),
        ("my_program.py:Agent", "SystemExit: 2", ""),
    ],
)
def test_an_unresolved_name_has_its_reason_and_the_nearest(code: str, why: str, near: str, module: str) -> None:
    reason = unresolved(code)
    assert reason is not None
    assert reason[0].startswith(why)
    assert reason[1] == near


def test_another_python_resolves_from_the_working_directory(module: str) -> None:
    assert unresolved_elsewhere(f"{module}:Agent", sys.executable) is None
    reason = unresolved_elsewhere(f"{module}:Agnt", sys.executable)
    assert reason == ("AttributeError: module 'my_rehearsed_agents' has no attribute 'Agnt'", f"{module}:Agent")
    assert unresolved_elsewhere("my_program:Agent", sys.executable) == ("SystemExit: 2", "")


def test_the_nearest_file_is_of_the_same_directory(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").touch()
    assert near_file(tmp_path / "task.json") == str(tmp_path / "tasks.jsonl")
    assert near_file(tmp_path / "model") == near_file("/none/tasks.jsonl") == ""
