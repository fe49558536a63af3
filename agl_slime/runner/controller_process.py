"""Agent Lightning 1.0's controller as a child process, in a separate Python.

``python -m agl_slime.runner.controller_process`` supervises it: when the parent ends, it ends the controller and the
agents that this has started, which would otherwise continue. If the supervisor is killed as well (Ray kills the
children of an actor), the controller ends with it on Linux, and the agents end at their next call.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from agl_slime.errors import ConfigError
from agl_slime.gateway.agl1.settings import PYTHON_VARIABLE, ControllerSettings
from agl_slime.support.child import ServerChild, wait_beside_parent
from agl_slime.support.other_python import installed_version

_END_TIMEOUT_S = 2.0
_POLL_S = 0.5  # between the controller's polls for new rollouts
_EVENT_URL = "AGL_EVENT_URL"  # in the environment of each agent
KEY_REFERENCE = "${oc.env:AGL_KEY}"
"""The key on a command line: Hydra reads it from the environment, which other users of the machine cannot see."""
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class ControllerProcess(ServerChild):
    """``agl-controller`` with its local runner, or the settings' worker command, for the server at ``url``."""

    def __init__(self, settings: ControllerSettings, *, url: str) -> None:
        command = [sys.executable, "-m", "agl_slime.runner.controller_process"]
        command += ["--url", url, "--parent-pid", str(os.getpid())]
        worker = settings.worker
        argv = _agl_controller(settings, url=url) if worker is None else [*worker.argv, "--url", url]
        command += ["--", *argv]
        super().__init__(
            command,
            name=worker.name if worker is not None else "the controller",
            served=settings.agent or "",
            start_timeout_s=60.0,
            env={**os.environ, **(worker.env if worker is not None else {}), "AGL_KEY": settings.key or ""},
            log=settings.log,
        )


def _agl_controller(settings: ControllerSettings, *, url: str) -> list[str]:
    command = [str(settings.python), "-m", "agentlightning.controller", "runner_type=local", f"agl_server.url={url}"]
    command += [f"agl_server.key={KEY_REFERENCE}", f"local_runner.maximum_size={settings.max_processes}"]
    # otherwise Hydra makes an output directory at every start
    quiet = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    return [*command, f"local_runner.poll_interval={_POLL_S}", *quiet]


def check_python(python: Path) -> str:
    """The version of agentlightning in ``python``. Raises ``ConfigError`` without one that has a controller."""
    fix = "make one with `python3.12 -m venv DIR && DIR/bin/pip install 'agentlightning>=1.0'`: DIR/bin/python"
    version = installed_version(python, "agentlightning", setting=PYTHON_VARIABLE, fix=fix)
    if int(version.partition(".")[0]) < 1:
        problem = f"its agentlightning is {version}, which has no controller"
        raise ConfigError(f"{PYTHON_VARIABLE} {python}: {problem}; {fix}")
    return version


def agents_of(url: str) -> Iterator[psutil.Process]:
    """The processes that a controller of the server at ``url`` has started, recognized by their environment."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(_EVENT_URL, "").startswith(f"{url}/"):
                yield process


def end_agents(url: str) -> int:
    """Kill the agents of the server at ``url``; returns their number."""
    agents = [process for process in agents_of(url) if process.pid != os.getpid()]
    for process in agents:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(agents, timeout=_END_TIMEOUT_S)
    return len(agents)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m agl_slime.runner.controller_process")
    parser.add_argument("--url", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    # before its program begins, the child asks for its end with this process
    ends = partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL) if sys.platform == "linux" else None
    controller = subprocess.Popen(args.command, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=ends)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: controller.terminate())
    print(json.dumps({"url": args.url, "serving": f"rollouts of {args.url}"}), flush=True)
    try:
        return wait_beside_parent(controller, args.parent_pid) or 0
    finally:
        controller.kill()
        controller.wait()
        end_agents(args.url)


if __name__ == "__main__":
    sys.exit(main())
