"""The ledger in memory and on disk: one end per rollout, and counts that add up after any crash."""

import logging
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agl_slime.data import ledger as ledger_module
from agl_slime.data.ledger import Ledger
from agl_slime.data.results import Outcome
from agl_slime.errors import ConfigError, FileLockedError
from agl_slime.support import database as database_module
from agl_slime.support.database import Database
from tests.harness.examples import examples
from tests.harness.waiting import becomes_true

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

ROLLOUTS = st.lists(st.sampled_from([f"r{number}" for number in range(6)]), min_size=1, max_size=3, unique=True)
OUTCOMES = st.sampled_from(list(Outcome))
REASONS = st.sampled_from(["", "timeout", "no_reward"])


@pytest.fixture(params=["memory", "disk"])
def ledger(request, tmp_path: Path):
    ledger = Ledger(path=None if request.param == "memory" else tmp_path / "ledger.sqlite")
    yield ledger
    ledger.close()


def test_dropped_groups_without_a_report_are_run_again(ledger):
    ledger.open_many([(f"{task}{n}", task) for task in "abcd" for n in (1, 2)])
    for task, outcome in (("a", Outcome.FILTERED), ("b", Outcome.FILTERED), ("c", Outcome.TRAINED)):
        if task == "c":
            ledger.checkpoint(3)
        ledger.close_many([f"{task}1"], Outcome.FAILED, "no_reward")
        ledger.close_many([f"{task}2"], outcome, "zero_variance" if outcome is Outcome.FILTERED else "")
        ledger.finish_instance(task)
    ledger.close_many(["d1"], Outcome.FAILED, "no_reward")
    assert ledger.resume(3, ready=[], reported=["a"]) == 5  # both of b and c; of d, the one in flight
    assert ledger.finished_instances() == ["a"]
    counts = ledger.counts()
    assert counts.opened == sum(counts.closed.values()) == 8
    assert counts.reasons[Outcome.CANCELLED, "restarted"] == 5
    assert ledger.outcome_of("a2") == (Outcome.FILTERED, "zero_variance")


def test_instances_count_as_finished_once_per_call(ledger):
    for rollout_id, instance_id in (("r1", "a"), ("r2", "a"), ("r3", "b"), ("r4", None)):
        ledger.open_many([(rollout_id, instance_id)])
    ledger.ready_many(["r3"])
    ledger.close_many(["r1"], Outcome.TRAINED)
    ledger.close_many(["r2"], Outcome.FAILED, "timeout")
    ledger.finish_instance("a")
    ledger.finish_instance("a")
    assert ledger.finished_instances() == ["a", "a"]
    assert ledger.open_ids() == ["r4"]


def test_rollouts_of_another_account_are_recognised_and_not_counted(ledger):
    ledger.open_many([("r1", None)])
    ledger.close_many(["r1"], Outcome.TRAINED)
    ledger.remember(["r1", "old"])
    assert not ledger.open_many([("old", None)])
    assert not ledger.close_many(["old"], Outcome.FAILED)
    assert sorted(ledger.recent_ids()) == ["old", "r1"]
    assert ledger.counts().closed == {Outcome.TRAINED: 1}


def test_a_batch_is_kept_or_lost_together(tmp_path):
    ledger = Ledger(path=tmp_path / "ledger.sqlite")

    def half_of_it() -> None:
        with ledger.batch():
            ledger.open_many([("r1", None)])
            ledger.close_many(["r1"], Outcome.TRAINED)
            raise RuntimeError("the power went")

    with pytest.raises(RuntimeError):
        half_of_it()
    assert ledger.counts().opened == 0
    ledger.open_many([("r1", None)])
    assert ledger.close_many(["r1"], Outcome.TRAINED)


