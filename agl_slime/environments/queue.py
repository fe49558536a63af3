"""Takes the rollouts of a run and ends them, over Agent Lightning 1.0's API. Runs in the Python that has verifiers."""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from typing import Any, Self

import httpx

from agl_slime.environments.play import EpisodeFailedError, Player
from agl_slime.support.backoff import Backoff

_CLAIMED_AT_ONCE = 32  # several workers share a queue
_RUNNING_LOOK_S = 2.0
_PATIENCE_S = 60.0
_CALL_S = 60.0
_MOST_WORDS = 2000
_MOST_SHOWN = 1000


class Queue:
    """At most ``limit`` episodes at once; looks for new rollouts every ``poll_s`` seconds and whenever one ends."""

    def __init__(self, player: Player, *, limit: int, poll_s: float) -> None:
        self._player, self._limit, self._poll_s = player, limit, poll_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._freed = asyncio.Event()
        self._api = f"{player.url}/api/rollouts"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def follow(self) -> None:
        """For ever; raises when the run cannot be reached for a minute."""
        looked = time.monotonic()
        while True:
            room = min(self._limit - len(self._tasks), _CLAIMED_AT_ONCE)
            taken = 0
            if room:
                waiting = await self._call("GET", f"{self._api}?state_in=queuing&limit={room}")
                begun = await asyncio.gather(*(self._begin(rollout) for rollout in waiting))
                taken = sum(begun)
            if time.monotonic() - looked > _RUNNING_LOOK_S:
                looked = time.monotonic()
                await self._end_cancelled()
            if not taken:
                self._freed.clear()
                try:
                    await asyncio.wait_for(self._freed.wait(), self._poll_s if room else _RUNNING_LOOK_S)
                except TimeoutError:
                    pass

    async def _begin(self, rollout: dict[str, Any]) -> bool:
        rollout_id = rollout["rollout_id"]
        if rollout_id in self._tasks or not await self._patch(rollout_id, state="running", last_attempt_id="0"):
            return False
        task = self._tasks[rollout_id] = asyncio.create_task(self._run(rollout))
        task.add_done_callback(lambda _: (self._tasks.pop(rollout_id, None), self._freed.set()))
        return True

    async def _end_cancelled(self) -> None:
        """Ends episodes whose rollouts have ended without this worker, and rollouts without an episode."""
        mine = dict(self._tasks)
        shown = await self._call("GET", f"{self._api}?state_in=running&limit={_MOST_SHOWN}")
        running = {rollout["rollout_id"] for rollout in shown}
        if len(running) == _MOST_SHOWN:
            return
        for rollout_id, task in mine.items():
            if rollout_id not in running:
                task.cancel()
        # begun by a call whose answer was lost
        for rollout_id in running - mine.keys() - self._tasks.keys():
            await self._fail(rollout_id, "the episode is not running")

    async def _run(self, rollout: dict[str, Any]) -> None:
        rollout_id, mode = rollout["rollout_id"], "train" if rollout["is_train"] else "val"
        address = f"{self._player.url}/proxy/rollout/{rollout_id}/attempt/0/mode/{mode}/openai/v1"
        limit = rollout["config"].get("timeout_seconds") or None
        try:
            episode = self._player.play(rollout["input"], address=address, name=rollout_id)
            rewards = await asyncio.wait_for(episode, limit)
            for reward in rewards:
                event = {"event_type": "reward", "data": reward}
                await self._call("POST", f"{self._api}/{rollout_id}/attempt/0/events", event)
        except TimeoutError:
            await self._fail(rollout_id, f"timed out after {limit} s")
        except EpisodeFailedError as error:
            await self._fail(rollout_id, str(error))
        except httpx.HTTPStatusError as error:
            await self._fail(rollout_id, f"environment: RewardRefused: {error.response.text}")
        except Exception as error:  # a fault of the environment costs its own rollout
            traceback.print_exc(file=sys.stderr)
            await self._fail(rollout_id, f"environment: {type(error).__name__}: {error}")
        else:
            await self._patch(rollout_id, state="succeeded")

    async def _fail(self, rollout_id: str, why: str) -> None:
        await self._patch(rollout_id, state="failed", error_message=why[:_MOST_WORDS])

    async def _patch(self, rollout_id: str, **status: Any) -> bool:
        """False where the rollout is another's, has ended or is gone."""
        try:
            await self._call("PATCH", f"{self._api}/{rollout_id}", {"status": status})
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (404, 409, 410):
                return False
            raise
        return True

    async def _call(self, method: str, url: str, body: Any = None) -> Any:
        async def once() -> Any:
            answer = await self._player.api.request(
                method, url, json=body, headers={"Authorization": f"Bearer {self._player.key}"}, timeout=_CALL_S
            )
            answer.raise_for_status()
            return answer.json()

        backoff = Backoff(f"the run at {self._player.url} did not answer", patience_s=_PATIENCE_S)
        return await backoff.run(once, lambda error: isinstance(error, httpx.TransportError))
