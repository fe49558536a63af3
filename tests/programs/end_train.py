"""SIGTERM, SIGINT, SIGHUP and SIGKILL to a real ``train.py`` in each of its phases, in random order, resumed each time;
after each end: do its files agree, and has groups.jsonl each group once? At last: was each task trained on or dropped
once?

    python -m tests.programs.end_train [--ends 24] [--signals KILL] [--max-staleness 2] [--trainer slime] [--seed 0]

The 24 ends are the pairs of a signal and a phase; every third one is followed by another signal within a second. Each
process of a run starts fresh. One in ten starts from nothing, with an embedded engine that must be gone soon after it.
The others, to save time, are forked from a process that has imported the modules of train.py, and use an engine that
outlives them, with abandoned requests and with weights that the next process has not made. The last checkpoint's
optimizer steps and the run's ``trained.jsonl`` say which tasks were trained on, and are compared with the ledger.

With ``--trainer slime`` a stand-in of slime's trainer takes its batches as slime's manager does and writes down their
tasks; each process has its own run directory then, and resumes with ``--load``.
"""

import argparse
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.report.files import iter_jsonl
from agl_slime.tools.audit import audit as audit_files
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.waiting import becomes_true
from tests.programs.slime import standin_trainer

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
PHASES = ("start", "collect", "train", "sync", "validation", "end")
ENDS_WITHIN_S = 40.0  # with a step of training, and on a machine with other work
_FLAGS = (
    "--agent tests.programs.agents.flaky_lookup:FlakyLookup --rollout-batch-size 3 --n-samples-per-prompt 3 "
    "--eval-interval 2 --eval-rollouts 3 --save-interval 3 --view lines"
)
_START_S = 4.0  # roughly one start
_ROOT = Path(__file__).parents[2]
_IMPORTED = ["agl_slime.cli.local", "agl_slime.train.local.trainer", "transformers.models.qwen3.modeling_qwen3"]


@dataclass
class Result:
    """``findings``: a sentence for each fault, with the number of its end."""

    ends: int = 0
    by_phase: Counter[str] = field(default_factory=Counter)
    """The phase at the moment of the signal."""
    iterations: int = 0
    tasks: int = 0
    slowest_s: float = 0.0
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0


def report_phases(pipe: int) -> None:
    """In the process of a run: write the number of each phase that it enters into ``pipe``."""
    from agl_slime.events import Event, PhaseStarted
    from agl_slime.loop.online import OnlineRLLoop
    from agl_slime.loop.validation import Validations

    os.set_blocking(pipe, False)

    def report(phase: str) -> None:
        with suppress(BlockingIOError, BrokenPipeError):  # the reader has gone
            os.write(pipe, bytes([PHASES.index(phase)]))

    emit, aside, save_at_end = OnlineRLLoop._emit, Validations._validate_concurrently, OnlineRLLoop._save_at_end

    def emit_and_report(self: OnlineRLLoop, event: Event) -> None:
        if isinstance(event, PhaseStarted):
            report("validation" if event.phase == "eval" else event.phase)
        emit(self, event)

    def beside(self: Validations, iteration: int) -> Any:
        report("validation")
        return aside(self, iteration)

    def at_end(self: OnlineRLLoop) -> Any:
        report("end")
        return save_at_end(self)

    OnlineRLLoop._emit, OnlineRLLoop._save_at_end = emit_and_report, at_end
    Validations._validate_concurrently = beside


def _local(flags: Sequence[str], log: Path, pipe: Any) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored
    report_phases(pipe.fileno())
    from agl_slime.cli.main import run

    os.chdir(_ROOT)
    with log.open("ab") as out:
        os.dup2(out.fileno(), sys.stdout.fileno())
        os.dup2(out.fileno(), sys.stderr.fileno())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server ignores
    run(["train", *flags])


def _slime(flags: Sequence[str], log: Path, pipe: Any) -> None:
    standin_trainer.take_slimes_place()
    _local(flags, log, pipe)


