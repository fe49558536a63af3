"""slime's default reward normalisation beside ours, on the same samples.

python -m tests.slime.programs.normalization
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.ray.rollout import RolloutManager

from agl_slime.slime_hooks import normalize_rewards
from agl_slime.types import Sample, sample_from_fields
from tests.slime.support import report

# (name, std normalisation, rewards by group and rollout; a rollout with several entries became several samples)
CASES: list[tuple[str, bool, list[list[list[float]]]]] = [
    ("full groups", True, [[[1.0], [0.0]], [[1.0], [1.0]]]),
    ("groups of 4, 3 and 4, all 5.0", True, [[[5.0]] * 4, [[5.0]] * 3, [[5.0]] * 4]),
    ("groups of 4, 3 and 4, one reward each", True, [[[1.0]] * 4, [[0.0]] * 3, [[0.5]] * 4]),
    ("one rollout of three samples, one of one", False, [[[1.0, 1.0, 1.0], [0.0]]]),
    ("a full batch by count, groups of 1 and 3", False, [[[1.0]], [[0.0], [0.0], [0.0]]]),
    ("a group with a single rollout left", True, [[[1.0]], [[1.0], [0.0]]]),
]


def samples_of(groups: list[list[list[float]]]) -> list[Sample]:
    samples, rollout_id = [], 0
    for group_index, rollouts in enumerate(groups):
        for rewards in rollouts:
            for reward in rewards:
                metadata = {"agl_rollout_id": str(rollout_id)}
                samples.append(
                    sample_from_fields(
                        reward=reward,
                        group_index=group_index,
                        rollout_id=rollout_id,
                        index=len(samples),
                        metadata=metadata,
                    )
                )
            rollout_id += 1
    return samples


def main() -> None:
    manager: Any = RolloutManager.__ray_metadata__.modified_class
    rows = []
    for name, std, groups in CASES:
        samples = samples_of(groups)
        args = Namespace(
            advantage_estimator="grpo",
            rewards_normalization=True,
            grpo_std_normalization=std,
            reward_key=None,
            n_samples_per_prompt=2,
            rollout_batch_size=2,
        )
        default = manager._post_process_rewards(Namespace(args=args, custom_reward_post_process_func=None), samples)[1]
        ours = normalize_rewards(args, samples)[1]
        rows.append(
            {"case": name, "slime": [round(value, 3) for value in default], "ours": [round(value, 3) for value in ours]}
        )
        print(f"| {name} | {rows[-1]['slime']} | {rows[-1]['ours']} |")
    report({"rows": rows})


if __name__ == "__main__":
    main()
