"""How a runner hears that somebody has cancelled a rollout in the store, wherever the store is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import aiohttp

from agl_slime.errors import DataSourceError
from agl_slime.store.feed import FeedPosition
from agl_slime.support.agl import LightningStore

logger = logging.getLogger(__name__)


def listen_for_cancellations(
    store: LightningStore, *, cancel: Callable[[str], None], claimed: Callable[[], set[str]]
) -> Callable[[], object]:
    """Call ``cancel(rollout_id)`` for each rollout that is cancelled in the store from now on, perhaps twice, on any
    thread, and for rollouts of other runners too; the returned function ends that.

    ``claimed`` are the ids of this runner's own, which are looked at after a time in which a store elsewhere could not
    be heard. Stores that tell of no cancellations are not asked.
    """
    subscribe: Any = getattr(store, "subscribe_finished", None)
    if subscribe is not None:
        return subscribe(lambda rollout: cancel(rollout.rollout_id) if rollout.status == "cancelled" else None)
    if not hasattr(store, "follow_cancelled"):
        return lambda: None
    return asyncio.create_task(_follow(store, cancel, claimed), name="agl-slime-cancellations").cancel


async def _follow(store: Any, cancel: Callable[[str], None], claimed: Callable[[], set[str]]) -> None:
    position = FeedPosition()
    try:
        async for page in store.follow_cancelled(position):
            ids = set(page["rollout_ids"])
            # another instance of the server: what was cancelled between the two is in neither's feed
            if page["missed"] or position.instance_id not in ("", page["instance_id"]):
                try:
                    if mine := claimed():
                        found = await store.query_rollouts(rollout_id_in=sorted(mine), status_in=["cancelled"])
                        ids.update(rollout.rollout_id for rollout in found)
                except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                    logger.debug("The store did not say what was cancelled (%s); asking again.", error)
                    continue  # the position stays, so the same page comes again
            for rollout_id in ids:
                cancel(rollout_id)
            position.instance_id, position.after = page["instance_id"], page["last"]
    except DataSourceError as error:
        logger.info("Rollouts that are cancelled in the store run to their ends here: %s", error)
    except Exception as error:
        logger.error("This runner does not hear of cancelled rollouts any more: %s", error, exc_info=error)
