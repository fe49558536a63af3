"""The API of Agent Lightning 1.0, on the address of a gateway over the same store.

    /healthz                                                                          open
    /api/rollouts…, /api/models, /api/rollouts/{id}/attempt/0/events                  what a controller and agents use
    /proxy/pause, /proxy/resume, /proxy/state
    /proxy/rollout/{id}/attempt/0/mode/{train|val}/openai/v1/…                        model calls: the gateway's

``/controller/NAME`` before any of them says which controller asks, where there is more than one: each is shown as
running what it runs itself.

More than 1.0's own server has: streams, ``/responses``, ``…/anthropic/v1/messages``, rewards by name and of single
answers; a reward is a number or an error, and a call of a rollout that has ended is refused.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar, get_args

import orjson
from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from agl_slime.agl1.events import events_of, refused_call, span_of
from agl_slime.agl1.rollouts import NOT_SHOWABLE, Rollouts, reason_of
from agl_slime.agl1.schemas import (
    MOST_CREATED,
    TERMINAL,
    Config,
    Create,
    EventCreate,
    Model,
    Patch,
    Pause,
    State,
    StatusPatch,
)
from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.attempt import Attempt
from agl_slime.gateway.remote import StoreGateway, span_builder
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.rollout.access import LLM_RESOURCE, EngineAccess
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.recording import Recording
from agl_slime.support.agl import LLM
from agl_slime.support.http import json_response, parse_json, read_body
from agl_slime.support.net import shown_url
from agl_slime.support.threads import run_in_thread
from agl_slime.trace.attributes import FAILURE_REASON

_STATES: frozenset[str] = frozenset(get_args(State))
_MOST_LISTED = 1_000
_CREATES = TypeAdapter(list[Create])
_MODELS = TypeAdapter(list[Model])
_EXCEPTION_SPAN = "agentlightning.exception"
_CONTROLLER = re.compile(r"(?:/k/[^/]+)?/controller/([^/]+)/")
_MOST_REFUSALS_KEPT = 32  # of one rollout: an agent may ask for ever

T = TypeVar("T")
Handler = Callable[..., Awaitable[web.Response]]


class ControllerGateway(StoreGateway):
    """Serves the rollouts of ``store`` to a controller of Agent Lightning 1.0 and the agents that it runs. ``config``
    is what the controller starts for rollouts that say nothing themselves, ``key`` what clients show; the engine is
    what each rollout's resources name as ``main_llm``. A rollout is named by its id alone; 1.0 calls its one attempt 0,
    whatever the store does."""

    # as 1.0's proxy asks for
    defaults: Mapping[str, Mapping[str, Any]] = {
        "chatcmpl-": {"return_token_ids": True, "logprobs": True},
        "cmpl-": {"return_token_ids": True, "logprobs": 0},
    }

    def __init__(
        self,
        *,
        store: BridgeStore,
        config: Config | None = None,
        key: str | None = None,
        settings: GatewaySettings | None = None,
        access: EngineAccess | None = None,
    ) -> None:
        super().__init__(store=store, llm=None, token=key, settings=settings, access=access)
        self.rollouts = Rollouts(store, config=config or Config())
        self.asked = 0
        """How often somebody has asked for rollouts to run."""
        self._paused: Pause | None = None
        self._losing: list[asyncio.Future[None]] = []
        self._api: list[tuple[str, re.Pattern[str], Handler]] = [
            (method, re.compile(pattern), handler)
            for method, pattern, handler in (
                ("POST", r"/api/rollouts", self._create),
                ("GET", r"/api/rollouts", self._list),
                ("GET", r"/api/rollouts/terminal", self._terminal),
                ("GET", r"/api/rollouts/(?P<rollout_id>[^/]+)", self._detail),
                ("PATCH", r"/api/rollouts/(?P<rollout_id>[^/]+)", self._patch),
                ("DELETE", r"/api/rollouts/(?P<rollout_id>[^/]+)", self._delete),
                ("POST", r"/api/rollouts/(?P<rollout_id>[^/]+)/attempt/[^/]+/events", self._post_event),
                ("GET", r"/api/rollouts/(?P<rollout_id>[^/]+)/events", self._events),
                ("GET", r"/api/models", self._models_of_run),
                ("POST", r"/api/models", self._register),
                ("DELETE", r"/api/models", self._unregister),
                ("POST", r"/proxy/pause", self._pause),
                ("POST", r"/proxy/resume", self._resume),
                ("GET", r"/proxy/state", self._pause_state),
            )
        ]

    async def _begin(self) -> None:
        await super()._begin()
        self.rollouts.start()

    async def _finish(self) -> None:
        self.rollouts.stop()
        await super()._finish()

    def lose(self, by: str) -> None:
        """The controller ``by`` is dead, and its agents with it: what they ran fails. From any thread; does not wait
        for it."""
        self._on_loop(lambda: self._losing.append(asyncio.ensure_future(self._lose(by))))

    async def _lose(self, by: str) -> None:
        for rollout in self.rollouts.lose(by):
            lost = StatusPatch(state="failed", error_message="the controller has died: its agent is not running")
            with suppress(GatewayRequestError):  # it has ended meanwhile
                await self._change(rollout.rollout_id, lost, by=by)

    # -- the API ------------------------------------------------------------------------------------------------------

    async def _unnamed(self, request: web.Request, path: str, named: dict[str, str | None]) -> web.Response | None:
        if path == "/healthz":
            return json_response({"status": "ok"})
        if named.get("rollout") is not None:
            return self._held_back()
        handler, arguments = next(
            (
                (handler, found.groupdict())
                for method, pattern, handler in self._api
                if method == request.method and (found := pattern.fullmatch(path)) is not None
            ),
            (None, {}),
        )
        if handler is None:
            known = any(pattern.fullmatch(path) for _, pattern, _ in self._api)
            return _refused(405, f"{path} takes no {request.method}") if known else None
        if not self._opens(self._shown(request, named)):
            return _refused(401, "Invalid or missing API key")
        try:
            return await handler(request, **arguments)
        except ValidationError as error:
            return json_response({"detail": _spelled(error)}, status=422)
        except GatewayRequestError as error:
            return _refused(error.status, str(error))

    async def _create(self, request: web.Request) -> web.Response:
        wanted = await _body(request, _creates)
        # a client that hangs up leaves no half of them behind
        return json_response(await asyncio.shield(self.rollouts.create(wanted)), status=201)

    async def _list(self, request: web.Request) -> web.Response:
        states = request.query.getall("state_in", [])
        if not states or not _STATES.issuperset(states):
            told = f"state_in must be given, once or more often, as {', '.join(sorted(_STATES))}; got {states}"
            raise GatewayRequestError(told, status=422)
        self.asked += 1
        limit = _number(request, "limit", 500)
        wanted: frozenset[State] = frozenset(states)  # type: ignore[arg-type]
        by = controller_of(request)
        page, not_shown = await self.rollouts.list(wanted, min(limit, _MOST_LISTED), by=by)
        for rollout_id in not_shown:
            with suppress(GatewayRequestError):  # it has ended meanwhile, and cannot be shown then either
                await self._change(rollout_id, StatusPatch(state="failed", error_message=NOT_SHOWABLE), by=by)
        return json_response(page)

    async def _terminal(self, request: web.Request) -> web.Response:
        after, limit = _number(request, "after", 0), _number(request, "limit", 1000)
        return json_response(await self.rollouts.terminal(after, limit))

    async def _detail(self, request: web.Request, rollout_id: str) -> web.Response:
        view = await self.rollouts.view(rollout_id)
        return json_response({"rollout": view, "attempts": await self.rollouts.attempts(rollout_id)})

    async def _patch(self, request: web.Request, rollout_id: str) -> web.Response:
        status = (await _body(request, Patch.model_validate)).status
        if status is None:
            return json_response(await self.rollouts.view(rollout_id))
        return json_response(await self._change(rollout_id, status, by=controller_of(request)))

    async def _change(self, rollout_id: str, status: StatusPatch, *, by: str) -> orjson.Fragment:
        new = await self.rollouts.check(rollout_id, status, by=by)
        if new in TERMINAL:
            await self._wind_up(rollout_id, status.error_message if new == "failed" else None, by=by)
        return await self.rollouts.patch(rollout_id, status, by=by)

    async def _wind_up(self, rollout_id: str, error: str | None, *, by: str) -> None:
        """All is written that there is to say of an attempt before it ends."""
        attempt_id = await self._begun(rollout_id, mode=None, by=by)
        if error is not None:
            told = {FAILURE_REASON: reason_of(error), "exception.type": "Controller", "exception.message": error}
            await self._written(rollout_id, attempt_id, _EXCEPTION_SPAN, told)
        self._has_ended(rollout_id, f"{rollout_id}/{attempt_id}")
        if (attempt := self._attempts.get((rollout_id, attempt_id))) is not None:
            await self.close(attempt)
            await flush(attempt)

    async def _written(self, rollout_id: str, attempt_id: str, name: str, attributes: dict[str, Any]) -> float:
        """The time of the span that was written."""
        recording, at = Recording(rollout_id, attempt_id, store=self._store), time.time()
        recording.add(span_builder(name, attributes, at))
        await recording.write()
        return at

    async def _delete(self, request: web.Request, rollout_id: str) -> web.Response:
        await self.rollouts.delete(rollout_id)
        return web.Response(status=204)

    async def _post_event(self, request: web.Request, rollout_id: str) -> web.Response:
        event = await _body(request, EventCreate.model_validate)
        name, attributes = span_of(event)
        attempt_id = await self._begun(rollout_id, mode=None, by=controller_of(request))
        at = await self._written(rollout_id, attempt_id, name, attributes)
        return json_response({"rollout_id": rollout_id, "attempt_id": "0", "timestamp": at, **event.model_dump()})

    async def _events(self, request: web.Request, rollout_id: str) -> web.Response:
        await self.rollouts.get(rollout_id)
        latest = await self._store.get_latest_attempt(rollout_id)
        if latest is None:
            return json_response([])
        spans = await self._store.query_spans(rollout_id, latest.attempt_id)
        kind, triplet = request.query.get("event_type"), request.query.get("format") == "triplet"
        return await run_in_thread(
            lambda: json_response(events_of(rollout_id, spans, event_type=kind, triplet=triplet))
        )

    async def _models_of_run(self, request: web.Request) -> web.Response:
        llm = await self._llm_now()
        return json_response(
            [] if llm is None else [{"model": llm.model, "endpoint": shown_url(llm.endpoint), "version": 0}]
        )

    async def _register(self, request: web.Request) -> web.Response:
        models, llm = await _body(request, _MODELS.validate_python), await self._llm_now()
        for model in models:
            known = (llm.model, shown_url(llm.endpoint).rstrip("/")) if llm is not None else None
            if (model.model, shown_url(model.endpoint).rstrip("/")) != known:
                where = f"{model.model} at {shown_url(model.endpoint)}"
                told = f"{where}: the run's own engine answers every call; register no other"
                raise GatewayRequestError(told, status=409)
        return json_response([model.model_dump() for model in models], status=201)

    async def _unregister(self, request: web.Request) -> web.Response:
        raise GatewayRequestError("the run's engine is not registered here and cannot be removed", status=409)

    async def _llm_now(self) -> LLM | None:
        update = await self._store.get_latest_resources()
        main = update.resources.get(LLM_RESOURCE) if update is not None else None
        return main if isinstance(main, LLM) else None

    # -- pause --------------------------------------------------------------------------------------------------------

    async def _pause(self, request: web.Request) -> web.Response:
        self._paused = await _body(request, Pause.model_validate)
        return await self._pause_state(request)

    async def _resume(self, request: web.Request) -> web.Response:
        self._paused = None
        return await self._pause_state(request)

    async def _pause_state(self, request: web.Request) -> web.Response:
        told = self._paused or Pause()
        running = sum(attempt.running for attempt in self._attempts.values())
        return json_response({"paused": self._paused is not None, **told.model_dump(), "inflight": running})

    def _held_back(self) -> web.Response | None:
        """The answer to model calls while they are paused."""
        if self._paused is None:
            return None
        headers = {"Retry-After": str(self._paused.retry_after_seconds), "X-Agl-Paused": "true"}
        return json_response({"error": "gateway paused", "reason": self._paused.reason}, status=429, headers=headers)

    # -- model calls --------------------------------------------------------------------------------------------------

    async def _attempt(self, request: web.Request, named: dict[str, str | None]) -> Attempt:
        rollout_id = named.get("rollout")
        if rollout_id is None or not self._opens(self._shown(request, named)):
            return await super()._attempt(request, named)
        begun = await self._begun(rollout_id, mode=named.get("mode"), by=controller_of(request))
        return await self._opened(rollout_id, begun)

    async def _was_refused(self, attempt: Attempt, path: str, refusal: GatewayRequestError) -> None:
        refused = sum(count for what, count in attempt.seen.items() if what.startswith("refused/"))
        if attempt.closed or refused > _MOST_REFUSALS_KEPT:
            return
        attempt.write(*refused_call(path, refusal, model=attempt.roles[LLM_RESOURCE].model), time.time())
        await flush(attempt)

    async def _begun(self, rollout_id: str, *, mode: str | None, by: str) -> str:
        """The attempt of a rollout that its controller ``by`` runs, which begins where it has not. ``mode`` is what the
        address says. Raises ``GatewayRequestError``."""
        rollout = await self.rollouts.get(rollout_id)
        if mode is not None and mode != ("val" if rollout.mode == "val" else "train"):
            told = f"rollout {rollout_id} is not of mode {mode}: use AGL_OPENAI_BASE_URL as it is"
            raise GatewayRequestError(told, status=404, code="unknown_rollout")
        return (await self.rollouts.begin(rollout, by=by)).attempt_id


async def flush(attempt: Attempt) -> None:
    assert attempt.flush is not None  # of a gateway over a store
    await attempt.flush()


def controller_of(request: web.Request) -> str:
    """The controller that the address names."""
    found = _CONTROLLER.match(request.path)
    return found[1] if found is not None else ""


def _refused(status: int, told: str) -> web.Response:
    return json_response({"detail": told}, status=status)


def _spelled(error: ValidationError) -> list[dict[str, Any]]:
    """FastAPI's form of what does not fit, without the values: one may be what JSON cannot hold."""
    return [
        {"loc": [str(part) for part in one["loc"]], "msg": one["msg"], "type": one["type"]} for one in error.errors()
    ]


def _creates(value: Any) -> list[Create]:
    if isinstance(value, list) and len(value) > MOST_CREATED:
        told = f"the body has {len(value)} rollouts; send at most {MOST_CREATED} in one request"
        raise GatewayRequestError(told, status=422)
    return _CREATES.validate_python(value)


async def _body(request: web.Request, read: Callable[[Any], T]) -> T:
    """What ``read`` makes of the JSON of the body; of a large one in a thread."""

    def parsed(raw: bytes) -> T:
        try:
            value = parse_json(raw) if raw else {}
        except ValueError as error:
            raise GatewayRequestError(str(error), status=422) from None
        return read(value)

    return await read_body(request, parsed)


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not re.fullmatch(r"-?\d{1,15}", text):
        raise GatewayRequestError(f"{name} must be a whole number, got {text!r:.40}", status=422)
    return int(text)
