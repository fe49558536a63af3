"""Progress: the exact plain lines, the live view under a pseudo-terminal, and constant memory."""

import io
import os
import pty
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agl_slime.events import (
    Event,
    IterationFinished,
    MetricValue,
    PhaseStarted,
    RolloutFinished,
    RunFinished,
    RunStarted,
    TrainingProgressed,
    Warning,
)
from agl_slime.report import ProgressReporter
from agl_slime.report.console import MOST_REASONS, OTHER, count_reason, iteration_line
from tests.report.cases import METRICS

STARTED = RunStarted(settings={}, num_iterations=40, rollouts_per_iteration=64, at=100.0)


def finished(number: int, **metrics: MetricValue) -> IterationFinished:
    return IterationFinished(iteration=number, metrics={**METRICS, **metrics})


def rollout(number: int, *, reward: float | None = 1.0, reason: str = "", **fields: Any) -> RolloutFinished:
    outcome = "failed" if reason else "succeeded"
    fields |= {"outcome": outcome, "reason": reason, "reward": None if reason else reward}
    return RolloutFinished(iteration=number, rollout_id="r", tokens=10, **fields)


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
        rollout(4, reason="timeout"),
        rollout(4, reason="bad_reward"),
        rollout(4, reason="timeout"),
        rollout(4, reason="elsewhere", mode="val"),
        finished(4, **{"rollout/failed": 3}),
        finished(5),
        RunFinished(),
    )
    assert text == (
        "iter 3/40  reward 0.41 (val 0.44)  rollouts 64 (0 failed)  loss -0.012  1234 tok/s  0.31 s  v4\n"
        "iter 4/40  reward 0.41  rollouts 64 (3 failed: timeout 2, bad_reward 1)  loss -0.012  1234 tok/s  0.31 s  v4\n"
        "iter 5/40  reward 0.41  rollouts 64 (0 failed)  loss -0.012  1234 tok/s  0.31 s  v4\n"
    )
    metrics: dict[str, MetricValue] = {"val/reward_mean": 0.12, "train/loss": float("nan"), "weights/version": None}
    assert iteration_line(IterationFinished(iteration=0, metrics=metrics), None, {}) == "iter 0  reward - (val 0.12)"


def test_a_long_run_says_how_much_time_is_left() -> None:
    first, second = (finished(n, **{"perf/iteration_s": seconds}) for n, seconds in ((3, 10), (4, 20)))
    lines = plain(STARTED, first, second).splitlines()
    assert "10.0 s  6m10s left  v4" in lines[0]
    assert "20.0 s  9m00s left  v4" in lines[1]  # of 36 iterations, 15 seconds each


def test_the_live_view_shows_the_current_iteration_and_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_slime.report.console.time", SimpleNamespace(monotonic=lambda: 130.0))
    reporter = ProgressReporter(console=Console(file=io.StringIO(), width=80), view="lines")
    screen = Console(width=80, color_system=None, file=io.StringIO())

    def view(*events: Event) -> list[str]:
        for event in events:
            reporter.handle(event)
        with screen.capture() as captured:
            screen.print(reporter.render())
        return captured.get().splitlines()

    lines = view(
        RunStarted(settings={}, num_iterations=40, rollouts_per_iteration=64, output_dir="runs/" + "x" * 60),
        finished(1, **{"rollout/reward_mean": 0.1}),
        finished(2, **{"rollout/reward_mean": 0.9, "val/reward_mean": 0.8, "rollout/staleness_mean": 1.25}),
        PhaseStarted(iteration=3, phase="collect"),
        rollout(3, reward=1.0),
        rollout(3, reward=0.0),
        rollout(3, reason="timeout"),
        Warning(text="first", key="a"),
        Warning(text="all rewards of 7 of 8 groups are equal; " * 4, key="b"),
    )
    head, rewards, figures, warning, path = lines
    assert max(map(len, lines)) <= 80
    assert "iteration 3/40" in head
    assert "collecting 3/64 rollouts" in head
    assert " ".join(rewards.split()) == "reward 0.90 this iteration so far 0.50 best 0.90 val 0.80 ▁█"
    assert all(text in figures for text in ("weights v4", "1 failed (timeout 1)", "staleness 1.2"))
    assert warning.startswith("2 warnings, the last: all rewards of 7")
    assert path.startswith("agl-slime view runs/xxx")
    started = PhaseStarted(iteration=3, phase="train", at=120.0)
    assert "training 25%, 30.0 s left" in view(started, TrainingProgressed(iteration=3, share=0.25))[0]


def test_plain_warnings_go_to_stderr_once_per_key(capsys: pytest.CaptureFixture[str]) -> None:
    warnings = {"[careful]": "a", "again": "a", "other": "b"}
    assert plain(STARTED, *(Warning(text=text, key=key) for text, key in warnings.items())) == ""
    assert capsys.readouterr().err == "warning: [careful]\nwarning: other\n"


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
    """The exit status and all output of the program with a pseudo-terminal as stdout."""
    leader, follower = pty.openpty()
    env = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TTY_COMPATIBLE", "FORCE_COLOR")
    }
    env |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30", "PYTHONUTF8": "1", **environment}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=follower, stderr=follower, stdin=subprocess.DEVNULL, env=env
    ) as process:
        os.close(follower)
        output = b""
        while True:
            try:
                data = os.read(leader, 65536)
            except OSError:  # how Linux says that the other side is closed
                break
            if not data:
                break
            output += data
        process.wait(timeout=60)
    os.close(leader)
    return process.returncode, output.decode("utf-8")


def test_a_terminal_gets_the_live_view_and_its_cursor_back() -> None:
    """Also of a run that dies."""
    dies = "from agl_slime.events import RunStarted\nfrom agl_slime.report import ProgressReporter\n"
    dies += "ProgressReporter().handle(RunStarted(settings={}))\nraise SystemExit(3)\n"
    for program, code in ((PROGRAM, 0), (dies, 3)):
        status, text = on_a_terminal(program)
        assert status == code, text
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
        if program is PROGRAM:
            assert "iter 2/3  reward 0.41" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_asks_for_plain_output_gets_it(environment: dict[str, str]) -> None:
    status, text = on_a_terminal(PROGRAM, **environment)
    assert status == 0
    assert "\x1b" not in text
    assert len(text.splitlines()) == 3
    styled = "from agl_slime.support.terminal import PlainConsole\nconsole = PlainConsole()\n"
    styled += "with console.status('loading'):\n    console.print('[bold]done')\n"
    if "NO_COLOR" in environment:
        assert on_a_terminal(styled, **environment) == (0, "done\r\n")


@given(st.lists(st.sampled_from([f"reason {number}" for number in range(MOST_REASONS * 2)])))
def test_reasons_are_all_counted(reasons: list[str]) -> None:
    counter: Counter[str] = Counter()
    for reason in reasons:
        count_reason(counter, reason)
    assert sum(counter.values()) == len(reasons)
    assert len(counter) <= MOST_REASONS + 1
    assert (OTHER in counter) == (len(set(reasons)) > MOST_REASONS)
