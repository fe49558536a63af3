"""Planted faults, and the tests that catch them.

Each line of ``planted.jsonl`` is a fault: one line of the package, and a wrong one in its place. A fault is planted
into a copy of the repository, where the tests that execute it run; the table lists the failed tests and their CPU time.

    python -m tests.harness.planted lines lines.json                 # which test executes which line; needs coverage
    python -m tests.harness.planted run lines.json --results results.jsonl [--room tokens] [--jobs 2]
    python -m tests.harness.planted table results.jsonl              # Markdown

For a line that only imports execute, the tests of its room run. A test that fails without any fault catches nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("planted.jsonl")
# the tests of a room that do not stand in tests/<room>
FOLDERS = {"rehearse": "tools/rehearse"}
TIME_LIMIT_S = 300.0
MOST_TESTS, MOST_OTHER_TESTS, MOST_OTHER_FILES = 60, 30, 10  # of the fault's room, and of others
# variables for the processes of tests, and a file beside the results
_RESULTS, _LINES, _SELECTED = "AGL_SLIME_PLANTED_RESULTS", "AGL_SLIME_PLANTED_LINES", "selected.json"


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
    """A run of the tests of a fault: the failed ones with their CPU seconds. ``error``: the run gave no result."""

    fault: dict[str, Any]
    failed: dict[str, float] = field(default_factory=dict)
    passed: int = 0
    error: str = ""


# -- in the process of the tests --------------------------------------------------------------------------------------


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class _Recorder:
    """A pytest plugin that runs the tests named in ``selected``, or all, and writes each one's outcome and CPU time as
    a line of JSON."""

    def __init__(self, results: str, selected: set[str]) -> None:
        self._results, self._selected = results, selected

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._selected:
            items[:] = [item for item in items if item.nodeid in self._selected]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._failed, begin = False, _cpu_seconds()
        result = yield
        line = {"test": item.nodeid, "failed": self._failed, "cpu": round(_cpu_seconds() - begin, 3)}
        with open(self._results, "a") as lines:
            lines.write(json.dumps(line) + "\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed


class _LineRecorder:
    """A pytest plugin that writes the lines of the package that each test executes, with coverage's contexts."""

    def __init__(self, directory: str) -> None:
        import coverage

        data = str(Path(directory) / f"{os.getpid()}.coverage")
        self._coverage = coverage.Coverage(data, source=["agl_slime"], config_file=False, messages=False)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()


def pytest_configure(config: pytest.Config) -> None:
    if results := os.environ.get(_RESULTS):
        names = Path(results).with_name(_SELECTED)
        selected = set(json.loads(names.read_text())) if names.exists() else set()
        config.pluginmanager.register(_Recorder(results, selected))
    elif directory := os.environ.get(_LINES):
        config.pluginmanager.register(_LineRecorder(directory))


# -- which tests execute a line ---------------------------------------------------------------------------------------


def record_lines(out: Path) -> None:
    """Run the default suite; write its tests, and per file and line the numbers of the tests that execute it, without
    lines that only imports execute."""
    from coverage import CoverageData

    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "tests.harness.planted"]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), _LINES: directory}, check=False)
        lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for path in Path(directory).glob("*.coverage*"):
            data = CoverageData(str(path))
            data.read()
            for file in data.measured_files():
                for number, contexts in data.contexts_by_lineno(file).items():
                    lines[str(Path(file).relative_to(ROOT))][number].update(filter(None, contexts))
    names = sorted({test for numbers in lines.values() for tests in numbers.values() for test in tests})
    number_of = {name: number for number, name in enumerate(names)}
    files = {
        file: {line: sorted(number_of[test] for test in tests) for line, tests in numbers.items() if tests}
        for file, numbers in lines.items()
    }
    out.write_text(json.dumps({"tests": names, "files": files}))


