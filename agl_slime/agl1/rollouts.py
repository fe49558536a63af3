"""The rollouts of a store as Agent Lightning 1.0 knows them: its states, its one attempt, its order of ends.

Nothing is kept twice: a rollout is the store's, what a controller says of it beside its state stands in the metadata of
the attempt, and the order of ends is the store's feed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from agl_slime.agl1.schemas import (
    CONFIG_KEY,
    NEXT,
    TERMINAL,
    Config,
    Create,
    Metadata,
    RolloutView,
    State,
    Status,
    StatusPatch,
)
from agl_slime.errors import GatewayRequestError
from agl_slime.store.bridge import FINISHED, RUNNING, BridgeStore
from agl_slime.store.feed import FinishedFeed
from agl_slime.support.agl import Attempt, EnqueueRolloutRequest, Rollout, RolloutConfig
from agl_slime.support.http import json_bytes
from agl_slime.support.threads import run_in_thread

T = TypeVar("T")

logger = logging.getLogger(__name__)

CONTROLLER = "agl-controller"
"""What the store calls whoever runs these rollouts, followed by the controller's name if it has one."""

_TOLD = "agl1"  # in an attempt's metadata: what its controller said of it
_DELETED_KEPT = 10_000
_CREATED_AT_ONCE = 100  # some milliseconds, between which the loop serves others
_WRITTEN_AT_ONCE = 20  # rollouts of a page; more are written in a thread
_MOST_LISTED_BYTES = 64 * 2**20
NOT_SHOWABLE = "it cannot be shown to a controller"

# How a controller words an end, and the reason that is counted.
_REASONS = (
    ("timed out", "timeout"),
    ("DeadlineExceeded", "timeout"),
    ("exited with code", "agent_failed"),
    ("is not running", "agent_lost"),
    ("Job disappeared", "agent_lost"),
    ("shutdown", "controller_shutdown"),
    ("spawn failed", "agent_not_started"),
    ("Invalid Job spec", "agent_not_started"),
    ("Job failed", "agent_failed"),
    (NOT_SHOWABLE, "not_showable"),
)

# How an environment's worker does, with the type of the error.
_TYPED = re.compile(r"environment: ([A-Za-z_][A-Za-z0-9_]{0,63}):")


