"""``RUN/model``: the newest weights of a run as a Hugging Face directory, and with ``--keep-best`` ``RUN/model-best``.

Weights are hard links to a checkpoint's, where the file system has hard links; the small files beside them are copies,
which a person may edit. A directory is written under a temporary name and renamed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from agl_slime import metric_names as m
from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.errors import ConfigError, format_exception
from agl_slime.events import Event, IterationFinished
from agl_slime.loop.checkpoint import read_checkpoints
from agl_slime.loop.metrics import FAILED_SHARE
from agl_slime.report.files import RunDir, dump, iter_jsonl, read_object, version_name
from agl_slime.report.metrics import number, validation_of
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
        self._failed_share = float(about.get("failed_share") or 0.0)  # of the best validation's rollouts
        self._candidate: tuple[int, str, float] | None = None  # iteration, weight version, mean reward

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
            if self._best is not None and share != self._failed_share:
                text = "Iteration %d has the best validation (%s), with another share of failed rollouts than before."
                logger.warning(text, event.iteration, result.format(3))
            self._best, self._failed_share = result.mean, share
            self._candidate = (event.iteration, str(event.metrics[m.WEIGHTS_VERSION]), result.mean)

    def save_newest(self, checkpoint: Path, *, iteration: int) -> None:
        """Make ``RUN/model`` from the trainer's files in a checkpoint."""
        self._save(self._run.model, checkpoint, iteration)

    def save_best(self) -> None:
        """Make ``RUN/model-best`` from the weights of the best validation, unless it has them. Call it before the next
        weights but one are pushed, which removes them."""
        if self._candidate is not None and self._weights is not None:
            iteration, weights, value = self._candidate
            about = {"validation": value, "failed_share": self._failed_share}
            self._save(self._run.best_model, self._weights / version_name(weights), iteration, **about)
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


_PACKAGES = ("agl-slime", "agentlightning", "torch", "transformers", "peft")
_MOST_ROWS = 12
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]+$")
_LICENSE = re.compile(r"\A---\n(?:.*\n)*?license:[ \t]*([\w.-]+)[ \t]*\n", re.ASCII)
# Settings of one machine, which do not describe the training.
_MACHINE_SETTINGS = ("output_dir", "sglang_url", "eval_sglang_url", "controller_python")
_MACHINE_SETTINGS += ("controller_host", "controller_port", "store_host", "view", "track", "overwrite", "resume")
_MACHINE_SETTINGS += ("env_python", "env_workers")


def model_card(run: RunDir, *, base: Path, iteration: int, lora: bool = False) -> str:
    """The README.md of the weights after ``iteration``, which began as the model in ``base``."""
    settings = run.settings() or {}
    agent = Path(settings.get("agent", "?")).name
    rows = [row for row in (iter_jsonl(run.metrics) if run.metrics.exists() else ()) if row["iteration"] <= iteration]
    license = license_of(base)
    head = {"library_name": "transformers", "base_model": hub_name(base), "license": license}
    head["pipeline_tag"] = "text-generation"
    front = "".join(f"{key}: {value}\n" for key, value in head.items() if value)
    front += "tags: [reinforcement-learning, agl-slime]\n"
    sections = [
        f"---\n{front}---\n",
        f"# {base_name(base)}, trained for {iteration} iterations\n",
        f"The weights of `{base_name(base)}` after {iteration} iterations of reinforcement learning on the agent "
        f"`{agent}` with agl-slime. Reward is the mean over rollouts that have one.\n",
        "## Task\n\n" + _task(settings),
        "## Curve\n\n" + _curve(rows),
        "## Settings\n\n```json\n" + json.dumps(_card_settings(settings), indent=2) + "\n```\n",
        "## Versions\n\n" + ", ".join([*_versions(), f"Python {sys.version.split()[0]}"]) + ".\n",
    ]
    if lora:
        text = "These are the merged weights; `adapter/` has the LoRA adapter alone, for PEFT."
        sections.append(f"## Adapter\n\n{text}\n")
    terms = f"The base model's licence is `{license}`, and these weights are under its terms."
    unknown = "The base model's directory names no licence: look it up before you share these weights."
    sections.append("## Licence\n\n" + (terms if license else unknown) + "\n")
    return "\n".join(sections)


def base_name(base: Path) -> str:
    return hub_name(base) or ("agl-slime's lookup policy" if base == LOOKUP_POLICY.resolve() else base.name)


def hub_name(base: Path) -> str | None:
    """The name on the Hugging Face hub of a model in the hub's own cache."""
    match = _SNAPSHOT.search(base.as_posix())
    return f"{match[1]}/{match[2]}" if match else None


def license_of(base: Path) -> str | None:
    """The licence in the model's card; the shipped policy has the package's licence, SmolLM2 its publisher's."""
    card = base / "README.md"
    if card.is_file() and (match := _LICENSE.match(card.read_text(encoding="utf-8", errors="replace"))):
        return match[1]
    return "apache-2.0" if base == LOOKUP_POLICY.resolve() or "smollm2" in base.name.lower() else None


def _task(settings: Mapping[str, Any]) -> str:
    tasks = settings.get("tasks")
    drawn = f"the tasks of `{Path(tasks).name}`" if tasks else "tasks that the agent makes (`make_task`)"
    return f"Agent `{Path(settings.get('agent', '?')).name}` on {drawn}, seed {settings.get('seed', '?')}.\n"


def _curve(rows: Sequence[Mapping[str, Any]]) -> str:
    rows = [row for row in rows if number(row, m.REWARD_MEAN) is not None]
    if not rows:
        return "Nothing was trained yet.\n"
    step = max(1, -(-len(rows) // _MOST_ROWS))
    validated = [row for row in rows if validation_of(row) is not None]
    chosen = {row["iteration"]: row for row in [*rows[::step], *validated[-_MOST_ROWS:], rows[-1]]}
    lines = ["| iteration | reward of training rollouts | validation |", "|-|-|-|"]
    if (start := validation_of(rows[0], start=True)) is not None:
        lines.append(f"| 0 | | {start.format(3)} |")
    for iteration in sorted(chosen):
        value = validation_of(chosen[iteration])
        text = "" if value is None else value.format(3)
        lines.append(f"| {iteration} | {number(chosen[iteration], m.REWARD_MEAN):.3f} | {text} |")
    return "\n".join(lines) + "\n"


def _card_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    values = json.loads(dump({key: value for key, value in settings.items() if key not in _MACHINE_SETTINGS}))
    files = ("agent", "model_path", "tasks", "eval_tasks", "job_template")
    values["external_plugins"] = [Path(path).name for path in values.get("external_plugins") or ()]
    return {key: Path(value).name if key in files and value else value for key, value in values.items()}


def _versions() -> list[str]:
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return versions
