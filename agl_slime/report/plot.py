"""``reward.png``: the reward per iteration with its spread and the validations, and below it what best shows the health
of training. Drawn on a thread of its own, so that neither the run nor the other reporters wait for it."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_slime import metric_names as m
from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.events import Event, IterationFinished, RunFinished
from agl_slime.report.files import RunDir
from agl_slime.report.metrics import number, read_metrics, validation_of
from agl_slime.support.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOT_INSTALLED = 'matplotlib is not installed; pip install "agl-slime[local]" draws reward.png as well.'
MOST_OF_THE_TIME = 0.05  # drawings during the run take at most this share of the wall time
EVERY, INTERRUPTED_TIMEOUT_S = 10, 2.0  # iterations; what an interrupted run waits for the last drawing, others 20 s
INK, MUTED, GRID = "#1f2933", "#52606d", "#e4e7eb"
REWARD_COLOR, VAL_COLOR, HEALTH_COLOR = "#2166ac", "#d6604d", "#7b6ca8"

_SIDES = ((m.TRAINER_WAITED, HEALTH_COLOR, "training"), (m.ENGINE_WAITED, VAL_COLOR, "engine"))

Points = Sequence[tuple[float, float]]


def plot_metrics(metrics_path: str | os.PathLike[str], image_path: str | os.PathLike[str], *, title: str = "") -> bool:
    """Draw the image from ``metrics.jsonl``; False when no iteration has a reward yet. Raises
    ``MissingDependencyError`` without matplotlib."""
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(NOT_INSTALLED)
    rows = read_metrics(metrics_path)
    reward = _points(rows, m.REWARD_MEAN)
    # after the step: with what the next iteration samples with
    found = [
        (row["iteration"] + (not start), validation_of(row, start=start)) for start in (True, False) for row in rows
    ]
    validations = [(at, one, one.mean) for at, one in found if one is not None and one.mean is not None]
    val = [(at, mean) for at, _, mean in validations]
    if not (reward or val):
        return False
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    diffs = [point for point in _points(rows, m.LOGPROB_DIFF_MAX) if point[1] > 0]
    health = diffs or _points(rows, m.RESPONSE_TOKENS)
    waited = [(_points(rows, key), *style) for key, *style in _SIDES]
    sides = [points for points, *_ in waited if points]
    panels = 1 + bool(health) + bool(sides)
    figure = Figure(figsize=(8, 2.6 + 1.3 * panels), dpi=150, layout="constrained", facecolor="white")
    top, *below = figure.subplots(panels, 1, sharex=True, squeeze=False, height_ratios=[3, *[1] * (panels - 1)])[:, 0]
    bottom = below[-1] if below else top
    if health:
        _style(below[0], "max log-prob diff\ntrainer vs engine" if diffs else "tokens per rollout")
        below[0].plot(
            *zip(*health, strict=True), color=HEALTH_COLOR, linewidth=1.3, marker="o" if len(health) == 1 else None
        )
        if diffs:
            below[0].set_yscale("log")
            below[0].set_ylim(min(y for _, y in diffs) / 3, max(y for _, y in diffs) * 3)  # noise looks like noise
            below[0].minorticks_off()
    if sides:
        _style(bottom, "share of time\nthat each waited")
        for points, colour, side in waited:
            marker = "o" if len(points) == 1 else None
            bottom.plot(*zip(*points, strict=True), color=colour, linewidth=1.3, marker=marker, label=side)
        bottom.set_ylim(0, 1)
        bottom.legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper right")
    _style(top, "reward")
    if band := _band(rows):
        xs, lows, highs = zip(*band, strict=True)
        top.fill_between(xs, lows, highs, color=REWARD_COLOR, alpha=0.14, linewidth=0, label="± 1 std over rollouts")
    if reward:
        line: dict[str, Any] = {"color": REWARD_COLOR, "linewidth": 2, "label": "training rollouts, mean"}
        top.plot(*zip(*reward, strict=True), marker="o" if len(reward) <= 60 else None, markersize=3.5, **line)
        label: dict[str, Any] = {"va": "center", "color": REWARD_COLOR, "fontweight": "bold"}
        top.annotate(f"{reward[-1][1]:.2f}", reward[-1], xytext=(6, 0), textcoords="offset points", **label)
    if val:
        diamond: dict[str, Any] = {"marker": "D", "markersize": 6, "markeredgecolor": "white", "linestyle": "none"}
        top.plot(*zip(*val, strict=True), color=VAL_COLOR, label="validation, mean", zorder=4, **diamond)
        for at, one, mean in validations:
            if one.rewarded != one.count:  # the others failed
                place: dict[str, Any] = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 7}
                top.annotate(f"of {one.rewarded}/{one.count}", (at, mean), color=VAL_COLOR, **place)
    top.margins(x=0.03, y=0.08)
    top.legend(frameon=False, fontsize=9, labelcolor=INK, loc="best")
    top.set_title(title or "Reward per iteration", loc="left", color=INK, fontsize=12, fontweight="bold")
    bottom.set_xlabel("iteration", color=MUTED)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    with whole_file(image_path, durable=False) as file:
        figure.savefig(file, format="png")
    return True


def draw_run(run_dir: Path) -> Path:
    """Draw ``reward.png`` of a run, ended or not. Raises ``ConfigError`` when there is nothing to draw."""
    run = RunDir(run_dir)
    if not run.metrics.is_file():
        raise ConfigError(f"{run_dir} holds no {run.metrics.name}; give the directory of a run")
    if not plot_metrics(run.metrics, run.plot, title=str((run.settings() or {}).get("agent", ""))):
        raise ConfigError(f"{run.metrics} has no iteration with a reward yet")
    return run.plot


def _points(rows: list[dict[str, Any]], key: str) -> Points:
    points = ((row["iteration"], number(row, key)) for row in rows)
    return [(iteration, value) for iteration, value in points if value is not None]


def _band(rows: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """Mean ± std, within min..max where these are known: rewards of 0 and 1 would otherwise pass their limits."""
    band = []
    for row in rows:
        mean, std, low, high = (number(row, key) for key in (m.REWARD_MEAN, m.REWARD_STD, m.REWARD_MIN, m.REWARD_MAX))
        if mean is not None and std is not None:
            low, high = -math.inf if low is None else low, math.inf if high is None else high
            band.append((row["iteration"], max(mean - std, low), min(mean + std, high)))
    return band


def _style(axes: Axes, label: str) -> None:
    axes.set_ylabel(label, color=MUTED, fontsize=9)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=9)


class RewardPlot:
    """Draws at the end and, during the run, at most every 10 iterations and for at most 5 % of the wall time."""

    def __init__(self, *, metrics_path: Path, image_path: Path, title: str = "") -> None:
        self.path = image_path
        self._metrics_path, self._title = metrics_path, title
        self._installed = find_spec("matplotlib") is not None
        self._thread: threading.Thread | None = None
        self._next_at = 0.0
        self._error: Exception | None = None
        self.note = "no iteration has a reward" if self._installed else NOT_INSTALLED

    def handle(self, event: Event) -> None:
        if not self._installed:
            return
        if isinstance(event, IterationFinished) and event.iteration > 0 and event.iteration % EVERY == 0:
            if time.monotonic() >= self._next_at and not self._drawing():
                self._start()
        elif isinstance(event, RunFinished):
            deadline = time.monotonic() + (20.0 if event.reason == "finished" else INTERRUPTED_TIMEOUT_S)
            if self._thread is not None:
                self._thread.join(deadline - time.monotonic())
            if not self._drawing():
                self._start().join(max(deadline - time.monotonic(), 0.0))
            if self._drawing():
                self.note = f"reward.png was not drawn in time; agl-slime plot {self.path.parent} draws it"
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Nothing to release: a drawing under way is on a daemon thread and replaces the file only when whole."""

    def _drawing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self) -> threading.Thread:
        self._thread = threading.Thread(target=self._draw, name="agl-slime-plot", daemon=True)
        self._thread.start()
        return self._thread

    def _draw(self) -> None:
        began = time.monotonic()
        try:
            if self._metrics_path.exists():
                plot_metrics(self._metrics_path, self.path, title=self._title)
        except Exception as error:  # raised again where events are handled, so that it is reported like any reporter's
            self._error = error
            self.note = f"reward.png could not be drawn: {error}"
        now = time.monotonic()
        self._next_at = now + (now - began) / MOST_OF_THE_TIME
