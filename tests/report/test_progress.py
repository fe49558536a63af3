"""Progress: the plain lines, the live view under a pseudo-terminal; and the summary at the end."""

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

from agl_slime import metric_names as m
from agl_slime.data.results import GroupResult, MemberResult
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
from agl_slime.loop.metrics import collect_metrics, eval_metrics, fork_examples, reward_by_task
from agl_slime.report import ProgressReporter
from agl_slime.report.console import MOST_REASONS, OTHER, count_reason, iteration_line
from agl_slime.report.summary import headline, sum_up, summary_rows
from agl_slime.support.intervals import estimate
from tests.report.cases import METRICS, row

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


OVERLAP = {"perf/roll_s": 0.9, "perf/train_s": 0.6, "perf/sync_s": 0.1, "perf/iteration_s": 1.0}
OVERLAP |= {"perf/trainer_waited": 0.3, "perf/engine_waited": 0.05, "perf/cpu_busy": 0.96}


def test_asynchronous_training_has_waiting_shares_speed_up_and_ceiling() -> None:
    line = iteration_line(IterationFinished(iteration=3, metrics={**METRICS, **OVERLAP}), 10, {})
    assert "1.00 s  waited: training 30%, engine 5%  CPU 96%" in line
    summary = sum_up([{"iteration": n, **row(n, **OVERLAP)} for n in range(1, 4)])
    assert summary["speed_up"] == pytest.approx(1.6)
    assert summary["speed_up_ceiling"] == pytest.approx(1.6 / 1.0)
    rows = dict(summary_rows({"reason": "finished", **summary}))
    assert rows["overlap"] == "1.60x, at most 1.60x;  training waited 30%, the engine 5%"
    assert "shared CPU" in rows
    synchronous = sum_up([{"iteration": 1, **row(1)}])
    assert "speed_up" not in synchronous
    assert not {"overlap", "shared CPU"} & {*dict(summary_rows({"reason": "finished", **synchronous}))}


def test_unequal_token_counts_and_the_reason_of_a_stop_are_shouted() -> None:
    def tokens(sampled: int, trained: int | None) -> str:
        return dict(summary_rows({"iterations": 1, "tokens_under_mask": sampled, "tokens_trained": trained}))["tokens"]

    assert dict(summary_rows({"reason": "every rollout failed"}))["run"] == "stopped: every rollout failed"
    assert tokens(10, 9) == "10 sampled under mask, 9 trained: NOT EQUAL"
    assert tokens(10, None) == "10 sampled under mask, none reported as trained"
    assert tokens(0, None) == "0 sampled under mask, nothing was trained"


def test_the_summary_has_first_and_last_validation_and_nothing_invented() -> None:
    start = {"val/start_reward_mean": 0.1, "val/start_reward_low": 0.0, "val/start_reward_high": 0.2}
    end = {"val/start_reward_mean": 0.5, "val/reward_mean": 0.9, "val/count": 16, "val/failed": 1}
    total = sum_up([{"iteration": 1, **start}, {"iteration": 2}, {"iteration": 3, **end}])
    assert (total["val_first"], total["val_last"]) == (0.1, 0.9)
    assert dict(summary_rows(total))["validation"] == "0.100 [0.000, 0.200] -> 0.900 of 15/16"
    names = ("reward_first", "tokens_trained", "logprob_diff_max", "first_ratio_dev_max")
    assert {total[name] for name in names} == {None}


START = {"val/start_reward_mean": 0.19, "val/count": 9, "rollout/count": 64, "rollout/failed": 2}
LAST = {"val/reward_mean": 0.94, "val/reward_low": 0.88, "val/reward_high": 0.98}
EARLY = {"val/start_reward_mean": 0.1}
LATE = {"val/reward_mean": 0.3, **dict(zip(m.VAL_DIFFERENCE, (0.2, -0.1, 0.8), strict=True))}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{}], "no rollout was rewarded over 1 iteration"),
        ([{"rollout/reward_mean": 0.5, "rollout/count": 4}], "reward 0.50 over 1 iteration; 0.0% of rollouts failed"),
        ([{"rollout/reward_mean": n} for n in (0.5, 0.4)], "reward fell from 0.50 to 0.40 over 2 iterations"),
        ([START, LAST], "validation rose from 0.19 to 0.94 [0.88, 0.98] over 2 iterations; 3.1% of rollouts failed"),
        ([EARLY, LATE], "validation went from 0.10 to 0.30, no clear change, over 2 iterations"),
    ],
)
def test_the_headline_says_what_became_of_the_run(rows: list[dict[str, Any]], sentence: str) -> None:
    figures = sum_up([{"iteration": number, **figures} for number, figures in enumerate(rows, start=1)])
    alarms = {0: "no alarm", 1: "1 alarm", 2: "2 alarms"}
    assert [headline(figures, alarms=n) for n in alarms] == [f"{sentence}; {text}" for text in alarms.values()]


