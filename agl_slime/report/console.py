"""Progress of a run: one line per iteration, and on a terminal a live view of the current iteration below them."""

from __future__ import annotations

import atexit
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agl_slime import events
from agl_slime import metric_names as m
from agl_slime.report.metrics import Validation, number, validation_of
from agl_slime.support.terminal import PlainConsole, plain, print_line

View = Literal["auto", "live", "lines", "web"]
BARS = "▁▂▃▄▅▆▇█"
MOST_REASONS = 50
OTHER = "other reasons"
_PHASE_WORDS = {"collect": "collecting", "train": "training", "sync": "syncing weights", "eval": "validating"}


class ProgressReporter:
    """Shows the run on ``console``. ``view="auto"`` and ``"web"`` give the live view on a terminal that supports it,
    else plain lines with warnings on stderr."""

    def __init__(self, *, console: Console | None = None, view: View = "auto") -> None:
        self._console = self._errors = console or PlainConsole()
        self._lock = threading.Lock()  # the live view draws on another thread
        self._warned: set[str] = set()
        self._run = events.RunStarted()
        self._phase: events.PhaseStarted | None = None
        self._rollouts = self._tokens = 0  # of the phase
        self._trained_share = 0.0  # of the phase
        self._seconds: deque[float] = deque(maxlen=5)  # of the last iterations
        self._rewards: deque[float] = deque(maxlen=1_000)  # of the last iterations
        self._best: float | None = None
        self._val: Validation | None = None
        self._version = ""
        self._staleness: float | None = None
        self._latest = ""  # the last warning
        self._reward_sum, self._reward_count = 0.0, 0  # of the current iteration's training rollouts
        self._reasons: Counter[str] = Counter()  # of their failures
        self._live: Live | None = None
        if view == "live" or (view in ("auto", "web") and supports_live_view(self._console)):
            self._live = Live(console=self._console, get_renderable=self.render, refresh_per_second=4, transient=True)
        else:
            self._errors = PlainConsole(stderr=True)

    def handle(self, event: events.Event) -> None:
        if isinstance(event, events.Warning):
            if event.key not in self._warned and len(self._warned) < 100:
                with self._lock:
                    self._warned.add(event.key)
                    self._latest = plain(event.text)
                print_line(f"warning: {event.text}", to=self._errors, style="yellow")
            return
        if isinstance(event, events.IterationFinished):
            with self._lock:
                if (seconds := number(event.metrics, m.ITERATION_S)) is not None:
                    self._seconds.append(seconds)
            remaining_s = self._remaining_s(event.iteration)
            line = iteration_line(event, self._run.num_iterations, self._reasons, remaining_s)
            print_line(line, to=self._console)
        with self._lock:
            self._update(event)
        if isinstance(event, events.RunStarted):
            if event.output_dir is not None:
                print_line(f"run {event.output_dir}", to=self._console)
            if self._live is not None:
                atexit.register(self.close)  # restores the cursor even if the run crashes
                self._live.start()
        elif isinstance(event, events.RunFinished):
            self.close()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            atexit.unregister(self.close)

    def render(self) -> RenderableType:
        with self._lock:
            return Group(self._head(), self._reward_line(), self._figures(), *self._foot())

    def _update(self, event: events.Event) -> None:
        if isinstance(event, events.RunStarted):
            self._run = event
        elif isinstance(event, events.PhaseStarted):
            self._phase, self._rollouts, self._tokens, self._trained_share = event, 0, 0, 0.0
        elif isinstance(event, events.TrainingProgressed):
            self._trained_share = event.share
        elif isinstance(event, events.RolloutFinished):
            self._rollouts += 1
            self._tokens += event.tokens
            if event.mode == "train" and event.outcome == "failed":
                count_reason(self._reasons, event.reason or "unknown")
            elif event.mode == "train" and event.reward is not None:
                self._reward_sum += event.reward
                self._reward_count += 1
        elif isinstance(event, events.IterationFinished):
            if (reward := number(event.metrics, m.REWARD_MEAN)) is not None:
                self._rewards.append(reward)
                self._best = reward if self._best is None else max(self._best, reward)
            if (val := latest_validation(event.metrics)) is not None:
                self._val = val
            self._version = format_version(event.metrics.get(m.WEIGHTS_VERSION)) or self._version
            self._staleness = number(event.metrics, m.STALENESS_MEAN)
            self._reward_sum, self._reward_count = 0.0, 0
            self._reasons.clear()

    def _remaining_s(self, iteration: int) -> float | None:
        """Estimated seconds for the iterations after ``iteration``, from the last few."""
        if not self._run.num_iterations or not self._seconds:
            return None
        return (self._run.num_iterations - iteration) * sum(self._seconds) / len(self._seconds)

    def _head(self) -> RenderableType:
        total, phase = self._run.num_iterations, self._phase
        iteration = phase.iteration if phase else 0
        doing = Text(_PHASE_WORDS[phase.phase] if phase else "starting", style="cyan")
        if phase and phase.phase in ("collect", "eval"):
            usual = self._run.rollouts_per_iteration if phase.phase == "collect" else None
            rollouts = usual if phase.rollouts is None else phase.rollouts
            doing.append(f" {self._rollouts}" + (f"/{rollouts}" if rollouts else "") + " rollouts")
        if phase and self._trained_share:
            seconds = (time.monotonic() - phase.at) * (1 - self._trained_share) / self._trained_share
            doing.append(f" {self._trained_share:.0%}, {format_seconds(max(seconds, 0.0))} left")
        spent = format_seconds(max(time.monotonic() - self._run.at, 0.0))
        if (remaining_s := self._remaining_s(iteration - 1)) is not None:
            spent += f", {format_seconds(remaining_s)} left"
        head, wide = Table.grid(padding=(0, 2)), self._console.width >= 110
        head.add_row(
            Text.assemble(("iteration ", "dim"), (f"{iteration}" + (f"/{total}" if total else ""), "bold")),
            ProgressBar(total=total, completed=max(iteration - 1, 0), width=24 if wide else 8) if total else "",
            doing,
            Text(spent, style="dim"),
        )
        return head

    def _reward_line(self) -> Text:
        line = Text()
        for label, value, style in (
            ("reward", self._rewards[-1] if self._rewards else None, "bold green"),
            ("this iteration so far", self._reward_sum / self._reward_count if self._reward_count else None, "green"),
            ("best", self._best, "default"),
        ):
            if value is not None:
                line.append(f"{label} ", style="dim").append(f"{value:.2f}  ", style=style)
        if self._val is not None:
            line.append("val ", style="dim").append(f"{self._val.format(2)}  ")
        room = min(self._console.width - len(line), 40)
        return line.append(sparkline([*self._rewards], room) if room > 0 else "", style="green")

    def _figures(self) -> Text:
        line = Text()
        if self._phase and self._phase.phase in ("collect", "eval"):
            line.append(f"{self._tokens / max(time.monotonic() - self._phase.at, 0.1):,.0f} tok/s  ")
        if self._version:
            line.append("weights ", style="dim").append(f"{self._version}  ")
        if self._staleness is not None:
            line.append("staleness ", style="dim").append(f"{self._staleness:.1f}  ")
        if self._reasons:
            line.append(f"{self._reasons.total()} failed ({format_reasons(self._reasons)})", style="red")
        return line

    def _foot(self) -> list[Text]:
        """The last warning, and the keys and commands; a line each, cut at the terminal's edge."""
        lines = []
        if self._warned:
            n = len(self._warned)
            text = f"{n} warning{'s' if n > 1 else ''}, the last: {self._latest}"
            lines.append(Text(text, style="yellow", no_wrap=True, overflow="ellipsis"))
        see = f"agl-slime view {self._run.output_dir}: rollouts and tokens" if self._run.output_dir else ""
        foot = "   ".join(filter(None, (see, "Ctrl-C: stop; what was written is kept")))
        return [*lines, Text(foot, style="dim", no_wrap=True, overflow="ellipsis")]


