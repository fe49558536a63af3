"""``agl-slime audit``: nothing to say of runs as they are, and something of every change to their files."""

from __future__ import annotations

import asyncio
import io
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("torch", reason='training needs torch: pip install "agl-slime[local]"')

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.cli.local import run_training
from agl_slime.cli.main import main
from agl_slime.cli.settings import train_config
from agl_slime.report.audit import audit
from agl_slime.report.audit.weights import missing_checkpoints
from tests.harness.engine_servers import engine_in_thread
from tests.tools.audit.mutations import JSONL, LOSSES, damage, lie, lose

_FLAKY = "tests.programs.agents.flaky_lookup:FlakyLookup"
_KINDS: dict[str, dict[str, Any]] = {
    "serial": {"keep_rollouts": "all", "keep_best": True},
    "overlapped": {"max_staleness": 2, "weight_pause": "in_place", "drop_zero_variance": True},
    "gone on with": {"max_staleness": 1, "group_min_ratio": 0.5},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small runs of a flaky agent: one after the other with all rollouts kept, beside training with groups dropped, and
    one that went on from a checkpoint."""
    made: dict[str, Path] = {}
    with engine_in_thread(LOOKUP_POLICY) as url:
        for name, settings in _KINDS.items():
            made[name] = tmp_path_factory.mktemp("run") / "out"
            about = {"agent": _FLAKY, "model_path": LOOKUP_POLICY, "sglang_url": url, "output_dir": made[name]}
            about |= {"rollout_batch_size": 3, "eval_interval": 2, "eval_rollouts": 2, "save_interval": 2, **settings}
            lives = (2, 4) if name == "gone on with" else (4,)
            for iterations in lives:
                config = train_config(**about, num_iterations=iterations, resume=iterations != lives[0])
                asyncio.run(run_training(config, console=Console(file=io.StringIO())))
    return made


@pytest.mark.parametrize("name", _KINDS)
def test_the_files_of_a_run_agree(runs: dict[str, Path], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = audit(runs[name])
    assert result.findings == []
    assert result.finished
    assert result.counts["iterations"] == 4
    assert result.counts["tokens trained"] > 0
    assert main(["audit", str(runs[name])]) == 0
    assert "agree: 4 iterations" in capsys.readouterr().out


@pytest.mark.parametrize("change", [damage, lie], ids=["damage", "lie"])
@pytest.mark.parametrize("n", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_every_change_is_found(runs: dict[str, Path], tmp_path: Path, change: Any, n: int) -> None:
    kept = {name: shutil.copytree(run, tmp_path / "kept" / name) for name, run in runs.items()}
    for run in kept.values():  # a database is its journal as well: one file has all that is put back
        with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
            ledger.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    copies = {name: shutil.copytree(run, tmp_path / "changed" / name) for name, run in kept.items()}
    missed: list[str] = []
    for seed in range(n):
        rng = random.Random(seed)
        name = rng.choice(sorted(copies))
        path, how = change(copies[name], rng)
        origin = kept[name] / path.relative_to(copies[name])
        if not audit(copies[name]).findings:
            missed.append(f"seed {seed}: {path.name} of {name}, {how}")
        if path.name == "loop.json":
            shutil.copytree(origin.parent, path.parent, dirs_exist_ok=True)
        for journal in ("-wal", "-shm"):  # what is put back has none
            path.with_name(path.name + journal).unlink(missing_ok=True)
        shutil.copyfile(origin, path)
    assert missed == []
    assert [finding for copy in copies.values() for finding in audit(copy).findings] == []  # each was taken back


@pytest.mark.parametrize("what", LOSSES)
def test_every_loss_is_found(runs: dict[str, Path], tmp_path: Path, what: str) -> None:
    run = shutil.copytree(runs["serial"], tmp_path / "run")
    assert audit(run).findings == []
    lose(run, what)
    assert audit(run).findings != []


def test_torn_last_lines_after_a_kill_are_no_finding(runs: dict[str, Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs["serial"], tmp_path / "run")
    lose(run, "garbage after rollouts.jsonl")
    (run / "summary.json").unlink()
    (run / "running.json").write_text("{}")
    assert audit(run).findings == []


def test_a_run_killed_in_its_first_iteration_has_empty_files(runs: dict[str, Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs["serial"], tmp_path / "run")
    for name in JSONL:
        (run / name).write_bytes(b"")
    for name in ("checkpoints", "model", "model-best"):
        shutil.rmtree(run / name)
    (run / "ledger.sqlite").unlink()
    (run / "summary.json").unlink()
    (run / "config.json").unlink()
    (run / "running.json").write_text("{}")
    result = audit(run)
    assert (result.findings, result.finished, result.counts["iterations"]) == ([], False, 0)


@pytest.mark.parametrize(
    ("here", "finished", "missing"),
    [
        ({4, 6}, True, []),
        ({2, 4}, False, []),  # killed when the ledger had noted the newest
        ({2, 4}, True, [6]),
        ({6}, False, [4]),
        ({4}, False, [2]),
        (set(), False, [2, 4]),
    ],
)
def test_the_two_newest_checkpoints_are_there(here: set[int], finished: bool, missing: list[int]) -> None:
    assert missing_checkpoints(here, {0, 2, 4, 6}, finished=finished, last=6) == missing


@pytest.mark.parametrize(("ahead", "findings"), [(True, 0), (False, 1)])
def test_task_cut_off_by_a_restart_must_be_run_again_before_the_run_ends(
    runs: dict[str, Path], tmp_path: Path, ahead: bool, findings: int
) -> None:
    run = shutil.copytree(runs["serial"], tmp_path / "run")
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger, ledger:
        (last,) = ledger.execute("SELECT max(CAST(instance_id AS INTEGER)) FROM ledger_finished").fetchone()
        task = str(last + 1 if ahead else 0)
        if not ahead:  # as if it had never been run again
            lines = (run / "groups.jsonl").read_text().splitlines(keepends=True)
            (run / "groups.jsonl").write_text("".join(line for line in lines if '"instance_id": "0"' not in line))
            for table in ("ledger_finished", "ledger_rollouts"):
                ledger.execute(f"DELETE FROM {table} WHERE instance_id = ?", (task,))
        ledger.execute("INSERT INTO ledger_rollouts VALUES ('ro-cut', ?, 2, 'cancelled', 'restarted', 1)", (task,))
    said = [one for one in audit(run).findings if f"task {task} has 0 ends" in one]
    assert len(said) == findings


@pytest.mark.parametrize(("reason", "findings"), [("group_finalized", 0), ("group_dropped", 1)])
def test_ledger_only_rollout_is_accepted_only_if_restarted_at_group_end(
    runs: dict[str, Path], tmp_path: Path, reason: str, findings: int
) -> None:
    run = shutil.copytree(runs["serial"], tmp_path / "run")
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger, ledger:
        late = ("ro-late", "0", 2, "cancelled", reason, 1)
        ledger.execute("INSERT INTO ledger_rollouts VALUES (?, ?, ?, ?, ?, ?)", late)
    said = [one for one in audit(run).findings if "rollout ro-late of task 0 is not in groups.jsonl" in one]
    assert len(said) == findings


def test_a_finding_names_file_and_line(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(runs["serial"], tmp_path / "run")
    lines = (copy / "groups.jsonl").read_text().splitlines(keepends=True)
    lines[2] = lines[2].replace('"ready": true', '"ready": false', 1)
    (copy / "groups.jsonl").write_text("".join(lines))
    assert main(["audit", str(copy)]) == 1
    assert "groups.jsonl line 3: is not as it was written" in capsys.readouterr().out


def test_directory_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
