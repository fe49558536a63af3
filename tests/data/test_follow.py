"""Following a store's feed across saves and crashes: every end is taken once, in whatever order it is read and however
often the feed lists it."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.data.completions import CompletionTable
from agl_slime.store.feed import FeedPage
from tests.harness.examples import examples

SERVER = "server"


def page(position: int, ids: list[str]) -> FeedPage:
    return FeedPage(server_instance_id=SERVER, last=position + len(ids), rollout_ids=ids, missed=False)


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), feed=st.lists(st.integers(0, 12).map(str), min_size=1, max_size=40), hold=st.booleans())
def test_after_a_crash_exactly_the_unread_completions_come_again(data: st.DataObject, feed: list[str], hold: bool):
    """``feed`` repeats rollouts, as a store does when an end is reported twice."""
    table = CompletionTable(hold=hold, has_feed=True)
    unread: list[str] = []
    read: set[str] = set()  # ended in the ledger
    released: set[str] = set()
    saved: tuple[str, set[str]] | None = None
    for _ in range(data.draw(st.integers(1, 30))):
        step = data.draw(st.sampled_from(["page", "read", "save", "crash"]))
        position = table.position.last
        if step == "page" and position < len(feed):
            fresh = table.add_page(page(position, feed[position : data.draw(st.integers(position + 1, len(feed)))]))
            assert len(set(fresh)) == len(fresh)
            unread += [name for name in fresh if name not in unread]
        elif step == "read" and unread:
            rollout_id = unread.pop(data.draw(st.integers(0, len(unread) - 1)))
            read.add(rollout_id)
            table.read(rollout_id)
        elif step == "save":
            saved = (json.dumps(table.state()), set(read))
            table.saved([])
            released.update(table.due)
            table.due.clear()
        elif step == "crash" and saved is not None:
            state = json.loads(saved[0])
            table, unread = CompletionTable(hold=hold, has_feed=True), []
            table.restore(state)
            read = set(saved[1])
            # the rest of the feed is read, or recognised as read before that state was saved
            rest = set(feed[table.position.last :])
            assert read & rest <= set(state["ended"]) | set(feed[: table.position.last])
            if hold:
                assert not released & (rest - read), "released and needed"
    while unread:
        table.read(unread.pop())
    position = table.position.last
    if position < len(feed):
        for rollout_id in table.add_page(page(position, feed[position:])):
            table.read(rollout_id)
    state = table.state()
    assert state["follow"] == {"server_instance_id": SERVER, "after": len(feed)} or not feed
    assert state["ended"] == []


def test_the_account_does_not_grow_with_the_run() -> None:
    table = CompletionTable(hold=False, has_feed=True)
    for start in range(0, 50_000, 10):
        for rollout_id in table.add_page(page(start, [str(i) for i in range(start, start + 10)])):
            table.read(rollout_id)
        table.due.clear()
    assert table.state() == {"follow": {"server_instance_id": SERVER, "after": 50_000}, "ended": [], "unreleased": []}
    assert len(table._ends) == 0
