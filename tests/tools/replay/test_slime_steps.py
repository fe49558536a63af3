"""``agl-slime replay`` on dumps of slime's own code: rewards, advantages, loss and gradient are what slime computed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.harness.slime_programs import require_slime, run_program


@pytest.mark.slime
def test_steps_from_slimes_dumps_equal_what_slime_computed(tmp_path: Path):
    root = require_slime("ray", "torch", "transformers", "sglang_router")
    if not (root / "slime" / "observability").is_dir():
        pytest.skip("this slime has another module of dumps than 624b824")
    from agl_slime.cli.autopsy import AutopsyConfig, autopsy
    from agl_slime.cli.replay import ReplayConfig
    from agl_slime.cli.replay_slime import replay_dump
    from tests.programs.slime.steps import CASES

    slimes = run_program(root, "steps", tmp_path, timeout_s=240)
    assert slimes.keys() == CASES.keys()
    for name, flags in CASES.items():
        config = ReplayConfig(run_dir=tmp_path / name, step=0, model=tmp_path / "policy")
        result = replay_dump(config, slime_flags=flags.split())
        apart = {one.name: one.difference for one in result.comparisons}
        assert None not in apart.values(), name
        assert max(value for value in apart.values() if value is not None) < 1e-5, (name, apart)
        expected = slimes[name]
        for figure in ("loss", "pg_loss", "pg_clipfrac", "ppo_kl", "kl_loss", "tis", "tis_clipfrac", "grad_norm"):
            if figure in expected and not (figure == "grad_norm" and "kl_loss" in expected):
                assert result.again[f"train/{figure}"] == pytest.approx(expected[figure], abs=2e-5), (name, figure)
        recorded = result.recorded["train/train_rollout_logprob_abs_diff"]
        assert recorded == pytest.approx(expected["train_rollout_logprob_abs_diff"], abs=1e-5)
        # without the flags, the rule of rewards follows from the recorded ones
        inferred = {one.name: one.difference for one in replay_dump(config).comparisons}
        assert inferred["normalized rewards"] == pytest.approx(0.0, abs=1e-5), name
    scored = AutopsyConfig(run_dir=tmp_path / "grpo", step=0, model=tmp_path / "policy", samples=12)
    found, case = asyncio.run(autopsy(scored))
    assert len(case.samples) == 12
    assert found.parts["trainer"] < 1e-5
    # slime's manager got log-probs with noise of 0.1
    assert found.first is None, found.sentence
    assert 0.05 < found.parts["sampler"] < 0.11
