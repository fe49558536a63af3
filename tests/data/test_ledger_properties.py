"""Whatever is reported in whatever order, the ledger's counts add up and a rollout has one outcome; both for memory and
for disk."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agl_slime.data.ledger import Ledger
from agl_slime.data.results import Outcome
from tests.harness.examples import examples

ROLLOUTS = st.lists(st.sampled_from([f"r{number}" for number in range(6)]), min_size=1, max_size=3, unique=True)
OUTCOMES = st.sampled_from(list(Outcome))
REASONS = st.sampled_from(["", "timeout", "no_reward"])


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
