"""kill -9 of ``--trainer slime --max-staleness N`` at random moments, resumed with --load each time; then: was each
task that the last checkpoint counts as done trained on exactly once?

    SLIME_DIR=… python -m tests.programs.kill_slime_overlap --kills 30 [--max-staleness 2] [--seed 1]

slime's manager, placement groups, actors' group and weight update are real, under a Ray of each life; the actor takes a
set time for a step and writes its batches into its checkpoints, the engine takes a set time for an answer and outlives
the lives. A kill hits the process of loop, store and runner; its Ray goes with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agl_slime.report.audit import audit
from benchmarks.common import question, scripted_engine, tokenizer
from tests.harness.guard import guarded
from tests.harness.slime_programs import environment, slime_dir

GROUPS, SIZE, SAVES = 4, 2, 2
_EARLY = 0.25  # lives that are ended before they have trained on anything
_START_S = 25.0  # roughly one start
_ANSWER_S, _TRAIN_S = 0.3, 0.3


def live(directory: Path, url: str, number: int, iterations: int, staleness: int) -> None:
    """One life, to its end or its kill."""
    import yaml
    from rich.console import Console

    from agl_slime.cli.demo import LOOKUP_POLICY
    from agl_slime.cli.local import run_training
    from agl_slime.cli.parts import RunParts
    from agl_slime.cli.settings import train_config
    from benchmarks.common import question_agent
    from tests.harness.slime_programs import model_flags
    from tests.programs.slime.common import start_ray
    from tests.programs.slime.cpu import register_cpu

    settings, saved = directory / "agl.yaml", directory / "checkpoint"
    settings.write_text(
        yaml.safe_dump({"agl_actor_cls": "tests.programs.slime.counting_actor.CountingActor", "agl_train_s": _TRAIN_S})
    )
    config = train_config(
        trainer="slime", sglang_url=url, model_path=LOOKUP_POLICY, num_iterations=iterations,
        rollout_batch_size=GROUPS, n_samples_per_prompt=SIZE, eval_interval=0, output_dir=directory / f"run{number}",
        max_staleness=staleness, keep_rollouts="none",
    )  # fmt: skip
    flags = [
        *model_flags(LOOKUP_POLICY),
        *("--num-gpus-per-node", "1", "--micro-batch-size", "1", "--custom-config-path", str(settings)),
        *("--update-weight-mode", "full", "--update-weight-transport", "disk"),
        *("--update-weight-disk-dir", str(directory / "weights")),
        *("--save", str(saved), "--save-interval", str(SAVES)),
        *(("--load", str(saved)) if (saved / "latest_checkpointed_iteration.txt").exists() else ()),
    ]
    parts = RunParts(agent=question_agent(), tasks=[{"prompt": question(n)} for n in range(100_000)])
    register_cpu()
    start_ray(num_gpus=1, setup_hook="tests.programs.slime.cpu.register_cpu")
    asyncio.run(run_training(config, slime_flags=flags, given=parts, console=Console(quiet=True)))


@dataclass
class Result:
    """``findings``: sentences of the audit of each life's files, and contradictions between checkpoints."""

    kills: int = 0
    while_training: int = 0
    steps: int = 0
    tasks: int = 0
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Scene:
    def __init__(self, directory: Path, url: str, *, staleness: int, limit_s: float) -> None:
        self.directory, self._url, self._staleness = directory, url, staleness
        self._lives, self._deadline = 0, time.monotonic() + limit_s

    @property
    def run(self) -> Path:
        return self.directory / f"run{self._lives}"

    def start(self, iterations: int) -> subprocess.Popen[bytes]:
        self._lives += 1
        root = slime_dir()
        assert root is not None
        command = [sys.executable, "-m", "tests.programs.kill_slime_overlap", "--life", str(self.directory), self._url]
        command += [str(number) for number in (self._lives, iterations, self._staleness)]
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(guarded(command), env=environment(root), stdout=log, stderr=log)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """kill -9 of the process, and of Ray's daemons, by their guard."""
        process.terminate()
        process.wait()

    def wait(self, process: subprocess.Popen[bytes], *, trained: bool, seconds: float) -> None:
        """Until this life has trained, if ``trained``, and ``seconds`` longer."""
        end = None if trained else time.monotonic() + seconds
        while end is None or time.monotonic() < end:
            if process.poll() is not None:
                raise RuntimeError(f"a life ended by itself with {process.returncode}; {self.last_words()}")
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"the run takes too long; {self.last_words()}")
            if end is None and (self.run / "metrics.jsonl").exists():
                end = time.monotonic() + seconds
            time.sleep(0.01)

    def last_words(self) -> str:
        return (self.directory / "log").read_text(errors="replace")[-3000:]

    def audit(self, *, finished: bool = False) -> list[str]:
        """Of the files of the last life, and of the newest checkpoint."""
        findings = []
        if (self.run / "metrics.jsonl").exists():
            audited = audit(self.run)
            findings = audited.findings + ([] if audited.finished or not finished else ["the run did not finish"])
        return findings + checkpoint_findings(self.directory / "checkpoint")[0]


