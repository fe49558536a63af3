"""Reports of a run: console progress, metrics, TensorBoard, groups, kept rollouts and the closing summary.
``StandardReporters`` writes them all into the directory that ``open_run_dir`` returns."""

from agl_slime.report.console import ProgressReporter as ProgressReporter
from agl_slime.report.files import RunDir as RunDir
from agl_slime.report.files import open_run_dir as open_run_dir
from agl_slime.report.metrics import MetricsWriter as MetricsWriter
from agl_slime.report.metrics import TensorBoardWriter as TensorBoardWriter
from agl_slime.report.metrics import read_metrics as read_metrics
from agl_slime.report.reporters import Reporters as Reporters
from agl_slime.report.reporters import StandardReporters as StandardReporters
