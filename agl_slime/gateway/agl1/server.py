"""``ControllerGateway``: the API of Agent Lightning 1.0 at the address of a gateway over the same store.

    /healthz                                                           without a key
    /api/rollouts…, /api/models, /api/rollouts/{id}/attempt/0/events   for controllers and agents
    /proxy/pause, /proxy/resume, /proxy/state
    /proxy/rollout/{id}/attempt/0/mode/{train|val}/openai/v1/…         model calls of the gateway

A prefix ``/controller/NAME`` names the controller, if there are several; each is shown its own running rollouts.

Beyond 1.0's server: streams, ``/responses``, ``…/anthropic/v1/messages``, rewards by name and for single answers.
A reward that is no number is an error, and model calls after the end of a rollout are refused.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, get_args

import orjson
from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from agl_slime.agent.access import LLM_RESOURCE
from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.agl1.events import events_of, refused_call, span_of
from agl_slime.gateway.agl1.rollouts import UNREADABLE, Rollouts, reason_of
from agl_slime.gateway.agl1.schemas import (
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
from agl_slime.gateway.attempt import Attempt
from agl_slime.gateway.remote import StoreGateway
from agl_slime.gateway.server import Address
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.recording import Recording
from agl_slime.support.agl import LLM
from agl_slime.support.http import json_response, parse_json, read_body
from agl_slime.support.net import shown_url
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.attributes import FAILURE_REASON

_STATES: frozenset[str] = frozenset(get_args(State))
_MOST_LISTED = 1_000
_CREATES = TypeAdapter(list[Create])
_MODELS = TypeAdapter(list[Model])
_EXCEPTION_SPAN = "agentlightning.exception"
_CONTROLLER = re.compile(r"(?:/k/[^/]+)?/controller/([^/]+)/")
_MAX_REFUSALS = 32  # recorded for a rollout: an agent may ask for ever

T = TypeVar("T")
Handler = Callable[..., Awaitable[web.Response]]


class ControllerGateway(StoreGateway):
    """Serves the rollouts of ``store`` to a controller of Agent Lightning 1.0 and its agents.

    The engine is ``main_llm`` of each rollout's resources. 1.0 knows one attempt, "0": here the latest in the store.

    Args:
        config: the agent that the controller starts for rollouts without a configuration.
        key: the key of clients; ``options`` are ``settings`` and ``access`` of ``Gateway``.
    """

    # fields that 1.0's proxy adds to requests
    defaults: Mapping[str, Mapping[str, Any]] = {
        "chatcmpl-": {"return_token_ids": True, "logprobs": True},
        "cmpl-": {"return_token_ids": True, "logprobs": 0},
    }

    def __init__(
        self, *, store: BridgeStore, config: Config | None = None, key: str | None = None, **options: Any
    ) -> None:
        super().__init__(store=store, llm=None, token=key, **options)
        self.rollouts = Rollouts(store, config=config or Config())
        self.polls = 0
        """How often controllers have listed rollouts."""
        self._paused: Pause | None = None
        self._failing: list[asyncio.Future[None]] = []
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
                ("GET", r"/api/models", self._list_models),
                ("POST", r"/api/models", self._register),
                ("DELETE", r"/api/models", self._unregister),
                ("POST", r"/proxy/pause", self._pause),
                ("POST", r"/proxy/resume", self._resume),
                ("GET", r"/proxy/state", self._pause_state),
            )
        ]

    def _start_services(self) -> None:
        super()._start_services()
        self._services.callback(self.rollouts.start())

    def fail_rollouts_of(self, controller: str) -> None:
        """Fail the running rollouts of a dead controller. From any thread; returns at once."""
        self._call_soon(lambda: self._failing.append(asyncio.ensure_future(self._fail_rollouts_of(controller))))

    async def _fail_rollouts_of(self, controller: str) -> None:
        for rollout in self.rollouts.remove_controller(controller):
            status = StatusPatch(state="failed", error_message="the controller has died: its agent is not running")
            with suppress(GatewayRequestError):  # the rollout has ended
                await self._change(rollout.rollout_id, status, controller=controller)

    # -- the API ------------------------------------------------------------------------------------------------------

    async def _service_response(self, request: web.Request, path: str, address: Address) -> web.Response | None:
        if path == "/healthz":
            return json_response({"status": "ok"})
        if address.get("rollout") is not None:  # of a model call
            if (pause := self._paused) is None:
                return None
            headers = {"Retry-After": str(pause.retry_after_seconds), "X-Agl-Paused": "true"}
            return json_response({"error": "gateway paused", "reason": pause.reason}, status=429, headers=headers)
        matches = [(*route, match) for route in self._api if (match := route[1].fullmatch(path)) is not None]
        if not matches:
            return None
        route = next(((handler, match) for method, _, handler, match in matches if method == request.method), None)
        if route is None:
            return _error(405, f"{path} takes no {request.method}")
        handler, match = route
        if not self._is_authorized(request, address):
            return _error(401, "Invalid or missing API key")
        try:
            return await handler(request, **match.groupdict())
        except ValidationError as error:
            # in FastAPI's form, without the values, which JSON may not represent
            details = error.errors(include_url=False, include_context=False, include_input=False)
            shown = [{**detail, "loc": [*map(str, detail["loc"])]} for detail in details]
            return json_response({"detail": shown}, status=422)
        except GatewayRequestError as error:
            return _error(error.status, str(error))

    async def _create(self, request: web.Request) -> web.Response:
        creates = await _body(request, _read_creates)
        # shielded: a client that disconnects leaves all rollouts or none
        return json_response(await asyncio.shield(self.rollouts.create(creates)), status=201)

    async def _list(self, request: web.Request) -> web.Response:
        states = request.query.getall("state_in", [])
        if not states or not _STATES.issuperset(states):
            message = f"state_in must be given, once or more often, as {', '.join(sorted(_STATES))}; got {states}"
            raise GatewayRequestError(message, status=422)
        self.polls += 1
        limit, controller = min(_number(request, "limit", 500), _MOST_LISTED), _controller_of(request)
        requested_states: frozenset[State] = frozenset(states)  # type: ignore[arg-type]
        page, unreadable = await self.rollouts.list(requested_states, limit, controller=controller)
        for rollout_id in unreadable:
            status = StatusPatch(state="failed", error_message=UNREADABLE)
            with suppress(GatewayRequestError):  # the rollout has ended
                await self._change(rollout_id, status, controller=controller)
        return json_response(page)

    async def _terminal(self, request: web.Request) -> web.Response:
        position, limit = _number(request, "after", 0), _number(request, "limit", 1000)
        return json_response(await self.rollouts.terminal(position, limit))

    async def _detail(self, request: web.Request, rollout_id: str) -> web.Response:
        view, latest = await self.rollouts.view(rollout_id), await self._store.get_latest_attempt(rollout_id)
        return json_response({"rollout": view, "attempts": [] if latest is None else ["0"]})

    async def _patch(self, request: web.Request, rollout_id: str) -> web.Response:
        status = (await _body(request, Patch.model_validate)).status
        if status is None:
            return json_response(await self.rollouts.view(rollout_id))
        return json_response(await self._change(rollout_id, status, controller=_controller_of(request)))

    async def _change(self, rollout_id: str, status: StatusPatch, *, controller: str) -> orjson.Fragment:
        new = await self.rollouts.check(rollout_id, status, controller=controller)
        if new in TERMINAL:
            await self._finish_attempt(rollout_id, status.error_message if new == "failed" else None, controller)
        return await self.rollouts.patch(rollout_id, status, controller=controller)

    async def _finish_attempt(self, rollout_id: str, error: str | None, controller: str) -> None:
        """Cancel pending model calls and write all spans of an attempt before its rollout ends."""
        attempt_id = await self._begin_attempt(rollout_id, controller)
        if error is not None:
            span = {FAILURE_REASON: reason_of(error), "exception.type": "Controller", "exception.message": error}
            await self._write_span(rollout_id, attempt_id, _EXCEPTION_SPAN, span)
        self._note_ended(rollout_id, f"{rollout_id}/{attempt_id}")
        if (attempt := self._attempts.get((rollout_id, attempt_id))) is not None:
            await self.close(attempt)
            await _flush(attempt)

    async def _write_span(self, rollout_id: str, attempt_id: str, name: str, attributes: dict[str, Any]) -> float:
        """Write a span; returns its time."""
        recording, moment = Recording(rollout_id, attempt_id, store=self._store), time.time()
        recording.add_instant(name, attributes, moment)
        await recording.write()
        return moment

    async def _delete(self, request: web.Request, rollout_id: str) -> web.Response:
        await self.rollouts.delete(rollout_id)
        return web.Response(status=204)

    async def _post_event(self, request: web.Request, rollout_id: str) -> web.Response:
        event = await _body(request, EventCreate.model_validate)
        name, attributes = span_of(event)
        attempt_id = await self._begin_attempt(rollout_id, _controller_of(request))
        moment = await self._write_span(rollout_id, attempt_id, name, attributes)
        return json_response({"rollout_id": rollout_id, "attempt_id": "0", "timestamp": moment, **event.model_dump()})

    async def _events(self, request: web.Request, rollout_id: str) -> web.Response:
        await self.rollouts.get(rollout_id)
        latest = await self._store.get_latest_attempt(rollout_id)
        if latest is None:
            return json_response([])
        spans = await self._store.query_spans(rollout_id, latest.attempt_id)
        kind, triplet = request.query.get("event_type"), request.query.get("format") == "triplet"
        read = partial(events_of, rollout_id, spans, event_type=kind, triplet=triplet)
        return await run_in_thread(lambda: json_response(read()))

    async def _list_models(self, request: web.Request) -> web.Response:
        llm = await self._current_llm()
        models = [] if llm is None else [Model(model=llm.model, endpoint=shown_url(llm.endpoint)).model_dump()]
        return json_response(models)

    async def _register(self, request: web.Request) -> web.Response:
        models, llm = await _body(request, _MODELS.validate_python), await self._current_llm()
        engine = (llm.model, shown_url(llm.endpoint).rstrip("/")) if llm is not None else None
        for model in models:
            if (model.model, shown_url(model.endpoint).rstrip("/")) != engine:
                registered = f"{model.model} at {shown_url(model.endpoint)}"
                message = f"{registered}: the run's own engine answers every call; register no other"
                raise GatewayRequestError(message, status=409)
        return json_response([model.model_dump() for model in models], status=201)

    async def _unregister(self, request: web.Request) -> web.Response:
        raise GatewayRequestError("the run's engine is not registered here and cannot be removed", status=409)

    async def _current_llm(self) -> LLM | None:
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
        pause = self._paused or Pause()
        running = sum(attempt.running for attempt in self._attempts.values())
        return json_response({"paused": self._paused is not None, **pause.model_dump(), "inflight": running})

    # -- model calls --------------------------------------------------------------------------------------------------

    async def _find_attempt(self, request: web.Request, address: Address) -> Attempt:
        rollout_id = address.get("rollout")
        if rollout_id is None or not self._is_authorized(request, address):
            return await super()._find_attempt(request, address)
        attempt_id = await self._begin_attempt(rollout_id, _controller_of(request), mode=address.get("mode"))
        return await self._get_attempt(rollout_id, attempt_id)

    async def _record_refusal(self, attempt: Attempt, path: str, refusal: GatewayRequestError) -> None:
        refusals = sum(count for name, count in attempt.counts.items() if name.startswith("refused/"))
        if attempt.closed or refusals > _MAX_REFUSALS:
            return
        attempt.write(*refused_call(path, refusal, model=attempt.roles[LLM_RESOURCE].model), time.time())
        await _flush(attempt)

    async def _begin_attempt(self, rollout_id: str, controller: str, *, mode: str | None = None) -> str:
        """The id of a rollout's attempt under ``controller``; begins it if it has not begun. ``mode`` is the mode in
        the address. Raises ``GatewayRequestError``."""
        rollout = await self.rollouts.get(rollout_id)
        if mode is not None and mode != ("val" if rollout.mode == "val" else "train"):
            message = f"rollout {rollout_id} is not of mode {mode}: use AGL_OPENAI_BASE_URL as it is"
            raise GatewayRequestError(message, status=404, code="unknown_rollout")
        return (await self.rollouts.begin(rollout, controller=controller)).attempt_id


async def _flush(attempt: Attempt) -> None:
    assert attempt.flush is not None  # attempts of a StoreGateway have one
    await attempt.flush()


def _controller_of(request: web.Request) -> str:
    match = _CONTROLLER.match(request.path)
    return match[1] if match is not None else ""


def _error(status: int, message: str) -> web.Response:
    return json_response({"detail": message}, status=status)


def _read_creates(value: Any) -> list[Create]:
    if isinstance(value, list) and len(value) > MOST_CREATED:
        message = f"the body has {len(value)} rollouts; send at most {MOST_CREATED} in one request"
        raise GatewayRequestError(message, status=422)
    return _CREATES.validate_python(value)


async def _body(request: web.Request, read: Callable[[Any], T]) -> T:
    """Parse the JSON body and ``read`` it; in a thread if it is large."""

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