def checkpoint_findings(saved: Path) -> tuple[list[str], int, int]:
    """Contradictions between the newest checkpoints of actor and loop; the number of steps, and of trained tasks."""
    latest = saved / "latest_checkpointed_iteration.txt"
    if not latest.exists():
        return [], 0, 0
    step = int(latest.read_text())
    trained = json.loads((saved / f"iter_{step:07d}" / "trained.json").read_text())
    state = saved / "rollout" / f"agl_loop_{step}.json"
    if not state.exists():
        return [f"{state} is missing, although slime's checkpoint {step} is there"], step + 1, 0
    loop = json.loads(state.read_text())
    done = {*range(loop["tasks_drawn"]), *loop["finished_beyond"]}
    text = tokenizer().decode
    numbers = Counter(int(text(prompt).partition("question number ")[2].partition(":")[0]) for _, prompt in trained)
    steps = Counter(number for number, _ in trained)
    findings = [f"task {task} was trained on {n} times of {SIZE}" for task, n in numbers.items() if n != SIZE]
    if len(done) != len(numbers):  # instances are numbered in another order
        findings.append(f"{len(done)} tasks count as done, {len(numbers)} were trained on")
    findings += [f"step {number} has {n} samples" for number, n in steps.items() if n != GROUPS * SIZE]
    if sorted(steps) != list(range(step + 1)):
        findings.append(f"checkpoint {step} has the steps {sorted(steps)}")
    return findings, step + 1, len(numbers)


def run(directory: Path, *, kills: int, seed: int, staleness: int, limit_s: float) -> Result:
    rng, result, began = random.Random(seed), Result(kills=kills), time.monotonic()
    with scripted_engine(latency_s=_ANSWER_S, spread_s=_ANSWER_S, slots=GROUPS * SIZE, update_s=0.05) as url:
        scene = Scene(directory, url, staleness=staleness, limit_s=limit_s)
        for number in range(1, kills + 1):
            process = scene.start(100_000)
            trained = rng.random() >= _EARLY
            try:
                scene.wait(process, trained=trained, seconds=rng.uniform(0.0, 4.0 if trained else _START_S))
            finally:
                scene.end(process)
            result.while_training += trained
            result.findings += [f"after kill {number}: {finding}" for finding in scene.audit()]
            _, steps, tasks = checkpoint_findings(directory / "checkpoint")
            summary = "; ".join(result.findings) or "no findings"
            print(f"kill {number}: checkpoint of {steps} steps, {tasks} tasks; {summary}", flush=True)
        _, steps, _ = checkpoint_findings(directory / "checkpoint")
        process = scene.start(steps + 2 * SAVES)
        try:
            if process.wait(limit_s) != 0:
                raise RuntimeError(f"the last life failed; {scene.last_words()}")
        finally:
            scene.end(process)
        result.findings += scene.audit(finished=True)
        _, result.steps, result.tasks = checkpoint_findings(directory / "checkpoint")
    result.seconds = time.monotonic() - began
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("kills", 30), ("seed", 1), ("max-staleness", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--limit-s", type=float, default=7200.0)
    parser.add_argument("--life", nargs=5, help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.life:
        directory, url, *numbers = options.life
        live(Path(directory), url, *map(int, numbers))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the directory
    with tempfile.TemporaryDirectory() as place:
        settings: Any = {"kills": options.kills, "seed": options.seed, "staleness": options.max_staleness}
        result = run(Path(place), limit_s=options.limit_s, **settings)
    print(result)
    sys.exit(1 if result.findings else 0)


if __name__ == "__main__":
    main()
