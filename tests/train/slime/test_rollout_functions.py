"""slime's own rollout functions over our data source: the default one and the fully-async one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.slime_programs import require_slime, run_program


@pytest.mark.slime
@pytest.mark.ray
def test_slimes_own_rollout_functions_get_full_groups_of_finished_samples(tmp_path: Path):
    root = require_slime("ray", "torch", "transformers", "sglang_router")
    result = run_program(root, "default_rollout", tmp_path, timeout_s=240)
    expected = {"groups": [4, 4, 4], "sizes": [4], "statuses": ["completed"], "distinct": True, "rewards_set": True}
    assert result == {"default": expected, "fully_async": expected}
