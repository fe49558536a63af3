"""Samples with images beside what slime's own example makes of the same conversations and engine answers."""

from __future__ import annotations

import pytest

from tests.harness.slime_programs import require_slime, run_program


@pytest.mark.slime
@pytest.mark.slow
def test_samples_with_images_equal_those_of_slimes_example():
    root = require_slime("ray", "torch", "PIL", "pybase64", "pylatexenc", "wandb")
    result = run_program(root, "images", "300", "11", timeout_s=300)
    assert result["different"] == []
    assert result["n_different"] == 0
    assert result["rollouts"] == result["converted"] == 300
    assert result["turns"] > 600
    assert result["images"] > 600
