"""The pictures of the live view in docs/report.md, in a terminal of 80x24 and of 200x60: a run's events, drawn as its
terminal would.

    python scripts/live_view_pictures.py RUN_DIR docs/images

The finished iterations are the run's own metrics, up to the middle. Made up for the picture are the warning, and of
the iteration at hand the rollouts that have ended: a run keeps neither.
"""

from __future__ import annotations

import argparse
import io
import re
import time
from pathlib import Path

from rich.console import Console

from agl_slime.events import IterationFinished, PhaseStarted, RolloutFinished, RunStarted, Warning
from agl_slime.report.console import ProgressReporter
from agl_slime.report.files import iter_jsonl

_FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # of a server; the page has its own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("images", type=Path)
    given = parser.parse_args()
    rows = list(iter_jsonl(given.run / "metrics.jsonl"))
    now, half = time.monotonic(), len(rows) // 2
    for width, height in ((80, 24), (200, 60)):
        console = Console(record=True, width=width, height=height, force_terminal=True, file=io.StringIO())
        reporter = ProgressReporter(console=console, view="lines")
        reporter.handle(RunStarted(num_iterations=len(rows), output_dir=str(given.run), at=now - half))
        for row in rows[:half]:
            reporter.handle(IterationFinished(iteration=row["iteration"], metrics=row))
        reporter.handle(Warning(text="3 of 8 groups had equal rewards and teach nothing", key="equal"))
        rollouts = int(rows[half]["rollout/count"])
        reporter.handle(PhaseStarted(iteration=half + 1, phase="collect", rollouts=rollouts, at=now - 0.5))
        for n in range(rollouts // 2):
            done = RolloutFinished(iteration=half + 1, rollout_id=str(n), outcome="succeeded", reward=0.7, tokens=12)
            reporter.handle(done)
        console.print(reporter.render())
        svg = console.export_svg(title=f"{width} x {height}")
        (given.images / f"live-{width}x{height}.svg").write_text(_FONTS.sub("", svg), encoding="utf-8")
        reporter.close()


if __name__ == "__main__":
    main()