class Rollouts:
    """The rollouts of ``store``. ``config`` is what its controller runs, for those that were created without one."""

    def __init__(self, store: BridgeStore, *, config: Config) -> None:
        self._store = store
        self._config = config
        self._feed = FinishedFeed()
        self._deleted: OrderedDict[str, None] = OrderedDict()
        self._gone: set[str] = set()
        self._unsubscribe: Callable[[], None] = lambda: None
        self.not_shown = 0
        """How many rollouts a listing has left out, for they cannot be shown."""

    def start(self) -> None:
        self._unsubscribe = self._store.subscribe_finished(self._feed.append)

    def stop(self) -> None:
        self._unsubscribe()

    async def create(self, wanted: Sequence[Create]) -> orjson.Fragment:
        """The JSON of the new rollouts. One that names an id which is known gives back the rollout that is there."""
        made: list[Rollout] = []
        for first in range(0, len(wanted), _CREATED_AT_ONCE):
            made += [await self._created(one) for one in wanted[first : first + _CREATED_AT_ONCE]]
            await asyncio.sleep(0)
        views = await _off_loop(lambda: [orjson.Fragment(self._json_of(rollout)) for rollout in made], len(made))
        return orjson.Fragment(orjson.dumps(views))

    async def _created(self, wanted: Create) -> Rollout:
        if wanted.rollout_id is not None and (known := await self._store.get_rollout_by_id(wanted.rollout_id)):
            return known
        config = wanted.config or self._config
        metadata = wanted.metadata.model_dump(exclude_unset=True) if wanted.metadata is not None else {}
        metadata |= {CONFIG_KEY: config.model_dump()} if wanted.config else {}
        request = EnqueueRolloutRequest(
            input=wanted.input,
            mode="train" if wanted.is_train else "val",
            config=RolloutConfig(timeout_seconds=config.timeout_seconds or None),
            metadata=metadata,
        )
        return await self._store.enqueue_as(request, rollout_id=wanted.rollout_id)

    async def list(
        self, states: frozenset[State], limit: int, *, by: str = ""
    ) -> tuple[orjson.Fragment, Sequence[str]]:
        """The JSON of the rollouts that are queuing, or running under the controller ``by``, oldest first, up to 64 MB;
        of ended ones ``terminal`` tells. A controller fails what it is shown as running and does not run. Beside it the
        ids of queuing rollouts that cannot be shown: nobody would ever run them."""
        found: list[Rollout] = []
        if "running" in states:
            found += sorted(self._running(by), key=lambda rollout: rollout.start_time)[:limit]
        if "queuing" in states:
            found += self._store.waiting(limit - len(found))
        ended = states & TERMINAL
        if ended and len(found) < limit:
            ids = self._feed.read(self._feed.position())["rollout_ids"]
            known = [rollout for one in ids if (rollout := await self._store.get_rollout_by_id(one)) is not None]
            found += [rollout for rollout in known if _state_of(rollout) in ended]
        listed = [rollout for rollout in found[:limit] if rollout.rollout_id not in self._deleted]
        return await _off_loop(lambda: self._page(listed), len(listed))

    def _page(self, rollouts: Sequence[Rollout]) -> tuple[orjson.Fragment, list[str]]:
        views, size, left_out = list[orjson.Fragment](), 0, list[str]()
        for rollout in rollouts:
            try:
                view = self._json_of(rollout)
            except GatewayRequestError as error:
                if not self.not_shown:
                    logger.warning("%s; it fails. Others like it are counted.", error)
                self.not_shown += 1
                if _state_of(rollout) == "queuing":
                    left_out.append(rollout.rollout_id)
                continue
            size += len(view)
            if views and size > _MOST_LISTED_BYTES:
                break
            views.append(orjson.Fragment(view))
        return orjson.Fragment(orjson.dumps(views)), left_out

    async def terminal(self, after: int, limit: int) -> dict[str, Any]:
        """The ends after position ``after``, in their order."""
        after, limit = max(0, after), max(1, limit)
        page = self._feed.read(self._feed.position(after))
        ids, first = page["rollout_ids"][:limit], page["last"] - len(page["rollout_ids"]) + 1
        items = []
        for rollout_id in ids:
            rollout = await self._store.get_rollout_by_id(rollout_id)
            if rollout is not None and rollout_id not in self._deleted:
                task = rollout.input if isinstance(rollout.input, dict) else {}
                told = {"rollout_id": rollout_id, "state": _state_of(rollout), "is_train": rollout.mode != "val"}
                items.append({**told, "data_id": str(task.get("data_id") or task.get("instance_id") or "")})
        return {
            "items": items,
            "next_after": first + len(ids) - 1 if ids else after,
            "total_terminal": self._feed.last,
        }

    async def get(self, rollout_id: str) -> Rollout:
        """Raises ``GatewayRequestError``."""
        rollout = None if rollout_id in self._deleted else await self._store.get_rollout_by_id(rollout_id)
        if rollout is None:
            raise GatewayRequestError(f"Rollout not found: {rollout_id}", status=404, code="unknown_rollout")
        return rollout

    async def view(self, rollout_id: str) -> orjson.Fragment:
        """The JSON of a rollout. Raises ``GatewayRequestError``."""
        return orjson.Fragment(self._json_of(await self.get(rollout_id)))

    def _running(self, by: str) -> Sequence[Rollout]:
        worker, latest = _worker(by), self._store.collections.latest_attempt
        running = self._store.running()
        return [one for one in running if (own := latest(one.rollout_id)) is not None and own.worker_id == worker]

    def lose(self, by: str) -> Sequence[Rollout]:
        """The controller ``by`` is dead and will not come back: it begins nothing any more. Returns what it ran."""
        self._gone.add(by)
        return self._running(by)

    async def begin(self, rollout: Rollout, *, by: str = "") -> Attempt:
        """The attempt of a rollout that ``get`` gave just now, which begins where it has not: a controller starts the
        agent's process before it says so, and the first call may come before. Raises ``GatewayRequestError`` when it
        has ended, or runs under another controller than ``by``."""
        rollout_id = rollout.rollout_id
        if rollout.status in FINISHED:
            raise GatewayRequestError(f"rollout {rollout_id} has ended", status=410, code="rollout_ended")
        latest = await self._store.get_latest_attempt(rollout_id)
        if latest is not None and rollout.status in RUNNING:
            if latest.worker_id != _worker(by):
                told = f"rollout {rollout_id} runs under another controller"
                raise GatewayRequestError(told, status=409, code="other_controller")
            return latest
        if by in self._gone:
            raise GatewayRequestError(f"the controller {by} is over", status=410, code="controller_gone")
        return (await self._store.begin(rollout_id, worker_id=_worker(by))).attempt

    async def check(self, rollout_id: str, wanted: StatusPatch, *, by: str = "") -> State | None:
        """The state that ``wanted`` brings, when it may follow. Raises ``GatewayRequestError`` (409)."""
        rollout = await self.get(rollout_id)
        now, new = _state_of(rollout), wanted.state
        latest = await self._store.get_latest_attempt(rollout_id)
        known = _told(latest)
        if now == "running" and latest is not None and latest.worker_id != _worker(by):
            told = f"Rollout {rollout_id} runs under another controller"
            raise GatewayRequestError(told, status=409, code="other_controller")
        # begun by its first call, and said to run only now
        catches_up = now == new == "running" and "last_attempt_id" not in known
        if new is not None and new not in NEXT[now] and not catches_up:
            told = f"Rollout {rollout_id}: cannot transition {now} -> {new}"
            raise GatewayRequestError(told, status=409, code="invalid_transition")
        return new

    async def patch(self, rollout_id: str, wanted: StatusPatch, *, by: str = "") -> orjson.Fragment:
        """Note what a controller says, and begin or end the attempt by it; ``check`` it before."""
        changes = wanted.model_dump(exclude_unset=True)
        rollout = await self.get(rollout_id)
        if not changes or rollout.status in FINISHED:
            return orjson.Fragment(self._json_of(rollout))
        attempt = await self.begin(rollout, by=by)
        known = _told(await self._store.get_latest_attempt(rollout_id))
        told = {**known, **changes, "version": known.get("version", 1) + 1, "updated_at": time.time()}
        told.setdefault("last_attempt_id", None)
        metadata: dict[str, Any] = {**(attempt.metadata or {}), _TOLD: told}
        if wanted.state in TERMINAL:
            ended: Any = wanted.state
            await self._store.update_attempt(rollout_id, attempt.attempt_id, status=ended, metadata=metadata)
        else:
            await self._store.update_attempt(rollout_id, attempt.attempt_id, status="running", metadata=metadata)
        return await self.view(rollout_id)

    async def delete(self, rollout_id: str) -> None:
        """What runs is cancelled; nobody finds it any more."""
        rollout = await self._store.get_rollout_by_id(rollout_id)
        if rollout is None:
            return
        if rollout.status not in FINISHED:
            await self._store.update_rollout(rollout_id, status="cancelled")
        self._deleted[rollout_id] = None
        while len(self._deleted) > _DELETED_KEPT:
            self._deleted.popitem(last=False)

    async def attempts(self, rollout_id: str) -> list[str]:
        return [] if await self._store.get_latest_attempt(rollout_id) is None else ["0"]

    def _json_of(self, rollout: Rollout) -> bytes:
        """Raises ``GatewayRequestError`` where the store holds what 1.0 has no form for."""
        try:
            return json_bytes(self._view(rollout).model_dump())
        except (ValueError, TypeError, RecursionError) as error:  # pydantic's are ValueErrors
            first = error.errors()[0] if isinstance(error, ValidationError) else None
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else f"{type(error).__name__}: {error}"
            told = f"rollout {rollout.rollout_id}: {NOT_SHOWABLE} ({' '.join(why.split()):.200})"
            raise GatewayRequestError(told, status=409, code="not_showable") from error

    def _view(self, rollout: Rollout) -> RolloutView:
        latest = self._store.collections.latest_attempt(rollout.rollout_id)
        told = _told(latest)
        state = _state_of(rollout)
        status = {**told, "state": state}
        if state == "failed" and rollout.status == "cancelled":
            status.setdefault("error_message", "cancelled")
        config = self._config
        metadata = dict(rollout.metadata or {})
        if given := metadata.pop(CONFIG_KEY, None):
            config = Config.model_validate(given)
        elif rollout.config.timeout_seconds is not None:
            config = config.model_copy(update={"timeout_seconds": math.ceil(rollout.config.timeout_seconds)})
        begun = rollout.start_time
        updated = rollout.end_time or (latest.start_time if latest is not None else begun)
        return RolloutView(
            rollout_id=rollout.rollout_id,
            input=rollout.input,
            is_train=rollout.mode != "val",
            config=config,
            metadata=Metadata.model_validate(metadata),
            status=Status(**{"updated_at": updated, **status, "created_at": begun}),
        )


async def _off_loop(write: Callable[[], T], count: int) -> T:
    """What ``write`` returns; in a thread where it writes many rollouts."""
    return write() if count <= _WRITTEN_AT_ONCE else await run_in_thread(write)


def reason_of(error_message: str) -> str:
    """The reason by which a failure is counted, from a controller's words for it."""
    if (typed := _TYPED.match(error_message)) is not None:
        return f"environment_{typed[1]}"
    return next((reason for words, reason in _REASONS if words in error_message), "controller")


def _told(attempt: Attempt | None) -> Mapping[str, Any]:
    """What the controller has said of an attempt."""
    return ((attempt.metadata or {}) if attempt is not None else {}).get(_TOLD, {})


def _worker(controller: str) -> str:
    return f"{CONTROLLER}/{controller}" if controller else CONTROLLER


def _state_of(rollout: Rollout) -> State:
    if rollout.status in RUNNING:
        return "running"
    if rollout.status in FINISHED:
        return "succeeded" if rollout.status == "succeeded" else "failed"
    return "queuing"
