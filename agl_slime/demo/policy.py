"""The tiny policy: a Qwen3 model of about 128,000 parameters and its tokenizer, an ordinary Hugging Face checkpoint.

It needs no download and no GPU, learns the shipped tasks in under a minute on a laptop, and a real SGLang serves the
same directory. The one of the first command (the lookup task, seed 0) is shipped beside this file, as
``scripts/make_demo_policy.py`` made it; any other is made in some 10 seconds. The same seed, demonstrations and
settings give the same policy on one machine and library version.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from agl_slime.demo.formats import DEFAULT_SOURCES, DemonstrationSource
from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.support.files import whole_directory

SPEC_FILE = "agl_slime_policy.json"
"""Beside the checkpoint: the hash of what it was made from, where, and what the warm-up reported."""

SHIPPED = Path(__file__).parent / "lookup_policy"

_FORMAT = 2  # raise when the code changes what the same spec gives


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """How the model is warmed up (see ``agl_slime.demo.warmup``). Steps are optimiser steps of ``batch_size``
    conversations."""

    batch_size: int = 16
    learning_rate: float = 4e-3
    lr_warmup_steps: int = 10
    grad_clip: float = 0.3
    probe_size: int = 64
    """Conversations, drawn once and never trained on."""
    probe_every: int = 5
    target: float = 0.9
    """Share of the probe's assistant turns in which every token is the model's first choice; reached, phase 1 ends."""
    max_steps: int = 600
    """Phase 1 gives up here with an error; it is a bound, not a schedule."""
    decay_steps: int = 30
    """Steps over which the learning rate then falls to 0, still on clean ones: the share of sampled turns that are
    right rises from 0.6 to 0.9."""
    imperfect_steps: int = 60
    imperfect_learning_rate: float = 1e-3


def make_policy(
    directory: str | os.PathLike[str],
    *,
    seed: int = 0,
    demonstrations: DemonstrationSource | None = None,
    settings: PolicySettings | None = None,
    anew: bool = False,
) -> Path:
    """Make the tiny policy in ``directory`` (created when missing) and return its path; a directory that already holds
    the same policy is returned as it is.

    ``demonstrations`` is what the warm-up trains on, by default the lookup task. The shipped policy is copied where it
    is the one asked for, unless ``anew``. The directory appears complete or not at all. Raises ``ConfigError`` when it
    exists and holds something else, ``TrainerError`` when the warm-up does not pass its probe.
    """
    target = Path(directory).expanduser().resolve()
    source = demonstrations or DEFAULT_SOURCES[0]
    settings = settings or PolicySettings()
    # the conversations themselves stand for the source: an edited task makes another policy
    sample = [source.demonstrations(random.Random(1), 16, quality=quality) for quality in ("clean", "imperfect")]
    text = json.dumps([_FORMAT, seed, asdict(settings), sample], sort_keys=True)
    spec = hashlib.sha256(text.encode()).hexdigest()
    if (found := _read_spec(target)) == spec:
        return target
    if found is None and target.exists() and any(target.iterdir()):
        raise ConfigError(f"the policy's directory {target} holds no tiny policy: name another directory")
    try:
        with whole_directory(target, durable=False) as fresh:
            if not anew and _read_spec(SHIPPED) == spec:
                for file in SHIPPED.iterdir():
                    shutil.copyfile(file, fresh / file.name)
            else:
                try:
                    from agl_slime.demo.warmup import train_policy
                except ImportError as error:
                    raise MissingDependencyError(
                        'the tiny policy needs torch and transformers: pip install "agl-slime[local]"'
                    ) from error
                report = train_policy(fresh, seed=seed, source=source, settings=settings)
                text = json.dumps({"spec": spec, "seed": seed, **report}, indent=2) + "\n"
                (fresh / SPEC_FILE).write_text(text, encoding="utf-8")
    except OSError:
        if _read_spec(target) != spec:  # another process made the same policy meanwhile
            raise
    return target


def _read_spec(directory: Path) -> str | None:
    try:
        return str(json.loads((directory / SPEC_FILE).read_text(encoding="utf-8"))["spec"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