def validation(*tasks: tuple[float | None, ...], first: Any = None) -> dict[str, Any]:
    members = []
    for task, rewards in enumerate(tasks):
        for number, reward in enumerate(rewards):
            name, failure = f"{task}-{number}", "x" if reward is None else None
            about: dict[str, Any] = {"rollout_id": name, "group_id": name, "failure": failure}
            members.append(MemberResult(mode="val", reward=reward, task={"n": task, 1: "another kind of key"}, **about))
    return eval_metrics(members, first=first)


def test_validation_has_mean_and_interval_of_its_tasks_without_failures() -> None:
    """Several rollouts of a task are one value; the mean lies within the interval, however often a task was drawn."""
    cases = {
        ((0.0,), (1.0,), (1.0,), (None,)): [0.0, 1.0, 1.0],
        ((1.0,) * 29, *(((0.0,),) * 11)): [1.0, *[0.0] * 11],
        ((0.0, 1.0, 0.5), (1.0, 1.0, None), (0.0, 0.0, 0.0)): [0.5, 1.0, 0.0],
    }
    for tasks, values in cases.items():
        metrics, expected = validation(*tasks), estimate(values)
        assert expected is not None
        figures = [metrics[f"val/reward_{name}"] for name in ("mean", "low", "high")]
        assert figures == [expected.mean, expected.low, expected.high]
    assert (metrics["val/count"], metrics["val/failed"], metrics["val/failed/x"]) == (9, 1, 1)
    assert "val/difference" not in metrics
    single = validation((1.0,))
    assert (single["val/reward_low"], single["val/reward_high"]) == (None, None)
    assert collect_metrics([], collect_s=1.0)["rollout/reward_mean"] is validation((None,))["val/reward_mean"] is None


def test_a_validation_is_compared_with_the_first_task_by_task() -> None:
    members = [
        MemberResult(rollout_id=str(n), group_id=str(n), task={"n": n, 1: "another kind of key"}, reward=reward)
        for n, reward in enumerate([0.0, 1.0, 0.5, 0.0])
    ]
    metrics = validation((1.0,), (1.0,), (None,), (0.5, 1.0), first=reward_by_task(members))
    expected = estimate([1.0, 0.0, 0.75], differences=True)
    assert expected is not None
    values = [metrics[name] for name in ("val/difference", "val/difference_low", "val/difference_high")]
    assert values == [expected.mean, expected.low, expected.high]
    shown = dict(summary_rows(sum_up([{"iteration": 1, "val/start_reward_mean": 0.3}, {"iteration": 2, **metrics}])))
    assert shown["validation"].endswith(", task by task {:+.3f} [{:+.3f}, {:+.3f}]".format(*values))


def member(number: int, *kinds: str | None, **counts: int) -> MemberResult:
    metadata = {"gateway": {"answers": 2, **counts}, "token_source": "engine"}
    fields: dict[str, Any] = {"loss_mask": [1], "status": None, "response_length": 1}
    samples: Any = tuple(SimpleNamespace(metadata={**metadata, "fork_reason": kind}, **fields) for kind in kinds)
    return MemberResult(rollout_id=f"ro-{number}", group_id="g", samples=samples, reward=1.0, sampled_tokens=1)


def test_gateway_counts_are_metrics_and_forks_and_refusals_are_named() -> None:
    members = (
        member(1, None, **{"overridden/temperature": 2}),
        member(2, None, "compaction", **{"overridden/temperature": 1, "refused/400": 2}),
        member(3, None, "compaction", "branch", **{"refused/413": 1}),
    )
    group = GroupResult(group_id="g", mode="train", size=3, members=members, ready=True)
    metrics = collect_metrics([group], collect_s=1.0)
    assert {name: value for name, value in metrics.items() if name.startswith("gateway/")} == {
        "gateway/answers": 6,
        "gateway/overridden/temperature": 3,
        "gateway/refused/400": 2,
        "gateway/refused/413": 1,
        "gateway/refused/rollouts": 2,
    }
    assert fork_examples(members) == {
        "compaction": "conversations fork (compaction), first seen in rollout ro-2: Sample 2 of 2",
        "branch": "conversations fork (branch), first seen in rollout ro-3: Sample 3 of 3",
        "refused": "requests were refused (2 x refused/400), first seen in rollout ro-2",
    }


def test_a_ratio_that_both_sides_computed_is_called_meaningless() -> None:
    figures = {"reason": "finished", "first_ratio_dev_max": 1e-6, "first_ratio_dev_max_iteration": 3, "forks": 0}
    assert dict(summary_rows({**figures, "retokenized": 0}))["first ratio"] == "within 1.0e-06 of 1 (iteration 3)"
    assert "; meaningless for retokenized samples" in dict(summary_rows({**figures, "retokenized": 3}))["first ratio"]
