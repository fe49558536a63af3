"""``python train.py --trainer slime`` with slime's Megatron actors."""

from pathlib import Path
from statistics import fmean

import pytest

from tests.harness.megatron import require_megatron
from tests.harness.slime_programs import require_slime, run_program

STEPS = 8


@pytest.mark.slime
@pytest.mark.ray
@pytest.mark.megatron
@pytest.mark.parametrize("engines", ["embedded", "router"])
def test_the_loop_trains_through_slime(engines: str, tmp_path: Path):
    """With one engine, and through a real sglang-router with two, both of which must get every weight update."""
    require_megatron()
    root = require_slime()
    result = run_program(root, "driver", tmp_path, str(STEPS), engines, timeout_s=420)
    rewards = result["rewards"]
    assert result["code"] == 0
    assert len(rewards) == STEPS
    assert fmean(rewards[-3:]) > fmean(rewards[:2]) + 0.2, rewards
    assert result["versions"] == [str(STEPS + 1)] * (2 if engines == "router" else 1)
    assert all(tokens > 0 for tokens in result["sampled"])  # every worker generated
    assert max(result["logprob_diff_max"]) < 1e-5
    assert result["trained_equals_sampled"]
    assert {f"iter_{STEPS - 1:07d}", "rollout"} <= set(result["checkpoint"])
    assert {"metrics.jsonl", "summary.json", "groups.jsonl", "rollouts.jsonl", "report.html"} <= set(result["files"])
    assert result["page"] == ["finished", []]
    assert result["kept"].count("trained") >= 2 * STEPS  # of each iteration the best and the worst
    if engines == "embedded":
        loaded = run_program(
            root, "driver", tmp_path, str(STEPS + 2), engines, str(tmp_path / "checkpoint"), timeout_s=420
        )
        assert loaded["code"] == 0
        assert loaded["iterations"] == [STEPS + 1, STEPS + 2]
        assert loaded["rewards"][:STEPS] == rewards  # the dump has the steps of both
        assert fmean(loaded["rewards"][STEPS:]) > fmean(rewards[:2]) + 0.2
        assert max(loaded["logprob_diff_max"]) < 1e-5
