"""``agl-slime audit``: no finding in runs as they are, and a finding for every change to their files."""

import json
import random
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.cli.main import main
from agl_slime.report.files import IterationFile
from agl_slime.report.records import SHAPES, misfit
from agl_slime.tools.audit.agree import audit
from agl_slime.tools.audit.figures import start_versions
from agl_slime.tools.audit.weights import missing_checkpoints
from tests.harness.engine_servers import engine_in_thread
from tests.harness.training import needs_torch, run_of
from tests.tools.audit.mutations import JSONL, LOSSES, damage, lie, lose, write_records

pytestmark = needs_torch

_FLAKY = "tests.programs.agents.flaky_lookup:FlakyLookup"
_KINDS: dict[str, dict[str, Any]] = {
    "serial": {"keep_rollouts": "all", "keep_best": True},
    "overlapped": {"max_staleness": 2, "weight_pause": "in_place", "drop_zero_variance": True},
    "resumed": {"max_staleness": 1, "group_min_ratio": 0.5},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small runs of a flaky agent: synchronous with all rollouts kept, asynchronous with groups dropped, resumed."""
    directories: dict[str, Path] = {}
    with engine_in_thread(LOOKUP_POLICY) as url:
        for name, settings in _KINDS.items():
            directories[name] = tmp_path_factory.mktemp("run") / "out"
            about: dict[str, Any] = {"agent": _FLAKY, "rollout_batch_size": 3, "eval_rollouts": 2}
            about |= {"eval_interval": 2, "save_interval": 2}
            for iterations in (2, 4) if name == "resumed" else (4,):
                about |= {"num_iterations": iterations, "resume": name == "resumed" and iterations == 4, **settings}
                run_of(directories[name], LOOKUP_POLICY, url, **about)
    return directories


@pytest.fixture
def run(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the synchronous run."""
    return shutil.copytree(runs["serial"], tmp_path / "run")


def test_a_batch_whose_tasks_have_no_names_has_the_shape_of_one() -> None:
    line = {"iteration": 1, "instance_id": None, "rollouts": {"a": None}, "samples": [["a", "0f", 3, {"1": 3}]]}
    assert misfit(line, SHAPES["trained.jsonl"], strict=True) == ""


def test_the_files_of_a_run_agree(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in runs.values():
        result = audit(run)
        assert result.findings == []
        assert result.finished
        assert result.counts["iterations"] == 4
        assert result.counts["tokens trained"] > 0
        assert main(["audit", str(run)]) == 0
        assert "agree: 4 iterations" in capsys.readouterr().out
    assert main(["audit", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("change", [damage, lie], ids=["damage", "lie"])
@pytest.mark.parametrize("n", [12, pytest.param(500, marks=pytest.mark.slow)])
def test_every_change_is_found(runs: dict[str, Path], tmp_path: Path, change: Any, n: int) -> None:
    originals = {name: shutil.copytree(run, tmp_path / "kept" / name) for name, run in runs.items()}
    for run in originals.values():  # without a journal the database is one file
        with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
            ledger.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    copies = {name: shutil.copytree(run, tmp_path / "changed" / name) for name, run in originals.items()}
    missed: list[str] = []
    for seed in range(n):
        rng = random.Random(seed)
        name = rng.choice(sorted(copies))
        path, description = change(copies[name], rng)
        origin = originals[name] / path.relative_to(copies[name])
        if not audit(copies[name]).findings:
            missed.append(f"seed {seed}: {path.name} of {name}, {description}")
        if path.name == "loop.json":
            shutil.copytree(origin.parent, path.parent, dirs_exist_ok=True)
        for journal in ("-wal", "-shm"):  # the original has none
            path.with_name(path.name + journal).unlink(missing_ok=True)
        shutil.copyfile(origin, path)
    assert missed == []
    assert [finding for copy in copies.values() for finding in audit(copy).findings] == []  # each change is undone


def test_a_dropped_group_in_a_later_iteration_is_found(runs: dict[str, Path], tmp_path: Path) -> None:
    """Its line stands where lines of that iteration do, and no other file has it."""
    run = shutil.copytree(runs["overlapped"], tmp_path / "run")
    records = [json.loads(line) for line in (run / "groups.jsonl").read_text().splitlines()]
    dropped = next(record for record in records if not record["ready"] and record["iteration"] < 4)
    dropped["iteration"] += 1
    write_records(run / "groups.jsonl", sorted(records, key=lambda record: record["iteration"]))
    assert any("was dropped in another iteration than collected" in finding for finding in audit(run).findings)


def test_every_loss_is_found(runs: dict[str, Path], tmp_path: Path) -> None:
    unnoticed = []
    for loss in LOSSES:
        lose(run := shutil.copytree(runs["serial"], tmp_path / loss), loss)
        unnoticed += [] if audit(run).findings else [loss]
    assert unnoticed == []


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'


@pytest.mark.parametrize("killed", [False, True])
def test_readers_leave_a_run_as_it_was_on_a_read_only_disk_too(run: Path, tmp_path: Path, killed: bool) -> None:
    """Of a killed run SQLite has a log, and of a run from another machine no ``-shm`` file."""
    if killed:
        with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
            ledger.execute("PRAGMA user_version=7")  # in its log
            shutil.copytree(run, tmp_path / "killed")
        run = tmp_path / "killed"
        (run / "ledger.sqlite-shm").unlink()
    assert (run / "ledger.sqlite-wal").exists() == killed
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [run, *run.rglob("*")]}
    assert audit(run).findings == []
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [run, *run.rglob("*")]} == before
    record = f"record --sglang-url http://127.0.0.1:1 --model-path {run} --directory"
    for command in ("audit", "report", "export --to sft", "export --to parquet", record):
        program = [sys.executable, "-m", "agl_slime", *command.split(), str(run)]
        done = subprocess.run(["unshare", "-m", "sh", "-c", READ_ONLY, run, *program], capture_output=True, text=True)
        if "mount" in done.stderr or "unshare" in done.stderr:
            pytest.skip(f"this machine allows no read-only mount ({done.stderr})")
        assert done.returncode == (0 if command == "audit" else 2), done.stderr
        assert command == "audit" or "cannot be written (Read-only file system): name another place" in done.stderr


def test_files_of_a_killed_run_have_no_finding(run: Path) -> None:
    """A torn last line; and empty files of a run that was killed in its first iteration."""
    lose(run, "garbage after rollouts.jsonl")
    (run / "summary.json").unlink()
    (run / "running.json").write_text("{}")
    assert audit(run).findings == []
    for name in JSONL:
        (run / name).write_bytes(b"")
    for name in ("checkpoints", "model", "model-best"):
        shutil.rmtree(run / name)
    (run / "ledger.sqlite").unlink()
    (run / "config.json").unlink()
    result = audit(run)
    assert (result.findings, result.finished, result.counts["iterations"]) == ([], False, 0)


def test_the_two_newest_checkpoints_are_there() -> None:
    for here, finished, missing in (
        ({4, 6}, True, []),
        ({2, 4}, False, []),  # killed when the ledger had noted the newest
        ({2, 4}, True, [6]),
        ({6}, False, [4]),
        (set(), False, [2, 4]),
    ):
        assert missing_checkpoints(here, {0, 2, 4, 6}, finished=finished, last=6) == missing


@pytest.mark.parametrize(("ahead", "findings"), [(True, 0), (False, 1)])
def test_task_cut_off_by_a_restart_must_be_run_again_before_the_run_ends(run: Path, ahead: bool, findings: int) -> None:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger, ledger:
        (last,) = ledger.execute("SELECT max(CAST(instance_id AS INTEGER)) FROM ledger_finished").fetchone()
        task = str(last + 1 if ahead else 0)
        if not ahead:  # as if it had never been repeated
            lines = (run / "groups.jsonl").read_text().splitlines(keepends=True)
            (run / "groups.jsonl").write_text("".join(line for line in lines if '"instance_id": "0"' not in line))
            for table in ("ledger_finished", "ledger_rollouts"):
                ledger.execute(f"DELETE FROM {table} WHERE instance_id = ?", (task,))
        ledger.execute("INSERT INTO ledger_rollouts VALUES ('ro-cut', ?, 2, 'cancelled', 'restarted', 1)", (task,))
    assert sum(f"task {task} has 0 ends" in finding for finding in audit(run).findings) == findings


@pytest.mark.parametrize(("reason", "findings"), [("group_finalized", 0), ("group_dropped", 1)])
def test_ledger_only_rollout_is_accepted_only_if_restarted_at_group_end(run: Path, reason: str, findings: int) -> None:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger, ledger:
        late = ("ro-late", "0", 2, "cancelled", reason, 1)
        ledger.execute("INSERT INTO ledger_rollouts VALUES (?, ?, ?, ?, ?, ?)", late)
    sentence = "rollout ro-late of task 0 is not in groups.jsonl"
    assert sum(sentence in finding for finding in audit(run).findings) == findings


def test_a_finding_names_file_and_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (run / "groups.jsonl").read_text().splitlines(keepends=True)
    lines[2] = lines[2].replace('"ready": true', '"ready": false', 1)
    (run / "groups.jsonl").write_text("".join(lines))
    assert main(["audit", str(run)]) == 1
    assert "groups.jsonl line 3: is not as it was written" in capsys.readouterr().out


def test_a_run_of_slimes_begins_with_version_1() -> None:
    """slime pushes weights before the first step."""
    later = {"iteration": 2, "weights/version": "9"}
    for first, versions in (
        ({"weights/version": "1"}, {"0": 0}),
        ({"weights/version": 2}, {"0": 0, "1": 0}),
        ({"weights/version": "1", "train/short_batch": 3.0}, {"0": 0, "1": 0}),
        ({"weights/version": "named"}, {"0": 0}),
    ):
        assert start_versions([later, {"iteration": 1, **first}]) == versions
    assert start_versions([]) == {"0": 0}


@pytest.mark.parametrize(("slimes", "missing"), [(True, [6]), (False, [1, 2, 3, 4, 6])])
def test_only_slime_runs_may_continue_from_another_directory(tmp_path: Path, slimes: bool, missing: list[int]) -> None:
    file = IterationFile(tmp_path / "metrics.jsonl")
    for iteration in (5, 7):
        extra = {"train/slime_rollout_id": iteration - 1.0} if slimes else {}
        file.append(iteration, [{"weights/version": str(iteration), **extra}])
    summary = {"reason": "finished", "iterations": 3 if slimes else 7}  # slime's: without earlier directories
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    findings = audit(tmp_path).findings
    sentences = [f"metrics.jsonl: there is no line of iteration {iteration}" for iteration in missing]
    assert [finding for finding in findings if "there is no line" in finding] == sentences
    assert not [finding for finding in findings if "iterations" in finding]


@pytest.mark.parametrize(
    ("versions", "wrong"),
    [
        (["1", "1", "2"], []),
        (["1", "1", "3"], ["3"]),
        (["1", "2", "2"], ["2"]),
    ],
)
def test_an_iteration_without_training_has_the_version_before_it(tmp_path: Path, versions: list[str], wrong: list[str]):
    metrics, trained = IterationFile(tmp_path / "metrics.jsonl"), IterationFile(tmp_path / "trained.jsonl")
    for iteration, version in enumerate(versions, 1):
        metrics.append(iteration, [{"weights/version": version}])
        if iteration != 2:
            line = {"instance_id": str(iteration), "rollouts": {f"ro-{iteration}": 1.0}, "samples": []}
            trained.append(iteration, [line])
    findings = [finding for finding in audit(tmp_path).findings if "weights/version" in finding]
    assert sorted({re.findall(r"iteration (\d)", finding)[0] for finding in findings}) == wrong


@pytest.mark.parametrize(
    ("config", "found"), [({"max_staleness": 1}, True), ({"max_staleness": 2}, False), ({}, False)]
)
def test_tokens_older_than_the_limit_are_a_finding(tmp_path: Path, config: dict[str, int], found: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    metrics, trained = IterationFile(tmp_path / "metrics.jsonl"), IterationFile(tmp_path / "trained.jsonl")
    for iteration in (1, 2, 3):
        metrics.append(iteration, [{"weights/version": str(iteration)}])
        samples = [[f"ro-{iteration}", "digest", 4, {"0": 3, str(iteration - 1): 1}]]
        trained.append(
            iteration, [{"instance_id": str(iteration), "rollouts": {f"ro-{iteration}": 1.0}, "samples": samples}]
        )
    findings = [finding for finding in audit(tmp_path).findings if "max_staleness" in finding]
    sentence = "trained.jsonl line 3: tokens of rollout ro-3 are 2 versions old, and max_staleness is 1"
    assert findings == [sentence] * found
