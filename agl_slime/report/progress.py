"""Progress of a run: one line per iteration, and on a terminal a live view of the iteration at hand below them."""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, Literal

from rich.console import Console

from agl_slime.report import metrics as m
from agl_slime.report.counts import Series, count_reason
from agl_slime.report.events import (
    Event,
    IterationFinished,
    PhaseStarted,
    RolloutFinished,
    RunFinished,
    RunStarted,
    Warning,
)

RATE_WINDOW_S = 10.0  # tokens/s is over the last seconds of the phase, so that it follows what happens now
View = Literal["auto", "live", "lines"]


class ProgressState:
    """What the views show, kept in constant memory however long the run."""

    def __init__(self) -> None:
        self.started_at = 0.0
        self.output_dir = ""
        self.num_iterations: int | None = None
        self.usual_rollouts: int | None = None
        self.iteration = 0
        self.phase = "start"
        self.phase_rollouts: int | None = None
        self.rewards = Series()
        self.best: float | None = None
        self.val: float | None = None
        self.version = ""
        self.reasons: Counter[str] = Counter()  # of the iteration at hand, training rollouts only
        self._clear_phase(0.0)
        self._clear_iteration()

    def _clear_phase(self, at: float) -> None:
        self.phase_started_at = at
        self.done = 0
        self._window: deque[tuple[float, int]] = deque(maxlen=10_000)
        self._window_tokens = 0

    def _clear_iteration(self) -> None:
        self.failed = 0
        self.reward_sum = 0.0
        self.reward_count = 0
        self.reasons.clear()

    @property
    def reward_so_far(self) -> float | None:
        """Mean over the training rollouts of this iteration that have a reward."""
        return self.reward_sum / self.reward_count if self.reward_count else None

    def tokens_per_s(self, now: float) -> float:
        """Sampled tokens per second over the last ``RATE_WINDOW_S`` seconds, or over the phase where that is shorter."""
        while self._window and self._window[0][0] < now - RATE_WINDOW_S:
            self._window_tokens -= self._window.popleft()[1]
        full = len(self._window) == self._window.maxlen  # then it reaches back less far
        since = self._window[0][0] if full else max(self.phase_started_at, now - RATE_WINDOW_S)
        return self._window_tokens / (now - since) if now > since else 0.0

    def update(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.started_at = event.at
            self.output_dir = str(event.output_dir or "")
            self.num_iterations = event.num_iterations
            self.usual_rollouts = event.rollouts_per_iteration
        elif isinstance(event, PhaseStarted):
            self.iteration = event.iteration
            self.phase = event.phase
            self.phase_rollouts = (
                event.rollouts
                if event.rollouts is not None
                else (self.usual_rollouts if event.phase == "collect" else None)
            )
            self._clear_phase(event.at)
        elif isinstance(event, RolloutFinished):
            self._rollout(event)
        elif isinstance(event, IterationFinished):
            self._finish(event)

    def _rollout(self, event: RolloutFinished) -> None:
        if len(self._window) == self._window.maxlen:
            self._window_tokens -= self._window[0][1]
        self._window.append((event.at, event.tokens))
        self._window_tokens += event.tokens
        self.done += 1
        if event.mode != "train":
            return
        if event.outcome == "failed":
            self.failed += 1
            count_reason(self.reasons, event.reason or "unknown")
        elif event.reward is not None:
            self.reward_sum += event.reward
            self.reward_count += 1

    def _finish(self, event: IterationFinished) -> None:
        self.iteration = event.iteration
        reward = m.number(event.metrics, m.REWARD_MEAN)
        if reward is not None:
            self.rewards.add(reward)
            self.best = reward if self.best is None else max(self.best, reward)
        val = latest_validation(event.metrics)
        self.val = val if val is not None else self.val
        self.version = spell_version(event.metrics.get(m.WEIGHTS_VERSION)) or self.version
        self._clear_iteration()


def latest_validation(metrics: Mapping[str, Any]) -> float | None:
    """The validation reward of the iteration: with the weights after it where there is one, else of the start."""
    after = m.number(metrics, m.VAL_REWARD_MEAN)
    return after if after is not None else m.number(metrics, m.VAL_START_REWARD_MEAN)


def spell_version(version: Any) -> str:
    """``4``, ``4.0`` and ``"4"`` as ``v4``; any other name as it stands."""
    if version is None:
        return ""
    if isinstance(version, float) and version.is_integer():
        version = int(version)
    text = str(version)
    return f"v{text}" if text[:1].isdigit() else text


def spell_seconds(seconds: float) -> str:
    """``0.31 s``, ``12.4 s``, ``3m05s``, ``2h04m``."""
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def spell_small(value: float) -> str:
    """Three decimals, or an exponent where these would hide the value."""
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.1e}"


