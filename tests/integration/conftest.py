"""What integration tests share: the engines, each started once per test run, and servers that start and end quickly."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.integration.engine_client import Client
from tests.integration.engine_servers import Server, real_sglang

if TYPE_CHECKING:
    from tests.harness.autopsies import Bench


@pytest.fixture(scope="session", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def server(
    request: pytest.FixtureRequest, policy_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The embedded engine and, under the marker ``sglang``, a real SGLang serving the same checkpoint. To be left as
    ``embedded_engine``."""
    if request.param == "embedded":
        yield Server(request.getfixturevalue("embedded_engine"), policy_dir, real=False)
    else:
        with real_sglang(policy_dir, tmp_path_factory.mktemp("sglang") / "server.log") as server:
            yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Client(session, server)


@pytest.fixture(scope="session")
def bench(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Rollouts of the tiny policy for an autopsy. To be left as it is."""
    from tests.harness.autopsies import dense_bench

    return dense_bench(policy_dir, tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="session")
def routed(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """As ``bench``, of a mixture of experts."""
    from tests.harness.autopsies import routed_bench

    return routed_bench(policy_dir, tmp_path_factory.mktemp("routed"))


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


@pytest.fixture
def fresh_sessions() -> Iterator[None]:
    """An agent rollout that remembers nothing of other tests."""
    from agl_slime.buffer import agent_rollout

    agent_rollout.sessions.clear()
    yield
    agent_rollout.sessions.clear()


class _AsyncioWithShortSleeps:
    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(delay: float) -> None:
        await asyncio.sleep(min(delay, 0.01))


@pytest.fixture(scope="session", autouse=True)
def servers_that_look_often() -> Iterator[None]:
    """uvicorn and Agent Lightning's launcher of it look every 0.1 s whether a server has started or is to end: 0.3 s
    for each store that a test serves. Here they look every 0.01 s."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("uvicorn.server", "agentlightning.utils.server_launcher"):
            if name in sys.modules:
                patch.setattr(sys.modules[name], "asyncio", _AsyncioWithShortSleeps())
        yield
