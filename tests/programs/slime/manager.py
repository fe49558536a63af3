"""slime's RolloutManager under real Ray, fed by agents that run elsewhere: ten batches, a checkpoint, another manager
that resumes from it.

python -m tests.programs.slime.manager DIRECTORY
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import ray

from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.data.normalize import normalize_rewards
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.runner.concurrent import RunnerThread
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.server import StoreService
from agl_slime.tokens.converter import convert_rollout
from agl_slime.tokens.loading import load_tokenizer
from tests.harness.slime_programs import report
from tests.programs.slime.common import as_flags, make_policy, sizes, slime_args, start_ray, write_tasks

GROUPS, SIZE, BATCHES, CHECKPOINT = 4, 4, 10, 4
PARALLEL = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


def main(directory: Path) -> None:
    model = make_policy(directory)
    store = BridgeStore()
    with (
        EmbeddedEngine(model) as engine,
        StoreService(store=store) as service,
        RunnerThread(agent=LookupAgent(), store=store),
    ):
        host, _, port = engine.url.removeprefix("http://").partition(":")
        flags = sizes(steps=BATCHES, groups=GROUPS, size=SIZE)
        flags |= {"rollout-temperature": 1.0, "rollout-num-gpus": 0}
        flags |= {"sglang-router-ip": host, "sglang-router-port": port}
        flags |= {"save": directory / "checkpoint", "load": directory / "checkpoint"}
        flags |= {"save-debug-rollout-data": directory / "rollouts_{rollout_id}.pt"}
        config = {
            "agl_store_url": service.url,
            "agl_llm_url": engine.url,
            "agl_tasks": str(write_tasks(directory / "tasks.jsonl", 200)),
            "agl_get_timeout_s": 120,
        }
        args = slime_args(as_flags(flags), model=model, config=config, directory=directory)
        start_ray()
        try:
            report(run(args, store, load_tokenizer(model)))
        finally:
            ray.shutdown()


def run(args: Any, store: BridgeStore, tokenizer: Any) -> dict[str, Any]:
    first = new_manager(args, load=-1)
    batches: list[dict[str, Any]] = []
    for step in range(BATCHES):
        batches.append(generate(first, args, step))
        if step == CHECKPOINT:
            ray.get(first.save.remote(step))
    expected = asyncio.run(expected_rows(store, tokenizer))
    mismatches = list((Counter(row for batch in batches for row in rows(batch)) - expected).elements())

    # the manager dies; another resumes from the checkpoint
    ray.kill(first)
    args.load = args.save  # as slime's parse_args sets it once there is a checkpoint
    second = new_manager(args, load=CHECKPOINT)
    later = [generate(second, args, step) for step in range(CHECKPOINT + 1, BATCHES + 2)]
    ray.kill(second)
    trained, delivered = rollouts_of(batches), rollouts_of(later)
    saved, lost = rollouts_of(batches[: CHECKPOINT + 1]), rollouts_of(batches[CHECKPOINT + 1 :])
    return {
        "keys": sorted(set(batches[0]) - {"names"}),
        "samples": [len(batch["tokens"]) for batch in batches],
        "rollouts": [len(set(batch["names"])) for batch in batches],
        "lengths_match": all(
            len(mask) == length == len(log_probs) < len(tokens)
            for batch in batches
            for mask, length, log_probs, tokens in zip(
                *(batch[n] for n in ("loss_masks", "response_lengths", "rollout_log_probs", "tokens")), strict=True
            )
        ),
        "mismatches": len(mismatches),
        "example": str(mismatches[:1])[:500],
        "finished": expected.total(),
        "trained": trained.total(),
        "trained_twice": sum(count - 1 for count in trained.values()),
        "twice_over_the_checkpoint": len(saved.keys() & delivered) + sum(count - 1 for count in delivered.values()),
        "after_the_checkpoint": len(lost),
        "delivered_again": len(delivered.keys() & lost),
    }


def rollouts_of(batches: list[dict[str, Any]]) -> Counter[str]:
    return Counter(name for batch in batches for name in batch["names"])


def new_manager(args: Any, *, load: int) -> Any:
    from slime.ray.placement_group import create_rollout_manager

    manager, _ = create_rollout_manager(args, (None, [], []))
    ray.get(manager.set_train_parallel_config.remote(PARALLEL))
    ray.get(manager.load.remote(load))
    return manager


def generate(manager: Any, args: Any, step: int) -> dict[str, Any]:
    """One batch, in the rank's order; ``names`` are the Agent Lightning rollouts that its samples came from."""
    import torch

    [box] = ray.get(manager.generate.remote(step))
    batch: Any = {
        name: [item.tolist() if hasattr(item, "tolist") else item for item in value]
        if isinstance(value, list)
        else value
        for name, value in ray.get(box.inner).items()
    }
    partition = [int(position) for position in batch["partition"]]
    batch["raw_reward"] = [batch["raw_reward"][position] for position in partition]
    samples = torch.load(args.save_debug_rollout_data.format(rollout_id=step), weights_only=False)["samples"]
    batch["names"] = [samples[position]["metadata"]["agl_rollout_id"] for position in partition]
    return batch


def rows(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    names = ("tokens", "response_lengths", "loss_masks", "raw_reward", "rewards", "truncated", "rollout_log_probs")
    return [row_of(*values) for values in zip(*(batch[name] for name in names), strict=True)]


def row_of(
    tokens: list[int], length: int, mask: list[int], raw: float, reward: float, truncated: int, log_probs: list[float]
) -> tuple[Any, ...]:
    """slime has log-probs and rewards as float32."""
    numbers = (int(length), float(raw), round(float(reward), 4), int(truncated))
    return (tuple(tokens), tuple(mask), *numbers, tuple(round(p, 4) for p in log_probs))


async def expected_rows(store: BridgeStore, tokenizer: Any) -> Counter[tuple[Any, ...]]:
    """The rows of every group that has finished, by the converter and the normaliser, straight from the store."""
    groups: dict[str, list[Any]] = {}
    for rollout in await store.query_rollouts(status_in=["succeeded"]):
        conversion = convert_rollout(rollout, await store.query_spans(rollout.rollout_id, "latest"), tokenizer)
        groups.setdefault((rollout.metadata or {})["group_id"], []).append(conversion.samples)
    expected: Counter[tuple[Any, ...]] = Counter()
    for group in groups.values():
        if len(group) != SIZE:
            continue
        numbers = [number for number, samples in enumerate(group) for _ in samples]
        flat = [sample for samples in group for sample in samples]
        advantages = normalize_rewards([s.reward for s in flat], group_indices=[0] * len(flat), rollout_ids=numbers)
        for s, advantage in zip(flat, advantages, strict=True):
            outcome = (s.reward, advantage, s.status == s.Status.TRUNCATED)
            expected[row_of(s.tokens, s.response_length, s.loss_mask, *outcome, s.rollout_log_probs)] += 1
    return expected


if __name__ == "__main__":
    main(Path(sys.argv[1]))