def supports_live_view(console: Console) -> bool:
    """Whether the terminal can move the cursor and show the bars' characters."""
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.lower().startswith("utf")


def iteration_line(
    event: events.IterationFinished, total: int | None, reasons: Mapping[str, int], remaining_s: float | None = None
) -> str:
    """The line of one iteration. Parts without a metric are left out; time left is shown from a minute on."""
    keys = (m.REWARD_MEAN, m.COUNT, m.FAILED, m.LOSS, m.TOKENS_PER_S, m.ITERATION_S)
    reward, count, failed, loss, rate, seconds = (number(event.metrics, key) for key in keys)
    val, why = latest_validation(event.metrics), f": {format_reasons(reasons)}" if reasons else ""
    keys = (m.TRAINER_WAITED, m.ENGINE_WAITED, m.CPU_BUSY)
    trainer, engine, busy = (number(event.metrics, key) for key in keys)
    # an exponent where three decimals would hide the loss
    loss_format = ".3f" if not loss or 0.001 <= abs(loss) < 1000 else ".1e"
    texts = (
        f"iter {event.iteration}" + (f"/{total}" if total else ""),
        f"reward {'-' if reward is None else f'{reward:.2f}'}" + ("" if val is None else f" (val {val.format(2)})"),
        "" if count is None else f"rollouts {count:.0f} ({failed or 0:.0f} failed{why})",
        "" if loss is None else f"loss {loss:{loss_format}}",
        "" if rate is None else f"{rate:.0f} tok/s",
        "" if seconds is None else format_seconds(seconds),
        "" if remaining_s is None or remaining_s < 60 else f"{format_seconds(remaining_s)} left",
        "" if trainer is None else f"waited: training {trainer:.0%}, engine {engine or 0:.0%}",
        "" if busy is None else f"CPU {busy:.0%}",
        format_version(event.metrics.get(m.WEIGHTS_VERSION)),
    )
    return "  ".join(text for text in texts if text)


def latest_validation(metrics: Mapping[str, Any]) -> Validation | None:
    """The validation after the iteration, else at the start."""
    return validation_of(metrics) or validation_of(metrics, start=True)


def format_version(version: Any) -> str:
    """``4``, ``4.0`` and ``"4"`` as ``v4``; any other name unchanged."""
    if isinstance(version, float) and version.is_integer():
        version = int(version)
    text = "" if version is None else str(version)
    return f"v{text}" if text[:1].isdigit() else text


def format_seconds(seconds: float) -> str:
    """``0.31 s``, ``12.4 s``, ``3m05s``, ``2h04m``."""
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def format_reasons(reasons: Mapping[str, int], most: int = 3) -> str:
    """``timeout 2, bad_reward 1``: the most frequent first."""
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} {count}" for reason, count in ordered[:most]) + (", ..." if len(ordered) > most else "")


def count_reason(counter: Counter[str], reason: str) -> None:
    """Count a reason; beyond ``MOST_REASONS`` different ones, further reasons are counted together."""
    counter[reason if reason in counter or len(counter) < MOST_REASONS else OTHER] += 1


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """At most ``width`` bars, each the mean of neighbouring values, scaled from lowest to highest."""
    if len(values) > width:
        edges = [round(index * len(values) / width) for index in range(width + 1)]
        values = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high <= low:
        return BARS[3] * len(values)
    return "".join(BARS[min(int((value - low) / (high - low) * len(BARS)), len(BARS) - 1)] for value in values)
