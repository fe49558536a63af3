"""Planted faults: what the test suite catches.

Each line of ``planted.jsonl`` is a fault: one line of the package, and a wrong one in its place. A fault is planted
into a copy of the repository, where the tests of its room run; the table lists the failed tests and their CPU time.

    python -m tests.harness.planted run [--room tokens] [--jobs 2] --results results.jsonl
    python -m tests.harness.planted table results.jsonl              # Markdown
    python -m tests.harness.planted draw --count 60 --seed 46        # new faults; needs the package cosmic-ray

A test that fails without any fault is left out, so that flaky tests catch nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("planted.jsonl")
ROOMS = ("tokens", "data", "loop", "runner", "engine", "gateway", "train", "store", "support", "rehearse")
# the tests of a room that do not stand in tests/<room>
FOLDERS = {"rehearse": "tools/rehearse"}
# cosmic-ray's operators for mistakes that people make; others change annotations or fail at once
OPERATORS = (
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt")),
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Is_IsNot", "IsNot_Is")),
    *(f"ReplaceBinaryOperator_{pair}" for pair in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul")),
    *("ReplaceAndWithOr", "ReplaceOrWithAnd", "AddNot", "ReplaceUnaryOperator_Delete_Not", "NumberReplacer"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
    *("ZeroIterationForLoop", "ExceptionReplacer"),
)
TIME_LIMIT_S = 300.0
_VARIABLE = "AGL_SLIME_PLANTED_RESULTS"


@dataclass(frozen=True)
class Fault:
    """``before`` and ``after`` are lines without indentation; ``nth`` counts equal lines in the file from 1. ``by`` is
    the author, ``invariant`` the number of the design's invariant that breaks, 0 for none."""

    file: str
    before: str
    after: str
    nth: int = 1
    by: str = "hand"
    invariant: int = 0
    what: str = ""

    @property
    def room(self) -> str:
        return Path(self.file).parts[1]

    def plant(self, root: Path) -> None:
        path = root / self.file
        lines = path.read_text().splitlines(keepends=True)
        places = [number for number, line in enumerate(lines) if line.strip() == self.before]
        if len(places) < self.nth:
            raise ValueError(f"{self.file} has no line {self.nth} of {self.before!r}: the fault needs the new line")
        at = places[self.nth - 1]
        lines[at] = lines[at].replace(self.before, self.after)
        path.write_text("".join(lines))


@dataclass
class Outcome:
    """A run of a room's tests: the failed tests with the CPU seconds of each. ``error``: the run gave no result."""

    fault: dict[str, Any]
    failed: dict[str, float] = field(default_factory=dict)
    passed: int = 0
    error: str = ""


# -- in the process of the tests --------------------------------------------------------------------------------------


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class _Recorder:
    """A pytest plugin that writes each test's outcome and CPU time as a line of JSON."""

    def __init__(self, path: str) -> None:
        self._path = path

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._failed, begin = False, _cpu_seconds()
        result = yield
        line = {"test": item.nodeid, "failed": self._failed, "cpu": round(_cpu_seconds() - begin, 3)}
        with open(self._path, "a") as lines:
            lines.write(json.dumps(line) + "\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed


def pytest_configure(config: pytest.Config) -> None:
    if (path := os.environ.get(_VARIABLE)) and hasattr(config, "pluginmanager"):
        config.pluginmanager.register(_Recorder(path))


# -- planting ---------------------------------------------------------------------------------------------------------


def tests_of(room: str) -> list[str]:
    return [f"tests/{FOLDERS.get(room, room)}"]


def run_tests(root: Path, room: str, fault: Fault | None, *, time_limit_s: float = TIME_LIMIT_S) -> Outcome:
    """The tests of ``room`` in the copy at ``root``, in a process group that ends with them."""
    outcome = Outcome(fault=asdict(fault) if fault else {"room": room})
    results = root / "planted-results.jsonl"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "tests.harness.planted"]
    command += ["-p", "no:cacheprovider", *tests_of(room)]
    environment = {**os.environ, "PYTHONPATH": str(root), _VARIABLE: str(results), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=time_limit_s)
    except subprocess.TimeoutExpired:
        outcome.error = f"the tests did not end within {time_limit_s:g} s"
        output = b""
    finally:
        for end in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, end)
            except ProcessLookupError:
                break
        process.wait()
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    outcome.failed = {line["test"]: line["cpu"] for line in lines if line["failed"]}
    outcome.passed = sum(not line["failed"] for line in lines)
    if not lines and not outcome.error:
        outcome.error = output.decode(errors="replace")[-500:]
    return outcome


