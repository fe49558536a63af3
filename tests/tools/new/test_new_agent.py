"""``agl-slime new`` and ``agl-slime demo-policy``: a newcomer's first agent works as it is written."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from agl_slime.agent.loading import load_agent
from agl_slime.cli.main import main
from agl_slime.report import read_metrics


def test_the_written_agent_loads_and_its_own_tests_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["new", str(tmp_path / "mine")]) == 0
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["README.md", "agent.py", "test_agent.py"]
    monkeypatch.syspath_prepend(tmp_path / "mine")
    tests = runpy.run_path(str(tmp_path / "mine" / "test_agent.py"))
    assert [function() for name, function in tests.items() if name.startswith("test_")] == [None, None]
    monkeypatch.delitem(sys.modules, "agent")
    assert type(load_agent(f"{tmp_path}/mine/agent.py:MyAgent")).__name__ == "MyAgent"


def test_a_used_directory_and_an_agent_without_demonstrations_are_refused(tmp_path, capsys):
    assert main(["new", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []
    assert f"{tmp_path} exists: name a new directory" in capsys.readouterr().err
    code = "from agl_slime import SGLangLitAgent\nclass Bare(SGLangLitAgent):\n    compute_reward = None\n"
    (tmp_path / "bare.py").write_text(code)
    assert main(["demo-policy", str(tmp_path / "tiny"), f"{tmp_path}/bare.py:Bare"]) == 2
    assert "has no `demonstrations`" in capsys.readouterr().err


@pytest.mark.slow
def test_the_commands_of_the_written_readme_lead_to_a_rising_reward(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "agl_slime"]
    train = ["train", "--agent", "agent.py:MyAgent", "--model-path", "tiny", "--view", "lines", "--output-dir", "out"]
    for command in (["new", "mine"], ["demo-policy", "tiny", "agent.py:MyAgent"], train):
        here = tmp_path if command[0] == "new" else tmp_path / "mine"
        subprocess.run([*program, *command], cwd=here, timeout=600, check=True)
    rewards = [row["rollout/reward_mean"] for row in read_metrics(tmp_path / "mine" / "out" / "metrics.jsonl")]
    assert max(rewards[-3:]) > rewards[0] + 0.3
