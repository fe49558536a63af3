"""The policy that tests of the trainer begin from, and samples of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agl_slime.types import Sample


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.harness.trainer_policy import save_policy  # imports torch

    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    from tests.harness.trainer_policy import make_model, make_samples

    return make_samples(make_model())
