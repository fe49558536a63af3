"""Progress: the exact plain lines, the live view under a pseudo-terminal, and constant memory."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agl_slime.events import (
    Event,
    IterationFinished,
    MetricValue,
    Mode,
    PhaseStarted,
    RolloutFinished,
    RunFinished,
    RunStarted,
    TrainingProgressed,
    Warning,
)
from agl_slime.report import ProgressReporter
from agl_slime.report.console import (
    MOST_REASONS,
    OTHER,
    count_reason,
    format_seconds,
    format_version,
    iteration_line,
    sparkline,
)
from tests.report.cases import METRICS

STARTED = RunStarted(settings={}, num_iterations=40, rollouts_per_iteration=64, at=100.0)


def finished(number: int, **metrics: MetricValue) -> IterationFinished:
    return IterationFinished(iteration=number, metrics={**METRICS, **metrics})


def rollout(
    number: int = 1,
    *,
    at: float = 0.0,
    reward: float | None = 1.0,
    reason: str = "",
    tokens: int = 10,
    mode: Mode = "train",
) -> RolloutFinished:
    return RolloutFinished(
        iteration=number,
        rollout_id="r",
        outcome="failed" if reason else "succeeded",
        reason=reason,
        reward=reward,
        tokens=tokens,
        mode=mode,
        at=at,
    )


def plain(*events: Event) -> str:
    out = io.StringIO()
    reporter = ProgressReporter(console=Console(file=out))
    for event in events:
        reporter.handle(event)
    reporter.close()
    return out.getvalue()


def test_plain_output_is_one_exact_line_per_iteration() -> None:
    text = plain(
        STARTED,
        PhaseStarted(iteration=3, phase="collect"),
        rollout(3),
        PhaseStarted(iteration=3, phase="train"),
        finished(3, **{"val/reward_mean": 0.44}),
        rollout(4, reason="timeout", reward=None),
        rollout(4, reason="bad_reward", reward=None),
        rollout(4, reason="timeout", reward=None),
        rollout(4, reason="elsewhere", reward=None, mode="val"),
        finished(4, **{"rollout/failed": 3}),
        finished(5),
        RunFinished(),
    )
    assert text == (
        "iter 3/40  reward 0.41 (val 0.44)  rollouts 64 (0 failed)  loss -0.012  1234 tok/s  0.31 s  v4\n"
        "iter 4/40  reward 0.41  rollouts 64 (3 failed: timeout 2, bad_reward 1)  loss -0.012  1234 tok/s  0.31 s  v4\n"
        "iter 5/40  reward 0.41  rollouts 64 (0 failed)  loss -0.012  1234 tok/s  0.31 s  v4\n"
    )


def test_the_line_says_of_how_many_rollouts_a_validation_is() -> None:
    lines = plain(
        finished(1, **{"val/start_reward_mean": 1.0, "val/start_count": 16, "val/start_failed": 15}),
        finished(2, **{"val/reward_mean": None, "val/count": 16, "val/failed": 16}),
        finished(3, **{"val/reward_mean": 0.5, "val/count": 16, "val/failed": 0}),
    ).splitlines()
    for line, told in zip(lines, ("(val 1.00 of 1/16)", "(val - of 0/16)", "(val 0.50)"), strict=True):
        assert told in line


def test_a_long_run_says_how_much_time_is_left() -> None:
    lines = plain(
        STARTED, finished(3, **{"perf/iteration_s": 10}), finished(4, **{"perf/iteration_s": 20})
    ).splitlines()
    assert "10.0 s  6m10s left  v4" in lines[0]
    assert "20.0 s  9m00s left  v4" in lines[1]  # of 36 iterations, 15 seconds each
    assert "left" not in plain(STARTED, finished(36, **{"perf/iteration_s": 14}))


def test_the_live_view_shows_how_far_training_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_slime.report.console.time", SimpleNamespace(monotonic=lambda: 130.0))
    reporter = ProgressReporter(console=Console(file=io.StringIO()), view="lines")
    view = Console(width=120, color_system=None, file=io.StringIO())

    def head(*events: Event) -> str:
        for event in events:
            reporter.handle(event)
        with view.capture() as captured:
            view.print(reporter.render())
        return captured.get().splitlines()[0]

    started = PhaseStarted(iteration=3, phase="train", at=120.0)
    assert "training 25%, 30.0 s left" in head(STARTED, started, TrainingProgressed(iteration=3, share=0.25))
    assert "30.0 s, 6m20s left" in head(finished(2, **{"perf/iteration_s": 10}))
    assert "%" not in head(PhaseStarted(iteration=3, phase="sync", at=130.0))
    reporter.close()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60)])
def test_live_view_shows_staleness_and_warnings_and_fits_the_terminal(width: int, height: int) -> None:
    reporter = ProgressReporter(console=Console(file=io.StringIO(), width=width), view="lines")
    view = Console(width=width, height=height, color_system=None, file=io.StringIO(), stderr=False)
    started = RunStarted(settings={}, num_iterations=40, output_dir="runs/" + "x" * 60)
    events: list[Event] = [started, PhaseStarted(iteration=9, phase="collect", rollouts=64), rollout(9)]
    events += [finished(n, **{"rollout/staleness_mean": 1.25}) for n in range(1, 9)] + [Warning(text="first", key="a")]
    events += [Warning(text="all rewards of 7 of 8 groups are equal; " * 4, key="b")]
    for event in events:
        reporter.handle(event)
    with view.capture() as captured:
        view.print(reporter.render())
    lines = captured.get().splitlines()
    assert len(lines) == 5
    assert max(map(len, lines)) <= width
    assert "staleness 1.2" in lines[2]
    assert lines[3].startswith("2 warnings, the last: all rewards of 7")
    assert lines[4].startswith("agl-slime view runs/xxx")
    reporter.close()


def test_parts_without_a_metric_are_left_out() -> None:
    event = IterationFinished(
        iteration=0, metrics={"val/reward_mean": 0.12, "train/loss": float("nan"), "weights/version": None}
    )
    assert iteration_line(event, None, {}) == "iter 0  reward - (val 0.12)"


@pytest.mark.parametrize(
    ("version", "text"), [(4, "v4"), (4.0, "v4"), ("4", "v4"), ("default", "default"), (None, ""), ("", "")]
)
def test_spell_version(version: object, text: str) -> None:
    assert format_version(version) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.312, "0.31 s"),
        (9.994, "9.99 s"),
        (9.996, "10.0 s"),
        (99.96, "1m40s"),
        (185, "3m05s"),
        (3599.6, "1h00m"),
        (7450, "2h04m"),
    ],
)
def test_spell_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_plain_warnings_go_to_stderr_once_per_key(capsys: pytest.CaptureFixture[str]) -> None:
    text = plain(
        STARTED, Warning(text="[careful]", key="a"), Warning(text="again", key="a"), Warning(text="other", key="b")
    )
    assert text == ""
    assert capsys.readouterr().err == "warning: [careful]\nwarning: other\n"


def test_a_piped_program_prints_lines_and_no_escapes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, check=True, timeout=60, env={**os.environ, "LC_ALL": "C"}
    )
    assert done.stdout.decode("ascii").splitlines() == [
        f"iter {i}/3  reward 0.41  rollouts 2 (1 failed: [red]timeout 1)  loss -0.012  1234 tok/s  0.31 s  v4"
        for i in (1, 2, 3)
    ]


PROGRAM = """
from agl_slime.events import *
from agl_slime.report import *
from tests.report.cases import METRICS
with Reporters([ProgressReporter()]) as reporters:
    reporters.handle(RunStarted(settings={}, num_iterations=3, rollouts_per_iteration=2))
    for i in (1, 2, 3):
        reporters.handle(PhaseStarted(iteration=i, phase="collect"))
        reporters.handle(RolloutFinished(iteration=i, rollout_id="r", outcome="succeeded", reward=0.5, tokens=7))
        reporters.handle(RolloutFinished(iteration=i, rollout_id="s", outcome="failed", reason="[red]timeout"))
        reporters.handle(IterationFinished(iteration=i, metrics={**METRICS, "rollout/count": 2, "rollout/failed": 1}))
    reporters.handle(RunFinished())
