"""slime's default normalisation beside ours: where they agree, and where groups are uneven or rollouts became several
samples."""

from __future__ import annotations

import pytest

from tests.harness.slime_programs import require_slime, run_program


@pytest.mark.slime
@pytest.mark.ray
def test_slimes_default_and_ours_on_the_cases_of_its_issues():
    root = require_slime("ray", "torch", "transformers", "sglang_router")
    result = run_program(root, "normalization", timeout_s=180)
    assert result["batches"] == 3_000
    assert result["apart"] < 1e-5  # float32 there, float64 here
    rows = {row["case"]: row for row in result["rows"]}
    if result["by_group"]:
        assert all(row["ours"] == pytest.approx(row["slime"], abs=1e-3) for row in rows.values())
        return
    full = rows["full groups"]
    assert full["ours"] == pytest.approx(full["slime"], abs=1e-3)
    equal = rows["groups of 4, 3 and 4, all 5.0"]
    assert equal["ours"] == [0.0] * 11
    uneven = rows[
        "groups of 4, 3 and 4, one reward each"
    ]  # within a prompt nothing differs, so there is nothing to learn
    assert uneven["ours"] == [0.0] * 11
    assert max(map(abs, uneven["slime"])) > 1.0
    siblings = rows["one rollout of three samples, one of one"]
    assert siblings["ours"] == [0.5, 0.5, 0.5, -0.5]
    assert siblings["slime"] != siblings["ours"]
    by_count = rows["a full batch by count, groups of 1 and 3"]
    assert by_count["ours"] == [0.0] * 4
    assert by_count["slime"] == [0.5, -0.5, 0.0, 0.0]  # cut by position, through the middle of a prompt
    alone = rows["a group with a single rollout left"]
    assert alone["ours"][0] == 0.0
    assert alone["ours"][1:] == pytest.approx([0.707, -0.707], abs=1e-3)
