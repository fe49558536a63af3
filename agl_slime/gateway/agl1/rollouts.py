"""``Rollouts``: a store's rollouts in Agent Lightning 1.0's terms: states, one attempt, a list of finished rollouts.

Rollouts live in the store only; the controller's status fields are metadata of the attempt, and the order of finished
rollouts is the store's feed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from pydantic import ValidationError

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.agl1.schemas import (
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
from agl_slime.store.bridge import FINISHED, RUNNING, BridgeStore
from agl_slime.store.feed import FeedPosition, FinishedFeed
from agl_slime.support.agl import Attempt, EnqueueRolloutRequest, Rollout, RolloutConfig
from agl_slime.support.http import json_bytes
from agl_slime.support.threads import run_in_thread_if

logger = logging.getLogger(__name__)

CONTROLLER = "agl-controller"
"""Worker id in the store, followed by the controller's name if it has one."""

_STATUS_KEY = "agl1"  # in an attempt's metadata: the controller's status fields
_MAX_DELETED = 10_000
_CREATE_CHUNK = 100  # some milliseconds, between which the loop serves others
_INLINE_ROLLOUTS = 20  # a larger page is written in a thread
_MAX_PAGE_BYTES = 64 * 2**20
UNREADABLE = "it cannot be shown to a controller"

# Parts of a controller's error messages, and failure reasons.
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
    (UNREADABLE, "not_showable"),
)

# Error messages of an environment's worker begin with the type of the error.
_ENVIRONMENT_ERROR = re.compile(r"environment: ([A-Za-z_][A-Za-z0-9_]{0,63}):")


