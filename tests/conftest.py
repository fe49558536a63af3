"""Fixtures for tests that need the tiny policy or a running engine; both are made once per test run."""

from __future__ import annotations

import functools
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


# `pytest -m smoke`: a minute with one path through every room.
SMOKE = [
    "unit/test_config",
    "unit/test_types",
    "unit/test_backoff",
    "unit/test_prose",
    "unit/test_chat_templates",
    "unit/test_tools_parsers",
    "unit/test_trace_codec",
    "unit/test_trace_segments",
    "unit/test_trace_converter",
    "unit/test_groups_ledger",
    "unit/test_groups_policy",
    "property/test_ledger_properties",
    "property/test_loop_admission",
    "unit/test_store_hooks",
    "unit/test_store_release",
    "unit/test_slime_hooks",
    "unit/test_slime_driver",
    "unit/test_buffer_store",
    "unit/test_trainer_batch",
    "unit/test_trainer_loss",
    "unit/test_report_files",
    "unit/test_report_page",
    "unit/test_rollout_agent_client",
    "integration/test_embedded_engine",
    "integration/test_runner_concurrent",
    "integration/test_multi_turn_agent",
    "integration/test_gateway_chat",
    "integration/test_gateway_protocols",
    "integration/test_datasource_groups",
    "integration/test_loop_interruptions",
    "integration/test_loop_training",
]


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
        if name in SMOKE and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.smoke)


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


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Iterator[None]:
    """httpx, and so the clients of OpenAI and Anthropic, reads the machine's certificates for each client anew, the
    greater part of a test's CPU time; over plain HTTP nobody needs them."""
    try:
        from httpx._transports import default
    except ImportError:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", functools.cache(default.create_ssl_context))
        yield


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
