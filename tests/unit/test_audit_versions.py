"""Which weights a run may have begun with, by its metrics alone."""

from __future__ import annotations

import pytest

from agl_slime.audit.agree import began_with


@pytest.mark.parametrize(
    ("first", "begun"),
    [
        ({"weights/version": "1"}, {"0": 0}),
        ({"weights/version": 2}, {"0": 0, "1": 0}),  # slime brings its weights to the engines before the first step
        ({"weights/version": "1", "train/short_batch": 3.0}, {"0": 0, "1": 0}),
        ({"weights/version": "1", "train/waiting_groups": 3.0}, {"0": 0, "1": 0}),
        ({"weights/version": "named"}, {"0": 0}),
    ],
)
def test_a_run_of_slimes_begins_with_version_1(first: dict[str, object], begun: dict[str, int]) -> None:
    later = {"iteration": 2, "weights/version": "9"}
    assert began_with([later, {"iteration": 1, **first}]) == begun
    assert began_with([]) == {"0": 0}
