"""slime's own plug-in contract tests, pointed at our hooks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.harness.slime_programs import REPOSITORY, require_slime


@pytest.mark.slime
def test_every_hook_passes_slimes_contract_tests():
    root = require_slime("torch", "httpx", "pylatexenc", "pybase64")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AGL_SLIME_")}
    finished = subprocess.run(
        [str(REPOSITORY / "scripts" / "slime_contracts.sh"), str(root), sys.executable],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    rows = [line for line in finished.stdout.splitlines() if line.endswith(("| pass |", "| FAIL |"))]
    assert len(rows) == 13, finished.stdout + finished.stderr
    assert all(row.endswith("| pass |") for row in rows), finished.stdout
