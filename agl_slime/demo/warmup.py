"""Supervised warm-up of the tiny policy on demonstrations, in two phases.

1. Clean demonstrations until a teacher-forced probe on unseen ones is passed. The number of steps differs from seed to
  seed, so the criterion
decides, never a count.
2. Imperfect demonstrations for a fixed number of steps. They blur what was learned, so that reinforcement starts from a
  low reward that is not zero.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from agl_slime.demo.formats import Demonstration, DemonstrationSource
from agl_slime.errors import TrainerError

_IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class WarmupSettings:
    """How the warm-up trains. Steps are optimiser steps of ``batch_size`` conversations."""

    batch_size: int = 16
    learning_rate: float = 4e-3
    lr_warmup_steps: int = 10
    betas: tuple[float, float] = (0.9, 0.99)
    grad_clip: float = 0.3
    probe_size: int = 64
    """Conversations in the probe, drawn once and never trained on."""
    probe_every: int = 5
    target: float = 0.9
    """Share of the probe's assistant turns in which every token is the model's first choice; reached, phase 1 ends."""
    max_steps: int = 600
    """Phase 1 gives up here with an error; it is a bound, not a schedule."""
    settle_steps: int = 30
    """Steps over which the learning rate then falls to 0, still on clean ones: the share of sampled turns that are
    right rises from 0.6 to 0.9."""
    imperfect_steps: int = 60
    imperfect_learning_rate: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class WarmupReport:
    """What the warm-up did: steps of each phase and the probe's value when each ended."""

    clean_steps: int
    clean_probe: float
    imperfect_steps: int
    final_probe: float


@dataclass(frozen=True)
class _Batch:
    """Right-padded conversations, all [conversations, tokens]: a label is the id at the same place where an assistant
    wrote it, else -100; ``turns`` is the turn's number, else -1."""

    ids: torch.Tensor
    labels: torch.Tensor
    turns: torch.Tensor


def encode(tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and, for each token, the number (from 0) of the assistant turn that it belongs to, or
    -1 for context.

    An assistant turn is its content and the end token after it: what a model has to sample.
    """
    ids: list[int] = []
    turns: list[int] = []
    number = 0
    rendered = 0
    text = str(tokenizer.apply_chat_template(demonstration, tokenize=False))
    for index, message in enumerate(demonstration):
        if message["role"] != "assistant":
            continue
        prompt = str(tokenizer.apply_chat_template(demonstration[:index], tokenize=False, add_generation_prompt=True))
        context = tokenizer.encode(text[rendered : len(prompt)], add_special_tokens=False)
        answer = [*tokenizer.encode(str(message["content"]), add_special_tokens=False), int(tokenizer.eos_token_id)]  # type: ignore[arg-type]
        ids += context + answer
        turns += [-1] * len(context) + [number] * len(answer)
        rendered = len(prompt) + len(str(message["content"])) + len(str(tokenizer.eos_token))
        number += 1
    return ids, turns


def warm_up(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    source: DemonstrationSource,
    *,
    seed: int,
    settings: WarmupSettings | None = None,
) -> WarmupReport:
    """Train ``model`` in place; deterministic for a seed on one machine. Raises ``TrainerError`` when the probe is not
    passed within ``max_steps``."""
    settings = settings or WarmupSettings()
    rng = random.Random(seed)
    probe = _batch(tokenizer, source.demonstrations(rng, settings.probe_size, quality="clean"))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0, fused=True
    )
    model.train()
    score, steps = 0.0, 0
    while score < settings.target:
        if steps >= settings.max_steps:
            raise TrainerError(
                f"the warm-up's probe is at {score:.2f} after {steps} steps and the target is {settings.target}: "
                "try another seed or simpler demonstrations"
            )
        _set_learning_rate(optimizer, settings.learning_rate * min(1.0, (steps + 1) / settings.lr_warmup_steps))
        _train_step(
            model,
            optimizer,
            _batch(tokenizer, source.demonstrations(rng, settings.batch_size, quality="clean")),
            settings.grad_clip,
        )
        steps += 1
        if steps % settings.probe_every == 0:
            score = _probe(model, probe)
    for step in range(settings.settle_steps):
        _set_learning_rate(optimizer, settings.learning_rate * (1 - (step + 1) / (settings.settle_steps + 1)))
        _train_step(
            model,
            optimizer,
            _batch(tokenizer, source.demonstrations(rng, settings.batch_size, quality="clean")),
            settings.grad_clip,
        )
    clean_probe = _probe(model, probe)
    _set_learning_rate(optimizer, settings.imperfect_learning_rate)
    for _ in range(settings.imperfect_steps):
        _train_step(
            model,
            optimizer,
            _batch(tokenizer, source.demonstrations(rng, settings.batch_size, quality="imperfect")),
            settings.grad_clip,
        )
    model.eval()
    return WarmupReport(
        clean_steps=steps,
        clean_probe=clean_probe,
        imperfect_steps=settings.imperfect_steps,
        final_probe=_probe(model, probe),
    )


def _batch(tokenizer: PreTrainedTokenizerBase, demonstrations: Sequence[Demonstration]) -> _Batch:
    encoded = [encode(tokenizer, demonstration) for demonstration in demonstrations]
    width = max(len(ids) for ids, _ in encoded)
    ids = torch.zeros(len(encoded), width, dtype=torch.long)
    turns = torch.full((len(encoded), width), -1, dtype=torch.long)
    for row, (row_ids, row_turns) in enumerate(encoded):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        turns[row, : len(row_turns)] = torch.tensor(row_turns)
    return _Batch(ids, torch.where(turns >= 0, ids, _IGNORED), turns)


def _answer_logits(model: Any, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
    # the output layer is a large part of a tiny model: it runs only where an assistant wrote. Right padding needs no
    # mask under causal attention.
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    written = batch.labels[:, 1:] != _IGNORED
    return model.lm_head(hidden[:, :-1][written]), batch.labels[:, 1:][written]


def _set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def _train_step(model: Any, optimizer: torch.optim.Optimizer, batch: _Batch, grad_clip: float) -> None:
    logits, labels = _answer_logits(model, batch)
    loss = functional.cross_entropy(logits, labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()


@torch.no_grad()
def _probe(model: Any, batch: _Batch) -> float:
    logits, labels = _answer_logits(model, batch)
    turns = batch.turns[:, 1:]
    written = turns >= 0
    rows = torch.arange(len(turns)).unsqueeze(1).expand_as(turns)[written]
    turn_of_token = rows * (int(turns.max()) + 1) + turns[written]
    _, where = torch.unique(turn_of_token, return_inverse=True)
    missed = torch.zeros(int(where.max()) + 1).index_add_(0, where, (logits.argmax(-1) != labels).float())
    return float((missed == 0).float().mean())
