"""kill -9 of a real ``train.py`` at random moments, going on with --resume each time; then: was each task trained on or
dropped exactly once?

python -m tests.faults.kill_train --kills 50 [--max-staleness 2] [--flags=--drop-zero-variance]

Each life is a process of its own. One in ten starts from nothing, with an embedded engine that must be gone soon after
it. The others, to save time, are forked from a process that has imported what train.py imports, and use an engine that
outlives them: with requests that nobody waits for any more, and weights that the next life has not made.

What was trained is judged by the last checkpoint's own optimizer steps and by the run's ``trained.jsonl``, and compared
with the ledger.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.report.audit import audit as audit_files

_ROOT = Path(__file__).parents[2]
_FLAGS = (
    "--agent tests.faults.flaky_lookup:FlakyLookup --rollout-batch-size 4 --n-samples-per-prompt 4 "
    "--eval-interval 7 --eval-rollouts 4 --save-interval 3"
)
# Lives that are ended before they have trained on anything; the others are ended within seconds of their first
# iteration.
_EARLY = 0.25
_COLD = 0.1
_START_S = {True: 8.0, False: 3.0}  # about what a cold start takes, and another
_IMPORTED = ["agl_slime.cli.local", "agl_slime.train.local.trainer", "transformers.models.qwen3.modeling_qwen3"]


def _train(flags: Sequence[str], log: Path) -> None:
    from agl_slime.cli.main import run

    os.chdir(_ROOT)
    with log.open("ab") as out:
        os.dup2(out.fileno(), sys.stdout.fileno())
        os.dup2(out.fileno(), sys.stderr.fileno())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server ignores
    run(["train", *flags])


@dataclass
class Result:
    """Numbers of tasks, and the names of those that went wrong."""

    kills: int
    kills_while_training: int
    iterations: int
    tasks: int
    trained: int
    dropped: int
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    optimizer_steps: tuple[int, int] = (0, 0)
    """Those that the last checkpoint has taken, and those of the iterations that the run's metrics report."""
    reports_in_order: bool = False
    adds_up: bool = False
    leftovers: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    """What ``agl-slime audit`` said after each kill, and at the end."""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        whole = not self.lost and not self.twice and not self.leftovers and self.adds_up and self.reports_in_order
        return whole and not self.findings and self.optimizer_steps[0] == self.optimizer_steps[1]