def tests_of(fault: Fault, lines: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Tests that execute the statement of the fault, evenly from the files of its room and of others, and the other
    tests that do; none where only imports execute it."""
    source = (ROOT / fault.file).read_text()
    number = fault.line_in(source) + 1
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    around = [node for node in statements if node.lineno <= number <= (node.end_lineno or node.lineno)]
    innermost = max(around, key=lambda node: node.lineno)
    inner = [node.lineno for node in ast.walk(innermost) if isinstance(node, ast.stmt) and node is not innermost]
    last = min(inner, default=(innermost.end_lineno or number) + 1)
    executed = lines["files"].get(fault.file, {})
    numbers = {test for line in range(innermost.lineno, max(last, number + 1)) for test in executed.get(str(line), [])}
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in sorted(numbers):
        by_file[lines["tests"][test].partition("::")[0]].append(lines["tests"][test])
    own = [tests for file, tests in by_file.items() if file.startswith(folder_of(fault.room))]
    others = [tests for file, tests in by_file.items() if not file.startswith(folder_of(fault.room))]
    first = [*_evenly(own, MOST_TESTS), *_evenly(others[:MOST_OTHER_FILES], MOST_OTHER_TESTS)]
    return first, sorted({test for tests in by_file.values() for test in tests} - {*first})


def folder_of(room: str) -> str:
    return f"tests/{FOLDERS.get(room, room)}/"


def _evenly(groups: Sequence[Sequence[str]], most: int) -> list[str]:
    return [test for row in zip_longest(*groups) for test in row if test is not None][:most]


# -- planting ---------------------------------------------------------------------------------------------------------


def run_tests(root: Path, fault: Fault, tests: Sequence[str], *, planted: bool) -> Outcome:
    """``tests``, or all of the fault's room, in the copy at ``root``, in a process group that ends with them."""
    outcome = Outcome(fault={**asdict(fault), "planted": planted})
    directory = root.parent / "results"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    (directory / _SELECTED).write_text(json.dumps([*tests]))
    files = sorted({test.partition("::")[0] for test in tests}) or [folder_of(fault.room)]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "tests.harness.planted"]
    environment = {**os.environ, "PYTHONPATH": str(root), _RESULTS: str(directory / "tests"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "-p", "no:cacheprovider", *files],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    output = b""
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        outcome.error = f"the tests did not end within {TIME_LIMIT_S:g} s"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
        process.wait()
    results = directory / "tests"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    outcome.failed = {row["test"]: row["cpu"] for row in rows if row["failed"]}
    outcome.passed = sum(not row["failed"] for row in rows)
    if not rows and not outcome.error:
        outcome.error = output.decode(errors="replace")[-500:]
    return outcome


def run_all(faults: Sequence[Fault], lines: Mapping[str, Any], *, jobs: int, results: Path) -> None:
    """Run the tests with each fault, and the failed ones again without; a line of JSON per fault, as it ends."""
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = [{key: value for key, value in row["fault"].items() if key != "planted"} for row in rows]
    copies = [Path(tempfile.mkdtemp(prefix="planted-")) / "repository" for _ in range(jobs)]
    free = list(copies)
    for copy in copies:
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(copy)], check=True)

    def run_one(fault: Fault) -> None:
        root = free.pop()
        try:
            fault.plant(root)
            first, others = tests_of(fault, lines)
            outcome = run_tests(root, fault, first, planted=True)
            if others and not outcome.failed and not outcome.error:  # no false "caught by none"
                outcome = run_tests(root, fault, others, planted=True)
            subprocess.run(["git", "checkout", "-q", "."], cwd=root, check=True)
            if outcome.failed:
                flaky = run_tests(root, fault, sorted(outcome.failed), planted=False).failed
                outcome.failed = {test: cpu for test, cpu in outcome.failed.items() if test not in flaky}
        finally:
            subprocess.run(["git", "checkout", "-q", "."], cwd=root, check=True)
            free.append(root)
        with results.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        caught = outcome.error.strip().splitlines()[-1:] or [f"{len(outcome.failed)} failed, {outcome.passed} passed"]
        print(f"{fault.file}: {fault.before}: {caught[0]}", flush=True)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(run_one, (fault for fault in faults if asdict(fault) not in done)))
    finally:
        for copy in copies:
            shutil.rmtree(copy.parent, ignore_errors=True)


# -- the table --------------------------------------------------------------------------------------------------------


def table(results: Path) -> str:
    """Fault x tests that catch it x their CPU seconds, and a summary per invariant."""
    runs = [json.loads(line) for line in results.read_text().splitlines()]
    rows, counts, invariants = [], Counter[str](), defaultdict[int, list[int]](list)
    for run in runs:
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
    head = "| fault | by | invariant | tests | CPU s | the cheapest tests that catch it |\n|---|---|---|---|---|---|\n"
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
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("lines", type=Path)
    running.add_argument("--room", action="append", default=[])
    running.add_argument("--jobs", type=int, default=2)
    running.add_argument("--results", type=Path, required=True, help="a run that was cut continues with this file")
    commands.add_parser("table").add_argument("results", type=Path)
    commands.add_parser("lines").add_argument("out", type=Path)
    options = parser.parse_args()
    if options.command == "table":
        print(table(options.results))
    elif options.command == "lines":
        record_lines(options.out)
    else:
        faults = [Fault(**json.loads(line)) for line in FAULTS.read_text().splitlines()]
        chosen = [fault for fault in faults if not options.room or fault.room in options.room]
        run_all(chosen, json.loads(options.lines.read_text()), jobs=options.jobs, results=options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