def run_all(faults: Sequence[Fault], *, jobs: int, results: Path) -> None:
    """Run the rooms' tests without a fault, then with each; a line of JSON per run, as it ends."""
    done = [json.loads(line)["fault"] for line in results.read_text().splitlines()] if results.exists() else []
    rooms = sorted({fault.room for fault in faults})
    work: list[tuple[str, Fault | None]] = [(room, None) for room in rooms if {"room": room} not in done]
    work += [(fault.room, fault) for fault in faults if asdict(fault) not in done]
    copies = [Path(tempfile.mkdtemp(prefix="planted-")) / "repository" for _ in range(jobs)]
    free = list(copies)
    for copy in copies:
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(copy)], check=True)

    def one(job: tuple[str, Fault | None]) -> None:
        room, fault = job
        root = free.pop()
        try:
            if fault is not None:
                fault.plant(root)
            outcome = run_tests(root, room, fault)
        finally:
            subprocess.run(["git", "checkout", "-q", "."], cwd=root, check=True)
            free.append(root)
        with results.open("a") as lines:
            lines.write(json.dumps(asdict(outcome)) + "\n")
        caught = outcome.error.strip().splitlines()[-1:] or [f"{len(outcome.failed)} of {outcome.passed} tests failed"]
        print(f"{room}: {fault.before if fault else 'no fault'}: {caught[0]}", flush=True)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, work))
    finally:
        for copy in copies:
            shutil.rmtree(copy.parent, ignore_errors=True)


# -- the table --------------------------------------------------------------------------------------------------------


def table(results: Path) -> str:
    """Fault x tests that catch it x their CPU seconds, and a summary per invariant."""
    runs = [json.loads(line) for line in results.read_text().splitlines()]
    flaky: set[str] = {test for run in runs if "file" not in run["fault"] for test in run["failed"]}
    rows, counts, invariants = [], Counter[str](), defaultdict[int, list[int]](list)
    for run in runs:
        if "file" not in (fault := run["fault"]):
            continue
        tests = {test: cpu for test, cpu in run["failed"].items() if test not in flaky}
        caught = len(tests) or int(bool(run["error"]))
        counts["uncaught" if not caught else "once" if caught == 1 else "more"] += 1
        if fault["invariant"]:
            invariants[fault["invariant"]].append(caught)
        named = sorted(tests, key=lambda test: tests[test])[:3]
        names = "; ".join(f"{name.removeprefix('tests/')} ({tests[name]:.1f} s)" for name in named)
        place = f"{fault['file'].removeprefix('agl_slime/')}: `{fault['before']}` → `{fault['after']}`"
        rows.append(
            f"| {place.replace('|', chr(92) + '|')} | {fault['by']} | {fault['invariant'] or ''} | "
            f"{caught} | {sum(tests.values()):.1f} | {names or run['error'][-80:]} |".replace("\n", " ")
        )
    head = "| fault | by | invariant | tests | CPU s | the cheapest tests that catch it |\n|---|---|---|---|---|---|\n"
    lines = [
        f"{sum(counts.values())} faults: {counts['more']} caught by several tests, {counts['once']} by one, "
        f"{counts['uncaught']} by none."
    ]
    lines += [
        f"Invariant {number}: {', '.join(map(str, found))} tests." for number, found in sorted(invariants.items())
    ]
    return "\n".join([*lines, "", head + "\n".join(rows), ""])


# -- new faults -------------------------------------------------------------------------------------------------------


def draw(count: int, seed: int) -> Iterator[Fault]:
    """Faults of one line each, drawn from modules by their number of lines, then from operators, then from places."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    rng = random.Random(seed)
    modules = {
        path: path.read_text()
        for room in ROOMS
        for path in sorted((ROOT / "agl_slime" / room).rglob("*.py"))
        if "standins" not in path.parts and "cpu" not in path.stem
    }
    by_room = {room: [path for path in modules if path.relative_to(ROOT).parts[1] == room] for room in ROOMS}
    for number in range(count):
        room = ROOMS[number % len(ROOMS)]
        while True:
            weights = [modules[path].count("\n") for path in by_room[room]]
            path = rng.choices(by_room[room], weights)[0]
            operator, place = get_operator(f"core/{rng.choice(OPERATORS)}")(), rng.randrange(20)
            changed = mutate_code(modules[path], operator, place)
            if changed and (fault := _one_line(path, modules[path], changed, f"cosmic-ray, seed {seed}")):
                yield fault
                break


def _one_line(path: Path, source: str, changed: str, by: str) -> Fault | None:
    """The fault, where a single line of code differs."""
    old, new = source.splitlines(), changed.splitlines()
    places = [number for number, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]]
    if len(old) != len(new) or len(places) != 1:
        return None
    try:
        ast.parse(changed)
    except SyntaxError:
        return None
    before, after = old[places[0]].strip(), new[places[0]].strip()
    if before.startswith(("def ", "async def ")):  # the star of keyword-only parameters, taken for a product
        return None
    nth = sum(line.strip() == before for line in old[: places[0] + 1])
    return Fault(str(path.relative_to(ROOT)), before, after, nth, by)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--room", choices=ROOMS, action="append", default=[])
    running.add_argument("--jobs", type=int, default=2)
    running.add_argument("--results", type=Path, required=True, help="a run that was cut continues with this file")
    drawing = commands.add_parser("draw")
    drawing.add_argument("--count", type=int, default=60)
    drawing.add_argument("--seed", type=int, default=46)
    commands.add_parser("table").add_argument("results", type=Path)
    options = parser.parse_args()
    if options.command == "draw":
        for fault in draw(options.count, options.seed):
            print(json.dumps(asdict(fault)), flush=True)
    elif options.command == "table":
        print(table(options.results))
    else:
        faults = [Fault(**json.loads(line)) for line in FAULTS.read_text().splitlines()]
        chosen = [fault for fault in faults if not options.room or fault.room in options.room]
        run_all(chosen, jobs=options.jobs, results=options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
