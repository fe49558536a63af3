"""Rollouts that several tests take apart, each sampled once per test run and left unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.tools.autopsy.autopsies import Bench


@pytest.fixture(scope="session")
def bench(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    from tests.tools.autopsy.autopsies import dense_bench

    return dense_bench(policy_dir, tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="session")
def routed(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    from tests.tools.autopsy.autopsies import routed_bench

    return routed_bench(policy_dir, tmp_path_factory.mktemp("routed"))