class Scene:
    """One run directory, and the process that works on it."""

    entry: Callable[..., None] = staticmethod(_local)

    def __init__(self, directory: Path, *, flags: str, limit_s: float, engine_url: str) -> None:
        self.output = directory / "run"
        self.directory, self.log, self.engine_url = directory, directory / "log", engine_url
        self.options = flags.split()
        self._deadline = time.monotonic() + limit_s

    def flags(self, iterations: int, *, cold: bool) -> list[str]:
        """Of train.py, for the next process."""
        policy = self.directory / "policy"  # a path of this run's engines alone
        if not policy.exists():
            shutil.copytree(LOOKUP_POLICY, policy)
        flags = [*self.options, "--model-path", str(policy), "--output-dir", str(self.output)]
        flags += ["--num-iterations", str(iterations), *([] if cold else ["--sglang-url", self.engine_url])]
        return flags + (["--resume"] if (self.output / "config.json").exists() else [])

    def rows(self) -> list[dict[str, Any]]:
        path = self.output / "metrics.jsonl"
        return [*iter_jsonl(path)] if path.exists() else []

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def leftovers(self) -> list[str]:
        """Command lines of processes that still work on this run; its engine ends moments after it."""
        becomes_true(lambda: not _processes_of(str(self.directory)), 20.0)
        return _processes_of(str(self.directory))

    def begin(self, iterations: int, *, cold: bool) -> tuple[BaseProcess, Any]:
        """A process, and the pipe that has its phases."""
        context: Any = multiprocessing.get_context("spawn" if cold else "forkserver")
        if not cold:
            context.set_forkserver_preload(_IMPORTED)
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=self.entry, args=(self.flags(iterations, cold=cold), self.log, writer))
        process.start()
        writer.close()
        return process, reader

    def wait_for_phase(self, process: BaseProcess, reader: Any, phase: str, *, times: int) -> str:
        """Until the run has entered ``phase`` ``times`` times, or has ended; returns its phase."""
        now, entered = "start", Counter[str]()
        while entered[phase] < times:
            if reader.poll(0.05):
                if not (byte := os.read(reader.fileno(), 1)):
                    break
                now = PHASES[byte[0]]
                entered[now] += 1
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"the run takes too long; {self.last_words()}")
        return now

    def done(self) -> int:
        """Iterations that are finished."""
        return max([0, *(row["iteration"] for row in self.rows())])

    def look(self, *, finished: bool = False) -> list[str]:
        """A sentence for each fault of the files."""
        findings: list[str] = []
        if (self.output / "metrics.jsonl").exists():
            result = audit_files(self.output)
            findings += result.findings + ([] if result.finished or not finished else ["the run did not finish"])
            behind = max((row.get("rollout/staleness_max") or 0 for row in self.rows()), default=0)
            limit = int(self.options[self.options.index("--max-staleness") + 1])
            findings += [f"tokens are {behind} versions behind the limit of {limit}"] if behind > limit else []
        groups = self.output / "groups.jsonl"
        if groups.exists():
            names = Counter(line["group_id"] for line in iter_jsonl(groups))
            findings += [f"group {name} is in groups.jsonl {count} times" for name, count in names.items() if count > 1]
        return findings


class SlimeScene(Scene):
    """Each process has its own directory, and loads the stand-in's checkpoint."""

    entry = staticmethod(_slime)
    lives = 0

    def flags(self, iterations: int, *, cold: bool) -> list[str]:
        self.lives += 1
        self.output = self.directory / f"run-{self.lives}"
        ours, _, slimes = standin_trainer.flags(self.directory, self.engine_url).partition(" -- ")
        flags = [*ours.split(), *self.options, "--num-iterations", str(iterations), "--output-dir", str(self.output)]
        loads = ["--load", str(self.directory / "saved")] if (self.directory / "saved" / "latest").exists() else []
        return [*flags, "--", *slimes.split(), *loads]

    def done(self) -> int:
        latest = self.directory / "saved" / "latest"
        return max(int(latest.read_text()) + 1 if latest.exists() else 0, super().done())


