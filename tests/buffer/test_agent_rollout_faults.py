"""What ends the agent rollout's wait for a batch, each time with its reason."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from agl_slime.buffer import session
from agl_slime.buffer.server import BufferServer
from agl_slime.errors import ConfigError, DataSourceError
from tests.buffer.items import add_generator, make_item, settings_for
from tests.harness.agent_rollout import GENERATOR, DataBuffer, args_for, buffer_that, call

pytestmark = pytest.mark.usefixtures("fresh_sessions")


async def test_a_generator_that_ends_too_early_ends_the_wait_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "CHECK_RUN_S", 0.1)
    add_generator(
        tmp_path, "sums", GENERATOR.replace("skip = list", "raise RuntimeError('no engine')\n        skip = list")
    )
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        with pytest.raises(DataSourceError, match=r"has ended \(failed\)(.|\n)*RuntimeError: no engine"):
            await call(args_for(server.url, tmp_path), 0, DataBuffer())


async def test_items_that_no_request_can_make_good_end_the_wait(tmp_path):
    """A buffer that returns items without messages would return them to each retry, forever."""
    item = make_item("1", tokens=[1, 2], response_length=1)
    del item["messages"]

    async def get(request: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": "", "data": {"data": [item], "meta_info": {}}})

    async with buffer_that(get) as url:
        args = args_for(url, tmp_path, fetch_trajectory_retry_times=-1)
        with pytest.raises(DataSourceError, match="messages"):
            await asyncio.wait_for(call(args, 0, DataBuffer()), 30)


async def test_groups_of_another_size_are_an_error(tmp_path):
    items = [
        make_item("1", "a", tokens=[1, 2], response_length=1),
        make_item("2", "b", tokens=[1, 2], response_length=1),
    ]

    async def get(request: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": "", "data": {"data": items, "meta_info": {}}})

    async with buffer_that(get) as url:
        with pytest.raises(DataSourceError, match="n_samples_per_prompt 2 is not the generator's group size"):
            await call(args_for(url, tmp_path), 0, DataBuffer())


async def test_failed_requests_are_retried_then_raised(tmp_path):
    requests = 0

    async def get(request: web.Request) -> web.Response:
        nonlocal requests
        requests += 1
        return web.Response(status=500, text="broken")

    async with buffer_that(get) as url:
        with pytest.raises(DataSourceError, match="4 tries"):
            await call(args_for(url, tmp_path, fetch_trajectory_retry_times=3), 0, DataBuffer())
    assert requests == 4


async def test_refused_start_is_raised_at_once(tmp_path):
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        with pytest.raises(ConfigError, match="task_type 'sums'"):
            await call(args_for(server.url, tmp_path), 0, DataBuffer())