def test_resuming_from_a_checkpoint_takes_later_steps_back(tmp_path):
    ledger = Ledger(path=tmp_path / "ledger.sqlite")
    for step, instance_id in enumerate("abc"):
        ledger.open_many([(f"r{step}", instance_id)])
        ledger.close_many([f"r{step}"], Outcome.TRAINED)
        ledger.finish_instance(instance_id)
        ledger.checkpoint(step)
    ledger.open_many([("bad", "d")])
    ledger.close_many(["bad"], Outcome.FAILED, "timeout")
    ledger.finish_instance("d")
    ledger.open_many([("kept", "e")])
    assert ledger.resume(0, ready=["kept", "unknown"]) == 2
    assert ledger.outcome_of("r1") == ledger.outcome_of("r2") == (Outcome.CANCELLED, "restarted")
    assert ledger.finished_instances() == ["a", "d"]
    counts = ledger.counts()
    assert (counts.opened, counts.open, counts.ready) == (5, 0, 1)
    assert counts.closed == {Outcome.TRAINED: 1, Outcome.FAILED: 1, Outcome.CANCELLED: 2}
    with pytest.raises(ConfigError, match="no checkpoint of step 2, only 0"):
        ledger.resume(2, ready=[])


def test_old_closed_rollouts_are_forgotten_but_counted(ledger, monkeypatch):
    monkeypatch.setattr(ledger_module, "_KEPT_CLOSED", 10)
    with ledger.batch():
        for number in range(2000):
            ledger.open_many([(str(number), None)])
            ledger.close_many([str(number)], Outcome.TRAINED)
    assert ledger.counts().closed == {Outcome.TRAINED: 2000}
    assert not ledger.instances_of(["0"])
    assert not ledger.open_many([("1995", None)])  # late reports of recent ones are recognised
    assert len(ledger.recent_ids()) <= 1010