"""


def on_a_terminal(program: str, **environment: str) -> tuple[int, str]:
    """Run the program with a pseudo-terminal as stdout; its exit status and everything it wrote."""
    leader, follower = pty.openpty()
    env = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TTY_COMPATIBLE", "FORCE_COLOR")
    }
    env |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30", "PYTHONUTF8": "1", **environment}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=follower, stderr=follower, stdin=subprocess.DEVNULL, env=env
    ) as process:
        os.close(follower)
        parts: list[bytes] = []
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # how Linux says that the other side is closed
                break
            if not part:
                break
            parts.append(part)
        process.wait(timeout=60)
    os.close(leader)
    return process.returncode, b"".join(parts).decode("utf-8")


def test_a_terminal_gets_the_live_view_and_its_cursor_back() -> None:
    status, text = on_a_terminal(PROGRAM)
    assert status == 0, text
    assert "iter 2/3  reward 0.41" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "\x1b[?25l" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_run_that_dies_gives_the_cursor_back() -> None:
    program = "from agl_slime.events import RunStarted\nfrom agl_slime.report import ProgressReporter\n"
    program += "ProgressReporter().handle(RunStarted(settings={}))\nraise SystemExit(3)\n"
    status, text = on_a_terminal(program)
    assert status == 3
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_asks_for_plain_output_gets_it(environment: dict[str, str]) -> None:
    status, text = on_a_terminal(PROGRAM, **environment)
    assert status == 0
    assert "\x1b" not in text
    assert len(text.splitlines()) == 3


def test_the_live_view_shows_the_iteration_at_hand() -> None:
    out = io.StringIO()
    reporter = ProgressReporter(
        console=Console(file=out, force_terminal=True, width=120, color_system=None), view="live"
    )
    for event in (
        STARTED,
        finished(1, **{"rollout/reward_mean": 0.1}),
        finished(2, **{"rollout/reward_mean": 0.9, "val/reward_mean": 0.8}),
        PhaseStarted(iteration=3, phase="collect"),
        rollout(3, reward=1.0),
        rollout(3, reward=0.0),
        rollout(3, reward=None, reason="timeout"),
    ):
        reporter.handle(event)
    view = Console(width=120, color_system=None, file=io.StringIO())
    with view.capture() as captured:
        view.print(reporter.render())
    reporter.close()
    head, rewards, figures, _ = captured.get().splitlines()
    assert "iteration 3/40" in head
    assert "collecting 3/64 rollouts" in head
    assert rewards.split() == [
        "reward",
        "0.90",
        "this",
        "iteration",
        "so",
        "far",
        "0.50",
        "best",
        "0.90",
        "val",
        "0.80",
        "▁█",
    ]
    assert "weights v4" in figures
    assert "1 failed (timeout 1)" in figures


@given(st.lists(st.sampled_from([f"reason {number}" for number in range(MOST_REASONS * 2)])))
def test_reasons_are_all_counted(reasons: list[str]) -> None:
    counter: Counter[str] = Counter()
    for reason in reasons:
        count_reason(counter, reason)
    assert sum(counter.values()) == len(reasons)
    assert len(counter) <= MOST_REASONS + 1
    assert (OTHER in counter) == (len(set(reasons)) > MOST_REASONS)


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(1, 50))
def test_a_sparkline_is_as_wide_as_it_may_be(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


def test_sparkline_goes_from_lowest_to_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0]) == "▄▄"
    assert sparkline([]) == ""
