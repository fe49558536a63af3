"""The store service and its feed, over real HTTP."""

from __future__ import annotations

import asyncio
import time

import pytest

from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import RemoteStore
from agl_slime.store.feed import FeedPosition, FinishedFeed
from agl_slime.store.server import StoreService
from agl_slime.support.agl import LLM, EnqueueRolloutRequest, LightningStore


async def _finish(store: LightningStore, n: int) -> list[str]:
    await store.add_resources({"main_llm": LLM(endpoint="http://127.0.0.1:1", model="m")})
    rollouts = await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input={"n": i}, mode="train") for i in range(n)]
    )
    for rollout in rollouts:
        attempted = await store.start_attempt(rollout.rollout_id)
        await store.update_attempt(rollout.rollout_id, attempted.attempt.attempt_id, status="succeeded")
    return [rollout.rollout_id for rollout in rollouts]


async def _take(store: RemoteStore, position: FeedPosition, n: int) -> list[str]:
    taken: list[str] = []
    async for page in store.follow_finished(position, wait_s=5):
        position.move(page)
        taken += page["rollout_ids"]
        if len(taken) >= n:
            break
    return taken


async def test_follower_gets_each_completion_once_in_order():
    with StoreService(store=(store := BridgeStore())) as service:
        remote, position = RemoteStore(service.url), FeedPosition()
        before = await _finish(store, 3)
        assert await _take(remote, position, 3) == before
        waiting = asyncio.create_task(_take(remote, position, 2))
        after = await _finish(remote, 2)
        assert await asyncio.wait_for(waiting, 10) == after
        await remote.close()


async def test_follower_resumes_from_a_saved_position():
    with StoreService(store=(store := BridgeStore())) as service:
        ended = await _finish(store, 5)
        remote = RemoteStore(service.url)
        assert await _take(remote, FeedPosition(service.feed.server_instance_id, 3), 2) == ended[3:]
        await remote.close()


async def test_new_server_instance_is_recognized_by_its_id():
    with StoreService(store=(store := BridgeStore())) as service:
        await _finish(store, 1)
        remote = RemoteStore(service.url)
        async for page in remote.follow_finished(FeedPosition("an earlier server", 40), wait_s=5):
            assert page["server_instance_id"] == service.feed.server_instance_id
            assert len(page["rollout_ids"]) == page["last"] == 1
            break
        await remote.close()


async def test_follower_behind_the_window_gets_kept_ids_and_a_missed_flag():
    store = BridgeStore()
    feed = FinishedFeed(window=4)
    store.subscribe_finished(feed.append)
    ended = await _finish(store, 10)
    page = feed.read(FeedPosition(feed.server_instance_id, 2))
    assert page["missed"]
    assert page["rollout_ids"] == ended[6:]
    assert not feed.read(FeedPosition(feed.server_instance_id, 6))["missed"]


async def test_memory_and_cost_of_following_do_not_grow_with_the_store():
    store = BridgeStore()
    feed = FinishedFeed(window=100)
    rollout = (await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={}, mode="train")]))[0]
    for number in range(20_000):
        feed.append(rollout.model_copy(update={"rollout_id": f"ro-{number}"}))
    began = time.perf_counter()
    for _ in range(1_000):
        feed.read(FeedPosition(feed.server_instance_id, 19_999))
    assert len(feed._ids) == 100
    assert (time.perf_counter() - began) / 1_000 < 1e-3  # microseconds in fact: it reads the tail, not the history


async def test_a_token_keeps_everyone_else_out():
    with StoreService(store=BridgeStore(), token="secret") as service:
        remote = RemoteStore(service.url, token="secret")
        assert len(await _finish(remote, 1)) == 1
        await remote.close()
        stranger = RemoteStore(service.url, retry_delays=(), health_retry_delays=())
        with pytest.raises(DataSourceError, match="AGL_SLIME_STORE_TOKEN"):
            await _take(stranger, FeedPosition(), 1)
        with pytest.raises(Exception, match="401"):
            await stranger.enqueue_rollout(input={})
        await stranger.close()


def test_an_address_that_others_reach_needs_a_token():
    with pytest.raises(ConfigError, match="AGL_SLIME_STORE_TOKEN"):
        StoreService(store=BridgeStore(), host="0.0.0.0")


async def test_stock_store_without_the_feed_is_an_error():
    from agentlightning.utils.server_launcher import PythonServerLauncherArgs

    from agl_slime.support.agl import LightningStoreServer

    server = LightningStoreServer(
        BridgeStore(),
        launcher_args=PythonServerLauncherArgs(host="127.0.0.1", access_host="127.0.0.1", launch_mode="thread"),
    )
    await server.start()
    try:
        remote = RemoteStore(server.endpoint)
        with pytest.raises(DataSourceError, match="StoreService"):
            await _take(remote, FeedPosition(), 1)
        await remote.close()
    finally:
        await server.stop()
