"""Model calls under the addresses of Agent Lightning 1.0: in the process of its API, or in one of several workers.

A worker finds the attempt of a rollout by asking that process (*home*) at the rollout's first call, which may begin it;
at the rollout's end home asks the worker to let go of it first. Everything else of ``/api`` is home's.
"""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
from aiohttp import web
from yarl import URL

from agl_slime.agl1.events import refused_call
from agl_slime.agl1.schemas import ATTEMPT
from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.attempt import Attempt
from agl_slime.gateway.remote import StoreGateway
from agl_slime.rollout.access import LLM_RESOURCE

_CONTROLLER = re.compile(r"(?:/k/[^/]+)?/controller/([^/]+)/")
_MOST_REFUSALS_KEPT = 32  # of one rollout: an agent may ask for ever
_ANSWER_S = 90.0  # a worker that has died is waited for


class ModelCalls(StoreGateway):
    """A gateway that knows a rollout by its id alone; 1.0 calls its one attempt 0, whatever the store does."""

    # as 1.0's proxy asks for
    defaults: Mapping[str, Mapping[str, Any]] = {
        "chatcmpl-": {"return_token_ids": True, "logprobs": True},
        "cmpl-": {"return_token_ids": True, "logprobs": 0},
    }

    @abstractmethod
    async def _begun(self, rollout_id: str, *, mode: str | None, by: str) -> str:
        """The attempt of a rollout that its controller ``by`` runs, which begins where it has not. ``mode`` is what the
        address says. Raises ``GatewayRequestError``."""

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

    async def wind_up(self, rollout_id: str, attempt_id: str) -> None:
        """Its agent's process is over: what it asked for and did not wait for is cut off, and what is held of it is
        written and let go."""
        self._has_ended(rollout_id, f"{rollout_id}/{attempt_id}")
        if (attempt := self._attempts.get((rollout_id, attempt_id))) is not None:
            await self.close(attempt)
            await flush(attempt)


class CallsWorker(ModelCalls):
    """Answers its share of the model calls of the API at ``home``, with that gateway's ``defaults``."""

    def __init__(self, *, home: str, defaults: Mapping[str, Mapping[str, Any]], **others: Any) -> None:
        super().__init__(**others)
        self._home, self.defaults = home, defaults
        self._known: dict[str, dict[tuple[str | None, str], str]] = {}  # by rollout

    async def _unnamed(self, request: web.Request, path: str, named: dict[str, str | None]) -> web.Response | None:
        rollout_id = named.get("rollout")
        if rollout_id is None or request.method != "DELETE" or path != "/":
            return None
        if not self._opens(self._shown(request, named)):
            return None
        await self.wind_up(rollout_id, request.query.get("attempt", ""))
        return web.Response(status=204)

    async def _begun(self, rollout_id: str, *, mode: str | None, by: str) -> str:
        known = self._known.setdefault(rollout_id, {})
        if (mode, by) not in known:
            known[mode, by] = await self._ask(rollout_id, mode=mode, by=by)
        return known[mode, by]

    async def _ask(self, rollout_id: str, *, mode: str | None, by: str) -> str:
        where = f"{self._home}/controller/{by}" if by else self._home
        url = f"{where}/api/rollouts/{quote(rollout_id, safe='')}/attempt/0/begin"
        status, told = await asked("POST", url, key=self._token, mode=mode or "")
        if status == 200:
            return told["attempt_id"]
        raise GatewayRequestError(told["detail"], status=status, code=told.get("code", "refused"))

    def _ended_rollout(self, rollout_id: str) -> None:
        super()._ended_rollout(rollout_id)
        self._known.pop(rollout_id, None)


async def end_elsewhere(front: str, rollout_id: str, attempt_id: str, *, key: str | None) -> None:
    """``wind_up`` in the worker that has the rollout, if any has. One that is dead holds nothing of it."""
    url = f"{front}/rollout/{quote(rollout_id, safe='')}/attempt/{ATTEMPT}"
    status, told = await asked("DELETE", url, key=key, attempt=attempt_id)
    if status not in (204, 503):
        raise GatewayRequestError(f"the worker of rollout {rollout_id} answers {status}: {told!r:.200}", status=503)


async def asked(method: str, url: str, *, key: str | None, **query: str) -> tuple[int, Any]:
    """Status and JSON of an answer. Raises ``GatewayRequestError`` (503) where there is none."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limit = aiohttp.ClientTimeout(total=_ANSWER_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit) as http,
            http.request(method, url, headers=headers, params=query) as answer,
        ):
            raw = await answer.read()
            return answer.status, orjson.loads(raw) if raw else None
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
        told = f"{URL(url).origin()} does not answer: {error or type(error).__name__}"
        raise GatewayRequestError(told, status=503, code="gateway_worker_lost") from error


async def flush(attempt: Attempt) -> None:
    assert attempt.flush is not None  # of a gateway over a store
    await attempt.flush()


def controller_of(request: web.Request) -> str:
    """The controller that the address names."""
    found = _CONTROLLER.match(request.path)
    return found[1] if found is not None else ""
