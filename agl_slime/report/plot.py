"""``reward.png``: the reward per iteration with its spread and the validations, and below it what best shows the health
of training.

Drawn from ``metrics.jsonl`` on a thread of its own, so that neither the run nor the other reporters wait for it;
matplotlib is loaded at the first drawing.
"""

from __future__ import annotations

import math
import os
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.report import metrics as m
from agl_slime.report.artifact import Artifact
from agl_slime.report.events import Event, IterationFinished, RunFinished
from agl_slime.report.rundir import RunDir
from agl_slime.support.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOT_INSTALLED = 'matplotlib is not installed; pip install "agl-slime[local]" draws reward.png as well.'
MOST_OF_THE_TIME = 0.05  # drawings during the run take at most this share of the wall time
INK, MUTED, GRID = "#1f2933", "#52606d", "#e4e7eb"
REWARD_COLOR, VAL_COLOR, HEALTH_COLOR = "#2166ac", "#d6604d", "#7b6ca8"


def plot_metrics(metrics_path: str | os.PathLike[str], image_path: str | os.PathLike[str], *, title: str = "") -> bool:
    """Draw the image from ``metrics.jsonl``; False when no iteration has a reward yet. Raises
    ``MissingDependencyError`` without matplotlib."""
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(NOT_INSTALLED)
    rows = m.read_metrics(metrics_path)
    reward, val = _column(rows, m.REWARD_MEAN), _column(rows, m.VAL_START_REWARD_MEAN)
    val += [
        (iteration + 1, value) for iteration, value in _column(rows, m.VAL_REWARD_MEAN)
    ]  # after the step: with what the next one samples with
    if not (reward or val):
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    health = _health(rows)
    figure = Figure(figsize=(8, 5.2 if health else 3.9), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    if health:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        _draw_health(bottom, *health)
    else:
        top = bottom = figure.subplots()
    _draw_reward(top, rows, reward, val)
    top.set_title(title or "Reward per iteration", loc="left", color=INK, fontsize=12, fontweight="bold")
    bottom.set_xlabel("iteration", color=MUTED)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    with whole_file(image_path, durable=False) as file:
        figure.savefig(file, format="png")
    return True


def draw_run(run_dir: Path) -> Path:
    """Draw ``reward.png`` of the run in the directory, whether it has ended or not; returns its path. Raises
    ``ConfigError`` when there is nothing to draw."""
    run = RunDir(path=run_dir)
    if not run.metrics.is_file():
        raise ConfigError(f"{run_dir} holds no {run.metrics.name}; give the directory of a run")
    if not plot_metrics(run.metrics, run.plot, title=run.agent):
        raise ConfigError(f"{run.metrics} has no iteration with a reward yet")
    return run.plot


def _column(rows: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    points = ((row["iteration"], m.number(row, key)) for row in rows)
    return [(iteration, value) for iteration, value in points if value is not None]


def _band(rows: list[dict[str, Any]]) -> tuple[str, list[tuple[int, float, float]]]:
    """Mean ± std, within min..max where these are known (rewards of 0 and 1 would otherwise pass their limits); else
    min..max."""
    band: list[tuple[int, float, float]] = []
    for row in rows:
        mean, std, low, high = (m.number(row, key) for key in (m.REWARD_MEAN, m.REWARD_STD, m.REWARD_MIN, m.REWARD_MAX))
        if mean is not None and std is not None:
            below, above = mean - std, mean + std
            band.append(
                (
                    row["iteration"],
                    below if low is None else max(below, low),
                    above if high is None else min(above, high),
                )
            )
    if band:
        return "± 1 std over rollouts", band
    spans = ((row["iteration"], m.number(row, m.REWARD_MIN), m.number(row, m.REWARD_MAX)) for row in rows)
    return "lowest to highest", [
        (iteration, low, high) for iteration, low, high in spans if low is not None and high is not None
    ]


def _health(rows: list[dict[str, Any]]) -> tuple[str, list[tuple[int, float]], bool] | None:
    """Label, points and whether they are on a log scale."""
    if diffs := [(iteration, value) for iteration, value in _column(rows, m.LOGPROB_DIFF_MAX) if value > 0]:
        return "max log-prob diff\ntrainer vs engine", diffs, True
    if lengths := _column(rows, m.RESPONSE_TOKENS):
        return "tokens per rollout", lengths, False
    return None


def _draw_reward(
    axes: Axes, rows: list[dict[str, Any]], reward: list[tuple[int, float]], val: list[tuple[int, float]]
) -> None:
    _style(axes)
    label, band = _band(rows)
    if band:
        xs, lows, highs = zip(*band, strict=True)
        axes.fill_between(xs, lows, highs, color=REWARD_COLOR, alpha=0.14, linewidth=0, label=label)
    if reward:
        xs, ys = zip(*reward, strict=True)
        few = len(xs) <= 60
        axes.plot(
            xs,
            ys,
            color=REWARD_COLOR,
            linewidth=2,
            marker="o" if few else None,
            markersize=3.5,
            label="training rollouts, mean",
        )
        axes.annotate(
            f"{ys[-1]:.2f}",
            (xs[-1], ys[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=REWARD_COLOR,
            fontweight="bold",
        )
    if val:
        xs, ys = zip(*val, strict=True)
        axes.plot(
            xs,
            ys,
            color=VAL_COLOR,
            linestyle="none",
            marker="D",
            markersize=6,
            markeredgecolor="white",
            label="validation, mean",
            zorder=4,
        )
    axes.set_ylabel("reward", color=MUTED)
    axes.margins(x=0.03, y=0.08)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK, loc="best")


def _draw_health(axes: Axes, label: str, points: list[tuple[int, float]], log: bool) -> None:
    _style(axes)
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, color=HEALTH_COLOR, linewidth=1.3, marker="o" if len(xs) == 1 else None)
    if log:  # whole powers of ten, so that ordinary noise looks like noise
        axes.set_yscale("log")
        axes.set_ylim(
            10.0 ** (math.floor(math.log10(min(ys))) - 0.2), 10.0 ** (math.ceil(math.log10(max(ys)) + 1e-9) + 0.2)
        )
        axes.minorticks_off()
    axes.set_ylabel(label, color=MUTED, fontsize=8.5)


def _style(axes: Axes) -> None:
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=9)


class RewardPlot:
    """Draws at the end and, during the run, at most every ``every`` iterations and for at most 5 % of the wall time.

    ``final_timeout_s`` bounds the wait for the last drawing; an interrupted run waits ``interrupted_timeout_s``.
    """

    def __init__(
        self,
        *,
        metrics_path: str | os.PathLike[str],
        image_path: str | os.PathLike[str],
        title: str = "",
        every: int = 10,
        final_timeout_s: float = 20.0,
        interrupted_timeout_s: float = 2.0,
    ) -> None:
        self._metrics_path = Path(metrics_path)
        self._image_path = Path(image_path)
        self._title = title
        self._every = every
        self._final_timeout_s = final_timeout_s
        self._interrupted_timeout_s = interrupted_timeout_s
        self._installed = find_spec("matplotlib") is not None
        self._thread: threading.Thread | None = None
        self._next_at = 0.0
        self._error: Exception | None = None
        self._note = "no iteration has a reward" if self._installed else NOT_INSTALLED

    def handle(self, event: Event) -> None:
        if not self._installed:
            return
        if self._error is not None:
            raise self._error
        if isinstance(event, IterationFinished) and event.iteration > 0 and event.iteration % self._every == 0:
            if time.monotonic() >= self._next_at and not self._drawing():
                self._start()
        elif isinstance(event, RunFinished):
            self._finish(self._final_timeout_s if event.reason == "finished" else self._interrupted_timeout_s)

    def close(self) -> None:
        """Nothing to release: a drawing under way is on a daemon thread and replaces the file only when whole."""

    def artifact(self) -> Artifact:
        return Artifact("reward plot", self._image_path, self._note)

    def _drawing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._draw, name="agl-slime-plot", daemon=True)
        self._thread.start()

    def _finish(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        if self._thread is not None:
            self._thread.join(timeout_s)
        if not self._drawing():
            self._start()
            assert self._thread is not None
            self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._drawing():
            self._note = f"reward.png was not drawn in time; agl-slime plot {self._image_path.parent} draws it"
        if self._error is not None:
            raise self._error

    def _draw(self) -> None:
        began = time.monotonic()
        try:
            if self._metrics_path.exists():
                plot_metrics(self._metrics_path, self._image_path, title=self._title)
        except Exception as error:  # raised again where events are handled, so that it is reported like any reporter's
            self._error = error
            self._note = f"reward.png could not be drawn: {error}"
        now = time.monotonic()
        self._next_at = now + (now - began) / MOST_OF_THE_TIME
