"""A disk that fills up while a run writes: weights, checkpoints, the ledger and JSON lines fail with one sentence, and
earlier files stay."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_slime.data.ledger import Ledger
from agl_slime.data.source import GroupSource
from agl_slime.errors import DiskFullError
from agl_slime.loop.checkpoint import CheckpointWriter, read_checkpoints
from agl_slime.loop.settings import LoopState
from agl_slime.report.files import IterationFile, iter_jsonl
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.database import Database
from tests.harness.training import needs_torch


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A mounted disk of 1 MB, or as large as the test says."""
    path = tmp_path / "disk"
    path.mkdir()
    size = getattr(request, "param", "1m")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a disk for the test needs the right to mount one: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def fill(disk: Path, *, leave: int) -> Path:
    """Take all space but ``leave`` bytes; deleting the file gives it back."""
    filler = disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(disk).free - leave))
    return filler


@pytest.fixture
def ours(tmp_path: Path) -> Any:
    from tests.harness.trainer_policy import save_policy
    from tests.harness.trainers import trainer

    return trainer(save_policy(tmp_path / "policy"))


@needs_torch
@pytest.mark.parametrize("leave", [0, 200_000, 400_000])
def test_weights_and_trainer_state(disk: Path, ours: Any, leave: int) -> None:
    """The weights have 340 kB, and the state has twice as much besides."""
    from tests.harness.trainer_policy import make_model, make_samples

    ours.train(make_samples(make_model()), iteration=0)
    fill(disk, leave=leave)
    if leave < 400_000:
        with pytest.raises(DiskFullError, match=f"^no space left in {disk};"):
            ours.save_weights(disk / "weights")
    with pytest.raises(DiskFullError, match=f"^no space left in {disk};"):
        ours.save(disk / "state")
    assert [path.name for path in disk.iterdir() if path.name != "weights"] == ["filler"]


@needs_torch
def test_a_checkpoint(disk: Path, ours: Any, tmp_path: Path) -> None:
    ledger = Ledger(path=tmp_path / "ledger.sqlite")
    with GroupSource(store=BridgeStore(), ledger=ledger) as source:
        writer = CheckpointWriter(directory=disk / "checkpoints", trainer=ours, source=source)
        writer.save(LoopState(iteration=1))
        filler = fill(disk, leave=100_000)
        with pytest.raises(DiskFullError, match=f"^no space left in {disk}/checkpoints;"):
            writer.save(LoopState(iteration=2))
        assert [checkpoint.loop.iteration for checkpoint in read_checkpoints(disk / "checkpoints")] == [1]
        filler.unlink()
        writer.save(LoopState(iteration=2))
    ledger.close()
    assert [checkpoint.loop.iteration for checkpoint in read_checkpoints(disk / "checkpoints")] == [2, 1]


def test_a_database(disk: Path) -> None:
    database = Database(path=disk / "ledger.sqlite")

    def insert(size: int) -> None:
        with database.transaction() as connection:
            connection.execute("INSERT INTO rows VALUES (?)", (bytes(size),))

    with database.transaction() as connection:
        connection.execute("CREATE TABLE rows (content)")
    insert(10)
    filler = fill(disk, leave=20_000)
    with pytest.raises(DiskFullError, match=f"^no space left in {disk};"):
        insert(100_000)
    filler.unlink()
    insert(100_000)
    with database.reading() as connection:
        assert connection.execute("SELECT count(*) FROM rows").fetchone() == (2,)
    database.close()


def test_json_lines(disk: Path) -> None:
    file = IterationFile(disk / "metrics.jsonl")
    file.append(1, [{"reward": 0.5}])
    filler = fill(disk, leave=0)
    with pytest.raises(DiskFullError, match=f"^no space left in {disk};"):
        file.append(2, [{"text": "x" * 5000}])
    with pytest.raises(DiskFullError, match=f"^no space left in {disk};"):
        file.close()
    filler.unlink()
    resumed = IterationFile(disk / "metrics.jsonl")
    resumed.append(2, [{"reward": 0.75}])
    resumed.close()
    assert [record["reward"] for record in iter_jsonl(disk / "metrics.jsonl") if "reward" in record] == [0.5, 0.75]


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("disk", ["512k", "1100k", "1800k", "2500k"], indirect=True)
def test_a_run(disk: Path) -> None:
    flags = "--num-iterations 12 --rollout-batch-size 2 --n-samples-per-prompt 2 --save-interval 1 --eval-interval 0"
    command = [sys.executable, "train.py", "--output-dir", str(disk / "run"), *flags.split()]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env={**os.environ}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert f"no space left in {disk}" in done.stderr
    assert "report it" not in done.stderr
    assert "Traceback" not in done.stderr
