"""Twelve turns of which one decides: which rule of credit finds it, and learns in fewer rollouts?

    python -m benchmarks.decisive_turn [--seeds 10]

A tiny transformer plays against a script. The prompt names a key. In one turn, another one in each task, the script
says "open": the right key then gets the value, which the policy has to name after the last report. What it says in the
other turns counts for nothing. A supervised warm-up gives it the format, a right key in about a third of the rollouts,
and values that are copied well. *Mass* is the decisive turn's share of the sum of the advantages' magnitudes, in the
first iteration and over all. Rollouts are counted until 256 held-out ones have a mean reward of ``--goal``.

*turn* has a reward for the right key in the decisive turn beside the rollout's, *alone* without the rollout's. *answer*
and *pooled* are rewards of turns made from a potential, the probability of the value in the place of the reply, which
the rollout's reward follows: its step, less the mean step of the group's turns with the same number; and its step,
normalized by the mean and the spread of all of the group's turns, as in IGPO (arXiv:2510.14967).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from agl_slime.data.credit import token_advantages
from agl_slime.support.intervals import estimate
from agl_slime.train.local.settings import LocalTrainerSettings
from agl_slime.train.local.trainer import LocalTrainer
from agl_slime.types import Sample
from benchmarks.common import console

TURNS = 12
CLOSED, OPEN, ASK, MISS, CALL, IS, UNSURE = range(7)
STEPS = range(8, 8 + TURNS)
WORDS, KEYS, VALUES = range(20, 28), range(28, 36), range(36, 52)
PROMPT, TURN = 2, 4  # tokens; a turn is two of the script and two of the policy
GROUP = 8
VARIANTS = ("group", "turn", "alone", "anchor", "answer", "pooled")


@dataclass
class Tasks:
    """Tasks as columns: the key, its value, and the turn in which it is asked for."""

    keys: Tensor
    values: Tensor
    turns: Tensor

    @classmethod
    def draw(cls, n: int, rng: torch.Generator, *, copies: int = 1) -> Tasks:
        ranges = ((KEYS.start, KEYS.stop), (VALUES.start, VALUES.stop), (4, TURNS - 1))
        columns = (torch.randint(*limits, (n,), generator=rng).repeat_interleave(copies) for limits in ranges)
        return cls(*columns)

    def report(self, turn: int, ids: Tensor) -> Tensor:
        """The script's two tokens before ``turn``: the number of the turn or the call's result, and the state."""
        state = torch.full_like(self.keys, ASK if turn == TURNS - 1 else CLOSED)
        state[self.turns == turn] = OPEN
        first, called = torch.full_like(self.keys, STEPS[turn]), self.turns == turn - 1
        right = (ids[:, -2] == CALL) & (ids[:, -1] == self.keys)
        first[called] = torch.where(right, self.values, MISS)[called]
        return torch.stack([first, state], dim=1)

    def begin(self) -> Tensor:
        return torch.stack([torch.full_like(self.keys, STEPS[0]), self.keys], dim=1)


def demonstrations(tasks: Tasks, rng: torch.Generator, *, right: float) -> Tensor:
    """Conversations with random words, now and then an early answer, and the share ``right`` of right keys (and of the
    others the eighth that is right by chance); the answers are right."""
    n, ids = len(tasks.keys), tasks.begin()
    words, keys = (torch.randint(r.start, r.stop, (TURNS, n, 2), generator=rng) for r in (WORDS, KEYS))
    key = torch.where(torch.rand(n, generator=rng) < right, tasks.keys, keys[0, :, 0])
    for turn in range(TURNS):
        ids = torch.cat([ids, tasks.report(turn, ids)], dim=1)
        got = (ids == tasks.values[:, None]).any(dim=1)
        named = torch.stack([torch.full_like(key, IS), tasks.values], dim=1)
        answers = torch.where(got[:, None], named, torch.full_like(named, UNSURE))
        early = torch.rand(n, generator=rng) < (1.0 if turn == TURNS - 1 else 0.2)
        said = torch.where(early[:, None], answers, words[turn])
        calls = torch.stack([torch.full_like(key, CALL), key], dim=1)
        ids = torch.cat([ids, torch.where((tasks.turns == turn)[:, None], calls, said)], dim=1)
    return ids


def make_policy(directory: Path) -> Path:
    """A policy that was trained on the replies of demonstrations."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=16,
        intermediate_size=96,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    model, rng = AutoModelForCausalLM.from_config(config), torch.Generator().manual_seed(1)
    for steps in (500, 300):  # a second round, so that nearly all values are copied
        warm_up(model, rng, steps)
    model.save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


