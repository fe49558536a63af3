"""slime's own reward normalisation beside ours, on the same samples: its batch builder's where it has one, else its
manager's.

python -m tests.programs.slime.normalization
"""

from __future__ import annotations

import random
from argparse import Namespace
from typing import Any

from agl_slime.slime_hooks import normalize_rewards
from agl_slime.support.slime import find_optional
from agl_slime.train.slime.versions import normalizes_by_group
from agl_slime.types import Sample, sample_from_fields
from tests.harness.slime_programs import report


def samples_of(groups: list[list[list[float]]]) -> list[Sample]:
    """Of the rewards by group and rollout; a rollout with several rewards became several Samples."""
    rollouts = [(index, rewards) for index, group in enumerate(groups) for rewards in group]
    rows = [(group, number, reward) for number, (group, rewards) in enumerate(rollouts) for reward in rewards]
    return [
        sample_from_fields(
            reward=reward, group_index=group, rollout_id=number, index=index, metadata={"agl_rollout_id": str(number)}
        )
        for index, (group, number, reward) in enumerate(rows)
    ]


def slimes_normalizer() -> Any:
    """slime's function of args and samples."""
    if (builder := find_optional("BatchBuilder")) is not None:
        paths = {"custom_reward_post_process_path": None, "custom_convert_samples_to_train_data_path": None}
        return lambda args, samples: builder(Namespace(**vars(args), **paths))._post_process_rewards(samples)[1]
    from slime.ray.rollout import RolloutManager

    manager: Any = RolloutManager.__ray_metadata__.modified_class
    normalize = manager._post_process_rewards
    return lambda args, samples: normalize(Namespace(args=args, custom_reward_post_process_func=None), samples)[1]


def args_of(*, std: bool, size: int, batch: int) -> Namespace:
    return Namespace(
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=std,
        reward_key=None,
        n_samples_per_prompt=size,
        rollout_batch_size=batch,
    )


def random_batches(n: int, *, by_group: bool) -> list[tuple[Namespace, list[Sample]]]:
    """Nested batches: groups of any size, rollouts of one to four samples, in any order. By position only full groups
    of plain samples, in order, can be right. Rewards are exact in float32."""
    rng = random.Random(0)
    batches = []
    for _ in range(n):
        size, batch = rng.randint(2, 8), rng.randint(1, 6)
        groups = [
            [
                [rng.randrange(-8, 9) / 8] * (rng.randint(1, 4) if by_group else 1)
                for _ in range(rng.randint(1, size) if by_group else size)
            ]
            for _ in range(batch)
        ]
        samples = samples_of(groups)
        if by_group:
            rng.shuffle(samples)
        batches.append((args_of(std=rng.random() < 0.5, size=size, batch=batch), samples))
    return batches


def main() -> None:
    default, by_group = slimes_normalizer(), normalizes_by_group()
    batches = random_batches(3_000, by_group=by_group)
    apart = max(
        abs(theirs - ours)
        for args, samples in batches
        for theirs, ours in zip(default(args, samples), normalize_rewards(args, samples)[1], strict=True)
    )
    # groups of 1 and 3 that fill a batch by count: slime cuts them by position, through the middle of a prompt
    samples, args = samples_of([[[1.0]], [[0.0], [0.0], [0.0]]]), args_of(std=False, size=2, batch=2)
    uneven = {"slime": list(map(float, default(args, samples))), "ours": normalize_rewards(args, samples)[1]}
    report({"uneven": uneven, "by_group": by_group, "batches": len(batches), "apart": apart})


if __name__ == "__main__":
    main()
