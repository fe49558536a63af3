"""``agl-slime warm-up``: supervised learning on recorded conversations, the start of a run."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from agl_slime.cli.models import find_model
from agl_slime.errors import ConfigError
from agl_slime.loop.tasks import read_tasks
from agl_slime.support.files import unwritable_as_error
from agl_slime.support.terminal import print_line
from agl_slime.train.local.settings import LocalTrainerSettings


def warm_up(
    demonstrations: Path,
    output_dir: Path,
    model: Annotated[Path, tyro.conf.arg(aliases=["--model-path"])],
    agent: str | None = None,
    epochs: int = 1,
    batch_size: int = 8,
    lr: float | None = None,
    lora_rank: int = 0,
    held_out: float = 0.1,
    seed: int = 0,
) -> None:
    """Train a model on recorded conversations: cross-entropy of the assistant's tokens, in the prompts of rollouts.

    Args:
        demonstrations: JSON lines with `messages`, and the `task` if the agent makes its prompt from one; also what
            `agl-slime export --to sft` writes.
        output_dir: A new directory for the trained model.
        model: A Hugging Face directory, a run's directory, smollm2, or a name on the hub.
        agent: path/to/file.py:Class or module:Class, with the tools and prompts of rollouts; by default the
            conversations alone.
        epochs: Passes over the conversations.
        batch_size: Conversations per optimizer step.
        lr: The highest learning rate, after a tenth of the steps; it falls to 0 at the end. By default 1e-4 below a
            billion parameters, else 1e-5, and ten times as much with LoRA.
        lora_rank: Rank of LoRA adapters, which are trained and then merged; 0 trains all weights.
        held_out: Share of the conversations that measure the result and are not trained on.
        seed: Seed of their order.
    """
    for name, value, fits in (("epochs", epochs, epochs >= 1), ("batch-size", batch_size, batch_size >= 1)):
        if not fits:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    if not 0 <= held_out < 1:
        raise ConfigError(f"--held-out must be at least 0 and below 1, got {held_out}")
    if output_dir.exists():
        raise ConfigError(f"--output-dir {output_dir} exists; name a new directory")
    say = partial(print_line, to=sys.stderr)
    rows = read_tasks(demonstrations, flag="--demonstrations", strings=False)
    directory = find_model(model, say)
    from agl_slime.agent.agent import SGLangLitAgent
    from agl_slime.agent.loading import load_agent
    from agl_slime.tools.warm_up.recorded import read_conversations
    from agl_slime.tools.warm_up.steps import SUPERVISED, imitate, probe
    from agl_slime.train.local.hardware import has_bfloat16, torch_device
    from agl_slime.train.local.trainer import LocalTrainer

    loaded = load_agent(agent) if agent is not None else None
    opener = loaded if isinstance(loaded, SGLangLitAgent) else SGLangLitAgent()
    conversations = asyncio.run(read_conversations(rows, agent=opener, model=str(directory)))
    settings = LocalTrainerSettings(
        lr=lr,
        lora_rank=lora_rank,
        grad_clip=1.0,
        **SUPERVISED,
        device="auto",
        compute_dtype="bfloat16" if has_bfloat16(torch_device("auto")) else "float32",
    )
    trainer = LocalTrainer(model_path=directory, settings=settings, seed=seed, torch_threads="auto")
    if lr is None:
        n = sum(parameter.numel() for parameter in trainer.model.parameters())
        trainer.lr = (1e-4 if n < 1_000_000_000 else 1e-5) * (10 if lora_rank else 1)
    random.Random(seed).shuffle(conversations)
    n_held_out = math.ceil(held_out * len(conversations)) if len(conversations) > 1 else 0
    tests, lessons = conversations[:n_held_out], conversations[n_held_out:]
    tokens = sum(sum(sample.loss_mask or ()) for each in lessons for sample in each)
    say(f"{len(lessons)} conversations with {tokens} tokens to train, {len(tests)} held out")
    before = probe(trainer, tests)
    imitate(trainer, lessons, epochs=epochs, batch_size=batch_size, seed=seed, say=say)
    after = probe(trainer, tests)
    with unwritable_as_error("--output-dir", output_dir):
        trainer.save_weights(output_dir)
    if tests:
        say(f"held out: loss {before[0]:.3f} -> {after[0]:.3f}, right answers {before[1]:.0%} -> {after[1]:.0%}")
    print_line(output_dir)
