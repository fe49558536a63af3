"""slime's own plug-in contract tests, pointed at our hooks."""

import os
import sys

import pytest

from tests.harness.slime_programs import REPOSITORY, require_slime, run_guarded


@pytest.mark.slime
def test_every_hook_passes_slimes_contract_tests():
    root = require_slime("torch", "httpx", "pylatexenc", "pybase64")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AGL_SLIME_")}
    command = [REPOSITORY / "scripts" / "slime_contracts.sh", root, sys.executable]
    _, output = run_guarded(command, timeout_s=300, env=environment)
    rows = [line for line in output.splitlines() if line.endswith(("| pass |", "| FAIL |"))]
    assert len(rows) == 13, output
    assert all(row.endswith("| pass |") for row in rows), output
