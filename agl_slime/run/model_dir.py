"""``RUN/model``: the newest weights of a run as a Hugging Face directory, and with ``--keep-best`` ``RUN/model-best``.

Weights are hard links to those of a checkpoint, where the file system has them, so that they take no second place on
the disk; the small files beside them are copies, which a person may edit. A directory is written aside and renamed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

from agl_slime.errors import ConfigError, format_exception
from agl_slime.events import Event, IterationFinished
from agl_slime.loop.checkpoint import read_checkpoints
from agl_slime.loop.metrics import FAILED_SHARE
from agl_slime.report.files import RunDir, read_object
from agl_slime.report.metrics import validation_of
from agl_slime.run.model_card import model_card
from agl_slime.support.files import whole_directory

logger = logging.getLogger(__name__)

_ABOUT = "agl_slime_model.json"
_ADAPTER = "adapter"


class RunModels:
    """Writes the models of a run that began as the one in ``base``. An observer of the run: ``handle`` only notes which
    validation was the best, ``save_newest`` and ``save_best`` write, in a thread where writing may block.

    ``weights`` is where the version of an iteration is that was validated last; ``None`` keeps no best model."""

    def __init__(self, run: RunDir, *, base: Path, weights: Path | None = None) -> None:
        self._run, self._base, self._weights = run, base, weights
        about = read_object(run.best_model / _ABOUT) or {}
        known = about.get("validation")
        self._best = float(known) if known is not None else None
        self._share = float(about.get("failed_share") or 0.0)  # of the best validation's rollouts
        self._candidate: tuple[int, float] | None = None

    def handle(self, event: Event) -> None:
        if self._weights is None or not isinstance(event, IterationFinished):
            return
        found = validation_of(event.metrics)
        if found is None or found.mean is None:
            return
        share = 1 - found.rewarded / found.count if found.count and found.rewarded is not None else 0.0
        if share > FAILED_SHARE:
            text = "Iteration %d: its validation (%s) is not compared for %s: too many of its rollouts failed."
            logger.warning(text, event.iteration, found.spell(3), self._run.best_model.name)
        elif self._best is None or found.mean > self._best:
            if self._best is not None and share != self._share:
                text = "Iteration %d has the best validation (%s), of another share of failed rollouts than before."
                logger.warning(text, event.iteration, found.spell(3))
            self._best, self._share, self._candidate = found.mean, share, (event.iteration, found.mean)

    def save_newest(self, checkpoint: Path, *, iteration: int) -> None:
        """``RUN/model`` from what the trainer wrote into a checkpoint."""
        self._save(self._run.model, checkpoint, iteration)

    def save_best(self) -> None:
        """``RUN/model-best`` from the weights of the best validation, unless it is there. To be called before the
        weights of another iteration but one are brought to the engine."""
        if self._candidate is not None and self._weights is not None:
            iteration, value = self._candidate
            about = {"validation": value, "failed_share": self._share}
            self._save(self._run.best_model, self._weights / f"v{iteration:06d}", iteration, **about)
            self._candidate = None

    def _save(self, target: Path, weights: Path, iteration: int, **about: float) -> None:
        try:
            write_model(self._run, target, weights, base=self._base, iteration=iteration, **about)
        except OSError as error:  # a checkpoint has the weights; the run can do without
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
    """Make ``target`` from the checkpoint in ``weights``, with a model card; ``failed_share`` is of the rollouts of its
    ``validation``. Raises ``OSError``."""
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
    """The newest model of the run in ``path``; one that a kill has taken, or an older version never wrote, is made from
    the newest checkpoint. Raises ``ConfigError`` when there is none."""
    run = RunDir(path)
    if not (run.model / "config.json").is_file():
        checkpoints = read_checkpoints(run.checkpoints) if run.checkpoints.is_dir() else []
        if not checkpoints:
            raise ConfigError(f"the run in {path} has no model and no checkpoint to make one from; train it first")
        began = str((read_object(run.start) or {}).get("model") or path)
        write_model(run, run.model, checkpoints[0].trainer, base=Path(began), iteration=checkpoints[0].loop.iteration)
    return run.model.resolve()


def _link(source: Path, target: Path) -> None:
    if source.suffix == ".safetensors":
        try:
            os.link(source, target)
            return
        except OSError:  # another file system, or one without links
            pass
    shutil.copyfile(source, target)
