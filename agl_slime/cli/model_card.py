"""The model card of a run's weights: base model, task, reward curve, settings, versions and licence."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from agl_slime import metric_names as m
from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.report.files import RunDir, dump, iter_jsonl
from agl_slime.report.metrics import number, validation_of

_PACKAGES = ("agl-slime", "agentlightning", "torch", "transformers", "peft")
_MOST_ROWS = 12
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]+$")
_LICENSE = re.compile(r"\A---\n(?:.*\n)*?license:[ \t]*([\w.-]+)[ \t]*\n", re.ASCII)
# Settings of one machine, which do not describe the training.
_MACHINE_SETTINGS = ("output_dir", "sglang_url", "eval_sglang_url", "sglang_python", "controller_python")
_MACHINE_SETTINGS += ("controller_host", "controller_port", "store_host", "view", "track", "overwrite", "resume")
_MACHINE_SETTINGS += ("env_python", "env_workers")


def model_card(run: RunDir, *, base: Path, iteration: int, lora: bool = False) -> str:
    """The README.md of the weights after ``iteration``, which began as the model in ``base``."""
    settings = run.settings() or {}
    rows = [row for row in (iter_jsonl(run.metrics) if run.metrics.exists() else ()) if row["iteration"] <= iteration]
    license = license_of(base)
    head = {"library_name": "transformers", "base_model": hub_name(base), "license": license}
    head["pipeline_tag"] = "text-generation"
    front = "".join(f"{key}: {value}\n" for key, value in head.items() if value)
    front += "tags: [reinforcement-learning, agl-slime]\n"
    parts = [
        f"---\n{front}---\n",
        f"# {base_name(base)}, trained for {iteration} iterations\n",
        f"The weights of `{base_name(base)}` after {iteration} iterations of reinforcement learning on the agent "
        f"`{settings.get('agent', '?')}` with agl-slime. Reward is the mean over rollouts that have one.\n",
        "## Task\n\n" + _task(settings),
        "## Curve\n\n" + _curve(rows),
        "## Settings\n\n```json\n" + json.dumps(_shown(settings), indent=2) + "\n```\n",
        "## Versions\n\n" + ", ".join([*_versions(), f"Python {sys.version.split()[0]}"]) + ".\n",
    ]
    if lora:
        parts.append("## Adapter\n\nThese are the merged weights; `adapter/` has the LoRA adapter alone, for PEFT.\n")
    terms = f"The base model's licence is `{license}`, and these weights are under its terms."
    unknown = "The base model's directory names no licence: look it up before you share these weights."
    parts.append("## Licence\n\n" + (terms if license else unknown) + "\n")
    return "\n".join(parts)


def base_name(base: Path) -> str:
    """A short name of the model in ``base``."""
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
    return f"Agent `{settings.get('agent', '?')}` on {drawn}, seed {settings.get('seed', '?')}.\n"


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


def _shown(settings: Mapping[str, Any]) -> dict[str, Any]:
    shown = json.loads(dump({key: value for key, value in settings.items() if key not in _MACHINE_SETTINGS}))
    files = ("model_path", "tasks", "eval_tasks", "job_template")
    return {key: Path(value).name if key in files and value else value for key, value in shown.items()}


def _versions() -> list[str]:
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return versions
