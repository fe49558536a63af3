"""Progress of a run: one line per iteration, and on a terminal a live view of the iteration at hand below them."""

from __future__ import annotations

import atexit
import itertools
import sys
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

from agl_slime.report import metrics as m
from agl_slime.report.events import (
    Event,
    IterationFinished,
    PhaseStarted,
    RolloutFinished,
    RunFinished,
    RunStarted,
    Warning,
)

View = Literal["auto", "live", "lines"]
BARS = "▁▂▃▄▅▆▇█"
MOST_REASONS = 50
OTHER = "other reasons"
_PHASE_WORDS = {"start": "starting", "collect": "collecting", "train": "training", "sync": "syncing weights"}
_PHASE_WORDS["eval"] = "validating"


class ProgressReporter:
    """Shows the run on ``console``: ``view="auto"`` is the live view where the terminal can show it, else plain lines,
    with warnings on stderr."""

    def __init__(self, *, console: Console | None = None, view: View = "auto") -> None:
        self._console = console or Console()
        self._lock = threading.Lock()  # the live view draws from a thread of its own
        self._warned: set[str] = set()
        self._num_iterations: int | None = None
        self._usual_rollouts: int | None = None
        self._started_at = self._phase_at = time.monotonic()
        self._iteration = 0
        self._phase = "start"
        self._phase_rollouts: int | None = None
        self._done = self._tokens = 0  # of the phase
        self._rewards: deque[float] = deque(maxlen=1_000)  # of the last iterations
        self._best: float | None = None
        self._val: float | None = None
        self._version = ""
        self._reward_sum = 0.0  # of the training rollouts of the iteration at hand, as are the next two
        self._reward_count = 0
        self._reasons: Counter[str] = Counter()
        self._live: Live | None = None
        if view == "live" or (view == "auto" and wants_live(self._console)):
            self._live = Live(console=self._console, get_renderable=self.render, refresh_per_second=4, transient=True)

    def handle(self, event: Event) -> None:
        if isinstance(event, Warning):
            self._warning(event)
            return
        if isinstance(event, IterationFinished):
            self._print(iteration_line(event, self._num_iterations, self._reasons))
        with self._lock:
            self._update(event)
        if isinstance(event, RunStarted):
            if event.output_dir is not None:
                self._print(f"run {event.output_dir}")
            if self._live is not None:
                atexit.register(self.close)  # a run that dies without closing its reporters must give the cursor back
                self._live.start()
        elif isinstance(event, RunFinished):
            self.close()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            atexit.unregister(self.close)

    def render(self) -> RenderableType:
        """The live view as it is now."""
        with self._lock:
            return Group(self._head(), self._reward_line(), self._figures())

    def _update(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._started_at = event.at
            self._num_iterations, self._usual_rollouts = event.num_iterations, event.rollouts_per_iteration
        elif isinstance(event, PhaseStarted):
            self._iteration, self._phase, self._phase_at = event.iteration, event.phase, event.at
            usual = self._usual_rollouts if event.phase == "collect" else None
            self._phase_rollouts = usual if event.rollouts is None else event.rollouts
            self._done = self._tokens = 0
        elif isinstance(event, RolloutFinished):
            self._done += 1
            self._tokens += event.tokens
            if event.mode == "train" and event.outcome == "failed":
                count_reason(self._reasons, event.reason or "unknown")
            elif event.mode == "train" and event.reward is not None:
                self._reward_sum += event.reward
                self._reward_count += 1
        elif isinstance(event, IterationFinished):
            self._iteration = event.iteration
            if (reward := m.number(event.metrics, m.REWARD_MEAN)) is not None:
                self._rewards.append(reward)
                self._best = reward if self._best is None else max(self._best, reward)
            if (val := latest_validation(event.metrics)) is not None:
                self._val = val
            self._version = spell_version(event.metrics.get(m.WEIGHTS_VERSION)) or self._version
            self._reward_sum, self._reward_count = 0.0, 0
            self._reasons.clear()

    def _head(self) -> RenderableType:
        total = self._num_iterations
        position = Text.assemble(("iteration ", "dim"), (f"{self._iteration}" + (f"/{total}" if total else ""), "bold"))
        phase = Text(_PHASE_WORDS.get(self._phase, self._phase), style="cyan")
        if self._phase in ("collect", "eval"):
            phase.append(f" {self._done}" + (f"/{self._phase_rollouts}" if self._phase_rollouts else "") + " rollouts")
        bar = ProgressBar(total=total, completed=max(self._iteration - 1, 0), width=24) if total else Text("")
        elapsed = Text(spell_seconds(max(time.monotonic() - self._started_at, 0.0)), style="dim")
        head = Table.grid(padding=(0, 2))
        head.add_row(position, bar, phase, elapsed)
        return head

    def _reward_line(self) -> Text:
        line = Text()
        for label, value, style in (
            ("reward", self._rewards[-1] if self._rewards else None, "bold green"),
            ("this iteration so far", self._reward_sum / self._reward_count if self._reward_count else None, "green"),
            ("best", self._best, "default"),
            ("val", self._val, "default"),
        ):
            if value is not None:
                line.append(f"{label} ", style="dim").append(f"{value:.2f}  ", style=style)
        return line.append(sparkline([*self._rewards]), style="green")

    def _figures(self) -> Text:
        line = Text()
        if self._phase in ("collect", "eval"):
            line.append(f"{self._tokens / max(time.monotonic() - self._phase_at, 0.1):,.0f} tok/s  ")
        if self._version:
            line.append("weights ", style="dim").append(f"{self._version}  ")
        if self._reasons:
            line.append(f"{self._reasons.total()} failed ({spell_reasons(self._reasons)})", style="red")
        return line

    def _print(self, line: str) -> None:
        if self._live is not None:  # above the live view
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=self._console.file, flush=True)

    def _warning(self, event: Warning) -> None:
        if event.key in self._warned or len(self._warned) >= 100:
            return
        self._warned.add(event.key)
        if self._live is not None:
            self._console.print(f"warning: {event.text}", style="yellow", markup=False, highlight=False)
        else:
            print(f"warning: {event.text}", file=sys.stderr, flush=True)