def warm_up(model: Any, rng: torch.Generator, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 4e-3 * (1 - step / steps)
        ids = demonstrations(Tasks.draw(64, rng), rng, right=0.25)
        logits = model(ids).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        said = (torch.arange(1, ids.shape[1]) - PROMPT) % TURN >= 2
        said[: PROMPT - 1] = False
        optimizer.zero_grad()
        losses[:, said].mean().backward()
        optimizer.step()


@torch.no_grad()
def play(model: Any, tasks: Tasks, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The ids of whole conversations, the log-probs of the replies ``[n, turns, 2]``, and the rewards."""
    ids, log_probs, cache = tasks.begin(), [], None
    fed = 0
    for turn in range(TURNS):
        ids = torch.cat([ids, tasks.report(turn, ids)], dim=1)
        for _ in range(2):
            output = model(ids[:, fed:], past_key_values=cache, use_cache=True)
            fed, cache = ids.shape[1], output.past_key_values
            scores = output.logits[:, -1].log_softmax(-1)
            token = torch.multinomial(scores.exp(), 1, generator=rng)
            log_probs.append(scores.gather(1, token))
            ids = torch.cat([ids, token], dim=1)
    return ids, torch.cat(log_probs, dim=1).unflatten(1, (TURNS, 2)), (ids[:, -1] == tasks.values).float()


@torch.no_grad()
def potentials(model: Any, tasks: Tasks, ids: Tensor) -> Tensor:
    """The probability of the value, after ``IS``, in the place of each reply: ``[n, turns]``."""
    columns = []
    lead = torch.full_like(tasks.keys, IS)[:, None]
    for turn in range(TURNS):
        context = torch.cat([ids[:, : PROMPT + turn * TURN + 2], lead], dim=1)
        columns.append(model(context).logits[:, -1].softmax(-1).gather(1, tasks.values[:, None]))
    return torch.cat(columns, dim=1)


def samples_of(ids: Tensor, log_probs: Tensor, rewards: Tensor, steps: np.ndarray | None = None) -> list[Sample]:
    """The Samples of a batch; ``steps`` ``[n, turns]`` are rewards of turns."""
    length, mask = TURN * TURNS, [0, 0, 1, 1] * TURNS
    samples = []
    for i, (row, scores, reward) in enumerate(zip(ids.tolist(), log_probs.tolist(), rewards.tolist(), strict=True)):
        engine = [log_prob for pair in scores for log_prob in (0.0, 0.0, *pair)]
        of_turns = [] if steps is None else steps[i].tolist()
        places = enumerate(range(2, length, TURN))
        spans = [[f"turn:{turn}", of_turns[turn], start, start + 2] for turn, start in places if of_turns]
        fields: dict[str, Any] = {"tokens": row, "response_length": length, "loss_mask": mask, "reward": reward}
        fields |= {"rollout_log_probs": engine, "group_index": i // GROUP, "rollout_id": i, "index": i}
        samples.append(Sample(**fields, metadata={"reward_spans": spans}))
    return samples


def steps_of(potential: Tensor, rewards: Tensor, *, pooled: bool) -> np.ndarray:
    """The advantages ``[n, turns]`` from the steps of the potential, in groups of ``GROUP``."""
    steps = torch.diff(torch.cat([potential, rewards[:, None]], dim=1), dim=1).unflatten(0, (-1, GROUP))
    if pooled:
        steps = (steps - steps.mean((1, 2), keepdim=True)) / (steps.std((1, 2), keepdim=True) + 1e-6)
    else:
        steps = steps - steps.mean(1, keepdim=True)
    return steps.flatten(0, 1).numpy().astype(np.float64)


def rewards_of_turns(tasks: Tasks, ids: Tensor, rewards: Tensor) -> np.ndarray:
    """``[n, turns]``: 1 for the right key in the decisive turn, 0 for a value that was not copied in the last, else
    constant."""
    replies = ids[:, PROMPT:].unflatten(1, (TURNS, TURN))[:, :, 2:]
    right = (replies[:, :, 0] == CALL) & (replies[:, :, 1] == tasks.keys[:, None])
    of_turns = (right & (torch.arange(TURNS) == tasks.turns[:, None])).float()
    of_turns[:, -1] = 1 - of_turns.sum(1) * (1 - rewards)
    return of_turns.numpy().astype(np.float64)


def mass(samples: list[Sample], decisive: list[int], rule: dict[str, Any]) -> np.ndarray:
    """The sum of the advantages' magnitudes in the decisive turns, and in all."""
    values = np.abs(token_advantages(samples, **rule)).reshape(len(samples), TURNS, TURN)[:, :, 2:].sum(2)
    return np.array([values[range(len(samples)), decisive].sum(), values.sum()])


def rule_of(variant: str) -> dict[str, Any]:
    credit = {"answer": "group", "pooled": "group", "alone": "turn"}.get(variant, variant)
    return {"credit": credit, "normalized": variant not in ("answer", "pooled")}


def rewarded(model: Any, tasks: Tasks, ids: Tensor, log_probs: Tensor, rewards: Tensor, variant: str) -> list[Sample]:
    """The Samples of a batch with the variant's rewards."""
    steps = None
    if variant in ("answer", "pooled"):
        steps = steps_of(potentials(model, tasks, ids), rewards, pooled=variant == "pooled")
    elif variant in ("turn", "alone"):
        steps = rewards_of_turns(tasks, ids, rewards)
    return samples_of(ids, log_probs, torch.zeros_like(rewards) if variant == "alone" else rewards, steps)


def gradients(policy: Path, options: argparse.Namespace) -> None:
    """Signal and noise of the first policy's gradients: each batch has the same rollouts under all variants. The cosine
    is with the mean gradient of ``group``, which is the reward's own, over the other half of the batches."""
    model, rng = AutoModelForCausalLM.from_pretrained(policy), torch.Generator().manual_seed(123)
    rows: dict[str, list[Tensor]] = {variant: [] for variant in options.variants}
    said = torch.tensor([0, 0, 1, 1] * TURNS)
    for _ in range(options.batches):
        tasks = Tasks.draw(options.groups, rng, copies=GROUP)
        ids, log_probs, rewards = play(model, tasks, rng)
        scores = model(ids).logits[:, PROMPT - 1 : -1].log_softmax(-1).gather(2, ids[:, PROMPT:, None]).squeeze(2)
        for variant, of_batches in rows.items():
            batch = rewarded(model, tasks, ids, log_probs, rewards, variant)
            advantages = torch.from_numpy(np.array(token_advantages(batch, **rule_of(variant)))).float()
            loss = (advantages * said * scores).mean()
            of_parameters = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
            of_batches.append(torch.cat([gradient.flatten() for gradient in of_parameters]))
    half = options.batches // 2
    means = [torch.stack(rows["group"][part]).mean(0) for part in (slice(half, None), slice(half))]
    length = (means[0] @ means[1]).sqrt()  # without the noise, which the halves do not share
    table = Table(title=f"gradients of {options.batches} batches of {options.groups} groups of {GROUP}")
    for column in ("credit", "signal² / noise²", "cosine with the reward's gradient"):
        table.add_column(column, justify="right")
    for variant, of_batches in rows.items():
        halves = [torch.stack(of_batches[part]) for part in (slice(half), slice(half, None))]
        signal = halves[0].mean(0) @ halves[1].mean(0)
        noise = torch.cat(halves).square().sum(1).mean() - signal
        cosines = torch.cat([part @ mean / part.norm(dim=1) for part, mean in zip(halves, means, strict=True)]) / length
        spread = cosines.std() / options.batches**0.5
        table.add_row(variant, f"{signal / noise:.3f}", f"{cosines.mean():.2f} ± {spread:.2f}")
    console.print(table)


def run(policy: Path, variant: str, seed: int, options: argparse.Namespace) -> tuple[int, float, float, float, float]:
    """Rollouts to the goal (all, if it was not reached), the mass in the first iteration and over all, the last
    held-out reward, and the share of the time that the potentials took."""
    rule = rule_of(variant)
    normalized = rule.pop("normalized")
    settings = LocalTrainerSettings(lr=options.lr, rewards_normalization=normalized, **rule)
    trainer = LocalTrainer(model_path=policy, settings=settings, torch_threads=1, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(policy)
    rng, held_out = torch.Generator().manual_seed(seed), 0.0
    sums, scoring_s, began = list[np.ndarray](), 0.0, time.monotonic()
    while held_out < options.goal and len(sums) < options.iterations:
        tasks = Tasks.draw(options.groups, rng, copies=GROUP)
        ids, log_probs, rewards = play(model, tasks, rng)
        started = time.monotonic()
        batch = rewarded(model, tasks, ids, log_probs, rewards, variant)
        scoring_s += time.monotonic() - started
        promising = len(sums) % 2 and rewards.mean() > options.goal - 0.25  # held-out rollouts take half of the time
        sums.append(mass(batch, tasks.turns.tolist(), rule_of(variant)))
        trainer.train(batch, iteration=len(sums))
        model.load_state_dict(trainer.model.state_dict())
        if promising:
            judged = torch.Generator().manual_seed(10_000 + seed)
            held_out = play(model, Tasks.draw(256, judged), judged)[2].mean().item()
    first, whole = (float(part / max(total, 1e-9)) for part, total in (sums[0], np.sum(sums, axis=0)))
    rollouts, scoring = len(sums) * options.groups * GROUP, scoring_s / (time.monotonic() - began)
    return rollouts, first, whole, held_out, scoring


def main() -> None:
    parser = argparse.ArgumentParser(description="Which rule of credit finds the turn that decides?")
    parser.add_argument("--seeds", type=int, default=10, help="how many, from --first-seed on")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--goal", type=float, default=0.9)
    parser.add_argument("--iterations", type=int, default=80)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batches", type=int, default=0, help="compare the gradients of so many, and train nothing")
    parser.add_argument("--policy", type=Path, help="a policy of an earlier warm-up")
    options = parser.parse_args()
    load = f"load average {os.getloadavg()[0]:.1f} at the start, {os.cpu_count()} cores"
    table = Table(title=f"{options.groups} groups of {GROUP}, lr {options.lr:g}, {options.seeds} seeds, {load}")
    columns = ("mass at first", "mass", "held-out", "scoring's share of the time")
    for column in ("credit", f"rollouts to {options.goal}", "not reached", *columns):
        table.add_column(column, justify="right")
    rows: dict[str, list[tuple[int, float, float, float, float]]] = {variant: [] for variant in options.variants}
    with tempfile.TemporaryDirectory() as directory:
        policy = options.policy or make_policy(Path(directory))
        if options.batches:
            gradients(policy, options)
            return
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for variant in options.variants:
                rows[variant].append(row := run(policy, variant, seed, options))
                figures = f"mass {row[1]:.2f}, {row[2]:.2f}, held-out {row[3]:.2f}, load {os.getloadavg()[0]:.0f}"
                print(f"{variant}, seed {seed}: {row[0]} rollouts, {figures}", flush=True)
    for variant, of_seeds in rows.items():
        rollouts, *figures = zip(*of_seeds, strict=True)
        interval = estimate([*map(float, rollouts)], rewards=[])
        bounds = "" if interval is None or interval.low is None else f" ({interval.low:.0f} to {interval.high:.0f})"
        unreached = sum(row[3] < options.goal for row in of_seeds)
        cells = (f"{fmean(values):.2f}" for values in figures)
        table.add_row(variant, f"{fmean(rollouts):.0f}{bounds}", str(unreached), *cells)
    console.print(table)


if __name__ == "__main__":
    main()
