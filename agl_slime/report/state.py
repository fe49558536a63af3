"""What a run directory is: finished, stopped, running, killed, or none of a run's."""

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

# A process on another host cannot be asked; one that wrote nothing for this long is taken for gone.
_SILENT_S = 900.0


@dataclass(frozen=True)
class RunState:
    """``word`` is ``finished``, ``stopped``, ``running``, ``killed`` or ``unknown``; ``text`` the sentence to it."""

    word: str
    text: str


def read_state(run: RunDir) -> RunState:
    """What the files of ``run`` say of it."""
    if (writer := read_object(run.alive)) is not None:
        last = max((path.stat().st_mtime for path in (run.alive, run.metrics, run.groups) if path.exists()), default=0)
        place = f"process {writer.get('pid')} on {writer.get('host')}"
        if _lives(writer, last):
            return RunState("running", f"This run is going on ({place}).")
        when = datetime.fromtimestamp(last, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return RunState("killed", f"This run was killed: {place} is gone; it last wrote at {when}.")
    if (summary := read_object(run.summary)) is not None:
        if (reason := summary.get("reason")) == "finished":
            return RunState("finished", "This run has finished.")
        return RunState("stopped", f"This run was stopped: {reason}")
    if run.summary.exists():
        return RunState("unknown", f"{run.summary.name} is not a JSON object: how this run ended is not known.")
    return RunState("unknown", "Neither running.json nor summary.json is there: how this run ended is not known.")


def write_alive(run: RunDir) -> None:
    """Write what tells a run that is going on from one that was killed: this process."""
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
    except PermissionError:  # the process is somebody else's
        pass
    return writer.get("began") == _process_began(pid)


def _process_began(pid: int) -> str | None:
    """When the process began, in the kernel's own ticks, so that a number given again is not mistaken for it; ``None``
    where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
