"""The watchdog's list of next checks against a dictionary of times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agl_slime.store.collections import WatchList

names = st.sampled_from([f"r{n}" for n in range(12)])
steps = st.one_of(
    st.tuples(st.just("set"), names, st.integers(0, 50)),
    st.tuples(st.just("discard"), names, st.just(0)),
    st.tuples(st.just("take"), st.just(""), st.integers(0, 50)),
)


@given(st.lists(steps, max_size=200))
def test_due_entries_are_taken_exactly_once(sequence: list[tuple[str, str, int]]) -> None:
    watch = WatchList()
    model: dict[str, int] = {}
    for action, name, when in sequence:
        if action == "set":
            watch.set(name, when)
            model[name] = when
        elif action == "discard":
            watch.discard(name)
            model.pop(name, None)
        else:
            due = watch.take_due(when)
            assert sorted(due) == sorted(rollout_id for rollout_id, due_at in model.items() if due_at <= when)
            for rollout_id in due:
                del model[rollout_id]
        assert len(watch) == len(model)


def test_rollouts_that_ended_do_not_pile_up() -> None:
    watch = WatchList()
    for number in range(50_000):
        watch.set(f"r{number}", 1e9)
        if number >= 10:
            watch.discard(f"r{number - 10}")
    assert len(watch) == 10
    assert len(watch._heap) < 2_000
