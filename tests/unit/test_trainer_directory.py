from __future__ import annotations

from pathlib import Path

import pytest

from agl_slime.trainers.local.directory import whole_directory


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
