"""Fixtures of several rooms: the tiny policy and running engines, once per test run, and a browser."""

import asyncio
import functools
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.browser import browser, page
from tests.harness.engine_servers import MAX_RUNNING, Server, real_sglang

__all__ = ["browser", "page"]  # fixtures

# Before the import of torch and tokenizers: with few cores and small tensors, more threads are slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")  # deterministic engines also run in threads of this process

try:
    from tests.harness.examples import quick

    quick()  # before --hypothesis-profile, which pytest loads after this file
except ImportError:  # the environments of clients and of verifiers have no hypothesis
    pass


# `pytest -m smoke`: a minute with one path through every room.
_FILES = """
    cli/test_config train/slime/test_types support/test_backoff house/test_prose tokens/test_chat_templates
    tokens/test_tools_parsers tokens/test_codec tokens/test_forks tokens/test_converter data/test_ledger
    data/test_policy loop/test_admission store/test_hooks
    train/slime/test_source_release train/slime/test_hooks train/slime/test_driver buffer/test_store
    train/local/test_batch train/local/test_loss report/test_metrics report/test_page agent/test_client
    engine/test_embedded_engine runner/test_concurrent agent/test_multi_turn_agent gateway/test_chat
    gateway/test_protocols data/test_source_groups loop/test_interruptions loop/test_training
"""
SMOKE = _FILES.split()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
        if name in SMOKE and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.smoke)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """With ``-n 2`` the tests of a file stay in one process, which makes their engine or trained run once."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadfile"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keeps the imported packages, a million objects, out of garbage collections; objects of tests are collected."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Iterator[Any]:
    """pytest-xdist sends reports as UTF-8, which has no lone surrogates; tests that draw them report them."""
    return _as_utf8((yield))


def _as_utf8(value: Any) -> Any:
    if isinstance(value, dict):
        return {_as_utf8(key): _as_utf8(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_as_utf8(item) for item in value)
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


class _AsyncioWithShortSleeps:
    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(delay: float) -> None:
        await asyncio.sleep(min(delay, 0.01))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Shortcuts in other packages, once they are imported: uvicorn and Agent Lightning's launcher of it poll each 0.1 s
    for the start and end of a server, and httpx reads the machine's certificates for each client."""
    for name in ("uvicorn.server", "agentlightning.utils.server_launcher"):
        if name in sys.modules:
            sys.modules[name].asyncio = _AsyncioWithShortSleeps()  # type: ignore[attr-defined]
    transports: Any = sys.modules.get("httpx._transports.default")
    if transports is not None and not hasattr(transports.create_ssl_context, "cache_info"):
        transports.create_ssl_context = functools.cache(transports.create_ssl_context)


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny policy for the lookup task, as a checkpoint directory."""
    pytest.importorskip("torch", reason='serving the tiny policy needs torch: pip install "agl-slime[local]"')
    from agl_slime.cli.demo import LOOKUP_POLICY

    return Path(shutil.copytree(LOOKUP_POLICY, tmp_path_factory.mktemp("policy") / "seed-0"))


@pytest.fixture(scope="session")
def embedded_engine(policy_dir: Path) -> Iterator[str]:
    """URL of the embedded engine that all tests share; it serves ``policy_dir``. Each test leaves it idle, unpaused and
    with the policy's weights."""
    from agl_slime.engine import EmbeddedEngine

    with EmbeddedEngine(policy_dir, max_running_requests=MAX_RUNNING) as engine:
        yield engine.url


@pytest.fixture(scope="session", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def server(
    request: pytest.FixtureRequest, policy_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The embedded engine and, under the marker ``sglang``, a real SGLang with the same checkpoint; each test leaves it
    as ``embedded_engine``."""
    if request.param == "embedded":
        yield Server(request.getfixturevalue("embedded_engine"), policy_dir, real=False)
    else:
        with real_sglang(policy_dir, tmp_path_factory.mktemp("sglang") / "server.log") as server:
            yield server


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.harness.trainer_policy import save_policy  # imports torch

    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def tokenizer(policy_dir: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(policy_dir)


@pytest.fixture(scope="module")
def model(policy_dir: Path) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(policy_dir).eval()
