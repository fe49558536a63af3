"""Files and directories that appear whole or not at all, also after a kill."""

import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agl_slime.errors import ConfigError, DiskFullError
from agl_slime.support import files
from agl_slime.support.database import Database


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


@contextmanager
def whole(kind: str, target: Path, **options: Any) -> Any:
    """Yields a function that writes text into the file or the directory ``target``."""
    if kind == "file":
        with files.whole_file(target, **options) as file:
            yield lambda text: file.write(text.encode())
    else:
        with files.whole_directory(target, **options) as directory:
            yield lambda text: (directory / f"weights-{text}").write_text(text)


def content(kind: str, target: Path) -> list[str]:
    return [path.read_text() for path in ([target] if kind == "file" else target.iterdir())]


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_target_is_replaced_as_a_whole_or_not_at_all(kind, durable, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "runs" / "step_1"
    with whole(kind, Path("runs/step_1"), durable=durable) as write:
        write("old")
        assert not target.exists()
    with whole(kind, target, durable=durable) as write:
        write("new")
        assert content(kind, target) == ["old"]
    assert content(kind, target) == ["new"]

    def write_half() -> None:
        with whole(kind, target, durable=durable) as write:
            write("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert content(kind, target) == ["new"]
    assert names(target.parent) == ["step_1"]


@pytest.mark.parametrize("durable", [False, True])
def test_durable_writes_go_through_to_the_disk_before_the_rename(tmp_path, monkeypatch, durable):
    flushed: list[str] = []

    def fsync(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}").replace(f"{tmp_path}", "").rpartition("/")[2])

    monkeypatch.setattr(os, "fsync", fsync)
    with files.whole_directory(tmp_path / "step_1", durable=durable) as fresh:
        (fresh / "trainer").mkdir()
        (fresh / "trainer" / "weights").write_text("new")
    with files.whole_file(tmp_path / "state.json", durable=durable) as file:
        file.write(b"{}")
    if not durable:
        assert flushed == []
        return
    assert {"trainer", "weights"} <= {*flushed}
    assert sum(name.startswith(".step_1.new-") for name in flushed) == 1
    assert sum(name.startswith(".state.json.new-") for name in flushed) == 1
    assert flushed.count("") == 2  # the parent directory, at each rename


_KILLED = """
import os, sys
from agl_slime.support.files import whole_directory, whole_file
with whole_directory(sys.argv[1] + "/step_1") as fresh, whole_file(sys.argv[1] + "/state.json") as file:
    (fresh / "weights").write_text("half")
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), 9)
"""


def test_killed_writers_leftovers_are_removed_by_the_next(tmp_path: Path):
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    assert len(names(tmp_path)) == 2
    with files.whole_directory(tmp_path / "step_2") as fresh:
        files.remove_leftovers(tmp_path)
        assert fresh.exists()  # of a running writer
    assert names(tmp_path) == ["step_2"]


def test_a_target_that_a_killed_writer_moved_aside_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "step_1"
    with whole("directory", target) as write:
        write("old")

    def killed(self: Path, target: Path) -> Path:
        os.rename(self, target)
        os._exit(9)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(Path, "rename", killed)
        with files.whole_directory(target):
            pass
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not target.exists()
    files.remove_leftovers(tmp_path)
    assert content("directory", target) == ["old"]
    assert names(tmp_path) == ["step_1"]


def test_scratch_directory_is_removed_at_exit_or_by_the_next_after_a_kill(tmp_path: Path):
    program = """
import os, pathlib, sys
from agl_slime.support.files import scratch_directory
with scratch_directory(pathlib.Path(sys.argv[1]), "weights") as directory:
    (directory / "v1").write_text("large")
    os._exit(0)
"""
    memory = tmp_path / "memory"
    subprocess.run([sys.executable, "-c", program, str(memory)], check=True)
    (leftover,) = memory.iterdir()
    with files.scratch_directory(memory, "weights") as first, files.scratch_directory(memory, "weights") as second:
        assert {first, second} == set(memory.iterdir())
        assert leftover not in (first, second)
    assert not names(memory)


def test_a_directory_has_one_owner(tmp_path: Path):
    with files.sole_owner(tmp_path), pytest.raises(ConfigError, match=f"in use by process {os.getpid()} "):
        files.sole_owner(tmp_path).__enter__()


def test_a_kill_while_a_directory_is_removed_leaves_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "step_1"
    for name in ("weights", "loop.json"):
        files.write_file(target / name, "old")

    def die_half_way(path: Path, **options: object) -> None:
        next(Path(path).iterdir()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die_half_way)
        with pytest.raises(KeyboardInterrupt):
            files.remove_directory(target)
    assert not target.exists()
    assert len(names(tmp_path)) == 1


def test_the_limit_of_file_sizes_is_named(tmp_path: Path) -> None:
    database, before = Database(path=tmp_path / "x.sqlite"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(DiskFullError, match=r"too large .*ulimit -f"):
            files.write_file(tmp_path / "x", b"0" * 10_000)
        with pytest.raises(DiskFullError, match=r"too large .*ulimit -f"), database.transaction() as connection:
            connection.execute("CREATE TABLE x AS SELECT zeroblob(1000000)")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        database.close()
