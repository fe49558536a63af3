"""slime's RolloutManager under real Ray, and its own rollout functions, over our data source."""

from pathlib import Path

import pytest

from tests.harness.slime_programs import require_slime, run_program

# the columns of a training rank in every version
_KEYS = """tokens response_lengths rewards truncated loss_masks sample_indices rollout_log_probs raw_reward
    total_lengths partition"""


@pytest.mark.slime
@pytest.mark.ray
def test_ten_batches_a_checkpoint_and_another_manager(tmp_path: Path):
    root = require_slime("ray", "torch", "transformers", "sglang_router")
    result = run_program(root, "manager", tmp_path, timeout_s=420)
    assert set(result["keys"]) >= {*_KEYS.split()}
    assert result["samples"] == result["rollouts"] == [16] * 10
    assert result["lengths_match"]
    # tokens, masks, log-probs, raw rewards and advantages, row by row, against the converter and the normaliser on the
    # store's own spans
    assert result["mismatches"] == 0, result["example"]
    assert result["trained"] == result["finished"] == 160
    assert result["trained_twice"] == 0
    # the new manager delivers nothing from before the checkpoint, and all later rollouts once more
    assert result["twice_over_the_checkpoint"] == 0
    assert result["delivered_again"] == result["after_the_checkpoint"] == 80


@pytest.mark.slime
@pytest.mark.ray
def test_slimes_own_rollout_functions_get_full_groups_of_finished_samples(tmp_path: Path):
    root = require_slime("ray", "torch", "transformers", "sglang_router")
    result = run_program(root, "default_rollout", tmp_path, timeout_s=240)
    expected = {"groups": [4, 4, 4], "sizes": [4], "statuses": ["completed"], "distinct": True, "rewards_set": True}
    assert result == {"default": expected, "fully_async": expected}
