"""What a run tells: progress on the console, metrics, TensorBoard, the reward plot, transcripts and the closing
summary.

``StandardReporters`` sets them all up for one run directory::

    run = open_run_dir(None, agent="LookupAgent", settings=settings)
    with StandardReporters(run) as reporters:
        reporters.handle(RunStarted(settings=settings, output_dir=run.path, num_iterations=40, rollouts_per_iteration=64))
        ...
        reporters.handle(RunFinished())
"""

from __future__ import annotations

from agl_slime.report.artifact import Artifact
from agl_slime.report.events import (
    Event,
    IterationFinished,
    PhaseStarted,
    Reporter,
    RolloutFinished,
    RunFinished,
    RunStarted,
    TranscriptsSampled,
    Warning,
)
from agl_slime.report.fanout import Reporters
from agl_slime.report.metrics import MetricsWriter, read_metrics
from agl_slime.report.plot import RewardPlot, plot_metrics
from agl_slime.report.progress import ProgressReporter
from agl_slime.report.rundir import RunDir, open_run_dir
from agl_slime.report.standard import StandardReporters
from agl_slime.report.summary import SummaryReporter
from agl_slime.report.tensorboard import TensorBoardWriter
from agl_slime.report.transcripts import (
    Segment,
    TranscriptItem,
    TranscriptSample,
    TranscriptWriter,
    choose_rollouts,
    transcript_sample,
)

__all__ = [
    "Artifact",
    "Event",
    "IterationFinished",
    "MetricsWriter",
    "PhaseStarted",
    "ProgressReporter",
    "Reporter",
    "Reporters",
    "RewardPlot",
    "RolloutFinished",
    "RunDir",
    "RunFinished",
    "RunStarted",
    "Segment",
    "StandardReporters",
    "SummaryReporter",
    "TensorBoardWriter",
    "TranscriptItem",
    "TranscriptSample",
    "TranscriptWriter",
    "TranscriptsSampled",
    "Warning",
    "choose_rollouts",
    "open_run_dir",
    "plot_metrics",
    "read_metrics",
    "transcript_sample",
]
