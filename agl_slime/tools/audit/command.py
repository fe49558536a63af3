"""``agl-slime audit``."""

from __future__ import annotations

from pathlib import Path

import tyro

from agl_slime.errors import AglSlimeError
from agl_slime.support.terminal import print_line
from agl_slime.tools import audit as auditor


def audit(run_dir: tyro.conf.Positional[Path]) -> None:
    """Check that the files of a run agree: each rollout has one outcome, each sampled token was trained at most
    once, and sampled by weights that the run pushed. Exit code 1 for findings.

    Args:
        run_dir: The directory of a run that is not running.
    """
    result = auditor.audit(run_dir)
    for sentence in result.findings:
        print_line(sentence)
    counts = ", ".join(f"{n:,} {name}" for name, n in result.counts.items())
    if result.findings:
        raise AglSlimeError(f"{len(result.findings)} findings in {run_dir} ({counts})")
    state = "" if result.finished else "; the run did not finish, so its last iteration may be incomplete"
    print_line(f"The files of {run_dir} agree: {counts}{state}.")
