"""A gateway for agents that other runners execute, on other hosts or in sandboxes: it learns of attempts from the store
when they first ask, and writes their spans there before each answer goes out.

    agl-slime gateway --store-url http://HOST:4747 --sglang-url http://HOST:30000 --model-path DIR

Agents find it as ``ProxyLLM(endpoint="http://HOST:PORT/k/TOKEN/v1", …)``, whose ``get_base_url(rollout_id,
attempt_id)`` Agent Lightning's decorators call by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.attempt import Attempt
from agl_slime.gateway.server import Gateway
from agl_slime.gateway.settings import GatewaySettings, endpoint_of
from agl_slime.rollout.access import LLM_RESOURCE, EngineAccess, run_parameters
from agl_slime.store.bridge import FINISHED
from agl_slime.store.follow import listen_for_ends
from agl_slime.store.recording import Recording, SpanBuilder
from agl_slime.support.agl import LLM, LightningStore, ProxyLLM, Span, SpanCoreFields, TraceStatus
from agl_slime.support.http import json_response
from agl_slime.support.memory import return_freed_memory
from agl_slime.support.net import require_token, same_secret
from agl_slime.support.threads import run_in_thread
from agl_slime.trace.attributes import GENERATE_SPAN

TOKEN_VARIABLE = "AGL_SLIME_GATEWAY_TOKEN"


class StoreGateway(Gateway):
    """Serves every attempt that runs in ``store``. ``llm`` is the engine, the model, and the sampling of rollouts whose
    resources name none. ``token`` opens all addresses: in ``/k/TOKEN`` or as the API key; without one, which only a
    loopback address may do, there is nothing to show."""

    def __init__(
        self,
        *,
        store: LightningStore,
        llm: LLM | None,
        token: str | None = None,
        settings: GatewaySettings | None = None,
        access: EngineAccess | None = None,
    ) -> None:
        super().__init__(settings, access=access)
        require_token(self.settings.host, token, setting=TOKEN_VARIABLE)
        self._store, self._llm, self._token = store, llm, token
        self._opening: dict[tuple[str, str], asyncio.Future[Attempt]] = {}
        self._unsubscribe: Callable[[], object] | None = None
        self._returning: asyncio.Future[None] | None = None  # a task that nobody holds may be collected

    @property
    def endpoint(self) -> str:
        """What a ``ProxyLLM`` is to name."""
        return endpoint_of(self.url, self._token)

    async def _begin(self) -> None:
        self._unsubscribe = listen_for_ends(
            self._store,
            lambda rollout_id: self._on_loop(lambda: self._ended_rollout(rollout_id)),
            mine=lambda: {rollout_id for rollout_id, _ in self._attempts},
        )

    async def _finish(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()

    def _ended_rollout(self, rollout_id: str) -> None:
        self._has_ended(rollout_id)
        for attempt in [attempt for (own, _), attempt in self._attempts.items() if own == rollout_id]:
            attempt.end()
            attempt.cut()
            self._forget(attempt)
        if self._may_return_memory():
            self._returning = asyncio.ensure_future(run_in_thread(return_freed_memory))

    def _opens(self, shown: list[str]) -> bool:
        return not self._token or any(same_secret(key, self._token) for key in shown)

    async def _attempt(self, request: web.Request, named: dict[str, str | None]) -> Attempt:
        rollout, attempt_id = named.get("rollout"), named.get("attempt")
        shown = self._shown(request, named)
        if not self._opens(shown):
            told = f"the key is missing or wrong: send the gateway's token ({TOKEN_VARIABLE})"
            raise GatewayRequestError(told, status=401, code="invalid_api_key")
        if rollout is None or attempt_id is None:
            told = "the address names no rollout: use ProxyLLM.get_base_url(rollout_id, attempt_id)"
            raise GatewayRequestError(told, status=404, code="unknown_rollout")
        return await self._opened(rollout, attempt_id)

    async def _opened(self, rollout: str, attempt_id: str) -> Attempt:
        """An attempt of the store that runs; it is served from its first call on."""
        key = rollout, attempt_id
        if (known := self._attempts.get(key)) is not None:
            return known
        if f"{rollout}/{attempt_id}" in self._ended:
            raise GatewayRequestError(f"rollout {rollout} has ended", status=410, code="rollout_ended")
        opening = self._opening.get(key)
        if opening is None:  # requests that come together wait for one look at the store
            opening = self._opening[key] = asyncio.ensure_future(self._found(rollout, attempt_id))
            opening.add_done_callback(lambda _: self._opening.pop(key, None))
        return await asyncio.shield(opening)

    async def _found(self, rollout_id: str, attempt_id: str) -> Attempt:
        [rollout] = [*await self._store.query_rollouts(rollout_id_in=[rollout_id], limit=1)] or [None]
        latest = await self._store.get_latest_attempt(rollout_id) if rollout is not None else None
        if rollout is None or latest is None or latest.attempt_id != attempt_id:
            told = f"the store has no attempt {attempt_id} of a rollout {rollout_id} that runs"
            raise GatewayRequestError(told, status=404, code="unknown_rollout")
        update = await self._store.get_resources_by_id(rollout.resources_id) if rollout.resources_id else None
        told = update.resources.get(LLM_RESOURCE) if update is not None else None
        llm = self._engine_of(told if isinstance(told, LLM) else None)
        if rollout.status in FINISHED or rollout_id in self._ended:  # the store may have told of its end meanwhile
            raise GatewayRequestError(f"rollout {rollout_id} has ended", status=410, code="rollout_ended")
        if [*await self._store.query_spans(rollout_id, attempt_id, name=GENERATE_SPAN, limit=1)]:
            # by a gateway that has ended: what it held of the conversation is gone, and must not be trained twice
            told = f"attempt {attempt_id} was begun at a gateway that has ended: begin the rollout again"
            raise GatewayRequestError(told, status=410, code="attempt_lost")
        recording = Recording(rollout_id, attempt_id, store=self._store, forgets=True)

        def write(name: str, attributes: dict[str, Any], started: float) -> None:
            recording.add(span_builder(name, attributes, started))

        attempt = Attempt(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            roles={LLM_RESOURCE: llm},
            settings=self.settings,
            access=self.access,
            write=write,
            flush=recording.write,
        )
        self._attempts[rollout_id, attempt_id] = attempt
        return attempt

    def _engine_of(self, told: LLM | None) -> LLM:
        """The model that a rollout is answered by, whose resources say ``told``."""
        if told is not None and not isinstance(told, ProxyLLM):
            return told  # the engine itself
        if self._llm is None:
            said = f"the rollout's resources name no engine as {LLM_RESOURCE}"
            raise GatewayRequestError(said, status=503, code="no_engine")
        sampling = (told.sampling_parameters if told is not None else None) or self._llm.sampling_parameters
        sampling = {**run_parameters(self._llm.sampling_parameters), **sampling}
        return self._llm.model_copy(update={"sampling_parameters": sampling})

    async def _unnamed(self, request: web.Request, path: str, named: dict[str, str | None]) -> web.Response | None:
        """Where an agent of ours finds the engine itself; it needs nobody to translate."""
        if path != "/engine" or named.get("rollout") is not None or request.method != "GET":
            return None
        if not self._opens(self._shown(request, named)):
            return None
        if self._llm is None:
            return None
        told: dict[str, Any] = {"endpoint": self._llm.endpoint}
        if replay := run_parameters(self._llm.sampling_parameters):
            told["replay"] = replay
        return json_response(told)


def span_builder(name: str, attributes: dict[str, Any], at: float) -> SpanBuilder:
    """A span of a moment, for a ``Recording``."""
    status = TraceStatus(status_code="OK")
    core = SpanCoreFields(name=name, attributes=attributes, status=status, start_time=at, end_time=at)
    return partial(Span.from_core_fields, core)
