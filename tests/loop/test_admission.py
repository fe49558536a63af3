"""The bound on staleness in simulated time: random latencies, stragglers, failures and training times."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.loop.admission import Admission
from tests.harness.examples import examples


@dataclass
class Simulation:
    """A loop around ``admission`` whose rollouts and steps take simulated time. ``fate(number)``: how long a group
    takes, and whether it is trained on or replaced."""

    admission: Admission
    batch_size: int
    max_staleness: int
    steps: int
    fate: Callable[[int], tuple[float, str]]
    train_s: Callable[[], float]
    now: float = 0.0
    drawn: int = 0
    admitted: dict[int, int] = field(default_factory=dict)
    ends: list[tuple[float, int, str]] = field(default_factory=list)
    trained: dict[int, int] = field(default_factory=dict)
    """Versions that each group was behind."""
    replaced: set[int] = field(default_factory=set)
    worst: int = 0

    def run(self) -> None:
        for _ in range(self.steps):
            self._admit()
            while (batch := self.admission.take()) is None:
                self._next_end()
            for number in batch:
                self.trained[number] = self.admission.step - self.admitted[number]
            done = self.now + self.train_s()
            while self.ends and self.ends[0][0] <= done:
                self._next_end()
            self.now = done
            self.admission.advance()

    def _admit(self) -> None:
        for _ in range(self.admission.free):
            latency, fate = self.fate(self.drawn)
            heapq.heappush(self.ends, (self.now + latency, self.drawn, fate))
            self.admission.admit(self.drawn)
            self.admitted[self.drawn] = self.admission.step
            self.drawn += 1
        waiting = self.drawn - len(self.trained) - len(self.replaced)
        self.worst = max(self.worst, waiting)

    def _next_end(self) -> None:
        assert self.ends, "a batch is missing, and nothing is in flight"
        end, number, fate = heapq.heappop(self.ends)
        self.now = max(self.now, end)
        if fate == "replaced":
            self.admission.replace(number)
            self.replaced.add(number)
            self._admit()
        else:
            self.admission.end(number)

    def check(self) -> None:
        assert set(self.trained) | self.replaced == set(range(self.drawn))  # none is lost
        assert len(self.trained) == self.steps * self.batch_size
        assert max(self.trained.values()) <= self.max_staleness
        assert self.worst <= (self.max_staleness + 1) * self.batch_size


def simulated(batch_size: int, max_staleness: int, steps: int, **settings: Any) -> Simulation:
    """A simulation that has run and whose outcome is right."""
    admission = Admission(batch_size=batch_size, max_staleness=max_staleness, last_step=steps)
    simulation = Simulation(admission, batch_size, max_staleness, steps, **settings)
    simulation.run()
    simulation.check()
    return simulation


@settings(max_examples=examples(60), deadline=None)
@given(
    batch_size=st.integers(1, 9),
    max_staleness=st.integers(0, 5),
    seed=st.integers(0, 2**32),
    straggling=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    lost=st.sampled_from([0.0, 0.2]),
    train_s=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
)
def test_no_group_is_ever_too_old_and_none_is_thrown_away(batch_size, max_staleness, seed, straggling, lost, train_s):
    rng = random.Random(seed)

    def fate(number: int) -> tuple[float, str]:
        slow = 20.0 if rng.random() < straggling else 1.0
        return rng.expovariate(1.0) * slow, "replaced" if rng.random() < lost else "trained"

    simulated(batch_size, max_staleness, 30, fate=fate, train_s=lambda: rng.uniform(0, 2 * train_s))


@settings(max_examples=examples(60), deadline=None)
@given(batch_size=st.integers(1, 5), max_staleness=st.integers(0, 4), cut=st.integers(0, 9), seed=st.integers(0, 2**32))
def test_resumed_run_makes_the_batches_of_the_uninterrupted_one(batch_size, max_staleness, cut, seed):
    """The same groups end between the same steps; the resume comes between two steps."""
    limits = {"batch_size": batch_size, "max_staleness": max_staleness, "last_step": 10}

    def batches(cut: int | None) -> list[list[int]]:
        rng = random.Random(seed)
        admission, made, in_flight, ended, drawn = Admission(**limits), [], set(), set(), 0
        for step in range(10):
            if step == cut:
                state, admission = admission.state(), Admission(**limits, step=step)
                for number, admitted in state.items():
                    admission.admit(int(number), step=admitted)
                    if int(number) in ended:
                        admission.end(int(number))
                admission.check()
            for _ in range(admission.free):
                admission.admit(drawn)
                in_flight.add(drawn)
                drawn += 1
            while (batch := admission.take()) is None:
                number = rng.choice(sorted(in_flight))
                in_flight.remove(number)
                ended.add(number)
                admission.end(number)
            made.append(batch)
            admission.advance()
        return made

    assert batches(cut) == batches(None)


def test_redrawn_task_does_not_push_an_older_group_past_staleness() -> None:
    """A resumed run draws dropped tasks a second time: their numbers are lower than the numbers in flight."""
    admission = Admission(batch_size=1, max_staleness=2, step=6)
    for number, step in ((34, 5), (35, 6)):
        admission.admit(number, step=step)
    admission.admit(30)
    for number in (30, 34, 35):
        admission.end(number)
    taken = []
    while batch := admission.take():
        taken += batch
        admission.advance()
        assert not admission.late()
    assert taken == [34, 30, 35]


@settings(max_examples=examples(60), deadline=None)
@given(
    batch_size=st.integers(1, 6),
    max_staleness=st.integers(0, 3),
    seeds=st.tuples(*[st.integers(0, 2**32)] * 2),
    lost=st.frozensets(st.integers(0, 80), max_size=12),
)
def test_batches_in_order_depend_on_no_latency(batch_size, max_staleness, seeds, lost):
    """Weights change when nothing is in flight; the ``lost`` groups are replaced, whenever they end."""

    def batches(rng: random.Random) -> list[list[tuple[int, int]]]:
        limits = {"batch_size": batch_size, "max_staleness": max_staleness, "last_step": 8}
        admission, taken, in_flight, drawn = Admission(**limits, in_order=True), [], set[int](), 0

        def end_one() -> None:
            nonlocal drawn
            while admission.free > 0:
                admission.admit(drawn)
                in_flight.add(drawn)
                drawn += 1
            number = rng.choice(sorted(in_flight))
            in_flight.remove(number)
            admission.end(number)
            if number in lost:
                admission.replace(number)

        for step in range(8):
            while admission.take() is None:
                end_one()
            taken.append([*admission.batch.items()])
            while admission.free > 0 or in_flight:
                end_one()
            assert min(admitted for _, admitted in taken[-1]) >= step - max_staleness
            admission.advance()
        return taken

    first, second = (batches(random.Random(seed)) for seed in seeds)
    assert first == second
