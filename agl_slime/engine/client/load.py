"""The load of engines by SGLang's ``/v1/loads`` (0.5.15 and 0.5.23; the embedded engine has it too)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.transport import ClientSettings, HttpTransport, checked_url, refused_calls
from agl_slime.errors import ConfigError, EngineProtocolError, EngineRequestError

_LOADS = "/v1/loads?include=core"
_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """The load of one server, or of all workers of a router: running and queued requests, the share of the KV cache in
    use (of the fullest worker), the largest number of running requests (0: not reported), and the calls of this process
    that were refused since the previous look."""

    running: int
    waiting: int
    usage: float = 0.0
    most_running: int = 0
    refused: int = 0


class EngineLoads:
    """Asks the server or router at ``base_url``."""

    def __init__(self, base_url: str) -> None:
        self._url = checked_url(base_url)
        self._workers: list[HttpTransport] = []
        self._refused = refused_calls(self._url)

    async def look(self) -> EngineLoad:
        """The load now. Raises ``EngineError``, and ``ConfigError`` where a server has no such endpoint."""
        if not self._workers:
            async with SGLangClient(base_url=self._url) as client:
                workers = await client.workers()
            self._workers = [HttpTransport(base_url=url, settings=ClientSettings()) for url in workers]
        loads = await asyncio.gather(*(self._ask(worker) for worker in self._workers))
        refused, self._refused = refused_calls(self._url) - self._refused, refused_calls(self._url)
        return EngineLoad(
            running=sum(one.running for one in loads),
            waiting=sum(one.waiting for one in loads),
            usage=max(one.usage for one in loads),
            most_running=sum(one.most_running for one in loads) if all(one.most_running for one in loads) else 0,
            refused=refused,
        )

    async def aclose(self) -> None:
        for worker in self._workers:
            await worker.aclose()

    async def _ask(self, worker: HttpTransport) -> EngineLoad:
        try:
            answer = await worker.call("GET", _LOADS, timeout_s=_TIMEOUT_S, max_attempts=1)
        except EngineRequestError as error:
            why = f"{worker.shown} does not say how busy it is ({error})"
            raise ConfigError(f"--max-concurrent auto: {why}; give a number") from error
        ranks = answer.get("loads")
        if not isinstance(ranks, list) or not ranks:
            raise EngineProtocolError(f"{worker.shown}{_LOADS} answered without loads")
        try:
            return EngineLoad(
                running=sum(_whole(rank, "num_running_reqs") for rank in ranks),
                waiting=sum(_whole(rank, "num_waiting_reqs") for rank in ranks),
                usage=max(float(rank.get("token_usage") or 0.0) for rank in ranks),
                most_running=sum(_whole(rank, "max_running_requests") for rank in ranks),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise EngineProtocolError(f"{worker.shown}{_LOADS} answered loads that cannot be read: {error}") from error


def _whole(rank: Mapping[str, Any], name: str) -> int:
    return int(rank.get(name) or 0)
