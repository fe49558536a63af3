"""The live view: a few lines at the foot of the terminal, redrawn four times a second by rich."""

from __future__ import annotations

import atexit
import threading
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agl_slime.report.counts import sparkline
from agl_slime.report.progress import ProgressState, spell_reasons, spell_seconds

REDRAWS_PER_S = 4
PHASE_WORDS = {
    "start": "starting",
    "collect": "collecting",
    "train": "training",
    "sync": "syncing weights",
    "eval": "validating",
}


class LiveView:
    """Draws ``state`` while it is updated elsewhere under ``lock``."""

    def __init__(self, state: ProgressState, *, console: Console, lock: threading.Lock) -> None:
        self._state = state
        self._lock = lock
        self._running = False
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=REDRAWS_PER_S, transient=True)

    def start(self) -> None:
        if not self._running:
            self._running = True
            atexit.register(self.stop)  # a run that dies without closing its reporters must give the cursor back
            self._live.start()

    def stop(self) -> None:
        if self._running:
            self._running = False
            self._live.stop()
            atexit.unregister(self.stop)

    def render(self) -> RenderableType:
        """The view as it is now."""
        with self._lock:
            return self._draw(time.monotonic())

    def _draw(self, now: float) -> RenderableType:
        state = self._state
        elapsed = spell_seconds(max(now - state.started_at, 0.0)) if state.started_at else ""
        total = state.num_iterations
        position = Text.assemble(("iteration ", "dim"), (f"{state.iteration}" + (f"/{total}" if total else ""), "bold"))
        phase = Text(PHASE_WORDS.get(state.phase, state.phase), style="cyan")
        if state.phase in ("collect", "eval"):
            phase.append(f" {state.done}" + (f"/{state.phase_rollouts}" if state.phase_rollouts else "") + " rollouts")
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=total, completed=max(state.iteration - 1, 0), width=24) if total else Text("")
        head.add_row(position, bar, phase, Text(elapsed, style="dim"))
        return Group(head, self._rewards(), self._figures(now))

    def _rewards(self) -> Text:
        state = self._state
        line = Text()
        for label, value, style in (
            ("reward", state.rewards.last, "bold green"),
            ("this iteration so far", state.reward_so_far, "green"),
            ("best", state.best, "default"),
            ("val", state.val, "default"),
        ):
            if value is not None:
                line.append(f"{label} ", style="dim").append(f"{value:.2f}  ", style=style)
        return line.append(sparkline(state.rewards.points), style="green")

    def _figures(self, now: float) -> Text:
        state = self._state
        line = Text()
        if state.phase in ("collect", "eval"):
            line.append(f"{state.tokens_per_s(now):,.0f} tok/s  ")
        if state.version:
            line.append("weights ", style="dim").append(f"{state.version}  ")
        if state.failed:
            line.append(f"{state.failed} failed ({spell_reasons(state.reasons)})", style="red")
        return line
