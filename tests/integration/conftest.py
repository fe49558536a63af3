"""The engines that integration tests share, each started once per test run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.engine_servers import Server, real_sglang


@pytest.fixture(scope="session", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def server(request: pytest.FixtureRequest, policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded engine and, under the marker ``sglang``, a real SGLang serving the same checkpoint. To be left as ``embedded_engine``."""
    if request.param == "embedded":
        yield Server(request.getfixturevalue("embedded_engine"), policy_dir, real=False)
    else:
        with real_sglang(policy_dir, tmp_path_factory.mktemp("sglang") / "server.log") as server:
            yield server
