"""The launch script in slime's style: slime's own parser takes all its flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slime.support import REPOSITORY, environment, model_flags, require_slime


@pytest.mark.slime
def test_slimes_parser_takes_the_flags_of_the_launch_script(policy_dir: Path, tmp_path: Path):
    root = require_slime("torch", "transformers", "sglang_router")
    # in place of the python that would start slime's train.py, one that only parses
    python = tmp_path / "python"
    standins = environment(root)["PYTHONPATH"]
    python.write_text(
        f'#!/bin/sh\nshift\nPYTHONPATH="{standins}" exec {sys.executable} -m tests.slime.programs.parse "$@"\n'
    )
    python.chmod(0o755)
    model_args = tmp_path / "model.sh"
    model_args.write_text(f"MODEL_ARGS=({' '.join(model_flags(policy_dir))})\n")
    finished = subprocess.run(
        [str(REPOSITORY / "examples" / "slime" / "run_agent.sh"), "--num-rollout", "3"],
        cwd=REPOSITORY,
        env={
            **environment(root),
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "SLIME_DIR": str(root),
            "MODEL": str(policy_dir),
            "MODEL_TORCH_DIST": str(tmp_path),
            "MODEL_ARGS_FILE": str(model_args),
            "NUM_GPUS": "4",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, finished.stdout[-2000:] + finished.stderr[-2000:]
    parsed = json.loads(lines[-1].removeprefix("RESULT "))
    assert parsed["data_source_path"] == "agl_slime.AGLDataSource"
    assert parsed["agl_agent"] == "agl_slime.demo.agent:LookupAgent"
    assert parsed["num_rollout"] == 3  # what is given to the script wins
    assert parsed["lr"] == 1e-6
