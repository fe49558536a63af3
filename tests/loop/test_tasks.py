"""Tasks: epochs over a fixed set, generated ones, and the file that they are read from."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl_slime.errors import ConfigError
from agl_slime.loop.tasks import GeneratedTasks, ShuffledTasks, TaskCursor, as_task_source, read_tasks

TASKS = [{"n": number} for number in range(7)]


def drawn(source: Any, *sizes: int) -> list[int]:
    return [task["n"] for size in sizes for task in source.next_batch(size)]


def test_each_task_comes_once_per_epoch_also_when_batches_straddle_the_end() -> None:
    source = ShuffledTasks(tasks=TASKS, seed=1)
    numbers = drawn(source, 5, 5, 5, 6)
    for epoch in range(3):
        assert sorted(numbers[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert numbers[:7] != numbers[7:14]


def test_a_batch_larger_than_the_set_goes_round() -> None:
    assert Counter(drawn(ShuffledTasks(tasks=TASKS), 21)) == dict.fromkeys(range(7), 3)


def test_task_order_depends_on_seed_and_epoch_but_not_on_batches() -> None:
    one = drawn(ShuffledTasks(tasks=TASKS, seed=3), *[1] * 20)
    assert drawn(ShuffledTasks(tasks=TASKS, seed=3), 20) == one
    assert drawn(ShuffledTasks(tasks=TASKS, seed=4), 20) != one


def test_generated_tasks_depend_on_the_seed_and_not_on_the_batches() -> None:
    def make(rng: random.Random) -> dict[str, Any]:
        return {"n": rng.randrange(10**9)}

    one = drawn(GeneratedTasks(make_task=make, seed=5), 3, 4)
    assert drawn(GeneratedTasks(make_task=make, seed=5), 7) == one
    assert drawn(GeneratedTasks(make_task=make, seed=6), 7) != one


def test_a_list_an_iterator_a_function_and_a_source_are_all_taken() -> None:
    source = ShuffledTasks(tasks=TASKS)
    assert as_task_source(source) is source
    assert sorted(drawn(as_task_source(TASKS), 7)) == list(range(7))
    assert sorted(drawn(as_task_source(iter(TASKS)), 7)) == list(range(7))
    assert drawn(as_task_source(lambda rng: {"n": 9}), 2) == [9, 9]


def test_a_cursor_that_is_restored_draws_nothing_again_that_the_store_has() -> None:
    """Five are drawn after the state; the store has two of those, and lost one of the state's."""
    first = TaskCursor(ShuffledTasks(tasks=TASKS))
    lost, kept = (group.group_id for group in first.take(2))
    state = json.loads(json.dumps(first.state()))
    later = [group.group_id for group in first.take(5)]
    second = TaskCursor(ShuffledTasks(tasks=TASKS))
    second.restore(state)
    second.reconcile([kept, later[1], later[3], "somebody-else", "x"])
    tasks = {group_id: group.task for group_id, group in first.in_flight.items()}
    assert {name: group.task for name, group in second.in_flight.items()} == {
        name: tasks[name] for name in (kept, later[1], later[3])
    }
    again = second.take(4)
    assert [group.task for group in again] == [tasks[name] for name in (lost, later[0], later[2], later[4])]
    assert not {group.group_id for group in again[:3]} & {*tasks}  # late reports are of the old groups


@pytest.mark.parametrize("call", [lambda cursor: cursor.take(4), lambda cursor: cursor.skip_to(4)])
def test_exhausted_task_source_is_an_error(call: Callable[[TaskCursor], Any]) -> None:
    class Three:
        def __init__(self) -> None:
            self.asked = 0

        def next_batch(self, n: int) -> list[dict[str, Any]]:
            self.asked += 1
            assert self.asked < 9, "it is asked again and again"
            return [{"n": self.asked}] if self.asked <= 3 else []

    with pytest.raises(ConfigError, match=r"no more tasks: Three\.next_batch\(1\) returned none after 3"):
        call(TaskCursor(Three()))


def test_empty_task_list_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no tasks"):
        as_task_source([])


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes('\ufeff{"n": 1}\r\n\r\n  \n{"n": 2, "text": "a\u2028b"}\n'.encode())
    assert read_tasks(file) == [{"n": 1}, {"n": 2, "text": "a\u2028b"}]


def test_a_task_may_be_a_string(tmp_path: Path) -> None:
    """As in Agent Lightning's first examples."""
    file = tmp_path / "tasks.jsonl"
    file.write_text('"one"\n{"n": 2}\n')
    assert read_tasks(file) == ["one", {"n": 2}]
    with pytest.raises(ConfigError, match="line 1: expected an object, got str"):
        read_tasks(file, strings=False)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "contains no tasks"),
        (b"\n \n", "contains no tasks"),
        (b'{"n": 1}\n{"n": 2\n', "line 2: not JSON"),
        (b'{"n": 1}\n\n[1]\n', "line 3: expected an object or a string, got list"),
        (b"5\n", "line 1: expected an object or a string, got int"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence_with_its_line(content: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_tasks(file)
    assert says in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_is_a_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_tasks(path)
