"""A client of either engine."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.harness.engine_client import Client
from tests.harness.engine_servers import Server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Client(session, server)
