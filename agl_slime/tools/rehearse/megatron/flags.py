"""Flags of slime for a model, and for a run of the lookup agent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from agl_slime.tools.rehearse.megatron.small import NAMES


def model_flags(model: Path) -> list[str]:
    """Megatron's options for a dense checkpoint, as slime's launch scripts give them."""
    config = json.loads((model / "config.json").read_text())
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    names = NAMES | {"rms_norm_eps": "norm-epsilon"}
    flags = {flag: config[field] for field, flag in names.items() if field in config} | {"rotary-base": int(theta)}
    switches = "swiglu disable-bias-linear group-query-attention use-rotary-position-embeddings"
    switches += " qk-layernorm" * config["model_type"].startswith("qwen3")
    switches += " untie-embeddings-and-output-weights" * (not config.get("tie_word_embeddings"))
    return [*as_flags(flags | dict.fromkeys(switches.split(), "")), "--normalization", "RMSNorm"]


def as_flags(values: Mapping[str, object]) -> list[str]:
    """The words of a command line; a value may be several words, or none."""
    return [word for name, value in values.items() for word in (f"--{name}", *str(value).split())]


def train_flags(model: Path, directory: Path) -> list[str]:
    """Optimizer, start and pushes of a model; weights go to the engines by disk, into ``directory``."""
    flags: dict[str, object] = {"ref-load": model, "advantage-estimator": "grpo", "micro-batch-size": 1}
    flags |= {"optimizer": "adam", "lr": 1e-3, "lr-decay-style": "constant", "weight-decay": 0.1, "adam-beta2": 0.98}
    flags |= {"attention-dropout": 0, "hidden-dropout": 0, "make-vocab-size-divisible-by": 1}
    flags |= {"update-weight-mode": "full", "update-weight-transport": "disk"}
    flags |= {"update-weight-disk-dir": directory / "weights", "dump-details": directory}
    return as_flags(flags)


def run_flags(model: Path, settings: Path, directory: Path, *, architecture: Sequence[str] | None = None) -> list[str]:
    """A run of 8 steps of 8 x 4 rollouts by this package's hooks, whose dumps are in ``directory``. ``architecture``:
    Megatron's options of the model, if it is not dense."""
    from agl_slime.cli.slime import HOOK_FLAGS, NORMALIZE_FLAGS  # imports slime

    flags: dict[str, object] = {"hf-checkpoint": model, "custom-config-path": settings}
    flags |= {"num-rollout": 8, "rollout-batch-size": 8, "n-samples-per-prompt": 4, "global-batch-size": 32}
    flags |= {"rollout-max-response-len": 48, "rollout-temperature": 1}
    flags |= {"override-opt_param-scheduler": ""}  # for a resume with more steps
    flags |= dict.fromkeys(("actor-num-nodes", "actor-num-gpus-per-node", "num-gpus-per-node"), 1)
    architecture = model_flags(model) if architecture is None else architecture
    return [*architecture, *train_flags(model, directory), *HOOK_FLAGS, *NORMALIZE_FLAGS, *as_flags(flags)]
