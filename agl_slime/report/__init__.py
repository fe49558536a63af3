"""What a run tells: progress on the console, metrics, TensorBoard, the reward plot, transcripts and the closing
summary. ``StandardReporters`` sets them all up for the directory that ``open_run_dir`` gives."""

from __future__ import annotations

from agl_slime.report.console import ProgressReporter
from agl_slime.report.events import (
    Event,
    IterationFinished,
    Observer,
    PhaseStarted,
    Reporter,
    RolloutFinished,
    RunFinished,
    RunStarted,
    Warning,
)
from agl_slime.report.files import RunDir, open_run_dir
from agl_slime.report.metrics import MetricsWriter, TensorBoardWriter, read_metrics
from agl_slime.report.plot import RewardPlot, plot_metrics
from agl_slime.report.reporters import Reporters, StandardReporters

__all__ = [
    "Event",
    "IterationFinished",
    "MetricsWriter",
    "Observer",
    "PhaseStarted",
    "ProgressReporter",
    "Reporter",
    "Reporters",
    "RewardPlot",
    "RolloutFinished",
    "RunDir",
    "RunFinished",
    "RunStarted",
    "StandardReporters",
    "TensorBoardWriter",
    "Warning",
    "open_run_dir",
    "plot_metrics",
    "read_metrics",
]
