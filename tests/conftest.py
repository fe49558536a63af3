"""Fixtures for tests that need the tiny policy or a running engine; both are made once per test run."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engine_servers import MAX_RUNNING

# Before torch and the tokenizers are first imported: the suite shares few cores, and more threads are slower for
# tensors this small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    from tests.harness.examples import quick

    quick()  # before --hypothesis-profile, which pytest loads after this file
except ImportError:  # the environments of clients and of verifiers have no hypothesis
    pass


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """With ``-n 2`` the tests of a file stay in one process, so that what they share (an engine, a run that was
    trained) is made once and not once per process."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadfile"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collecting imports torch, transformers and LiteLLM: a million objects that stay. Without this, each full garbage
    collection walks all of them, a quarter of the time of collecting; what tests make themselves is collected as ever.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Iterator[Any]:
    """pytest-xdist sends reports between processes as UTF-8, in which lone surrogates cannot be; tests that draw them
    have them in their reports."""
    return _as_utf8((yield))


def _as_utf8(value: Any) -> Any:
    if isinstance(value, dict):
        return {_as_utf8(key): _as_utf8(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_as_utf8(item) for item in value)
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy for the lookup task as a checkpoint directory, a copy of its own."""
    pytest.importorskip("torch", reason='serving the tiny policy needs torch: pip install "agl-slime[local]"')
    from agl_slime.cli.demo import LOOKUP_POLICY

    return Path(shutil.copytree(LOOKUP_POLICY, tmp_path_factory.mktemp("policy") / "seed-0"))


@pytest.fixture(scope="session")
def embedded_engine(policy_dir: Path) -> Iterator[str]:
    """URL of the embedded engine that all tests share; it serves ``policy_dir``. A test that pauses it or changes its
    weights leaves it as it was: nothing runs, nothing is paused, and the weights are the policy's."""
    from agl_slime.engine import EmbeddedEngine

    with EmbeddedEngine(policy_dir, max_running_requests=MAX_RUNNING) as engine:
        yield engine.url
