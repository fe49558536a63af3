"""What a run tells: progress on the console, metrics, TensorBoard, the reward plot, transcripts and the closing
summary. ``StandardReporters`` sets them all up for the directory that ``open_run_dir`` gives."""

from agl_slime.report.console import ProgressReporter as ProgressReporter
from agl_slime.report.files import RunDir as RunDir
from agl_slime.report.files import open_run_dir as open_run_dir
from agl_slime.report.metrics import MetricsWriter as MetricsWriter
from agl_slime.report.metrics import TensorBoardWriter as TensorBoardWriter
from agl_slime.report.metrics import read_metrics as read_metrics
from agl_slime.report.plot import RewardPlot as RewardPlot
from agl_slime.report.plot import plot_metrics as plot_metrics
from agl_slime.report.reporters import Reporters as Reporters
from agl_slime.report.reporters import StandardReporters as StandardReporters