def test_threads_that_report_the_same_rollouts_close_each_once(ledger):
    names = [str(number) for number in range(500)]
    wins = [0] * 4
    start = threading.Barrier(4)

    def report(worker: int) -> None:
        start.wait()
        for name in names:
            ledger.open_many([(name, None)])
            ledger.ready_many([name])
            wins[worker] += ledger.close_many([name], Outcome.TRAINED if worker % 2 else Outcome.FILTERED)

    threads = [threading.Thread(target=report, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    counts = ledger.counts()
    assert sum(wins) == len(names) == sum(counts.closed.values()) == counts.opened
    assert (counts.open, counts.ready) == (0, 0)


def test_an_exclusive_file_serves_one_process(tmp_path):
    database = Database(path=tmp_path / "x.sqlite", exclusive=True)
    with database.transaction() as connection:
        connection.execute("CREATE TABLE t (a)")
    with pytest.raises(ConfigError, match="another process uses it"):
        Database(path=tmp_path / "x.sqlite", exclusive=True)
    database.close()
    Database(path=tmp_path / "x.sqlite", exclusive=True).close()


HOLDS = """
import sqlite3, sys
other = sqlite3.connect(sys.argv[1], isolation_level=None)
other.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.readline()
"""


def test_another_programs_lock_is_waited_for_and_named(tmp_path, monkeypatch, caplog):
    """A backup, say: with a warning while it holds the file, and an error when it does so for too long."""
    monkeypatch.setattr(database_module, "_SOON_S", 0.05)
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path=path)
    with subprocess.Popen([sys.executable, "-c", HOLDS, path], **PIPES) as other:
        assert other.stdout.readline() == "locked\n"
        caplog.set_level(logging.WARNING)
        writing = threading.Thread(target=ledger.open_many, args=([("a", None)],))
        writing.start()
        assert becomes_true(lambda: f"{path} is locked by another program" in caplog.text, 30)
        assert writing.is_alive()
        monkeypatch.setattr(database_module, "_PATIENCE_S", 0.1)
        with pytest.raises(FileLockedError, match=r"ledger\.sqlite is locked .* copy the file .*, then resume"):
            Ledger(path=path)
        other.communicate("\n")
        writing.join(30)
    assert ledger.counts().open == 1


def test_a_killed_process_leaves_an_account_that_adds_up(tmp_path):
    """The child prints its progress after each commit; the file has at least that, and adds up."""
    code = """
        import sys
        from agl_slime.data.ledger import Ledger
        from agl_slime.data.results import Outcome
        ledger = Ledger(path=sys.argv[1])
        n = 0
        while True:
            ledger.open_many([(str(n), None)])
            if n % 3:
                end = (Outcome.TRAINED, "") if n % 3 == 1 else (Outcome.FAILED, "timeout")
                ledger.close_many([str(n)], *end)
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
    printed = [int(line) for line in child.stdout.read().split("\n")[:-1] if line]
    child.wait()
    child.stdout.close()
    ledger = Ledger(path=path)
    counts = ledger.counts()
    assert counts.opened >= max([500, *printed]) + 1
    assert counts.opened == counts.open + counts.ready + sum(counts.closed.values())
    assert len(ledger.open_ids()) == counts.open


class LedgerMachine(RuleBasedStateMachine):
    """Compared with the plainest model there is: one state per rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger: Ledger = self.make()
        self.states: dict[str, str | tuple[Outcome, str]] = {}

    def make(self) -> Ledger:
        return Ledger()

    def moved(self, rollouts: list[str], sources: tuple[Any, ...], target: str | tuple[Outcome, str]) -> int:
        """Move the rollouts in one of the states ``sources`` to ``target``; their number."""
        allowed = [rollout for rollout in rollouts if self.states.get(rollout) in sources]
        self.states.update(dict.fromkeys(allowed, target))
        return len(allowed)

    @rule(rollouts=ROLLOUTS)
    def open(self, rollouts: list[str]) -> None:
        moved = self.moved(rollouts, (None,), "open")
        assert self.ledger.open_many([(rollout, None) for rollout in rollouts]) == moved

    @rule(rollouts=ROLLOUTS)
    def ready(self, rollouts: list[str]) -> None:
        assert self.ledger.ready_many(rollouts) == self.moved(rollouts, ("open",), "ready")

    @rule(rollouts=ROLLOUTS, outcome=OUTCOMES, reason=REASONS)
    def close(self, rollouts: list[str], outcome: Outcome, reason: str) -> None:
        moved = self.moved(rollouts, ("open", "ready"), (outcome, reason))
        assert self.ledger.close_many(rollouts, outcome, reason) == moved

    @rule(rollouts=ROLLOUTS, reason=REASONS)
    def filter_trained(self, rollouts: list[str], reason: str) -> None:
        moved = self.moved(rollouts, ((Outcome.TRAINED, ""),), (Outcome.FILTERED, reason))
        assert self.ledger.filter_trained(rollouts, reason) == moved

    @invariant()
    def the_counts_add_up(self) -> None:
        counts = self.ledger.counts()
        ended = [state for state in self.states.values() if isinstance(state, tuple)]
        assert counts.opened == counts.open + counts.ready + sum(counts.closed.values())
        assert counts.opened == len(self.states)
        assert counts.open == sum(state == "open" for state in self.states.values())
        assert counts.ready == sum(state == "ready" for state in self.states.values())
        assert {outcome: n for outcome, n in counts.closed.items() if n} == Counter(outcome for outcome, _ in ended)
        assert {key: n for key, n in counts.reasons.items() if n} == Counter(ended)
        assert sorted(self.ledger.open_ids()) == sorted(name for name, state in self.states.items() if state == "open")
        for name, state in self.states.items():
            assert self.ledger.is_open(name) is (state == "open")
            assert self.ledger.has_ended(name) is (state != "open")
            assert self.ledger.outcome_of(name) == (state if isinstance(state, tuple) else None)


class DiskLedgerMachine(LedgerMachine):
    def make(self) -> Ledger:
        self.directory = tempfile.TemporaryDirectory()
        return Ledger(path=Path(self.directory.name) / "ledger.sqlite")

    @rule()
    def restart(self) -> None:
        """Another process takes over the file."""
        self.ledger.close()
        self.ledger = Ledger(path=Path(self.directory.name) / "ledger.sqlite")

    def teardown(self) -> None:
        self.ledger.close()
        self.directory.cleanup()


TestLedger = LedgerMachine.TestCase
TestLedgerOnDisk = DiskLedgerMachine.TestCase
# each example opens files: fewer of them
TestLedgerOnDisk.settings = settings(max_examples=examples(12), stateful_step_count=20, deadline=None)
TestLedger.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
