"""Tasks: epochs over a fixed set, generated tasks, and task files."""

import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl_slime.cli.config_file import parse_train_config
from agl_slime.errors import ConfigError
from agl_slime.loop.task_files import digest
from agl_slime.loop.tasks import TaskCursor, as_task_source, read_tasks, shuffled_tasks

TASKS = [{"n": number} for number in range(7)]


def drawn(source: Any, *sizes: int) -> list[int]:
    return [task["n"] for size in sizes for task in source.next_batch(size)]


def test_each_task_comes_once_per_epoch_whatever_the_batches() -> None:
    numbers = drawn(shuffled_tasks(TASKS, seed=1), 5, 5, 5, 6)
    for epoch in range(3):
        assert sorted(numbers[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert numbers[:7] != numbers[7:14]
    assert drawn(shuffled_tasks(TASKS, seed=1), 21) == numbers
    assert Counter(drawn(shuffled_tasks(TASKS), 21)) == dict.fromkeys(range(7), 3)


@pytest.mark.parametrize(
    "source",
    [
        lambda seed: shuffled_tasks(TASKS, seed=seed),
        lambda seed: as_task_source(lambda rng: {"n": rng.randrange(10**9)}, seed=seed),
    ],
    ids=["fixed", "generated"],
)
def test_tasks_depend_on_the_seed_and_not_on_the_batches(source: Callable[[int], Any]) -> None:
    numbers = drawn(source(5), *[1] * 20)
    assert drawn(source(5), 20) == numbers
    assert drawn(source(6), 20) != numbers


def test_a_list_an_iterator_a_function_and_a_source_are_all_taken() -> None:
    source = shuffled_tasks(TASKS)
    assert as_task_source(source) is source
    assert sorted(drawn(as_task_source(TASKS), 7)) == list(range(7))
    assert sorted(drawn(as_task_source(iter(TASKS)), 7)) == list(range(7))
    assert drawn(as_task_source(lambda rng: {"n": 9}), 2) == [9, 9]
    with pytest.raises(ConfigError, match="no tasks"):
        as_task_source([])


def test_a_restored_cursor_draws_no_group_that_the_store_has() -> None:
    """Five are drawn after the state; the store has two of the five, and lost a group of the state."""
    first = TaskCursor(shuffled_tasks(TASKS))
    lost, pending = (group.group_id for group in first.take(2))
    state = json.loads(json.dumps(first.state()))
    later = [group.group_id for group in first.take(5)]
    second = TaskCursor(shuffled_tasks(TASKS))
    second.restore(state)
    second.reconcile([pending, later[1], later[3], "of another run", "x"])
    tasks = {group_id: group.task for group_id, group in first.in_flight.items()}
    assert {name: group.task for name, group in second.in_flight.items()} == {
        name: tasks[name] for name in (pending, later[1], later[3])
    }
    groups = second.take(4)
    assert [group.task for group in groups] == [tasks[name] for name in (lost, later[0], later[2], later[4])]
    assert not {group.group_id for group in groups[:3]} & {*tasks}  # late reports are of the old groups
    numbers = [group.group_id.rpartition("-")[2] for group in groups]
    assert numbers == ["0", "2", "4", "6"]  # their rollouts' seeds are the same


@pytest.mark.parametrize("call", [lambda cursor: cursor.take(4), lambda cursor: cursor.skip_to(4)])
def test_exhausted_task_source_is_an_error(call: Callable[[TaskCursor], Any]) -> None:
    class Three:
        calls = 0

        def next_batch(self, n: int) -> list[dict[str, Any]]:
            self.calls += 1
            assert self.calls < 9, "it is called forever"
            return [{"n": self.calls}] if self.calls <= 3 else []

    with pytest.raises(ConfigError, match=r"no more tasks: Three\.next_batch\(1\) returned none after 3"):
        call(TaskCursor(Three()))


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes('\ufeff{"n": 1}\r\n\r\n  \n{"n": 2, "text": "a\u2028b"}\n"a string"\n'.encode())
    assert read_tasks(file) == [{"n": 1}, {"n": 2, "text": "a\u2028b"}, "a string"]
    with pytest.raises(ConfigError, match="line 5: expected an object, got str"):
        read_tasks(file, strings=False)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"\n \n", "contains no tasks"),
        (b'{"n": 1}\n{"n": 2\n', "line 2: not JSON"),
        (b'{"n": 1}\n\n[1]\n', "line 3: expected an object or a string, got list"),
        (b"\xff\xfe\x00", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence_with_its_line(content: bytes | None, error: str, tmp_path: Path):
    file = tmp_path / "tasks.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_tasks(file)
    assert error in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def pipe_of(path: Path, content: bytes) -> Path:
    """A pipe to which the content is written once somebody reads it."""
    os.mkfifo(path)
    threading.Thread(target=path.write_bytes, args=(content,), daemon=True).start()
    return path


def test_a_pipe_is_read_whole_and_once_by_all_who_read_its_file(tmp_path: Path) -> None:
    rows = [{"n": number, "text": "x" * 40_000} for number in range(5)]  # more than a pipe holds
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pipe = pipe_of(tmp_path / "pipe", file.read_bytes())
    assert read_tasks(pipe) == read_tasks(f"{pipe}@[:]") == rows
    assert digest(pipe) == digest(file)
    pyarrow = pytest.importorskip("pyarrow", reason="pip install pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), file)
    assert read_tasks(pipe_of(tmp_path / "pipe.parquet", file.read_bytes())) == rows
    config = pipe_of(tmp_path / "config", b"num_iterations = 7")
    assert parse_train_config(["--config", str(config)]).loop.num_iterations == 7


@pytest.mark.parametrize("flag", ["--tasks", "--config"])
def test_silent_pipes_and_devices_are_refused_in_a_sentence(flag, tmp_path, monkeypatch):
    monkeypatch.setattr("agl_slime.support.files.PIPE_SILENCE_S", 0.1)
    os.mkfifo(pipe := tmp_path / "pipe")
    silent = r"nothing was written to this pipe for 0\.1 s"
    with pytest.raises(ConfigError, match=f"{flag} {pipe}: .*{silent}"):
        parse_train_config([flag, str(pipe)]).check_files()
    with open(os.open(pipe, os.O_RDWR), "wb", buffering=0) as writer:
        writer.write(b"{}")
        for path, sentence in ((pipe, silent), ("/dev/zero", "it is a device; give a file or a pipe")):
            with pytest.raises(ConfigError, match=f"{flag} {path}: .*{sentence}"):
                parse_train_config([flag, str(path)]).check_files()
