from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agl_slime.support.files import (
    remove_directory,
    remove_leftovers,
    scratch_directory,
    whole_directory,
    whole_file,
    write_file,
)


@pytest.mark.parametrize("durable", [False, True])
def test_the_directory_appears_when_the_block_ends(tmp_path: Path, durable: bool):
    target = tmp_path / "runs" / "step_1"
    with whole_directory(target, durable=durable) as fresh:
        (fresh / "weights").write_text("new")
        assert not target.exists()
    assert (target / "weights").read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_a_former_directory_is_replaced_as_a_whole(tmp_path: Path):
    target = tmp_path / "step_1"
    target.mkdir()
    (target / "stale").write_text("old")
    with whole_directory(target) as fresh:
        (fresh / "weights").write_text("new")
        assert (target / "stale").read_text() == "old"
    assert [path.name for path in target.iterdir()] == ["weights"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_block_leaves_the_former_directory(tmp_path: Path):
    target = tmp_path / "step_1"
    target.mkdir()
    (target / "weights").write_text("old")

    def write_half() -> None:
        with whole_directory(target) as fresh:
            (fresh / "weights").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert (target / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_relative_target_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with whole_directory("step_1") as fresh:
        (fresh / "weights").write_text("new")
    assert (tmp_path / "step_1" / "weights").read_text() == "new"


def test_a_file_is_replaced_as_a_whole(tmp_path: Path):
    target = tmp_path / "state" / "held.json"
    write_file(target, "old")
    with whole_file(target) as file:
        file.write(b"new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_a_failed_block_leaves_the_previous_file(tmp_path: Path):
    target = tmp_path / "held.json"
    write_file(target, b"old")

    def write_half() -> None:
        with whole_file(target) as file:
            file.write(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("durable", [False, True])
def test_durable_writes_go_through_to_the_disk_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
):
    flushed: list[str] = []

    def fsync(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}").replace(f"{tmp_path}", ""))

    monkeypatch.setattr(os, "fsync", fsync)
    with whole_directory(tmp_path / "step_1", durable=durable) as fresh:
        (fresh / "trainer").mkdir()
        (fresh / "trainer" / "weights").write_text("new")
    with whole_file(tmp_path / "held.json", durable=durable) as file:
        file.write(b"{}")
    names = [name.rpartition("/")[2] for name in flushed]
    if not durable:
        assert names == []
        return
    assert {"trainer", "weights", tmp_path.name} <= {*names, tmp_path.name}
    assert sum(name.startswith(".step_1.new-") for name in names) == 1
    assert sum(name.startswith(".held.json.new-") for name in names) == 1
    assert names.count("") == 2  # the directory that holds both, after each rename


_KILLED = """
import os, sys
from agl_slime.support.files import whole_directory, whole_file
with whole_directory(sys.argv[1] + "/step_1") as fresh, whole_file(sys.argv[1] + "/held.json") as file:
    (fresh / "weights").write_text("half")
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), 9)
"""


def test_killed_writers_leftovers_are_removed_by_the_next(tmp_path: Path):
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    with whole_directory(tmp_path / "step_2"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_directory_of_a_running_writer_stays(tmp_path: Path):
    with whole_directory(tmp_path / "step_1") as fresh:
        remove_leftovers(tmp_path)
        assert fresh.exists()


def test_a_target_that_a_killed_writer_moved_aside_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "step_1"
    with whole_directory(target) as fresh:
        (fresh / "weights").write_text("old")

    def killed(self: Path, other: Path) -> Path:
        os.rename(self, other)
        os._exit(9)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(Path, "rename", killed)
        with whole_directory(target):
            pass
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not target.exists()
    remove_leftovers(tmp_path)
    assert (target / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_scratch_directory_is_removed_at_exit_or_by_the_next_after_a_kill(tmp_path: Path):
    program = """
import os, pathlib, sys
from agl_slime.support.files import scratch_directory
with scratch_directory(pathlib.Path(sys.argv[1]), "weights") as directory:
    (directory / "v1").write_text("large")
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "memory")], check=True)
    (left,) = (tmp_path / "memory").iterdir()
    with (
        scratch_directory(tmp_path / "memory", "weights") as mine,
        scratch_directory(tmp_path / "memory", "weights") as other,
    ):
        assert {mine, other} == set((tmp_path / "memory").iterdir())
        assert left not in (mine, other)
    assert not list((tmp_path / "memory").iterdir())


def test_a_kill_while_a_directory_is_removed_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "step_1"
    for name in ("weights", "loop.json"):
        write_file(target / name, "old")

    def die_half_way(path: Path, **options: object) -> None:
        next(Path(path).iterdir()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die_half_way)
        with pytest.raises(KeyboardInterrupt):
            remove_directory(target)
    assert not target.exists()
    assert len(list(tmp_path.iterdir())) == 1
