"""An environment that has Agent Lightning 1.x, or none, where this package needs 0.3: one sentence, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command",
    [
        ["-c", "from agl_slime.cli.main import run; run()", "gateway", "--store-url", "http://127.0.0.1:1"],
        ["train.py", "--num-iterations", "1"],
    ],
)
def test_where_1_x_is_installed_every_command_says_so_in_one_sentence(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "agentlightning").mkdir()
    (tmp_path / "agentlightning" / "__init__.py").touch()
    (tmp_path / "agentlightning-1.0.2.dist-info").mkdir()
    (tmp_path / "agentlightning-1.0.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: agentlightning\nVersion: 1.0.2\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    known = subprocess.run(
        [sys.executable, "-c", "import agl_slime; from agl_slime.cli.main import main; main(['--help'])"],
        env=environment,
        timeout=60,
    )
    assert known.returncode == 0
    said = subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert said.returncode == 2
    line, hint = said.stderr.strip().splitlines()
    assert "agl-slime doctor" in hint
    assert line.startswith("error: agentlightning 1.0.2 is installed here, without agentlightning.adapter")
    assert "pip install 'agentlightning>=0.3,<0.4'" in line
