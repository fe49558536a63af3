"""Samples of the policy for tests of the trainer."""

import pytest

from agl_slime.types import Sample


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    from tests.harness.trainer_policy import make_model, make_samples

    return make_samples(make_model())
