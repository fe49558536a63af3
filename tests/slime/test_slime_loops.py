"""slime's own training loops on a CPU: everything is real but Megatron, in whose place our local trainer steps."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.slime.support import require_disk_updates, require_slime, run_program

STEPS = 12


@pytest.mark.slime
@pytest.mark.ray
@pytest.mark.parametrize("loop", ["train", "train_async"])
def test_the_reward_rises_in_slimes_own_loop(loop: str, tmp_path: Path):
    root = require_slime("ray", "torch", "transformers", "sglang_router")
    require_disk_updates(root)
    _judge(run_program(root, "loop", tmp_path, loop, str(STEPS), "embedded", timeout_s=420), loop, engines=1)


@pytest.mark.slime
@pytest.mark.ray
@pytest.mark.sglang
@pytest.mark.parametrize("loop", ["train", "train_async"])
def test_the_reward_rises_in_slimes_own_loop_with_a_real_sglang(loop: str, tmp_path: Path):
    root = require_slime("ray", "torch", "transformers", "sglang_router")
    require_disk_updates(root)
    from tests.integration.engine_servers import real_sglang
    from tests.slime.programs.common import make_policy

    with real_sglang(make_policy(tmp_path), tmp_path / "sglang.log", ()) as server:
        _judge(run_program(root, "loop", tmp_path, loop, str(STEPS), server.url, timeout_s=420), loop, engines=1)


def _judge(result: dict[str, Any], loop: str, *, engines: int) -> None:
    rewards = result["rewards"]
    assert len(rewards) == STEPS
    assert fmean(rewards[-4:]) > fmean(rewards[:2]) + 0.3, rewards
    # one weight update before the first batch and one after each; every engine reports the last
    assert result["versions"] == [str(STEPS + 1)] * engines
    assert len(result["weights"]) == STEPS + 1
    assert {f"iter_{STEPS - 1:07d}", "rollout"} <= set(result["checkpoint"])
    if loop == "train":  # on-policy: the trainer's log-probs are the engine's
        assert max(result["logprob_diff_max"]) < 1e-4
    assert all(0.0 <= mean <= 1.0 for mean in result["eval"])
