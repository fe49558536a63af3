"""Off-policy corrections compared: a fast-changing policy, trained on batches that are 4 versions old.

    python -m benchmarks.off_policy

A tiny transformer answers with 8 tokens and is rewarded for the share of them that are of its prompt's kind. Batches
wait in a queue, so that each is trained on ``--staleness`` steps after it was sampled; the rest is the local trainer.
*engine* divides by the log-probs of the policy that sampled (PPO's ratio), *recompute* by the log-probs of the policy
before the step, without correcting the difference; *tis* and *icepop* weigh tokens by it, *decoupled* (decoupled PPO)
by all of it. Rewards are means of the last 10 iterations: mean, minimum and maximum over seeds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config

from agl_slime.train.local.settings import LocalTrainerSettings
from agl_slime.train.local.trainer import LocalTrainer
from agl_slime.types import Sample
from benchmarks.common import console

VOCABULARY, KINDS, ANSWER = 64, 4, 8
VARIANTS: dict[str, dict[str, Any]] = {
    "engine": {"old_log_probs": "engine"},
    "recompute": {"old_log_probs": "recompute"},
    "tis": {"old_log_probs": "recompute", "off_policy": "tis"},
    "icepop": {"old_log_probs": "recompute", "off_policy": "icepop"},
    "decoupled": {"old_log_probs": "recompute", "off_policy": "tis", "tis_clip": 1e9},
}


def make_policy(directory: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


@torch.no_grad()
def sample_batch(model: Any, *, version: int, groups: int, per_group: int, drawn: torch.Generator) -> list[Sample]:
    prompts = torch.randint(0, VOCABULARY, (groups, 3), generator=drawn).repeat_interleave(per_group, dim=0)
    ids, log_probs = prompts, []
    for _ in range(ANSWER):
        scores = model(ids).logits[:, -1].log_softmax(-1)
        token = torch.multinomial(scores.exp(), 1, generator=drawn)
        log_probs.append(scores.gather(1, token))
        ids = torch.cat([ids, token], dim=1)
    right = (ids[:, 3:] % KINDS == ids[:, :1] % KINDS).float().mean(-1)
    return [
        Sample(
            group_index=i // per_group,
            index=i,
            rollout_id=i,
            tokens=row,
            response_length=ANSWER,
            loss_mask=[1] * ANSWER,
            rollout_log_probs=own,
            reward=reward,
            metadata={"weight_spans": [[str(version), 0, ANSWER]]},
        )
        for i, (row, own, reward) in enumerate(
            zip(ids.tolist(), torch.cat(log_probs, dim=1).tolist(), right.tolist(), strict=True)
        )
    ]


def run(
    policy: Path, variant: str, staleness: int, seed: int, options: argparse.Namespace
) -> tuple[list[float], dict[str, float]]:
    """The mean reward of each batch when it was sampled, and the means of the metrics."""
    settings = LocalTrainerSettings(lr=options.lr, **VARIANTS[variant])
    trainer = LocalTrainer(model_path=policy, settings=settings, torch_threads=1, seed=seed)
    drawn = torch.Generator().manual_seed(seed)
    waiting: deque[list[Sample]] = deque()
    rewards, told = [], []
    for version in range(options.iterations):
        batch = sample_batch(
            trainer.model, version=version, groups=options.groups, per_group=options.per_group, drawn=drawn
        )
        rewards.append(fmean(float(sample.reward) for sample in batch))
        waiting.append(batch)
        if len(waiting) > staleness:
            batch = waiting.popleft()
            for sample in batch:
                sample.metadata["policy_version"] = version
            told.append(trainer.train(batch, iteration=version))
    names = ("train/engine_kl", "train/off_policy_clipped", "train/clip_fraction")
    return rewards, {name: fmean(metrics.get(name, 0.0) for metrics in told) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--per-group", type=int, default=8)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="seeds that run at the same time")
    options = parser.parse_args()
    load = f"load average {os.getloadavg()[0]:.1f} at the start, {os.cpu_count()} cores"
    table = Table(title=f"staleness {options.staleness}, lr {options.lr:g}, {options.seeds} seeds, {load}")
    for column in ("variant", "reward", "lowest", "highest", "of all", "engine KL", "cut", "clipped"):
        table.add_column(column, justify="right")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        policies = [make_policy(Path(directory) / str(seed), seed) for seed in range(options.seeds)]
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=options.processes, mp_context=spawned) as pool:
            rows = [
                (
                    variant,
                    staleness,
                    [
                        pool.submit(run, policy, variant, staleness, seed, options)
                        for seed, policy in enumerate(policies)
                    ],
                )
                for staleness, variant in ((0, "engine"), *((options.staleness, name) for name in VARIANTS))
            ]
            for variant, staleness, seeds in rows:
                tell(table, f"{variant}, staleness {staleness}", [future.result() for future in seeds])
    console.print(table)
    console.print(f"{time.monotonic() - began:.0f} s")


def tell(table: Table, name: str, found: list[tuple[list[float], dict[str, float]]]) -> None:
    """A row of the table, and a line at once."""
    ends = [fmean(rewards[-10:]) for rewards, _ in found]
    console.print(f"{name}:", *(f"{end:.3f}" for end in ends), highlight=False)
    means = {metric: fmean(metrics[metric] for _, metrics in found) for metric in found[0][1]}
    table.add_row(
        name,
        f"{fmean(ends):.3f}",
        f"{min(ends):.3f}",
        f"{max(ends):.3f}",
        f"{fmean(fmean(rewards) for rewards, _ in found):.3f}",
        *(f"{value:.3f}" for value in means.values()),
    )


if __name__ == "__main__":
    main()