class Run:
    """One run directory and the process that works on it."""

    def __init__(self, directory: Path, *, flags: str, limit_s: float, engine_url: str) -> None:
        self.output = directory / "run"
        self.directory, self.log, self.engine_url = directory, directory / "log", engine_url
        self.more = flags.split()
        self._deadline = time.monotonic() + limit_s

    def flags(self, iterations: int, *, cold: bool) -> list[str]:
        """Of train.py, for the next life."""
        policy = self.directory / "policy"  # tells this run's engines from others
        if not policy.exists():
            shutil.copytree(LOOKUP_POLICY, policy)
        flags = [*self.more, "--model-path", str(policy), "--output-dir", str(self.output)]
        flags += ["--num-iterations", str(iterations), *([] if cold else ["--sglang-url", self.engine_url])]
        return flags + (["--resume"] if (self.output / "config.json").exists() else [])

    def start(self, *, iterations: int, cold: bool = False) -> BaseProcess:
        flags = self.flags(iterations, cold=cold)
        context = multiprocessing.get_context("spawn" if cold else "forkserver")
        if not cold:
            context.set_forkserver_preload(_IMPORTED)
        process = context.Process(target=_train, args=(flags, self.log))
        process.start()
        return process

    def rows(self) -> list[dict[str, Any]]:
        path = self.output / "metrics.jsonl"
        return (
            [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        )

    def wait_for_training(self, process: BaseProcess) -> None:
        """Until this life has reported an iteration."""
        before = self._stamp()
        while self._stamp() == before:
            self._check(process)
            time.sleep(0.02)

    def wait(self, process: BaseProcess, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._check(process)
            time.sleep(0.005)

    def _check(self, process: BaseProcess) -> None:
        if not process.is_alive():
            raise RuntimeError(f"train.py ended by itself with {process.exitcode}; {self.last_words()}")
        self.check_time()

    def check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"the run takes too long; {self.last_words()}")

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def _stamp(self) -> tuple[int, int]:
        path = self.output / "metrics.jsonl"
        return (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else (0, 0)

    def leftovers(self, *, patience_s: float = 20.0) -> list[str]:
        """Command lines of processes that still work on this run; an engine notices within moments that its run is
        gone."""
        end = time.monotonic() + patience_s
        while (found := _processes_of(str(self.directory))) and time.monotonic() < end:
            time.sleep(0.05)
        return found


def run(directory: Path, *, kills: int, seed: int, limit_s: float, max_staleness: int = 0, flags: str = "") -> Result:
    rng = random.Random(seed)
    began = time.monotonic()
    leftovers: list[str] = []
    findings: list[str] = []
    training = 0
    with EmbeddedEngine(LOOKUP_POLICY) as engine:
        flags = f"{_FLAGS} --max-staleness {max_staleness} {flags}"
        scene = Run(directory, flags=flags, limit_s=limit_s, engine_url=engine.url)
        for number in range(1, kills + 1):
            cold = rng.random() < _COLD
            process = scene.start(iterations=100_000, cold=cold)
            try:
                if rng.random() < _EARLY:
                    scene.wait(process, rng.uniform(0.0, _START_S[cold]))
                else:
                    scene.wait_for_training(process)
                    scene.wait(process, rng.uniform(0.0, 3.0))
                    training += 1
            finally:
                process.kill()
                process.join()
            leftovers += scene.leftovers()
            if scene.rows():
                findings += [f"after kill {number}: {said}" for said in audit_files(scene.output).findings]
        done = max([0, *(row["iteration"] for row in scene.rows())])
        last = scene.start(iterations=done + 4, cold=True)
        last.join(limit_s)
        if last.exitcode != 0:
            raise RuntimeError(f"the last life of the run failed; {scene.last_words()}")
        result = audit(scene.output)
        result.kills, result.kills_while_training = kills, training
        result.leftovers = leftovers + scene.leftovers()
        closing = audit_files(scene.output)
        result.findings = findings + closing.findings + ([] if closing.finished else ["the run did not finish"])
        result.seconds = time.monotonic() - began
        return result


def audit(output: Path) -> Result:
    """What became of each task of the run in ``output``."""
    import torch

    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    trained = Counter(json.loads(line)["instance_id"] for line in (output / "trained.jsonl").read_text().splitlines())
    with sqlite3.connect(output / "ledger.sqlite") as ledger:
        finished = Counter(name for (name,) in ledger.execute("SELECT instance_id FROM ledger_finished"))
        outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for instance, state, outcome in ledger.execute(
            "SELECT instance_id, state, outcome FROM ledger_rollouts WHERE instance_id IS NOT NULL"
        ):
            outcomes[instance][outcome if state == 2 else "unfinished"] += 1
        counts = dict(ledger.execute("SELECT kind, sum(n) FROM ledger_counts GROUP BY kind").fetchall())
    tasks = {str(n) for n in range(1 + max(map(int, finished)))}
    states = sorted((output / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    state = torch.load(states[-1] / "trainer" / "trainer_state.pt", weights_only=True)
    wrong = {
        name
        for name in tasks
        if trained[name] != (outcomes[name]["trained"] > 0)  # the ledger and the trainer agree
        or outcomes[name]["unfinished"]
        or finished[name] != 1
        or outcomes[name]["trained"] > 4
    }
    closed = sum(n for kind, n in counts.items() if kind.startswith("closed:"))
    return Result(
        kills=0,
        kills_while_training=0,
        iterations=len(metrics),
        tasks=len(tasks),
        trained=len(trained),
        dropped=len(tasks - set(trained)),
        lost=sorted(
            (tasks - set(finished)) | {name for name in wrong if trained[name] <= 1 and finished[name] <= 1}, key=int
        ),
        twice=sorted(
            name for name in tasks if trained[name] > 1 or finished[name] > 1 or outcomes[name]["trained"] > 4
        ),
        optimizer_steps=(state["steps"], round(sum(row.get("train/steps") or 0 for row in metrics))),
        reports_in_order=[row["iteration"] for row in metrics] == list(range(1, state["iteration"] + 1)),
        adds_up=counts["opened"] == closed and not counts.get("open") and not counts.get("ready"),
    )


def _processes_of(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        if (
            int(path.name) != os.getpid()
            and any(text in word for word in words)
            and "kill_train" not in " ".join(words)
        ):
            found.append(" ".join(words))
    return found


def report(result: Result, whom: str) -> int:
    """Print it; the exit code."""
    print(
        f"{result.kills} kills of {whom} ({result.kills_while_training} while it trained) "
        f"in {result.seconds:.0f} s, {result.iterations} iterations"
    )
    print(f"  tasks      {result.tasks}: {result.trained} trained on, {result.dropped} dropped with a reason")
    print(f"  lost       {len(result.lost)} {result.lost[:10]}")
    print(f"  twice      {len(result.twice)} {result.twice[:10]}")
    print(
        f"  steps      {result.optimizer_steps[0]} in the last checkpoint, {result.optimizer_steps[1]} in the reports"
    )
    print(
        f"  ledger     {'adds up' if result.adds_up else 'does NOT add up'}; "
        f"reports {'in order' if result.reports_in_order else 'NOT in order'}"
    )
    print(f"  audit      {len(result.findings)} findings {result.findings[:20]}")
    print(f"  left over  {len(result.leftovers)} processes {result.leftovers[:3]}")
    return 0 if result.good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--flags", default="", help="further flags of train.py")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        limits = {"limit_s": 120 + 60 * options.kills, "max_staleness": options.max_staleness, "flags": options.flags}
        result = run(Path(directory), kills=options.kills, seed=options.seed, **limits)
    return report(result, "train.py")


if __name__ == "__main__":
    sys.exit(main())
