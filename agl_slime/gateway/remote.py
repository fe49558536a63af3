"""``StoreGateway``: a gateway for agents that other runners execute, on other hosts or in sandboxes.

It reads an attempt from the store at its first call, and writes its spans to the store before each answer is sent.

    agl-slime gateway --store-url http://HOST:4747 --sglang-url http://HOST:30000 --model-path DIR

Agents get ``ProxyLLM(endpoint="http://HOST:PORT/k/TOKEN/v1", …)``; Agent Lightning's decorators call its
``get_base_url(rollout_id, attempt_id)``.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from agl_slime.agent.access import LLM_RESOURCE, limits_of, run_parameters
from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.attempt import Attempt
from agl_slime.gateway.server import Address, TokenGateway
from agl_slime.store.bridge import FINISHED
from agl_slime.store.client import listen_for_ends
from agl_slime.support.agl import LLM, LightningStore, ProxyLLM
from agl_slime.support.http import json_response
from agl_slime.support.memory import return_freed_memory
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.attributes import GENERATE_SPAN


class StoreGateway(TokenGateway):
    """Serves every running attempt of ``store``.

    Args:
        llm: engine, model and sampling parameters of rollouts whose resources have none.
        options: ``token``, ``settings`` and ``access`` of ``TokenGateway``.
    """

    def __init__(self, *, store: LightningStore, llm: LLM | None, token: str | None = None, **options: Any) -> None:
        super().__init__(token=token, **options)
        self._store, self._llm = store, llm
        self._opening: dict[tuple[str, str], asyncio.Future[Attempt]] = {}
        self._returning: asyncio.Future[None] | None = None  # a reference keeps the task alive

    @property
    def endpoint(self) -> str:
        """The endpoint for a ``ProxyLLM``."""
        return f"{self.url}/k/{self._token}/v1" if self._token else f"{self.url}/v1"

    def _start_services(self) -> None:
        unsubscribe = listen_for_ends(
            self._store,
            lambda rollout_id: self._call_soon(lambda: self._end_rollout(rollout_id)),
            own_rollouts=lambda: {rollout_id for rollout_id, _ in self._attempts},
        )
        self._services.callback(unsubscribe)

    def _end_rollout(self, rollout_id: str) -> None:
        self._note_ended(rollout_id)
        for attempt in [attempt for attempt in self._attempts.values() if attempt.rollout_id == rollout_id]:
            attempt.end()
            attempt.cancel_pending()
            self._forget(attempt)
        if self._may_return_memory():
            self._returning = asyncio.ensure_future(run_in_thread(return_freed_memory))

    async def _find_attempt(self, request: web.Request, address: Address) -> Attempt:
        rollout, attempt_id = address.get("rollout"), address.get("attempt")
        self._check_token(request, address)
        if rollout is None or attempt_id is None:
            message = "the address names no rollout: use ProxyLLM.get_base_url(rollout_id, attempt_id)"
            raise GatewayRequestError(message, status=404, code="unknown_rollout")
        return await self._get_attempt(rollout, attempt_id)

    async def _get_attempt(self, rollout: str, attempt_id: str) -> Attempt:
        """A running attempt, read from the store at its first call. Raises ``GatewayRequestError``."""
        key = rollout, attempt_id
        if (attempt := self._attempts.get(key)) is not None:
            return attempt
        if f"{rollout}/{attempt_id}" in self._ended:
            raise GatewayRequestError(f"rollout {rollout} has ended", status=410, code="rollout_ended")
        opening = self._opening.get(key)
        if opening is None:  # concurrent requests share one read of the store
            opening = self._opening[key] = asyncio.ensure_future(self._read_attempt(rollout, attempt_id))
            opening.add_done_callback(lambda _: self._opening.pop(key, None))
        return await asyncio.shield(opening)

    async def _read_attempt(self, rollout_id: str, attempt_id: str) -> Attempt:
        [rollout] = [*await self._store.query_rollouts(rollout_id_in=[rollout_id], limit=1)] or [None]
        latest = await self._store.get_latest_attempt(rollout_id) if rollout is not None else None
        if rollout is None or latest is None or latest.attempt_id != attempt_id:
            message = f"the store has no attempt {attempt_id} of a rollout {rollout_id} that runs"
            raise GatewayRequestError(message, status=404, code="unknown_rollout")
        update = await self._store.get_resources_by_id(rollout.resources_id) if rollout.resources_id else None
        resource = update.resources.get(LLM_RESOURCE) if update is not None else None
        llm = self._engine_of(resource if isinstance(resource, LLM) else None)
        if rollout.status in FINISHED or rollout_id in self._ended:  # it may have ended during these reads
            raise GatewayRequestError(f"rollout {rollout_id} has ended", status=410, code="rollout_ended")
        if [*await self._store.query_spans(rollout_id, attempt_id, name=GENERATE_SPAN, limit=1)]:
            # another gateway answered it; without its conversations tokens would be trained twice
            message = f"attempt {attempt_id} was begun at a gateway that has ended: begin the rollout again"
            raise GatewayRequestError(message, status=410, code="attempt_lost")
        limits = limits_of(rollout, latest)
        return self._record(rollout_id, attempt_id, llm=llm, store=self._store, limits=limits)

    def _engine_of(self, resource: LLM | None) -> LLM:
        if resource is not None and not isinstance(resource, ProxyLLM):
            return resource
        if self._llm is None:
            message = f"the rollout's resources name no engine as {LLM_RESOURCE}"
            raise GatewayRequestError(message, status=503, code="no_engine")
        sampling = (resource.sampling_parameters if resource is not None else None) or self._llm.sampling_parameters
        sampling = {**run_parameters(self._llm.sampling_parameters), **sampling}
        return self._llm.model_copy(update={"sampling_parameters": sampling})

    async def _service_response(self, request: web.Request, path: str, address: Address) -> web.Response | None:
        """``/engine``: the address of the engine, for agents of this package, which ask it directly."""
        if path != "/engine" or address.get("rollout") is not None or request.method != "GET" or self._llm is None:
            return None
        if not self._is_authorized(request, address):
            return None
        engine: dict[str, Any] = {"endpoint": self._llm.endpoint}
        if replay := run_parameters(self._llm.sampling_parameters):
            engine["replay"] = replay
        return json_response(engine)
