"""``Queue``: claims rollouts of a run over Agent Lightning 1.0's API, plays them and reports their ends. Runs in the
Python that has verifiers."""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from typing import Any, Self

import httpx

from agl_slime.environments.play import EpisodeFailedError, Player
from agl_slime.support.backoff import Backoff
from agl_slime.support.net import shown_url

_MAX_CLAIM = 32  # several workers share a queue
_CANCEL_POLL_S = 2.0
_PATIENCE_S = 60.0
_CALL_TIMEOUT_S = 60.0
_MAX_ERROR_CHARS = 2000
_MAX_LISTED = 1000


class Queue:
    """Plays at most ``limit`` concurrent episodes; polls for rollouts every ``poll_s`` seconds and when one ends."""

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
        """Run without end; raises when the run cannot be reached for a minute."""
        last_check = time.monotonic()
        while True:
            free = min(self._limit - len(self._tasks), _MAX_CLAIM)
            claimed = 0
            if free:
                waiting = await self._call("GET", f"{self._api}?state_in=queuing&limit={free}")
                claimed = sum(await asyncio.gather(*(self._claim(rollout) for rollout in waiting)))
            if time.monotonic() - last_check > _CANCEL_POLL_S:
                last_check = time.monotonic()
                await self._end_cancelled()
            if not claimed:
                self._freed.clear()
                try:
                    await asyncio.wait_for(self._freed.wait(), self._poll_s if free else _CANCEL_POLL_S)
                except TimeoutError:
                    pass

    async def _claim(self, rollout: dict[str, Any]) -> bool:
        rollout_id = rollout["rollout_id"]
        if rollout_id in self._tasks or not await self._patch(rollout_id, state="running", last_attempt_id="0"):
            return False
        task = self._tasks[rollout_id] = asyncio.create_task(self._run(rollout))
        task.add_done_callback(lambda _: (self._tasks.pop(rollout_id, None), self._freed.set()))
        return True

    async def _end_cancelled(self) -> None:
        """Cancel episodes whose rollouts were ended elsewhere, and fail running rollouts without an episode."""
        episodes = dict(self._tasks)
        listed = await self._call("GET", f"{self._api}?state_in=running&limit={_MAX_LISTED}")
        running = {rollout["rollout_id"] for rollout in listed}
        if len(running) == _MAX_LISTED:
            return
        for rollout_id, task in episodes.items():
            if rollout_id not in running:
                task.cancel()
        # claimed by a call whose response was lost
        for rollout_id in running - episodes.keys() - self._tasks.keys():
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
        except Exception as error:  # an error of the environment must only cost its rollout
            traceback.print_exc(file=sys.stderr)
            await self._fail(rollout_id, f"environment: {type(error).__name__}: {error}")
        else:
            await self._patch(rollout_id, state="succeeded")

    async def _fail(self, rollout_id: str, why: str) -> None:
        await self._patch(rollout_id, state="failed", error_message=why[:_MAX_ERROR_CHARS])

    async def _patch(self, rollout_id: str, **status: Any) -> bool:
        """Update a rollout's status. False if another worker has it, or if it has ended or was deleted."""
        try:
            await self._call("PATCH", f"{self._api}/{rollout_id}", {"status": status})
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (404, 409, 410):
                return False
            raise
        return True

    async def _call(self, method: str, url: str, body: Any = None) -> Any:
        async def request() -> Any:
            answer = await self._player.api.request(
                method, url, json=body, headers={"Authorization": f"Bearer {self._player.key}"}, timeout=_CALL_TIMEOUT_S
            )
            answer.raise_for_status()
            return answer.json()

        backoff = Backoff(f"the run at {shown_url(self._player.url)} did not answer", patience_s=_PATIENCE_S)
        return await backoff.run(request, lambda error: isinstance(error, httpx.TransportError))
