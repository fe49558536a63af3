"""How long until the first rollout? Seconds from ``python train.py`` until its agent is first run, and of ``--help``.

    python -m benchmarks.startup --runs 10 --tree . --tree ../another-worktree

Trees alternate, each run in processes of its own with the files of that tree. The first run of each is thrown away: it
reads the packages from disk.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

REPO = Path(__file__).resolve().parent.parent
AGENT = """
import os, time
from agl_slime.cli.demo.agent import LookupAgent

class FirstRollout(LookupAgent):
    async def run(self, task, session):
        if not os.path.exists(os.environ["FIRST_ROLLOUT"]):
            with open(os.environ["FIRST_ROLLOUT"], "w") as file:
                file.write(repr(time.monotonic()))
        await super().run(task, session)
"""


def seconds_to_first_rollout(tree: Path) -> float:
    with tempfile.TemporaryDirectory() as directory:
        agent, first = Path(directory, "agent.py"), Path(directory, "first")
        agent.write_text(AGENT)
        command = [
            "train.py",
            "--agent",
            f"{agent}:FirstRollout",
            "--output-dir",
            f"{directory}/run",
            "--view",
            "lines",
        ]
        env = {**os.environ, "PYTHONPATH": str(tree), "FIRST_ROLLOUT": str(first)}
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *command], cwd=tree, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            while process.poll() is None and not (first.exists() and first.read_text()):
                time.sleep(0.05)  # the moment itself is in the file
            if process.poll() is not None:
                error = process.stderr.read().decode() if process.stderr else ""
                sys.exit(f"{tree}: train.py ended with {process.returncode}: {error}")
            return float(first.read_text()) - began
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def seconds_of_help(tree: Path) -> float:
    began = time.monotonic()
    command = [sys.executable, "-m", "agl_slime", "--help"]
    subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True, capture_output=True)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--tree", type=Path, action="append", help="a checkout; may be given several times")
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.tree or [REPO]]
    seen: dict[tuple[Path, str], list[float]] = {}
    print(f"load average {os.getloadavg()[0]:.1f} at the start, {os.cpu_count()} cores", flush=True)
    for number in range(options.runs + 1):
        for tree in trees:
            for what, seconds in (("first rollout", seconds_to_first_rollout), ("--help", seconds_of_help)):
                value = seconds(tree)
                if number:
                    seen.setdefault((tree, what), []).append(value)
    for (tree, what), values in seen.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"{tree.name}: {what}: median {median(values):.2f} s, mean {mean(values):.2f} s, {spread} s", flush=True)
    print(f"load average {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
