"""The store service and its feed, over real HTTP."""

from __future__ import annotations

import asyncio

import pytest

from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import RemoteStore
from agl_slime.store.feed import FeedPosition, FinishedFeed
from agl_slime.store.server import StoreService
from tests.harness.stores import execute


async def take(store: RemoteStore, position: FeedPosition, n: int) -> list[str]:
    ids: list[str] = []
    async for page in store.follow_finished(position, wait_s=5):
        position.move(page)
        ids += page["rollout_ids"]
        if len(ids) >= n:
            break
    return ids


async def test_follower_gets_each_completion_once_in_order_and_resumes():
    with StoreService(store=(store := BridgeStore())) as service:
        remote, position = RemoteStore(service.url), FeedPosition()
        first = await execute(store, 3)
        assert await take(remote, position, 3) == first
        waiting = asyncio.create_task(take(remote, position, 2))
        second = await execute(remote, 2)
        assert await asyncio.wait_for(waiting, 10) == second
        assert await take(remote, FeedPosition(service.feed.server_instance_id, 2), 3) == [*first, *second][2:]
        assert await take(remote, FeedPosition("an earlier server", 40), 5) == [*first, *second]
        await remote.close()


async def test_follower_behind_the_window_gets_kept_ids_and_a_missed_flag():
    store = BridgeStore()
    feed = FinishedFeed(window=4)
    store.subscribe_finished(feed.append)
    ids = await execute(store, 10)
    page = feed.read(FeedPosition(feed.server_instance_id, 2))
    assert (page["missed"], page["rollout_ids"]) == (True, ids[6:])
    assert not feed.read(FeedPosition(feed.server_instance_id, 6))["missed"]
    assert feed.read(FeedPosition("an earlier server", 40))["missed"]
    assert len(feed._ids) == len(feed._id_set) == 4


async def test_a_token_keeps_everyone_else_out():
    with StoreService(store=BridgeStore(), token="secret") as service:
        remote = RemoteStore(service.url, token="secret")
        assert len(await execute(remote, 1)) == 1
        await remote.close()
        stranger = RemoteStore(service.url, retry_delays=(), health_retry_delays=())
        with pytest.raises(DataSourceError, match="AGL_SLIME_STORE_TOKEN"):
            await take(stranger, FeedPosition(), 1)
        with pytest.raises(Exception, match="401"):
            await stranger.enqueue_rollout(input={})
        await stranger.close()
    with pytest.raises(ConfigError, match="AGL_SLIME_STORE_TOKEN"):
        StoreService(store=BridgeStore(), host="0.0.0.0")


async def test_stock_store_without_the_feed_is_an_error():
    from agentlightning.utils.server_launcher import PythonServerLauncherArgs

    from agl_slime.support.agl import LightningStoreServer

    arguments = PythonServerLauncherArgs(host="127.0.0.1", access_host="127.0.0.1", launch_mode="thread")
    server = LightningStoreServer(BridgeStore(), launcher_args=arguments)
    await server.start()
    try:
        remote = RemoteStore(server.endpoint)
        with pytest.raises(DataSourceError, match="StoreService"):
            await take(remote, FeedPosition(), 1)
        await remote.close()
    finally:
        await server.stop()
