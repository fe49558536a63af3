"""An environment with Agent Lightning 1.x, or none, where this package needs 0.3: one sentence, no traceback."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def test_where_1_x_is_installed_a_command_is_one_sentence_and_help_works(tmp_path: Path) -> None:
    (tmp_path / "agentlightning").mkdir()
    (tmp_path / "agentlightning" / "__init__.py").touch()
    (tmp_path / "agentlightning-1.0.2.dist-info").mkdir()
    (tmp_path / "agentlightning-1.0.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: agentlightning\nVersion: 1.0.2\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}

    def run(*command: str) -> Any:
        arguments = [sys.executable, *command]
        return subprocess.run(arguments, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)

    help_page = run("-c", "import agl_slime; from agl_slime.cli.main import main; main(['--help'])")
    assert help_page.returncode == 0
    refused = run("train.py", "--num-iterations", "1")
    assert refused.returncode == 2
    line, hint = refused.stderr.strip().splitlines()
    assert "agl-slime doctor" in hint
    assert line.startswith("error: agentlightning 1.0.2 is installed here, without agentlightning.adapter")
    assert "pip install 'agentlightning>=0.3,<0.4'" in line
