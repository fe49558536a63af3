"""Generated requests, good and bad, against the buffer's own OpenAPI description. Needs the extra ``peers``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from agl_slime.buffer.models import openapi_description
from agl_slime.buffer.server import BufferServer
from tests.buffer.items import add_generator, settings_for
from tests.harness.examples import examples

schemathesis = pytest.importorskip("schemathesis", reason="needs the extra [peers]: schemathesis")
from hypothesis import HealthCheck, settings  # noqa: E402

schema = schemathesis.openapi.from_dict(openapi_description())


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server on a thread of its own, as the generated tests are synchronous."""
    directory = tmp_path_factory.mktemp("buffer")
    add_generator(directory, "sums", 'TASK_TYPE = "sums"\ndef run_rollout(data):\n    pass\n')
    urls: list[str] = []
    ready, ended = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with BufferServer(settings=settings_for(directory)) as server:
            urls.append(server.url)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(20)
    yield urls[0]
    loop.call_soon_threadsafe(ended.set)
    thread.join(20)
    loop.close()


@schema.parametrize()
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_matches_the_openapi_document(case: Any, url: str) -> None:
    case.call_and_validate(base_url=url, timeout=20)