def spell_reasons(reasons: Mapping[str, int], most: int = 3) -> str:
    """``timeout 2, bad_reward 1``: the most frequent first."""
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} {count}" for reason, count in ordered[:most]) + (", ..." if len(ordered) > most else "")


def iteration_line(event: IterationFinished, num_iterations: int | None, reasons: Mapping[str, int]) -> str:
    """The line of one iteration; a part whose metric is absent is left out."""

    def value(key: str) -> float | None:
        return m.number(event.metrics, key)

    of = f"/{num_iterations}" if num_iterations else ""
    parts = [f"iter {event.iteration}{of}"]
    reward, val = value(m.REWARD_MEAN), latest_validation(event.metrics)
    parts.append(f"reward {'-' if reward is None else f'{reward:.2f}'}" + ("" if val is None else f" (val {val:.2f})"))
    if (count := value(m.COUNT)) is not None:
        why = f": {spell_reasons(reasons)}" if reasons else ""
        parts.append(f"rollouts {count:.0f} ({value(m.FAILED) or 0:.0f} failed{why})")
    if (loss := value(m.LOSS)) is not None:
        parts.append(f"loss {spell_small(loss)}")
    if (rate := value(m.TOKENS_PER_S)) is not None:
        parts.append(f"{rate:.0f} tok/s")
    if (seconds := value(m.ITERATION_S)) is not None:
        parts.append(spell_seconds(seconds))
    if version := spell_version(event.metrics.get(m.WEIGHTS_VERSION)):
        parts.append(version)
    return "  ".join(parts)


def wants_live(console: Console) -> bool:
    """A live view needs a terminal that can move the cursor and show its characters; ``NO_COLOR`` asks for plain
    output."""
    return (
        console.is_terminal
        and not console.is_dumb_terminal
        and not console.no_color
        and console.encoding.lower().startswith("utf")
    )


class ProgressReporter:
    """Shows the run on ``console``: ``view="auto"`` is the live view where the terminal can show it, else plain lines,
    with warnings on stderr."""

    def __init__(self, *, console: Console | None = None, view: View = "auto") -> None:
        self._console = console or Console()
        self._state = ProgressState()
        self._lock = threading.Lock()  # the live view draws from a thread of its own
        self._live = None
        self._warned: set[str] = set()
        if view == "live" or (view == "auto" and wants_live(self._console)):
            from agl_slime.report.live import LiveView

            self._live = LiveView(self._state, console=self._console, lock=self._lock)

    def handle(self, event: Event) -> None:
        if isinstance(event, Warning):
            self._warning(event)
            return
        if isinstance(event, IterationFinished):
            self._print(iteration_line(event, self._state.num_iterations, self._state.reasons))
        with self._lock:
            self._state.update(event)
        if isinstance(event, RunStarted):
            if event.output_dir is not None:
                self._print(f"run {event.output_dir}")
            if self._live is not None:
                self._live.start()
        elif isinstance(event, RunFinished):
            self.close()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

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
