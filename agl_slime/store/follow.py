"""Following the ends of a store's rollouts: the one way for data sources, gateways and runners."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

import aiohttp

from agl_slime.errors import AglSlimeError
from agl_slime.store.bridge import FINISHED, BridgeStore
from agl_slime.store.client import RemoteStore
from agl_slime.store.feed import FeedPage, FeedPosition
from agl_slime.support.agl import LightningStore, Rollout

logger = logging.getLogger(__name__)


async def follow_feed(
    store: RemoteStore,
    position: FeedPosition,
    take: Callable[[FeedPage, Collection[str]], None],
    catch_up: Callable[[FeedPage], Awaitable[Collection[str]]],
    *,
    only_cancelled: bool = False,
    patience_s: float | None = None,
) -> None:
    """Have each page of a store's feed taken in, for ever; the position moves after that. ``catch_up`` finds what has
    ended unseen, where a page begins beyond the position or comes from another server instance."""
    async for page in store.follow_finished(position, only_cancelled=only_cancelled, patience_s=patience_s):
        found = await catch_up(page) if page["missed"] or position.restarted(page) else ()
        take(page, found)
        position.move(page)


def listen_for_ends(
    store: LightningStore,
    tell: Callable[[str], None],
    *,
    mine: Callable[[], Collection[str]],
    only_cancelled: bool = False,
) -> Callable[[], object]:
    """Call ``tell(rollout_id)`` for each rollout that ends in the store from now on, or is cancelled there; perhaps
    twice, on any thread, and for rollouts of others too. The returned function ends that.

    ``mine`` are the rollouts of this listener, which are looked at after a time in which a store elsewhere could not be
    heard. Stores that tell of nothing are not asked.
    """
    if isinstance(store, BridgeStore):

        def ended(rollout: Rollout) -> None:
            if rollout.status == "cancelled" or not only_cancelled:
                tell(rollout.rollout_id)

        return store.subscribe_finished(ended)
    if not isinstance(store, RemoteStore):
        return lambda: None

    def take(page: FeedPage, found: Collection[str]) -> None:
        for rollout_id in {*page["rollout_ids"], *found}:
            tell(rollout_id)

    async def catch_up(page: FeedPage) -> Collection[str]:
        known = {*mine()}
        statuses = await store.statuses(known) if known else {}
        if only_cancelled:
            return {name for name, status in statuses.items() if status == "cancelled"}
        return known - {name for name, status in statuses.items() if status not in FINISHED}

    async def follow() -> None:
        try:
            await follow_feed(store, FeedPosition(), take, catch_up, only_cancelled=only_cancelled)
        except (AglSlimeError, aiohttp.ClientError) as error:
            what = "cancellations" if only_cancelled else "ends of rollouts"
            logger.warning("%s in the store are not heard of any more: %s", what.capitalize(), error)

    return asyncio.ensure_future(follow()).cancel
