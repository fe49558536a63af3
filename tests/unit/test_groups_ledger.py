"""The ledger in memory: its memory is bounded, and it may be used from any thread."""

from __future__ import annotations

import threading

import pytest

from agl_slime.groups import ledger as ledger_module
from agl_slime.groups.ledger import Ledger
from agl_slime.groups.results import Outcome


def test_a_second_end_changes_nothing() -> None:
    ledger = Ledger()
    ledger.open("a")
    assert ledger.close("a", Outcome.FAILED, "timeout")
    assert not ledger.close("a", Outcome.TRAINED)
    assert not ledger.ready("a")
    assert not ledger.open("a")
    counts = ledger.counts()
    assert counts.closed == {Outcome.FAILED: 1}
    assert counts.reasons == {(Outcome.FAILED, "timeout"): 1}
    assert (counts.opened, counts.open, counts.ready) == (1, 0, 0)


def test_what_was_never_opened_cannot_be_ready_or_end() -> None:
    ledger = Ledger()
    assert not ledger.ready("a")
    assert not ledger.close("a", Outcome.TRAINED)
    assert ledger.counts().opened == 0


def test_counts_are_a_copy() -> None:
    ledger = Ledger()
    ledger.open("a")
    before = ledger.counts()
    ledger.close("a", Outcome.TRAINED)
    assert (before.open, before.closed) == (1, {})


def test_closed_rollouts_are_counts_and_the_ids_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_REMEMBERED_CLOSED", 50)
    ledger = Ledger()
    for number in range(500):
        ledger.open(str(number))
        ledger.close(str(number), Outcome.TRAINED)
        assert ledger.recent_ids() == [
            str(closed) for closed in range(max(0, (number + 1) // 50 * 50 - 50), number + 1)
        ]
    assert ledger.counts().closed[Outcome.TRAINED] == 500
    assert not ledger.open("450")  # late reports of recent ones are recognised
    assert not ledger.open("499")
    assert ledger.open("449")


def test_threads_that_report_the_same_rollouts_close_each_once() -> None:
    ledger = Ledger()
    names = [str(number) for number in range(2_000)]
    wins = [0] * 4
    start = threading.Barrier(4)

    def report(worker: int) -> None:
        start.wait()
        for name in names:
            ledger.open(name)
            ledger.ready(name)
            wins[worker] += ledger.close(name, Outcome.TRAINED if worker % 2 else Outcome.FILTERED)

    threads = [threading.Thread(target=report, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    counts = ledger.counts()
    assert sum(wins) == len(names) == sum(counts.closed.values()) == counts.opened
    assert (counts.open, counts.ready) == (0, 0)
