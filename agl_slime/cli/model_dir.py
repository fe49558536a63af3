"""``RUN/model``: the newest weights of a run as a Hugging Face directory, and with ``--keep-best`` ``RUN/model-best``.

Weights are hard links to a checkpoint's, where the file system has hard links; the small files beside them are copies,
which a person may edit. A directory is written under a temporary name and renamed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

from agl_slime.cli.model_card import model_card
from agl_slime.errors import ConfigError, format_exception
from agl_slime.events import Event, IterationFinished
from agl_slime.loop.checkpoint import read_checkpoints
from agl_slime.loop.metrics import FAILED_SHARE
from agl_slime.report.files import RunDir, read_object
from agl_slime.report.metrics import validation_of
from agl_slime.support.files import whole_directory

logger = logging.getLogger(__name__)

_ABOUT = "agl_slime_model.json"
_ADAPTER = "adapter"


class RunModels:
    """Writes the models of a run that began with the model in ``base``. As an observer of the run, ``handle`` only
    notes the best validation; ``save_newest`` and ``save_best`` write, and must be called where blocking is allowed.

    ``weights`` is the directory with the weights of the last validation; ``None`` keeps no best model."""

    def __init__(self, run: RunDir, *, base: Path, weights: Path | None = None) -> None:
        self._run, self._base, self._weights = run, base, weights
        about = read_object(run.best_model / _ABOUT) or {}
        best = about.get("validation")
        self._best = float(best) if best is not None else None
        self._share = float(about.get("failed_share") or 0.0)  # of the best validation's rollouts
        self._candidate: tuple[int, float] | None = None

    def handle(self, event: Event) -> None:
        if self._weights is None or not isinstance(event, IterationFinished):
            return
        result = validation_of(event.metrics)
        if result is None or result.mean is None:
            return
        share = 1 - result.rewarded / result.count if result.count and result.rewarded is not None else 0.0
        if share > FAILED_SHARE:
            text = "Iteration %d: its validation (%s) is not compared for %s: too many of its rollouts failed."
            logger.warning(text, event.iteration, result.format(3), self._run.best_model.name)
        elif self._best is None or result.mean > self._best:
            if self._best is not None and share != self._share:
                text = "Iteration %d has the best validation (%s), with another share of failed rollouts than before."
                logger.warning(text, event.iteration, result.format(3))
            self._best, self._share, self._candidate = result.mean, share, (event.iteration, result.mean)

    def save_newest(self, checkpoint: Path, *, iteration: int) -> None:
        """Make ``RUN/model`` from the trainer's files in a checkpoint."""
        self._save(self._run.model, checkpoint, iteration)

    def save_best(self) -> None:
        """Make ``RUN/model-best`` from the weights of the best validation, unless it has them. Call it before the
        weights of the next iteration but one are pushed, which removes them."""
        if self._candidate is not None and self._weights is not None:
            iteration, value = self._candidate
            about = {"validation": value, "failed_share": self._share}
            self._save(self._run.best_model, self._weights / f"v{iteration:06d}", iteration, **about)
            self._candidate = None

    def _save(self, target: Path, weights: Path, iteration: int, **about: float) -> None:
        try:
            write_model(self._run, target, weights, base=self._base, iteration=iteration, **about)
        except OSError as error:  # the weights are in a checkpoint, too
            logger.warning("%s was not written: %s", target, format_exception(error))


def write_model(
    run: RunDir,
    target: Path,
    weights: Path,
    *,
    base: Path,
    iteration: int,
    validation: float | None = None,
    failed_share: float = 0.0,
) -> None:
    """Make ``target`` from the checkpoint in ``weights``, with a model card. ``validation`` is its mean reward,
    ``failed_share`` the share of the validation's rollouts that failed. Raises ``OSError``."""
    with whole_directory(target) as fresh:
        for path in sorted(weights.rglob("*")):
            place = fresh / path.relative_to(weights)
            if path.is_dir():
                place.mkdir()
            elif not path.name.startswith("agl_slime_") and path.suffix != ".pt":
                _link(path, place)
        about = {"iteration": iteration, "validation": validation, "failed_share": failed_share, "base": str(base)}
        (fresh / _ABOUT).write_text(json.dumps(about))
        card = model_card(run, base=base, iteration=iteration, lora=(fresh / _ADAPTER).is_dir())
        (fresh / "README.md").unlink(missing_ok=True)
        (fresh / "README.md").write_text(card, encoding="utf-8")


def model_of_run(path: Path) -> Path:
    """The newest model of the run in ``path``; if it is missing, it is made from the newest checkpoint. Raises
    ``ConfigError`` when there is no checkpoint."""
    run = RunDir(path)
    if not (run.model / "config.json").is_file():
        checkpoints = read_checkpoints(run.checkpoints) if run.checkpoints.is_dir() else []
        if not checkpoints:
            raise ConfigError(f"the run in {path} has no model and no checkpoint to make one from; train it first")
        base = Path(str((read_object(run.start) or {}).get("model") or path))
        write_model(run, run.model, checkpoints[0].trainer, base=base, iteration=checkpoints[0].loop.iteration)
    return run.model.resolve()


def _link(source: Path, target: Path) -> None:
    if source.suffix == ".safetensors":
        try:
            os.link(source, target)
            return
        except OSError:  # another file system, or one without links
            pass
    shutil.copyfile(source, target)
