"""The usual set of reporters for one run directory."""

from __future__ import annotations

from rich.console import Console

from agl_slime.report.fanout import Reporters
from agl_slime.report.metrics import MetricsWriter
from agl_slime.report.plot import RewardPlot
from agl_slime.report.progress import ProgressReporter, View
from agl_slime.report.rundir import RunDir
from agl_slime.report.summary import SummaryReporter
from agl_slime.report.tensorboard import TensorBoardWriter
from agl_slime.report.transcripts import TranscriptWriter


class StandardReporters(Reporters):
    """The fan-out with everything a run directory gets; ``transcripts`` tells the loop which iterations it wants."""

    def __init__(self, run: RunDir, *, console: Console | None = None, view: View = "auto", title: str = "") -> None:
        super().__init__()
        console = console or Console()
        metrics = MetricsWriter(run.metrics, warn=self.warn)
        tensorboard = TensorBoardWriter(run.tensorboard)
        self.transcripts = TranscriptWriter(run.transcripts)
        plot = RewardPlot(metrics_path=run.metrics, image_path=run.plot, title=title)
        self.add(metrics)  # first: nothing of an iteration is lost while others work
        self.add(tensorboard)
        self.add(self.transcripts)
        self.add(plot)
        self.add(ProgressReporter(console=console, view=view))
        # last: the live view has gone and every file is there
        artifacts = (metrics, plot, self.transcripts, tensorboard)
        self.add(
            SummaryReporter(metrics_path=run.metrics, summary_path=run.summary, artifacts=artifacts, console=console)
        )
