"""Follow the ends of a store's rollouts, for data sources, gateways and runners."""

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
    """Call ``take`` with each page of a store's feed, without end, and move the position behind it. ``catch_up``
    returns the rollouts that may have ended unseen, if a page has missed ends or comes from another server instance."""
    async for page in store.follow_finished(position, only_cancelled=only_cancelled, patience_s=patience_s):
        missed = await catch_up(page) if page["missed"] or position.restarted(page) else ()
        take(page, missed)
        position.move(page)


def listen_for_ends(
    store: LightningStore,
    notify: Callable[[str], None],
    *,
    mine: Callable[[], Collection[str]],
    only_cancelled: bool = False,
) -> Callable[[], object]:
    """Call ``notify(rollout_id)`` for each rollout that ends in the store from now on, or is cancelled there. Calls may
    repeat, come on any thread, and concern other listeners' rollouts. The returned function unsubscribes.

    ``mine`` returns this listener's rollouts, whose status is looked up after an interruption of a remote store's feed.
    Does nothing for stores without notifications.
    """
    if isinstance(store, BridgeStore):

        def ended(rollout: Rollout) -> None:
            if rollout.status == "cancelled" or not only_cancelled:
                notify(rollout.rollout_id)

        return store.subscribe_finished(ended)
    if not isinstance(store, RemoteStore):
        return lambda: None

    def take(page: FeedPage, missed: Collection[str]) -> None:
        for rollout_id in {*page["rollout_ids"], *missed}:
            notify(rollout_id)

    async def catch_up(page: FeedPage) -> Collection[str]:
        ids = {*mine()}
        statuses = await store.statuses(ids) if ids else {}
        if only_cancelled:
            return {name for name, status in statuses.items() if status == "cancelled"}
        return ids - {name for name, status in statuses.items() if status not in FINISHED}

    async def follow() -> None:
        try:
            await follow_feed(store, FeedPosition(), take, catch_up, only_cancelled=only_cancelled)
        except (AglSlimeError, aiohttp.ClientError) as error:
            kind = "cancellations" if only_cancelled else "ends of rollouts"
            logger.warning("The store's %s are no longer followed: %s", kind, error)

    return asyncio.ensure_future(follow()).cancel
