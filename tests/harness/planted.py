"""Planted faults, and the tests that catch them.

Each line of ``planted.jsonl`` is a fault: one line of the package, and a wrong one in its place. A fault is planted
into a copy of the repository, where the tests that execute it run; the table lists the failed tests and their seconds.
With pytest-cov, which ``run`` needs too, the first command writes down in ``.coverage`` which test executes which line.

    python -m pytest -n 2 --cov=agl_slime --cov-context=test --cov-report=
    python -m tests.harness.planted run results.jsonl [--room tokens] [--jobs 2]
    python -m tests.harness.planted table results.jsonl              # Markdown

For a line that only imports execute, the tests of its room run. A test that fails without any fault catches nothing.
"""

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("planted.jsonl")
TIME_LIMIT_S = 300.0
MOST_TESTS, MOST_OTHER_TESTS = 60, 30  # of the fault's room, and of others


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
        parts = Path(self.file).parts
        return "/".join(parts[1:3]) if parts[1] == "tools" else parts[1]

    @property
    def folder(self) -> str:
        return f"tests/{self.room}/"

    def line_in(self, source: str) -> int:
        """The index of the line. Raises ``ValueError`` where the source has none."""
        places = [index for index, line in enumerate(source.splitlines()) if line.strip() == self.before]
        if len(places) < self.nth:
            raise ValueError(f"{self.file} has no line {self.nth} of {self.before!r}: the fault needs the new line")
        return places[self.nth - 1]

    def plant(self, root: Path) -> None:
        path = root / self.file
        lines = path.read_text().splitlines(keepends=True)
        index = self.line_in("".join(lines))
        lines[index] = lines[index].replace(self.before, self.after)
        path.write_text("".join(lines))


@dataclass
class Outcome:
    """A run of the tests of a fault: the failed ones with their seconds. ``error``: the run gave no result."""

    fault: dict[str, Any]
    failed: dict[str, float] = field(default_factory=dict)
    passed: int = 0
    error: str = ""


def tests_of(fault: Fault) -> tuple[list[str], list[str]]:
    """Tests that execute the statement of the fault, evenly from the files of its room and of others, and the other
    tests that do; none where only imports execute it."""
    from coverage import CoverageData

    source = (ROOT / fault.file).read_text()
    number = fault.line_in(source) + 1
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    around = [node for node in statements if node.lineno <= number <= (node.end_lineno or node.lineno)]
    innermost = max(around, key=lambda node: node.lineno)
    inner = [node.lineno for node in ast.walk(innermost) if isinstance(node, ast.stmt) and node is not innermost]
    last = min(inner, default=(innermost.end_lineno or number) + 1)
    data = CoverageData(str(ROOT / ".coverage"))
    data.read()
    executed = data.contexts_by_lineno(str(ROOT / fault.file))
    contexts = {
        context for line in range(innermost.lineno, max(last, number + 1)) for context in executed.get(line, [])
    }
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in sorted({context.rpartition("|")[0] for context in contexts if context}):  # "|run" and "|setup"
        by_file[test.partition("::")[0]].append(test)
    in_turn = [test for _, test in sorted(pair for tests in by_file.values() for pair in enumerate(tests))]
    own = [test for test in in_turn if test.startswith(fault.folder)]
    others = [test for test in in_turn if not test.startswith(fault.folder)]
    return own[:MOST_TESTS] + others[:MOST_OTHER_TESTS], own[MOST_TESTS:] + others[MOST_OTHER_TESTS:]


def run_tests(root: Path, fault: Fault, tests: Sequence[str], *options: str) -> Outcome:
    """``tests``, or all of the fault's room, in the copy at ``root``, in a process group that ends with them."""
    outcome = Outcome(fault=asdict(fault))
    names, report = root.with_suffix(".tests"), root.with_suffix(".xml")
    names.write_text("\n".join(tests or [fault.folder]))
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-o", "junit_family=xunit1", f"@{names}"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*command, *options], cwd=root, env=environment, start_new_session=True, **output) as process:
        try:
            outcome.error = process.communicate(timeout=TIME_LIMIT_S)[0][-500:]
        except subprocess.TimeoutExpired:
            outcome.error = f"the tests did not end within {TIME_LIMIT_S:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            outcome.error = ""
            if case.find("failure") is None and case.find("error") is None:
                outcome.passed += 1
            else:
                outcome.failed[f"{case.get('file')}::{case.get('name')}"] = float(case.get("time", 0))
    return outcome


def run_all(faults: Sequence[Fault], *, jobs: int, results: Path) -> None:
    """Run the tests with each fault, and the failed ones again without; a line of JSON per fault, as it ends."""
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = [row["fault"] for row in rows]

    def run_one(fault: Fault) -> None:
        root = free.pop()
        first, others = tests_of(fault)
        fault.plant(root)
        outcome = run_tests(root, fault, first)
        if others and not outcome.failed and not outcome.error:  # no false "caught by none"
            outcome = run_tests(root, fault, first := others)
        subprocess.run(["git", "checkout", "-q", "."], cwd=root, check=True)
        if outcome.failed:
            flaky = run_tests(root, fault, first, "--lf").failed
            outcome.failed = {test: seconds for test, seconds in outcome.failed.items() if test not in flaky}
        free.append(root)
        with results.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        caught = outcome.error.strip().splitlines()[-1:] or [f"{len(outcome.failed)} failed, {outcome.passed} passed"]
        print(f"{fault.file}: {fault.before}: {caught[0]}", flush=True)

    with tempfile.TemporaryDirectory(prefix="planted-") as directory, ThreadPoolExecutor(jobs) as pool:
        free = [Path(directory) / str(number) for number in range(jobs)]
        for copy in free:
            subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(copy)], check=True)
        list(pool.map(run_one, (fault for fault in faults if asdict(fault) not in done)))


def table(results: Path) -> str:
    """Fault x tests that catch it x their seconds, and a summary per invariant."""
    rows, counts, invariants = [], Counter[str](), defaultdict[int, list[int]](list)
    for run in (json.loads(line) for line in results.read_text().splitlines()):
        fault, tests = run["fault"], run["failed"]
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
    head = "| fault | by | invariant | tests | s | the cheapest tests that catch it |\n|---|---|---|---|---|---|\n"
    lines = [
        f"{sum(counts.values())} faults: {counts['more']} caught by several tests, {counts['once']} by one, "
        f"{counts['uncaught']} by none."
    ]
    lines += [
        f"Invariant {number}: {', '.join(map(str, found))} tests." for number, found in sorted(invariants.items())
    ]
    return "\n".join([*lines, "", head + "\n".join(rows), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("results", type=Path, help="a run that was cut continues with this file")
    parser.add_argument("--room", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.command == "table":
        print(table(options.results))
    else:
        faults = [Fault(**json.loads(line)) for line in FAULTS.read_text().splitlines()]
        chosen = [fault for fault in faults if not options.room or fault.room in options.room]
        run_all(chosen, jobs=options.jobs, results=options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
