"""slime's default normalisation beside ours: equal where every group is full, apart where groups are uneven."""

from __future__ import annotations

import pytest

from tests.harness.slime_programs import require_slime, run_program


@pytest.mark.slime
@pytest.mark.ray
def test_slimes_default_and_ours_are_equal_on_full_groups():
    root = require_slime("ray", "torch", "transformers", "sglang_router")
    result = run_program(root, "normalization", timeout_s=180)
    assert result["batches"] == 3_000
    assert result["apart"] < 1e-5  # float32 there, float64 here
    assert result["uneven"]["ours"] == [0.0] * 4
    if not result["by_group"]:
        assert result["uneven"]["slime"] == [0.5, -0.5, 0.0, 0.0]
