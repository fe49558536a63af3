"""Steps of supervised learning by the local trainer, and the measure of their result."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from agl_slime.train.local.trainer import LocalTrainer
from agl_slime.types import Sample

SUPERVISED: Mapping[str, Any] = {"old_log_probs": "recompute", "rewards_normalization": False}
"""Settings of a trainer of recorded conversations, which have neither log-probs nor groups."""
_REPORTS = 10  # lines of progress


def imitate(
    trainer: LocalTrainer,
    conversations: Sequence[Sequence[Sample]],
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    say: Callable[[str], object],
) -> None:
    """Train on the conversations in an order by ``seed``. The learning rate rises to the trainer's over a tenth of the
    steps, and falls to 0 over the others."""
    highest, losses = trainer.lr, list[float]()
    steps = [(epoch, start) for epoch in range(epochs) for start in range(0, len(conversations), batch_size)]
    orders = [random.Random(f"{seed} {epoch}").sample(conversations, len(conversations)) for epoch in range(epochs)]
    for step, (epoch, start) in enumerate(steps):
        share = step / len(steps)
        trainer.lr = highest * min((step + 1) / max(1.0, len(steps) / 10), 1 - share)
        batch = [sample for each in orders[epoch][start : start + batch_size] for sample in each]
        losses.append(trainer.imitate(batch))
        if int((share + 1 / len(steps)) * _REPORTS) > int(share * _REPORTS):
            say(f"step {step + 1} of {len(steps)}: loss {fmean(losses):.3f}")
            losses.clear()


def probe(trainer: LocalTrainer, conversations: Sequence[Sequence[Sample]]) -> tuple[float, float]:
    """The cross-entropy in nats per token, and the share of answers each of whose tokens has more than half of the
    probability."""
    samples = [sample for each in conversations for sample in each]
    if not samples:
        return math.nan, math.nan
    nats = n_tokens = right = answers = 0.0
    for sample, log_probs in zip(samples, trainer.score(samples), strict=True):
        nats, n_tokens = nats - float(log_probs.sum()), n_tokens + len(log_probs)
        start = 0
        for first, end in sample.metadata["turn_spans"]:
            turn, start = log_probs[start : start + end - first], start + end - first
            right, answers = right + bool((turn > math.log(0.5)).all()), answers + 1
    return nats / n_tokens, right / answers
