"""Rollouts that several tests take apart, each sampled once per test run and left unchanged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.tools.forensics.autopsies import Bench


@pytest.fixture(scope="session")
def bench(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    from tests.tools.forensics.autopsies import BASE, OLD, bench_of, noisy

    directory = tmp_path_factory.mktemp("weights")
    shutil.copytree(policy_dir, directory / BASE)
    return bench_of(noisy(policy_dir, directory / OLD, seed=2, share=0.2), policy_dir)


@pytest.fixture(scope="session")
def routed(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A mixture of experts, with the experts that its engine used."""
    from tests.harness.moe_policy import save_moe
    from tests.tools.forensics.autopsies import OLD, bench_of

    save_moe(old := tmp_path_factory.mktemp("routed") / OLD)
    return bench_of(old, policy_dir)
