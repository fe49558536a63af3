"""Following a store's feed across saves and crashes: every end is taken in once, whatever settles in which order."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.datasource.follow import FollowProgress
from agl_slime.store.feed import FeedPage

EPOCH = "life"


def page(after: int, n: int) -> FeedPage:
    return FeedPage(
        instance_id=EPOCH, last=after + n, rollout_ids=[str(i) for i in range(after + 1, after + n + 1)], missed=False
    )


@settings(max_examples=300, deadline=None)
@given(data=st.data(), total=st.integers(1, 40))
def test_after_a_crash_exactly_what_the_saved_state_had_not_settled_comes_again(data: st.DataObject, total: int):
    progress = FollowProgress()
    open_ids: list[str] = []
    settled: set[str] = set()
    saved: tuple[str, set[str]] | None = None
    for _ in range(data.draw(st.integers(1, 30))):
        step = data.draw(st.sampled_from(["page", "settle", "save", "crash"]))
        if step == "page" and progress.position.after < total:
            fresh = progress.take(
                page(progress.position.after, data.draw(st.integers(1, total - progress.position.after)))
            )
            assert not settled & set(fresh), "an end came that had been settled"
            open_ids += fresh
        elif step == "settle" and open_ids:
            rollout_id = open_ids.pop(data.draw(st.integers(0, len(open_ids) - 1)))
            settled.add(rollout_id)
            progress.settle(rollout_id)
        elif step == "save":
            saved = (json.dumps(progress.state()), set(settled))
        elif step == "crash" and saved is not None:
            progress, open_ids = FollowProgress(), []
            progress.restore(json.loads(saved[0]))
            settled = set(saved[1])
    if progress.position.after < total:
        open_ids += progress.take(page(progress.position.after, total - progress.position.after))
    assert sorted([*open_ids, *settled], key=int) == [str(i) for i in range(1, total + 1)]


def test_the_account_does_not_grow_with_the_run():
    progress = FollowProgress()
    for after in range(0, 50_000, 10):
        for rollout_id in progress.take(page(after, 10)):
            progress.settle(rollout_id)
    assert progress.state() == {"epoch": EPOCH, "after": 50_000, "settled": []}
    assert len(progress._ends) == len(progress._unsettled) == 0
