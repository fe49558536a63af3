"""Training with and without replay of routed experts, on five seeds.

    python -m benchmarks.routed_replay [--seeds 5] [--families qwen3_moe,olmoe] [--cases bfloat16,noise]

A tiny mixture of experts of random weights answers with 8 tokens and is rewarded for the share of them whose id is a
multiple of 4. The embedded engine samples, the local trainer takes one step per iteration, the new weights go to the
engine. The engine's router differs from the trainer's: with *bfloat16* the trainer computes in it, *noise* adds
``--router-noise``, drawn again for each version, to the engine's router weights; *exact* does neither.
Mean difference of log-probs (nats) and KL to the engine are over all iterations; rewards are means of the first five,
the last five and all iterations. Each figure is the mean of the seeds and their standard deviation.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich.table import Table
from safetensors.torch import load_file, save_file

from agl_slime.engine import EmbeddedEngine
from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.train.local import LocalTrainer, LocalTrainerSettings
from agl_slime.types import Sample
from benchmarks.common import console
from tests.harness.moe_policy import LAYERS, TOP_K, save_moe

KINDS, ANSWER, PROMPT = 4, 8, 3
SAMPLING = SamplingParams(max_new_tokens=ANSWER, routed_experts=(LAYERS, TOP_K), extra={"ignore_eos": True})
COLUMNS = ("log-prob difference", "KL to the engine", "first reward", "last reward", "of all")


def add_router_noise(directory: Path, deviation: float, drawn: torch.Generator) -> None:
    """To the weights of the routers in the checkpoint in ``directory``."""
    file = directory / "model.safetensors"
    weights = load_file(file)
    routers = [name for name in weights if name.endswith("mlp.gate.weight")]
    assert len(routers) == LAYERS
    for name in routers:
        weights[name] = weights[name] + deviation * torch.randn(weights[name].shape, generator=drawn)
    save_file(weights, file, metadata={"format": "pt"})


async def sample_batch(
    client: SGLangClient, *, version: int, groups: int, per_group: int, rng: random.Random, replay: bool
) -> list[Sample]:
    prompts = [[rng.randrange(64) for _ in range(PROMPT)] for _ in range(groups)]
    each = [prompt for prompt in prompts for _ in range(per_group)]
    answers = await asyncio.gather(*(client.generate(prompt, SAMPLING) for prompt in each))
    made = []
    for number, (prompt, answer) in enumerate(zip(each, answers, strict=True)):
        assert answer.experts is not None
        made.append(
            Sample(
                group_index=number // per_group,
                index=number,
                rollout_id=number,
                tokens=[*prompt, *answer.output_ids],
                response_length=ANSWER,
                loss_mask=[1] * ANSWER,
                rollout_log_probs=list(answer.log_probs),
                rollout_routed_experts=answer.experts.rows if replay else None,
                reward=fmean(float(token % KINDS == 0) for token in answer.output_ids),
                metadata={"weight_spans": [[str(version), 0, ANSWER]], "policy_version": version},
            )
        )
    return made


async def run(
    url: str, policy: Path, *, case: str, replay: bool, seed: int, options: argparse.Namespace
) -> list[float]:
    """One training run on the engine at ``url``; a figure for each of ``COLUMNS``."""
    settings = LocalTrainerSettings(
        lr=options.lr,
        grad_clip=1.0,
        n_minibatches=1,
        compute_dtype="bfloat16" if case == "bfloat16" else "float32",
    )
    trainer = LocalTrainer(model_path=policy, settings=settings, torch_threads=1, seed=seed)
    rng = random.Random(seed)
    drawn = torch.Generator().manual_seed(seed)
    told, rewards = [], []
    with tempfile.TemporaryDirectory() as weights:
        async with SGLangClient(base_url=url) as client:
            for version in range(options.iterations):
                trainer.save_weights(weights)
                if case == "noise":
                    add_router_noise(Path(weights), options.router_noise, drawn)
                await client.update_weights_from_disk(weights, str(version))
                batch = await sample_batch(
                    client, version=version, groups=options.groups, per_group=options.per_group, rng=rng, replay=replay
                )
                rewards.append(fmean(float(sample.reward) for sample in batch))
                told.append(trainer.train(batch, iteration=version))
    means = [fmean(metrics[f"train/{name}"] for metrics in told) for name in ("logprob_diff_mean", "engine_kl")]
    return [*means, fmean(rewards[:5]), fmean(rewards[-5:]), fmean(rewards)]


def tell(values: Sequence[float]) -> str:
    return f"{fmean(values):.4f} ± {stdev(values) if len(values) > 1 else 0.0:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default="qwen3_moe,olmoe")
    parser.add_argument("--cases", default="bfloat16,noise", help="of exact, bfloat16 and noise")
    parser.add_argument("--router-noise", type=float, default=0.05, help="its standard deviation")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--per-group", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-3)
    options: Any = parser.parse_args()
    load = f"load average {os.getloadavg()[0]:.1f} at the start, {os.cpu_count()} cores"
    table = Table("model", "router", "replay", *COLUMNS, title=f"{options.seeds} seeds, lr {options.lr:g}, {load}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        for family in options.families.split(","):
            policy = save_moe(Path(directory) / family, family=family)
            with EmbeddedEngine(policy, enable_return_routed_experts=1) as engine:
                for case in options.cases.split(","):
                    for replay in (False, True):
                        how: Any = {"case": case, "replay": replay, "options": options}
                        runs = [asyncio.run(run(engine.url, policy, seed=seed, **how)) for seed in range(options.seeds)]
                        row = [family, case, "yes" if replay else "no", *map(tell, zip(*runs, strict=True))]
                        ends = " ".join(f"{found[-2]:.3f}" for found in runs)
                        console.print(*row, f"last reward of each: {ends}", sep="  ", highlight=False)
                        table.add_row(*row)
    console.print(table)
    console.print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
