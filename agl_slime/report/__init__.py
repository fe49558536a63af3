"""What a run tells: progress on the console, metrics, TensorBoard, the reward plot, transcripts and the closing
summary. ``StandardReporters`` sets them all up for the directory that ``open_run_dir`` gives."""

from agl_slime.report.console import ProgressReporter as ProgressReporter
from agl_slime.report.events import Event as Event
from agl_slime.report.events import IterationFinished as IterationFinished
from agl_slime.report.events import Observer as Observer
from agl_slime.report.events import PhaseStarted as PhaseStarted
from agl_slime.report.events import Reporter as Reporter
from agl_slime.report.events import RolloutFinished as RolloutFinished
from agl_slime.report.events import RunFinished as RunFinished
from agl_slime.report.events import RunStarted as RunStarted
from agl_slime.report.events import TrainingProgressed as TrainingProgressed
from agl_slime.report.events import Warning as Warning
from agl_slime.report.files import RunDir as RunDir
from agl_slime.report.files import open_run_dir as open_run_dir
from agl_slime.report.metrics import MetricsWriter as MetricsWriter
from agl_slime.report.metrics import TensorBoardWriter as TensorBoardWriter
from agl_slime.report.metrics import read_metrics as read_metrics
from agl_slime.report.plot import RewardPlot as RewardPlot
from agl_slime.report.plot import plot_metrics as plot_metrics
from agl_slime.report.reporters import Reporters as Reporters
from agl_slime.report.reporters import StandardReporters as StandardReporters
