"""Our batch against the dict that slime's own code makes of the same samples."""

import ast
import copy
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agl_slime.train.local import TrainBatch
from agl_slime.types import Sample, sample_from_fields
from tests.harness.slime_programs import slime_package

pytestmark = pytest.mark.slime


def functions(path: Path, *names: str, **scope: Any) -> dict[str, Any]:
    """The functions or methods of these names in a source file, compiled on their own in ``scope``."""
    definitions = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    assert sorted(node.name for node in definitions) == sorted(names)
    namespace = dict(scope)
    exec(compile(ast.Module(body=list(definitions), type_ignores=[]), str(path), "exec"), namespace)
    return namespace


def slime_convert(samples: list[Sample], **arguments: Any) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    package = slime_package()
    get_source = functions(package / "utils" / "data.py", "get_source", Sample=Sample)["get_source"]
    code = functions(
        package / "ray" / "rollout.py",
        "_post_process_rewards",
        "_convert_samples_to_train_data",
        torch=torch,
        Sample=Sample,
        get_source=get_source,
    )
    args = SimpleNamespace(
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=True,
        reward_key=None,
        n_samples_per_prompt=4,
        rollout_batch_size=len(samples) // 4,
    )
    vars(args).update(arguments)
    manager = SimpleNamespace(
        args=args, custom_reward_post_process_func=None, custom_convert_samples_to_train_data_func=None
    )
    manager._post_process_rewards = lambda samples: code["_post_process_rewards"](manager, samples)
    own_sample = _slime_sample(package)
    theirs = [own_sample(**{**vars(sample), "status": own_sample.Status(sample.status.value)}) for sample in samples]
    return code["_convert_samples_to_train_data"](manager, copy.deepcopy(theirs))


def _slime_sample(package: Path) -> Any:
    """slime's own ``Sample``; nothing of slime stays imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(package.parent))
        try:
            return importlib.import_module("slime.utils.types").Sample
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
                del sys.modules[name]


def full_groups(**fields: Any) -> list[Sample]:
    """Three full groups of four in order: the one case in which slime's grouping by position is right."""
    rewards = [1.0, 0.0, 0.0, 1.0, 0.25, 0.5, 0.75, 0.0, 1.0, 1.0, 1.0, 0.0]
    return [
        sample_from_fields(
            group_index=i // 4,
            index=i,
            rollout_id=i if i % 3 else None,
            tokens=list(range(5 + i)),
            response_length=2 + i % 3,
            loss_mask=[1, 0, 1, 1][: 2 + i % 3] if i % 2 else None,
            rollout_log_probs=[-0.5] * (2 + i % 3),
            reward=reward,
            remove_sample=i == 7,
            status=Sample.Status.TRUNCATED if i == 3 else Sample.Status.COMPLETED,
            metadata={"source_name": "letters"} if i == 2 else {},
            **fields,
        )
        for i, reward in enumerate(rewards)
    ]


def check(ours: TrainBatch, theirs: dict[str, Any]) -> None:
    """That the batch says what slime's dict does."""
    masks = [np.array(mask, dtype=bool) for mask in theirs["loss_masks"]]
    counts = [mask.sum() for mask in masks]
    assert [ids.tolist() for ids in ours.tokens] == theirs["tokens"]
    starts = [len(ids) - n for ids, n in zip(theirs["tokens"], theirs["response_lengths"], strict=True)]
    positions = [(start + np.flatnonzero(mask)).tolist() for start, mask in zip(starts, masks, strict=True)]
    assert [row.tolist() for row in ours.target_positions] == positions
    assert ours.rollout_ids.tolist() == theirs["rollout_ids"]
    assert ours.token_rollout_mask_sums.tolist() == np.repeat(theirs["rollout_mask_sums"], counts).tolist()
    assert ours.token_rewards == pytest.approx(np.repeat(theirs["rewards"], counts), abs=2e-6)  # theirs are float32
    assert ours.token_log_probs is not None
    expected = [np.array(row)[mask] for row, mask in zip(theirs["rollout_log_probs"], masks, strict=True)]
    assert ours.token_log_probs.tolist() == np.concatenate(expected).tolist()


@pytest.mark.parametrize("std", [True, False])
def test_the_batch_is_slimes(std: bool):
    samples = full_groups()
    samples[7].remove_sample = False  # slime's baseline counts samples out of the loss, ours does not
    theirs = slime_convert(samples, grpo_std_normalization=std)
    check(TrainBatch.from_samples(samples, std_normalization=std), theirs)


def test_the_batch_is_slimes_with_rewards_by_name():
    samples = full_groups()
    for sample in samples:
        sample.reward = {"score": sample.reward, "format": 0.0}
    theirs = slime_convert(samples, reward_key="score", rewards_normalization=False)
    check(TrainBatch.from_samples(samples, rewards="score", rewards_normalization=False), theirs)
