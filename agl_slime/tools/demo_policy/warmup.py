"""Making the tiny policy: supervised warm-up on demonstrations, in two phases.

1. Clean demonstrations until a teacher-forced probe on unseen ones is passed. The number of steps differs from seed to
   seed, so the criterion decides, never a count.
2. Imperfect demonstrations for a fixed number of steps. They blur the format, so that reinforcement starts from a
   low reward that is not zero.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from agl_slime.agent.agent import SGLangLitAgent
from agl_slime.cli.demo import DemonstrationSource
from agl_slime.cli.demo.formats import Quality
from agl_slime.errors import ConfigError, TrainerError
from agl_slime.support.files import whole_directory
from agl_slime.tools.demo_policy.tokenizer import DEFAULT_SOURCES, make_tokenizer
from agl_slime.tools.warm_up.recorded import read_conversations
from agl_slime.tools.warm_up.steps import SUPERVISED, probe
from agl_slime.train.local.settings import LocalTrainerSettings
from agl_slime.train.local.trainer import LocalTrainer
from agl_slime.types import Sample

SPEC_FILE = "agl_slime_policy.json"
"""A file beside the checkpoint: the hash of its inputs, the machine, and the warm-up's report."""

_REPORT_EVERY = 25  # steps between lines of progress
_LR_WARMUP_STEPS, _GRAD_CLIP, _IMPERFECT_LEARNING_RATE = 10, 0.3, 1e-3
_FORMAT = 2  # raise when the code changes the result of a spec

# Two layers and hidden 64 are the smallest shape that learned to copy (one layer, or hidden 48, did not).
# initializer_range is four times the usual one: at 0.02 the copying had not formed after 400 steps. A low rope_theta
# suits the short contexts here and speeds it up; it is a field in transformers 4 and a converted keyword in 5.
_SHAPE: dict[str, Any] = {
    "vocab_size": 460,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.08,
    "rope_theta": 1000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": None,
}


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """How the model is warmed up. Steps are optimiser steps of ``batch_size`` conversations."""

    batch_size: int = 16
    learning_rate: float = 4e-3
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


def make_policy(
    directory: str | os.PathLike[str],
    *,
    seed: int = 0,
    demonstrations: DemonstrationSource | None = None,
    settings: PolicySettings | None = None,
    progress: Callable[[str], object] = lambda line: None,
) -> Path:
    """Make the tiny policy in ``directory``, which appears complete or not at all, and return its path. ``progress``
    takes a line now and then.

    ``demonstrations`` are the training data of the warm-up, by default the lookup task. The same seed, demonstrations
    and settings give the same policy on one machine and library version. Raises ``ConfigError`` when the directory has
    other files, ``TrainerError`` when the warm-up does not pass its probe.
    """
    target = Path(directory).expanduser().resolve()
    source, settings = demonstrations or DEFAULT_SOURCES[0], settings or PolicySettings()
    if target.exists() and any(target.iterdir()) and not (target / SPEC_FILE).exists():
        raise ConfigError(f"the policy's directory {target} holds no tiny policy: name another directory")
    with whole_directory(target, durable=False) as fresh:
        report = {"spec": spec_of(seed, source, settings), "seed": seed}
        report |= train_policy(fresh, seed=seed, source=source, settings=settings, progress=progress)
        (fresh / SPEC_FILE).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return target


def spec_of(seed: int, source: DemonstrationSource, settings: PolicySettings) -> str:
    """A hash of all that a policy is made from; the conversations themselves stand for the source."""
    sample = [source.demonstrations(random.Random(1), 16, quality=quality) for quality in ("clean", "imperfect")]
    text = json.dumps([_FORMAT, seed, asdict(settings), sample], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def train_policy(
    directory: Path,
    *,
    seed: int,
    source: DemonstrationSource,
    settings: PolicySettings,
    progress: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Make the policy and write its checkpoint into ``directory``; returns the report of the warm-up, and the libraries
    that the weights depend on to the last bit."""
    tokenizer = make_tokenizer(source)
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.Qwen3Config(**_SHAPE, **ends)
    with torch.random.fork_rng(devices=[]), _on_one_thread():
        torch.manual_seed(seed)
        model = transformers.Qwen3ForCausalLM(config).float()
        model.generation_config = transformers.GenerationConfig(**ends, do_sample=True, temperature=1.0)
        transformers.utils.logging.disable_progress_bar()
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        report = warm_up(directory, source, seed=seed, settings=settings, progress=progress)
    # transformers 5 writes what transformers 4, in a server for example, does not read
    edit_json(directory / "config.json", rope_theta=_SHAPE["rope_theta"])
    edit_json(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    cpu = torch.backends.cpu.get_cpu_capability()
    made_with = f"torch {torch.__version__} {cpu}, transformers {transformers.__version__}"
    return {"warmup": report, "made_with": made_with}


def warm_up(
    directory: Path,
    source: DemonstrationSource,
    *,
    seed: int,
    settings: PolicySettings,
    progress: Callable[[str], object] = lambda line: None,
) -> dict[str, float]:
    """Train the checkpoint in ``directory``; deterministic for a seed on one machine. Returns the steps of each phase
    and the probe's value when each ended. Raises ``TrainerError`` when the probe is not passed within ``max_steps``."""
    rng = random.Random(seed)
    of_steps: dict[str, Any] = {"lr": settings.learning_rate, "warmup_steps": _LR_WARMUP_STEPS, "grad_clip": _GRAD_CLIP}
    supervised = LocalTrainerSettings(**SUPERVISED, **of_steps)
    trainer = LocalTrainer(model_path=directory, settings=supervised, torch_threads=1)

    def conversations(n: int, quality: Quality) -> list[list[Sample]]:
        rows = [{"messages": messages} for messages in source.demonstrations(rng, n, quality=quality)]
        return asyncio.run(read_conversations(rows, agent=SGLangLitAgent(), model=str(directory)))

    def step(quality: Quality) -> None:
        trainer.imitate([sample for each in conversations(settings.batch_size, quality) for sample in each])

    held_out = conversations(settings.probe_size, "clean")
    score, steps = 0.0, 0
    while score < settings.target:
        if steps >= settings.max_steps:
            raise TrainerError(
                f"the warm-up's probe is at {score:.2f} after {steps} steps and the target is {settings.target}: "
                "try another seed or simpler demonstrations"
            )
        step("clean")
        steps += 1
        if steps % settings.probe_every == 0:
            _, score = probe(trainer, held_out)
            if steps % _REPORT_EVERY == 0:
                progress(f"step {steps}: {score:.0%} of new answers are right (goal {settings.target:.0%})")
    for n in range(settings.decay_steps):
        trainer.lr = settings.learning_rate * (1 - (n + 1) / (settings.decay_steps + 1))
        step("clean")
    report: dict[str, float] = {"clean_steps": steps, "clean_probe": probe(trainer, held_out)[1]}
    trainer.lr = _IMPERFECT_LEARNING_RATE
    for _ in range(settings.imperfect_steps):
        step("imperfect")
    trainer.save_weights(directory)
    return report | {"imperfect_steps": settings.imperfect_steps, "final_probe": probe(trainer, held_out)[1]}


@contextmanager
def _on_one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads, and sums in another order would give another policy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def edit_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}, indent=2) + "\n")
