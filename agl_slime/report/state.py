"""The state of a run: finished, stopped, running, killed or unknown."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agl_slime.report.files import RunDir, dump, read_object
from agl_slime.support.files import write_file

# A process on another host cannot be checked: it counts as killed after this long without a write.
_SILENT_S = 900.0


@dataclass(frozen=True)
class RunState:
    """``word`` is ``finished``, ``stopped``, ``running``, ``killed`` or ``unknown``; ``text`` a sentence about it."""

    word: str
    text: str


def read_state(run: RunDir) -> RunState:
    """The state of ``run`` by its files."""
    if (writer := read_object(run.alive)) is not None:
        last = max((path.stat().st_mtime for path in (run.alive, run.metrics, run.groups) if path.exists()), default=0)
        place = f"process {writer.get('pid')} on {writer.get('host')}"
        if _lives(writer, last):
            return RunState("running", f"This run is in progress ({place}).")
        when = datetime.fromtimestamp(last, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return RunState("killed", f"This run was killed: {place} is gone; it last wrote at {when}.")
    if (summary := read_object(run.summary)) is not None:
        if (reason := summary.get("reason")) == "finished":
            return RunState("finished", "This run has finished.")
        return RunState("stopped", f"This run was stopped: {reason}")
    if run.summary.exists():
        return RunState("unknown", f"{run.summary.name} is not a JSON object: how this run ended is unknown.")
    return RunState("unknown", "Neither running.json nor summary.json is there: how this run ended is unknown.")


def write_alive(run: RunDir) -> None:
    """Record this process as the run's writer, so that a killed run can be told from a current one."""
    pid = os.getpid()
    writer = {"host": socket.gethostname(), "pid": pid, "began": _process_began(pid), "at": time.time()}
    write_file(run.alive, dump(writer, indent=2), durable=False)


def _lives(writer: dict[str, Any], last: float) -> bool:
    pid = writer.get("pid")
    if writer.get("host") != socket.gethostname() or not isinstance(pid, int) or not 0 < pid < 2**31:
        return time.time() - last < _SILENT_S
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is alive and belongs to another user
        pass
    return writer.get("began") == _process_began(pid)


def _process_began(pid: int) -> str | None:
    """The start time of the process in kernel ticks, which tells a reused pid apart; ``None`` without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