def wants_live(console: Console) -> bool:
    """A live view needs a terminal that can move the cursor and show its characters; ``NO_COLOR`` asks for plain
    output."""
    plain = console.is_dumb_terminal or console.no_color
    return console.is_terminal and not plain and console.encoding.lower().startswith("utf")


def iteration_line(event: IterationFinished, num_iterations: int | None, reasons: Mapping[str, int]) -> str:
    """The line of one iteration; a part whose metric is absent is left out."""

    def value(key: str) -> float | None:
        return m.number(event.metrics, key)

    parts = [f"iter {event.iteration}" + (f"/{num_iterations}" if num_iterations else "")]
    reward, val = value(m.REWARD_MEAN), latest_validation(event.metrics)
    parts.append(f"reward {'-' if reward is None else f'{reward:.2f}'}" + ("" if val is None else f" (val {val:.2f})"))
    if (count := value(m.COUNT)) is not None:
        why = f": {spell_reasons(reasons)}" if reasons else ""
        parts.append(f"rollouts {count:.0f} ({value(m.FAILED) or 0:.0f} failed{why})")
    if (loss := value(m.LOSS)) is not None:  # an exponent where three decimals would hide the value
        parts.append(f"loss {loss:.3f}" if loss == 0 or 0.001 <= abs(loss) < 1000 else f"loss {loss:.1e}")
    if (rate := value(m.TOKENS_PER_S)) is not None:
        parts.append(f"{rate:.0f} tok/s")
    if (seconds := value(m.ITERATION_S)) is not None:
        parts.append(spell_seconds(seconds))
    if version := spell_version(event.metrics.get(m.WEIGHTS_VERSION)):
        parts.append(version)
    return "  ".join(parts)


def latest_validation(metrics: Mapping[str, Any]) -> float | None:
    """The validation reward of the iteration: with the weights after it where there is one, else of the start."""
    after = m.number(metrics, m.VAL_REWARD_MEAN)
    return after if after is not None else m.number(metrics, m.VAL_START_REWARD_MEAN)


def spell_version(version: Any) -> str:
    """``4``, ``4.0`` and ``"4"`` as ``v4``; any other name as it stands."""
    if isinstance(version, float) and version.is_integer():
        version = int(version)
    text = "" if version is None else str(version)
    return f"v{text}" if text[:1].isdigit() else text


def spell_seconds(seconds: float) -> str:
    """``0.31 s``, ``12.4 s``, ``3m05s``, ``2h04m``."""
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def spell_reasons(reasons: Mapping[str, int], most: int = 3) -> str:
    """``timeout 2, bad_reward 1``: the most frequent first."""
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} {count}" for reason, count in ordered[:most]) + (", ..." if len(ordered) > most else "")


def count_reason(counter: Counter[str], reason: str) -> None:
    """Count a reason; when there are too many different ones (an error text used as a reason), the rest is counted
    together."""
    counter[reason if reason in counter or len(counter) < MOST_REASONS else OTHER] += 1


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """At most ``width`` bars, means over neighbours, from the lowest to the highest; equal values give half height."""
    if len(values) > width:
        edges = [round(index * len(values) / width) for index in range(width + 1)]
        values = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high <= low:
        return BARS[3] * len(values)
    return "".join(BARS[min(int((value - low) / (high - low) * len(BARS)), len(BARS) - 1)] for value in values)