class Rollouts:
    """The rollouts of ``store``. ``config`` is the configuration of rollouts that were created without one."""

    def __init__(self, store: BridgeStore, *, config: Config) -> None:
        self._store = store
        self._config = config
        self._feed = FinishedFeed()
        self._deleted: OrderedDict[str, None] = OrderedDict()
        self._dead_controllers: set[str] = set()
        self.unreadable = 0
        """Number of rollouts that listings left out because 1.0 has no form for them."""

    def start(self) -> Callable[[], object]:
        """Note the ends of rollouts from now on; the returned function stops it."""
        return self._store.subscribe_finished(self._feed.append)

    async def create(self, creates: Sequence[Create]) -> orjson.Fragment:
        """Create rollouts; returns their JSON. An id that exists returns the existing rollout."""
        rollouts: list[Rollout] = []
        for first in range(0, len(creates), _CREATE_CHUNK):
            rollouts += [await self._create(create) for create in creates[first : first + _CREATE_CHUNK]]
            await asyncio.sleep(0)
        many = len(rollouts) > _INLINE_ROLLOUTS
        views = await run_in_thread_if(many, lambda: [*map(orjson.Fragment, map(self._json_of, rollouts))])
        return orjson.Fragment(orjson.dumps(views))

    async def _create(self, create: Create) -> Rollout:
        if create.rollout_id is not None and (existing := await self._store.get_rollout_by_id(create.rollout_id)):
            return existing
        config = create.config or self._config
        metadata = create.metadata.model_dump(exclude_unset=True) if create.metadata is not None else {}
        metadata |= {CONFIG_KEY: config.model_dump()} if create.config else {}
        request = EnqueueRolloutRequest(
            input=create.input,
            mode="train" if create.is_train else "val",
            config=RolloutConfig(timeout_seconds=config.timeout_seconds or None),
            metadata=metadata,
        )
        return await self._store.enqueue_as(request, rollout_id=create.rollout_id)

    async def list(
        self, states: frozenset[State], limit: int, *, controller: str = ""
    ) -> tuple[orjson.Fragment, Sequence[str]]:
        """The JSON of rollouts in ``states``, oldest first, up to 64 MB, and the ids of queuing rollouts without a form
        in 1.0, which no controller could run. Running rollouts are of ``controller``, which fails any that it
        does not run; for finished rollouts see ``terminal``."""
        rollouts: list[Rollout] = []
        if "running" in states:
            rollouts += sorted(self._running(controller), key=lambda rollout: rollout.start_time)[:limit]
        if "queuing" in states:
            rollouts += self._store.waiting(limit - len(rollouts))
        ended = states & TERMINAL
        if ended and len(rollouts) < limit:
            for rollout_id in self._feed.read(FeedPosition())["rollout_ids"]:
                rollout = await self._store.get_rollout_by_id(rollout_id)
                if rollout is not None and _state_of(rollout) in ended:
                    rollouts.append(rollout)
        listed = [rollout for rollout in rollouts[:limit] if rollout.rollout_id not in self._deleted]
        return await run_in_thread_if(len(listed) > _INLINE_ROLLOUTS, lambda: self._page(listed))

    def _page(self, rollouts: Sequence[Rollout]) -> tuple[orjson.Fragment, list[str]]:
        views, size, unreadable = list[orjson.Fragment](), 0, list[str]()
        for rollout in rollouts:
            try:
                view = self._json_of(rollout)
            except GatewayRequestError as error:
                if not self.unreadable:
                    logger.warning("%s; it fails. Others like it are counted.", error)
                self.unreadable += 1
                if _state_of(rollout) == "queuing":
                    unreadable.append(rollout.rollout_id)
                continue
            size += len(view)
            if views and size > _MAX_PAGE_BYTES:
                break
            views.append(orjson.Fragment(view))
        return orjson.Fragment(orjson.dumps(views)), unreadable

    async def terminal(self, start: int, limit: int) -> dict[str, Any]:
        """The rollouts that finished after position ``start``, in order."""
        start, limit = max(0, start), max(1, limit)
        page = self._feed.read(FeedPosition(self._feed.server_instance_id, start))
        ids, first = page["rollout_ids"][:limit], page["last"] - len(page["rollout_ids"]) + 1
        items = []
        for rollout_id in ids:
            rollout = await self._store.get_rollout_by_id(rollout_id)
            if rollout is not None and rollout_id not in self._deleted:
                task = rollout.input if isinstance(rollout.input, dict) else {}
                data_id = str(task.get("data_id") or task.get("instance_id") or "")
                item = {"rollout_id": rollout_id, "state": _state_of(rollout), "is_train": rollout.mode != "val"}
                items.append({**item, "data_id": data_id})
        return {"items": items, "next_after": first + len(ids) - 1 if ids else start, "total_terminal": self._feed.last}

    async def get(self, rollout_id: str) -> Rollout:
        """A rollout by its id. Raises ``GatewayRequestError``."""
        rollout = None if rollout_id in self._deleted else await self._store.get_rollout_by_id(rollout_id)
        if rollout is None:
            raise GatewayRequestError(f"Rollout not found: {rollout_id}", status=404, code="unknown_rollout")
        return rollout

    async def view(self, rollout_id: str) -> orjson.Fragment:
        """The JSON of a rollout. Raises ``GatewayRequestError``."""
        return orjson.Fragment(self._json_of(await self.get(rollout_id)))

    def _running(self, controller: str) -> Sequence[Rollout]:
        worker, latest_attempt = _worker(controller), self._store.collections.latest_attempt
        attempts = ((rollout, latest_attempt(rollout.rollout_id)) for rollout in self._store.running())
        return [rollout for rollout, attempt in attempts if attempt is not None and attempt.worker_id == worker]

    def remove_controller(self, controller: str) -> Sequence[Rollout]:
        """Refuse new attempts of a dead controller; returns its running rollouts."""
        self._dead_controllers.add(controller)
        return self._running(controller)

    async def begin(self, rollout: Rollout, *, controller: str = "") -> Attempt:
        """The attempt of a rollout that ``get`` returned; begins it if it has not begun: a controller starts the agent
        before it reports "running", and the first model call may come before. Raises ``GatewayRequestError`` if the
        rollout has ended or runs under another controller."""
        rollout_id = rollout.rollout_id
        if rollout.status in FINISHED:
            raise GatewayRequestError(f"rollout {rollout_id} has ended", status=410, code="rollout_ended")
        latest = await self._store.get_latest_attempt(rollout_id)
        if latest is not None and rollout.status in RUNNING:
            if latest.worker_id != _worker(controller):
                message = f"rollout {rollout_id} runs under another controller"
                raise GatewayRequestError(message, status=409, code="other_controller")
            return latest
        if controller in self._dead_controllers:
            raise GatewayRequestError(f"the controller {controller} has ended", status=410, code="controller_gone")
        return (await self._store.begin(rollout_id, worker_id=_worker(controller))).attempt

    async def check(self, rollout_id: str, patch: StatusPatch, *, controller: str = "") -> State | None:
        """The new state, if it may follow the current state. Raises ``GatewayRequestError`` (409)."""
        rollout = await self.get(rollout_id)
        state, requested = _state_of(rollout), patch.state
        latest = await self._store.get_latest_attempt(rollout_id)
        if state == "running" and latest is not None and latest.worker_id != _worker(controller):
            message = f"Rollout {rollout_id} runs under another controller"
            raise GatewayRequestError(message, status=409, code="other_controller")
        # the first model call may have begun the attempt before the controller reports "running"
        first_report = state == requested == "running" and "last_attempt_id" not in _status_of(latest)
        if requested is not None and requested not in NEXT[state] and not first_report:
            message = f"Rollout {rollout_id}: cannot transition {state} -> {requested}"
            raise GatewayRequestError(message, status=409, code="invalid_transition")
        return requested

    async def patch(self, rollout_id: str, patch: StatusPatch, *, controller: str = "") -> orjson.Fragment:
        """Store a controller's status fields, and begin or end the attempt; call ``check`` before."""
        changes = patch.model_dump(exclude_unset=True)
        rollout = await self.get(rollout_id)
        if not changes or rollout.status in FINISHED:
            return orjson.Fragment(self._json_of(rollout))
        attempt = await self.begin(rollout, controller=controller)
        previous = _status_of(await self._store.get_latest_attempt(rollout_id))
        fields = {**previous, **changes, "version": previous.get("version", 1) + 1, "updated_at": time.time()}
        fields.setdefault("last_attempt_id", None)
        metadata: dict[str, Any] = {**(attempt.metadata or {}), _STATUS_KEY: fields}
        status: Any = patch.state if patch.state in TERMINAL else "running"
        await self._store.update_attempt(rollout_id, attempt.attempt_id, status=status, metadata=metadata)
        return await self.view(rollout_id)

    async def delete(self, rollout_id: str) -> None:
        """Cancel the rollout if it has not ended, and hide it."""
        rollout = await self._store.get_rollout_by_id(rollout_id)
        if rollout is None:
            return
        if rollout.status not in FINISHED:
            await self._store.update_rollout(rollout_id, status="cancelled")
        self._deleted[rollout_id] = None
        while len(self._deleted) > _MAX_DELETED:
            self._deleted.popitem(last=False)

    def _json_of(self, rollout: Rollout) -> bytes:
        """A rollout as 1.0's JSON. Raises ``GatewayRequestError`` if 1.0 has no form for it."""
        try:
            return json_bytes(self._view(rollout).model_dump())
        except (ValueError, TypeError, RecursionError) as error:  # pydantic's are ValueErrors
            first = error.errors()[0] if isinstance(error, ValidationError) else None
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else f"{type(error).__name__}: {error}"
            message = f"rollout {rollout.rollout_id}: {UNREADABLE} ({' '.join(why.split()):.200})"
            raise GatewayRequestError(message, status=409, code="not_showable") from error

    def _view(self, rollout: Rollout) -> RolloutView:
        latest = self._store.collections.latest_attempt(rollout.rollout_id)
        status: dict[str, Any] = {**_status_of(latest), "state": _state_of(rollout)}
        if rollout.status == "cancelled":
            status.setdefault("error_message", "cancelled")
        config = self._config
        metadata = dict(rollout.metadata or {})
        if saved_config := metadata.pop(CONFIG_KEY, None):
            config = Config.model_validate(saved_config)
        elif rollout.config.timeout_seconds is not None:
            config = config.model_copy(update={"timeout_seconds": math.ceil(rollout.config.timeout_seconds)})
        created = rollout.start_time
        updated = rollout.end_time or (latest.start_time if latest is not None else created)
        return RolloutView(
            rollout_id=rollout.rollout_id,
            input=rollout.input,
            is_train=rollout.mode != "val",
            config=config,
            metadata=Metadata.model_validate(metadata),
            status=Status(**{"updated_at": updated, **status, "created_at": created}),
        )


def reason_of(error_message: str) -> str:
    """The failure reason for a controller's error message."""
    if (match := _ENVIRONMENT_ERROR.match(error_message)) is not None:
        return f"environment_{match[1]}"
    return next((reason for part, reason in _REASONS if part in error_message), "controller")


def _status_of(attempt: Attempt | None) -> Mapping[str, Any]:
    """The controller's status fields of an attempt."""
    return ((attempt.metadata or {}) if attempt is not None else {}).get(_STATUS_KEY, {})


def _worker(controller: str) -> str:
    return f"{CONTROLLER}/{controller}" if controller else CONTROLLER


def _state_of(rollout: Rollout) -> State:
    if rollout.status in RUNNING:
        return "running"
    if rollout.status in FINISHED:
        return "succeeded" if rollout.status == "succeeded" else "failed"
    return "queuing"
