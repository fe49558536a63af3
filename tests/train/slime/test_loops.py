"""slime's own training loops on a CPU: everything is real but Megatron, in whose place our local trainer steps."""

import filecmp
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.harness.megatron import require_megatron
from tests.harness.slime_programs import require_slime, run_program

STEPS = 12


@pytest.mark.slime
@pytest.mark.ray
@pytest.mark.parametrize("loop", ["train", "train_async"])
def test_the_reward_rises_in_slimes_own_loop(loop: str, tmp_path: Path):
    root = require_slime("ray", "torch", "transformers", "sglang_router")
    result = run_program(root, "loop", tmp_path, loop, str(STEPS), "embedded", timeout_s=420)
    _judge(result, loop)


@pytest.mark.slime
@pytest.mark.ray
@pytest.mark.sglang
@pytest.mark.parametrize("loop", ["train", "train_async"])
def test_the_reward_rises_in_slimes_own_loop_with_a_real_sglang(loop: str, tmp_path: Path):
    root = require_slime("ray", "torch", "transformers", "sglang_router")
    from tests.harness.engine_servers import real_sglang
    from tests.programs.slime.common import make_policy

    with real_sglang(make_policy(tmp_path), tmp_path / "sglang.log", ()) as server:
        _judge(run_program(root, "loop", tmp_path, loop, str(STEPS), server.url, timeout_s=420), loop)


@pytest.mark.slime
@pytest.mark.ray
def test_actors_of_the_managers_run_the_agent_in_slimes_own_loop(tmp_path: Path):
    """``agl_runners: ray:2`` inside slime's manager, which is an actor of the same Ray; they end with it."""
    root = require_slime("ray", "torch", "transformers", "sglang_router")
    result = run_program(root, "loop", tmp_path, "train", "2", "ray", timeout_s=480)
    assert len(result["rewards"]) == 2
    assert max(result["logprob_diff_max"]) < 1e-4
    assert result["versions"] == ["3"]
    assert result["actors"] == {"Worker": 0, "RolloutManager": 0}
    _judge_evals(result["evals"])  # of make_task


def _judge(result: dict[str, Any], loop: str) -> None:
    rewards = result["rewards"]
    assert len(rewards) == STEPS
    assert fmean(rewards[-4:]) > fmean(rewards[:2]) + 0.3, rewards
    # one weight update before the first batch and one after each; every engine reports the last
    assert result["versions"] == [str(STEPS + 1)]
    assert len(result["weights"]) == STEPS + 1
    assert "rollout" in result["checkpoint"]
    if loop == "train":  # on-policy: the trainer's log-probs are the engine's
        assert max(result["logprob_diff_max"]) < 1e-4
    _judge_evals(result["evals"])


def _judge_evals(evals: list[dict[str, list[float]]]) -> None:
    """``eval_interval`` of our settings' file alone: slime's parser would ask for a data set."""
    assert len(evals) >= 1
    assert {(name, len(rewards)) for one in evals for name, rewards in one.items()} == {("agl", 8)}
    assert all(0.0 <= reward <= 1.0 for one in evals for reward in one["agl"])


TRAINER_STEPS = 8


@pytest.mark.slime
@pytest.mark.ray
@pytest.mark.megatron
@pytest.mark.parametrize("engines", ["embedded", "router"])
def test_the_loop_trains_through_slime(engines: str, tmp_path: Path):
    """With one engine, and through a real sglang-router with two, both of which must get every weight update."""
    require_megatron()
    root = require_slime()
    result = run_program(root, "driver", tmp_path, str(TRAINER_STEPS), engines, timeout_s=420)
    rewards = result["rewards"]
    assert result["code"] == 0
    assert len(rewards) == TRAINER_STEPS
    assert fmean(rewards[-3:]) > fmean(rewards[:2]) + 0.2, rewards
    assert result["versions"] == [str(TRAINER_STEPS + 1)] * (2 if engines == "router" else 1)
    assert all(tokens > 0 for tokens in result["sampled"])  # every worker generated
    assert max(result["logprob_diff_max"]) < 1e-5
    assert result["trained_equals_sampled"]
    assert {f"iter_{TRAINER_STEPS - 1:07d}", "rollout"} <= set(result["checkpoint"])
    assert {"metrics.jsonl", "summary.json", "groups.jsonl", "rollouts.jsonl", "report.html"} <= set(result["files"])
    assert result["page"] == ["finished", []]
    assert result["kept"].count("trained") >= 2 * TRAINER_STEPS  # of each iteration the best and the worst
    if engines == "embedded":
        loaded = run_program(
            root, "driver", tmp_path, str(TRAINER_STEPS + 2), engines, str(tmp_path / "checkpoint"), timeout_s=420
        )
        assert loaded["code"] == 0
        assert loaded["iterations"] == [TRAINER_STEPS + 1, TRAINER_STEPS + 2]
        assert loaded["rewards"][:TRAINER_STEPS] == rewards  # the dump has the steps of both
        assert fmean(loaded["rewards"][TRAINER_STEPS:]) > fmean(rewards[:2]) + 0.2
        assert max(loaded["logprob_diff_max"]) < 1e-5
        last, first = (tmp_path / "dump" / "weights" / f"weight_v{version:06d}" for version in (TRAINER_STEPS + 1, 1))
        assert filecmp.cmpfiles(last, first, ["model-00001-of-00001.safetensors"], shallow=False)[0]
