from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agl_slime.errors import ConfigError
from agl_slime.groups.ledger import Ledger
from agl_slime.groups.ledger_disk import PersistentLedger
from agl_slime.groups.results import Outcome
from agl_slime.support.database import Database


@pytest.fixture(params=["memory", "disk"])
def ledger(request, tmp_path: Path):
    return Ledger() if request.param == "memory" else PersistentLedger(path=tmp_path / "ledger.sqlite")


def test_a_rollout_goes_from_open_over_ready_to_one_end(ledger):
    assert ledger.open("r1", instance_id="a")
    assert not ledger.open("r1")
    assert ledger.is_open("r1")
    assert ledger.ready("r1")
    assert not ledger.ready("r1")
    assert ledger.close("r1", Outcome.TRAINED)
    assert not ledger.close("r1", Outcome.FAILED, "late")
    assert not ledger.close("r2", Outcome.FAILED)
    assert not ledger.open("r1")
    counts = ledger.counts()
    assert (counts.opened, counts.open, counts.ready, counts.closed) == (1, 0, 0, {Outcome.TRAINED: 1})
    assert counts.reasons == {(Outcome.TRAINED, ""): 1}


def test_instances_are_finished_as_often_as_they_are_said_to_be(ledger):
    for rollout_id, instance_id in (("r1", "a"), ("r2", "a"), ("r3", "b"), ("r4", None)):
        ledger.open(rollout_id, instance_id=instance_id)
    ledger.ready("r3")
    assert sorted(ledger.instances_in_flight()) == ["a", "b"]
    ledger.close("r1", Outcome.TRAINED)
    ledger.close("r2", Outcome.FAILED, "timeout")
    ledger.finish_instance("a")
    ledger.finish_instance("a")
    assert ledger.finished_instances() == ["a", "a"]
    assert ledger.instances_in_flight() == ["b"]
    assert ledger.open_ids() == ["r4"]


def test_rollouts_of_another_account_are_recognised_and_not_counted(ledger):
    ledger.open("r1")
    ledger.close("r1", Outcome.TRAINED)
    ledger.remember(["r1", "old"])
    assert not ledger.open("old")
    assert not ledger.close("old", Outcome.FAILED)
    assert sorted(ledger.recent_ids()) == ["old", "r1"]
    assert ledger.counts().closed == {Outcome.TRAINED: 1}


def test_the_account_goes_on_after_the_file_is_opened_again(tmp_path):
    first = PersistentLedger(path=tmp_path / "ledger.sqlite")
    first.open_many([("r1", "a"), ("r2", "a"), ("r3", "b")])
    first.ready("r1")
    first.close("r2", Outcome.FILTERED, "zero_variance")
    before = first.counts()
    first.shut()
    again = PersistentLedger(path=tmp_path / "ledger.sqlite")
    assert again.counts() == before
    assert again.outcome_of("r2") == (Outcome.FILTERED, "zero_variance")
    assert again.outcome_of("r1") is None
    assert sorted(again.instances_in_flight()) == ["a", "b"]
    assert not again.open("r2")


def test_a_batch_is_kept_or_lost_together(tmp_path):
    ledger = PersistentLedger(path=tmp_path / "ledger.sqlite")

    def half_of_it() -> None:
        with ledger.batch():
            ledger.open("r1")
            ledger.close("r1", Outcome.TRAINED)
            raise RuntimeError("the power went")

    with pytest.raises(RuntimeError):
        half_of_it()
    assert ledger.counts().opened == 0
    ledger.open("r1")
    assert ledger.close("r1", Outcome.TRAINED)


def test_rewinding_to_a_checkpoint_puts_later_steps_in_flight_again(tmp_path):
    ledger = PersistentLedger(path=tmp_path / "ledger.sqlite")
    for step, instance_id in enumerate("abc"):
        ledger.open(f"r{step}", instance_id=instance_id)
        ledger.close(f"r{step}", Outcome.TRAINED)
        ledger.finish_instance(instance_id)
        ledger.checkpoint(step)
    ledger.open("bad", instance_id="d")
    ledger.close("bad", Outcome.FAILED, "timeout")
    ledger.finish_instance("d")
    assert ledger.rewind(0) == ["r1", "r2"]
    assert ledger.finished_instances() == ["a", "d"]
    assert ledger.instances_in_flight() == ["b", "c"]
    counts = ledger.counts()
    assert (counts.opened, counts.open, counts.closed) == (4, 2, {Outcome.TRAINED: 1, Outcome.FAILED: 1})
    with pytest.raises(ConfigError, match="no checkpoint of step 2; it has 0"):
        ledger.rewind(2)


def test_old_closed_rollouts_are_forgotten_but_counted(tmp_path):
    ledger = PersistentLedger(path=tmp_path / "ledger.sqlite", remembered=10)
    with ledger.batch():
        for number in range(2000):
            ledger.open(str(number))
            ledger.close(str(number), Outcome.TRAINED)
    assert ledger.counts().closed == {Outcome.TRAINED: 2000}
    assert not ledger.is_known("0")
    assert ledger.is_known("1995")


def test_an_exclusive_file_serves_one_process(tmp_path):
    database = Database(path=tmp_path / "x.sqlite", exclusive=True)
    with database.transaction() as connection:
        connection.execute("CREATE TABLE t (a)")
    with pytest.raises(ConfigError, match="another process uses it"):
        Database(path=tmp_path / "x.sqlite", exclusive=True)
    database.close()
    Database(path=tmp_path / "x.sqlite", exclusive=True).close()


def test_a_killed_process_leaves_an_account_that_adds_up(tmp_path):
    """The child says how far it was after each commit; the file must hold at least that, and add up."""
    code = """
        import sys
        from agl_slime.groups.ledger_disk import PersistentLedger
        from agl_slime.groups.results import Outcome
        ledger = PersistentLedger(path=sys.argv[1])
        n = 0
        while True:
            ledger.open(str(n))
            if n % 3:
                ledger.close(str(n), Outcome.TRAINED if n % 3 == 1 else Outcome.FAILED, "" if n % 3 == 1 else "timeout")
            print(n, flush=True)
            n += 1
    """
    path = tmp_path / "ledger.sqlite"
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) >= 500:
            break
    child.kill()
    said = [int(line) for line in child.stdout.read().split("\n")[:-1] if line]
    child.wait()
    child.stdout.close()
    ledger = PersistentLedger(path=path)
    counts = ledger.counts()
    assert counts.opened >= max([500, *said]) + 1
    assert counts.opened == counts.open + counts.ready + sum(counts.closed.values())
    assert len(ledger.open_ids()) == counts.open
