"""Routed experts and nuclei of our Samples beside slime's own Samples of the same engine answers."""

from __future__ import annotations

import pytest

from tests.harness.slime_programs import require_slime, run_program


@pytest.mark.slime
@pytest.mark.slow
def test_samples_with_experts_and_nuclei_equal_slimes():
    root = require_slime("ray", "torch", "pybase64", "pylatexenc", "wandb")
    result = run_program(root, "replay", "2000", "7", timeout_s=600)
    assert result["different"] == []
    assert result["converted"] == result["rollouts"] > 1_800
    assert result["forked"] > 300  # the random agents do fork, and engines do abort
    assert result["resumed"] > 300
    assert result["filed"] > 500  # experts of every second rollout are in files