def ends(n: int, rng: random.Random, signals: Sequence[signal.Signals] = SIGNALS) -> list[tuple[str, signal.Signals]]:
    """Each signal in each phase in random order, repeated until there are ``n``."""
    pairs = [(phase, number) for phase in PHASES for number in signals]
    return [pair for _ in range(-(-n // len(pairs))) for pair in rng.sample(pairs, len(pairs))][:n]


def run(
    directory: Path,
    *,
    planned: Sequence[tuple[str, signal.Signals]],
    rng: random.Random,
    max_staleness: int = 0,
    trainer: str = "local",
    flags: str = "",
    limit_s: float = 3600.0,
) -> Result:
    """``flags``: further flags of train.py."""
    result, began = Result(ends=len(planned)), time.monotonic()
    slime = trainer == "slime"
    with in_thread(ScriptedEngine()) if slime else EmbeddedEngine(LOOKUP_POLICY) as engine:
        kind = SlimeScene if slime else Scene
        all_flags = f"{'' if slime else _FLAGS} --max-staleness {max_staleness} {flags}"
        scene = kind(directory, flags=all_flags, limit_s=limit_s, engine_url=engine.url)
        for number, (phase, first) in enumerate(planned, 1):
            title = f"end {number}, {first.name} in {phase}"
            cold = not slime and rng.random() < 0.1
            iterations = scene.done() + 3 if phase == "end" else 100_000
            process, reader = scene.begin(iterations, cold=cold)
            try:
                now = scene.wait_for_phase(process, reader, phase, times=0 if phase == "start" else rng.choice((1, 2)))
                time.sleep(rng.uniform(0.0, _START_S) if phase == "start" else rng.expovariate(10.0))
                result.by_phase[now] += 1
                code, took = _end(process, first, rng)
                result.slowest_s = max(result.slowest_s, took)
                # before the command line is there, Python ends with 1 for a KeyboardInterrupt
                expected = {130, -first, -signal.SIGKILL} | {"end": {0}, "start": {1}}.get(phase, set())
                wrong = [] if code in expected else [f"ended with {code}; {scene.last_words()}"]
            finally:
                process.kill()
                process.join()
                reader.close()
            wrong += scene.look() + scene.leftovers()
            result.findings += [f"{title}: {sentence}" for sentence in wrong]
            summary = f"{title} (in {now}): exit code {code} after {took:.1f} s, {len(wrong)} findings"
            print("\n    ".join([summary, *wrong]), flush=True)
        process, reader = scene.begin(scene.done() + 3, cold=False)
        process.join(limit_s)
        reader.close()
        if process.exitcode != 0:
            raise RuntimeError(f"the last process of the run ended with {process.exitcode}; {scene.last_words()}")
        result.findings += [f"at the end: {sentence}" for sentence in scene.look(finished=True)]
        result.iterations = scene.done()
        wrong, result.tasks = standin_trainer.look(directory / "saved") if slime else account(scene.output)
        result.findings += wrong
    result.seconds = time.monotonic() - began
    return result


def account(output: Path) -> tuple[list[str], int]:
    """A sentence for each task of the finished run in ``output`` with a wrong end; the number of tasks. What files say
    of one another is the audit's."""
    import torch

    metrics = [*iter_jsonl(output / "metrics.jsonl")]
    trained = Counter(line["instance_id"] for line in iter_jsonl(output / "trained.jsonl"))
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    with sqlite3.connect(output / "ledger.sqlite") as ledger:
        finished = Counter(name for (name,) in ledger.execute("SELECT instance_id FROM ledger_finished"))
        query = "SELECT instance_id, state, outcome FROM ledger_rollouts WHERE instance_id IS NOT NULL"
        for instance, state, outcome in ledger.execute(query):
            outcomes[instance][outcome if state == 2 else "unfinished"] += 1
    findings = []
    tasks = {str(n) for n in range(1 + max(map(int, finished)))}
    for name in sorted(tasks, key=int):
        if trained[name] > 1 or finished[name] > 1 or outcomes[name]["trained"] > 3:
            findings.append(f"task {name} was trained on twice")
        elif not finished[name] or outcomes[name]["unfinished"] or trained[name] != (outcomes[name]["trained"] > 0):
            findings.append(f"task {name} is lost")
    checkpoints = {int(path.name.removeprefix("step_")): path for path in (output / "checkpoints").glob("step_*")}
    last = max(checkpoints)
    state = torch.load(checkpoints[last] / "trainer" / "trainer_state.pt", weights_only=True)
    steps = state["steps"], round(sum(row.get("train/steps") or 0 for row in metrics))
    if steps[0] != steps[1] or not steps[0]:
        findings.append(f"the last checkpoint has {steps[0]} optimizer steps, and the reports {steps[1]}")
    if state["iteration"] != (trained_last := max(row["iteration"] for row in metrics if row.get("train/steps"))):
        findings.append(f"the trainer's last iteration is {state['iteration']}, and the reports' {trained_last}")
    return findings, len(tasks)


def _processes_of(text: str) -> list[str]:
    commands = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if process.pid != os.getpid() and any(text in word for word in words) and "end_train" not in " ".join(words):
            commands.append(" ".join(words))
    return commands


def _end(process: BaseProcess, first: signal.Signals, rng: random.Random) -> tuple[int | None, float]:
    """Send the signal, and another one to every third process; its exit code, and the seconds until it came."""
    assert process.pid is not None
    began = time.monotonic()
    with suppress(ProcessLookupError):
        os.kill(process.pid, first)
        if rng.random() < 1 / 3:
            process.join(rng.uniform(0.0, 1.0))
            if process.is_alive():
                os.kill(process.pid, rng.choice(SIGNALS))
    process.join(ENDS_WITHIN_S)
    return process.exitcode, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ends", 24), ("seed", 0), ("max-staleness", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--trainer", choices=("local", "slime"), default="local")
    parser.add_argument("--signals", nargs="+", choices=[number.name[3:] for number in SIGNALS], help="all by default")
    parser.add_argument("--flags", default="", help="further flags of train.py")
    options = parser.parse_args()
    signals = [number for number in SIGNALS if number.name[3:] in (options.signals or number.name)]
    rng = random.Random(options.seed)
    directory = Path(tempfile.mkdtemp(prefix="end-train-"))
    print(f"the run is in {directory}, which is kept where something is wrong", flush=True)
    settings: dict[str, Any] = {"max_staleness": options.max_staleness, "trainer": options.trainer}
    planned = ends(options.ends, rng, signals)
    result = run(directory, planned=planned, rng=rng, flags=options.flags, **settings)
    if not result.findings:
        shutil.rmtree(directory)
    print(f"{result.ends} ends in {result.seconds:.0f} s, by phase {dict(result.by_phase)}")
    print(f"{result.iterations} iterations, {result.tasks} tasks, {result.slowest_s:.1f} s from signal to end at most")
    print("\n    ".join([f"{len(result.findings)} findings", *result.findings]))
    return 1 if result.findings else 0


if __name__ == "__main__":
    sys.exit(main())
