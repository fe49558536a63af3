"""The fan-out: order, isolation of a failing reporter, bounded memory, and an end that does not hang."""

import threading

from agl_slime.events import Event, IterationFinished, PhaseStarted, RolloutFinished, RunFinished, Warning
from agl_slime.report import Reporters
from tests.harness.loop import Recorder


def iteration(number: int) -> IterationFinished:
    return IterationFinished(iteration=number, metrics={})


def rollout(number: int) -> RolloutFinished:
    return RolloutFinished(iteration=1, rollout_id=str(number), outcome="trained", reward=1.0)


class Failing(Recorder):
    def handle(self, event: Event) -> None:
        super().handle(event)
        raise OSError("No space left on device")

    def close(self) -> None:
        super().close()
        raise OSError("still no space")


class Gated(Recorder):
    """Stops at its first event until the gate is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.gate = threading.Event(), threading.Event()

    def handle(self, event: Event) -> None:
        self.entered.set()
        assert self.gate.wait(10)
        super().handle(event)


def test_events_arrive_in_order_from_one_thread() -> None:
    threads: set[str] = set()

    class Threads(Recorder):
        def handle(self, event: Event) -> None:
            super().handle(event)
            threads.add(threading.current_thread().name)

    recorder = Threads()
    events = [PhaseStarted(iteration=1, phase="collect"), *map(rollout, range(50)), iteration(1), RunFinished()]
    with Reporters([recorder]) as reporters:
        for event in events:
            reporters.handle(event)
    assert recorder.events == events
    assert threads == {"agl-slime-report"}
    assert recorder.closed == 1


def test_failing_reporters_are_dropped_with_warnings_and_others_continue() -> None:
    """The second fails on the warning about the first."""

    class Worse(Failing):
        pass

    first, failing, worse, last = Recorder(), Failing(), Worse(), Recorder()
    with Reporters([first, failing, worse, last]) as reporters:
        for number in range(3):
            reporters.handle(iteration(number))
    assert (failing.events, failing.closed, worse.closed) == ([iteration(0)], 1, 1)
    for reporter in (first, last):
        assert [event for event in reporter.events if isinstance(event, IterationFinished)] == [
            *map(iteration, range(3))
        ]
        assert sorted((event.key, event.text) for event in reporter.events if isinstance(event, Warning)) == [
            (f"reporter:{name}", f"{name} stopped with OSError: No space left on device; the run continues without it.")
            for name in ("Failing", "Worse")
        ]


def test_a_warning_from_a_reporter_is_not_overtaken_by_the_end_of_the_run() -> None:
    class Warns(Recorder):
        def handle(self, event: Event) -> None:
            if isinstance(event, IterationFinished):
                reporters.warn("careful", "key")

    recorder, gated = Recorder(), Gated()
    reporters = Reporters([gated, Warns(), recorder])
    reporters.handle(iteration(1))
    reporters.handle(RunFinished())  # is in the queue before the first event is through
    gated.gate.set()
    assert reporters.close()
    assert [type(event) for event in recorder.events] == [Warning, IterationFinished, RunFinished]


def test_falling_behind_leaves_out_rollouts_only_and_says_how_many() -> None:
    gated = Gated()
    reporters = Reporters([gated], backlog=10)
    reporters.handle(iteration(0))
    assert gated.entered.wait(10)  # the next events pile up
    for number in range(25):
        reporters.handle(rollout(number))
    reporters.handle(iteration(1))
    reporters.handle(RunFinished())
    gated.gate.set()
    assert reporters.close()
    assert [event for event in gated.events if isinstance(event, RolloutFinished)] == [*map(rollout, range(10))]
    assert [event.iteration for event in gated.events if isinstance(event, IterationFinished)] == [0, 1]
    assert [event.text[:31] for event in gated.events if isinstance(event, Warning)] == [
        "15 rollout events were left out"
    ]


def test_close_times_out_on_a_hanging_reporter_and_ignores_later_events() -> None:
    gated = Gated()
    reporters = Reporters([gated])
    reporters.handle(iteration(1))
    assert not reporters.close(timeout_s=0.05)
    reporters.handle(iteration(2))
    gated.gate.set()
    assert reporters.close()
    assert gated.events == [iteration(1)]
    recorder = Recorder()
    assert Reporters([recorder]).close()  # without any event
    assert recorder.closed == 1
