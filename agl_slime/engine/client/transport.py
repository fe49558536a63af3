"""HTTP to one base URL: pooled connections, time limits, retries, JSON. Knows nothing of SGLang's endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import orjson

from agl_slime.engine.client.prompt import PromptIds
from agl_slime.engine.client.retry import PROTOCOL_ERROR_RETRIES, engine_error, error_message, refusal
from agl_slime.errors import ConfigError, EngineProtocolError, EngineTimeoutError
from agl_slime.support.backoff import Backoff
from agl_slime.support.net import shown_url
from agl_slime.support.ranges import check_ranges

logger = logging.getLogger(__name__)

T = TypeVar("T")


# uvicorn under SGLang closes a connection that was idle for 5 s (SGLANG_TIMEOUT_KEEP_ALIVE); letting go of it first
# avoids sending into a closing socket.
_KEEPALIVE_S = 4.0

# A generation can be silent for many minutes: without probes a vanished host or a NAT that forgot the connection would
# be noticed only by the idle timeout.
_TCP_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 6}

# Opening one TCP connection: SYN is sent again after 1, 3 and 7 s.
_CONNECT_TIMEOUT_S = 10.0

# Files that a process needs besides: libraries, logs, the store's connections.
_OTHER_FILES = 512


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Limits of a client; all times in seconds."""

    max_connections: int = 4096
    """Requests on the wire at once; more wait in the client, in order. The soft limit of open files is raised for them
    where the hard one allows; else there are fewer connections, and a warning."""
    total_timeout_s: float = 3600.0
    """One call with all its retries, resumes and waiting for a connection. 32k tokens at 20 tokens/s are 27 minutes,
    plus as much again in the queue."""
    idle_timeout_s: float = 1800.0
    """The longest silence of one request, so the longest that one generation may take: ``/generate`` without streaming
    is silent until its last token. A vanished host is noticed by TCP keep-alive within 3 minutes."""
    control_timeout_s: float = 60.0
    """One control call (model_info, flush, pause, ...) with its retries."""
    max_attempts: int = 8
    """Sends of one request. With the backoff below the seven pauses are 23 s together on average and 45 s at most."""
    backoff_base_s: float = 0.5
    """Upper bound of the first pause; each further one doubles it (see ``agl_slime.support.backoff``)."""
    backoff_cap_s: float = 15.0
    """No bound of a pause grows above this."""
    resume_limit: int = 64
    """How often one generation may be aborted and taken up again; a weight sync aborts it once."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as ``Authorization: Bearer``; what SGLang was started with as ``--api-key``."""

    def __post_init__(self) -> None:
        seconds = " ".join(setting.name for setting in fields(self) if setting.name.endswith("_s"))
        check_ranges(
            self,
            (seconds, lambda value: value > 0, "above 0 seconds"),
            ("max_connections max_attempts", lambda value: value >= 1, "at least 1"),
            ("resume_limit", lambda value: value >= 0, "at least 0"),
        )


class HttpTransport:
    """Requests to one base URL from any number of event loops and threads: each loop gets its own connection pool."""

    def __init__(self, *, base_url: str, settings: ClientSettings) -> None:
        self.base_url = checked_url(base_url)
        self.shown_url = shown_url(self.base_url)
        if settings.api_key and "@" in urlsplit(self.base_url).netloc:
            raise ConfigError(f"{self.shown_url} has a user or password, and there is a key: a request has one of them")
        self.settings = settings
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self._lock = threading.Lock()

    async def call(
        self,
        method: str,
        path: str,
        payload: Any = None,
        *,
        timeout_s: float | None = None,
        max_attempts: int | None = None,
        json: bool = True,
    ) -> dict[str, Any]:
        """One control call with retries. Returns the JSON object of the answer; nothing of it without ``json``."""
        deadline = time.monotonic() + (timeout_s or self.settings.control_timeout_s)
        endpoint = self.shown_url + path

        async def attempt() -> dict[str, Any]:
            content = await self.send(method, path, payload, deadline=deadline, json=json)
            if not isinstance(content, dict):
                raise EngineProtocolError(f"{endpoint} answered a JSON {type(content).__name__}; expected an object")
            return content

        return await self.retry(attempt, endpoint=endpoint, deadline=deadline, tries=max_attempts)

    async def retry(
        self, attempt: Callable[[], Awaitable[T]], *, endpoint: str, deadline: float, tries: int | None = None
    ) -> T:
        """Attempts until one succeeds, its verdict is final, the ``tries`` are used up, or the ``deadline`` (of
        ``time.monotonic``) would pass. Raises the last failure's typed error, which names the first if it differs."""
        started, tries = time.monotonic(), tries or self.settings.max_attempts
        base_s, cap_s = self.settings.backoff_base_s, self.settings.backoff_cap_s
        backoff = Backoff(base_s=base_s, cap_s=cap_s, tries=tries, deadline=deadline)
        protocol_errors = 0
        while True:
            try:
                return await attempt()
            except Exception as exc:
                error = failure = engine_error(exc, endpoint=endpoint)
                cause = exc.__cause__ if exc is failure else exc
            protocol_errors += isinstance(error, EngineProtocolError)
            pause = backoff.failed(error, at_least_s=failure.retry_after_s)
            retry = failure.transient and protocol_errors <= PROTOCOL_ERROR_RETRIES
            reason = ""
            if time.monotonic() >= deadline:
                last = f"the last failure: {error}"
                error = EngineTimeoutError(f"{endpoint} did not answer within the time limit; {last}")
            elif retry and pause is not None:
                logger.debug("%s; trying again in %.2f s (attempt %d of %d)", error, pause, backoff.failures + 1, tries)
                await asyncio.sleep(pause)
                continue
            elif retry and backoff.failures < tries:
                reason = "; the time limit leaves no room for another"
            if backoff.failures > 1 or reason:
                if type(backoff.first) is not type(failure):
                    reason += f"; the first failure: {backoff.first}"
                attempts = f"{backoff.failures} attempt{'s' * (backoff.failures > 1)}"
                spent = f"{attempts} in {time.monotonic() - started:.1f} s"
                error = type(error)(f"{error} (gave up after {spent}{reason})")
                error.status = failure.status
            raise error from cause

    async def send(
        self,
        method: str,
        path: str,
        payload: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        deadline: float,
        json: bool = True,
        on_event: Callable[[Any], None] | None = None,
    ) -> Any:
        """Send once. Returns the answer's JSON, or an empty object without ``json``. Raises ``refusal`` for any
        status but 200, ``EngineProtocolError`` for a body that is no JSON (a page of some other server, half an
        answer), and what aiohttp raises.

        Of an answer that is streamed ``on_event`` gets the JSON of events, those excepted that a later one has
        overtaken (SGLang's hold all that came before them), and the last one is returned.
        """
        endpoint = self.shown_url + path
        remaining = max(0.001, deadline - time.monotonic())
        timeout = aiohttp.ClientTimeout(
            total=remaining,
            sock_connect=min(remaining, _CONNECT_TIMEOUT_S),
            sock_read=min(remaining, self.settings.idle_timeout_s),
        )
        session = self._session()
        body = None if payload is None else _encoded(payload)
        if body is not None:
            headers = {**(headers or {}), "Content-Type": "application/json"}
        # a redirect is not followed: it is no answer of SGLang's, and the key would travel with it
        async with session.request(
            method, self.base_url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as answer:
            if on_event is not None and answer.status == 200 and answer.content_type == "text/event-stream":
                return await _last_event(answer, on_event, endpoint)
            content = await answer.read()
            status, kind, answer_headers = answer.status, answer.content_type, answer.headers
        if status != 200:
            raise refusal(status, content.decode(errors="replace"), endpoint=endpoint, headers=answer_headers)
        try:
            return _decoded(content) if json else {}
        except ValueError:
            start = error_message(content[:200].decode(errors="replace"))
            raise EngineProtocolError(f"{endpoint} answered {kind}, which is not JSON: {start!r}") from None

    async def aclose(self) -> None:
        """Close the connections of every loop. May be called more than once; a later request opens new ones."""
        with self._lock:
            sessions, self._sessions = self._sessions, {}
        here = asyncio.get_running_loop()
        for loop, session in sessions.items():
            if loop is here:
                await session.close()
            elif loop.is_running():
                future = asyncio.run_coroutine_threadsafe(session.close(), loop)
                await asyncio.wait_for(asyncio.wrap_future(future), timeout=5.0)
            else:
                _drop(session)

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        with self._lock:
            session = self._sessions.get(loop)
            if session is None or session.closed:
                for dead in [loop for loop in self._sessions if loop.is_closed()]:
                    _drop(self._sessions.pop(dead))
                session = self._sessions[loop] = self._new_session()
            return session

    def _new_session(self) -> aiohttp.ClientSession:
        headers = {"Authorization": f"Bearer {self.settings.api_key}"} if self.settings.api_key else None
        connector = aiohttp.TCPConnector(
            limit=_within_file_limit(self.settings.max_connections),
            limit_per_host=0,
            keepalive_timeout=_KEEPALIVE_S,
            ttl_dns_cache=300,
            socket_factory=_socket_with_keepalive,
        )
        # cookies of a load balancer would pin every rollout to one worker
        return aiohttp.ClientSession(connector=connector, headers=headers, cookie_jar=aiohttp.DummyCookieJar())


async def _last_event(answer: aiohttp.ClientResponse, on_event: Callable[[Any], None], endpoint: str) -> Any:
    last, rest = None, b""
    async for data in answer.content.iter_any():
        *events, rest = (rest + data).split(b"\n\n")
        bodies = [event[5:] for event in events if event.startswith(b"data:") and event[5:].strip() != b"[DONE]"]
        if not bodies:
            continue
        try:
            last = _decoded(bodies[-1])
        except ValueError:
            raise EngineProtocolError(f"{endpoint} streamed an event that is not JSON: {bodies[-1][:200]!r}") from None
        on_event(last)
    return last


def _encoded(payload: Any) -> bytes:
    """JSON; the standard library takes what orjson refuses: text cut within a character, numbers beyond 64 bits."""
    try:
        # a copy: orjson's own bytes keep their buffer of 8 kB or more, and a body lives as long as its request
        return bytes(memoryview(orjson.dumps(payload, default=_written, option=orjson.OPT_SERIALIZE_NUMPY)))
    except TypeError:
        return json.dumps(payload, default=list).encode()


def _written(ids: Any) -> Any:
    if isinstance(ids, PromptIds):
        return ids.array
    raise TypeError


def _decoded(body: bytes) -> Any:
    """JSON, with what orjson refuses and servers write: NaN, text cut within a character."""
    try:
        return orjson.loads(body)
    except ValueError:
        return json.loads(body)


def checked_url(url: str) -> str:
    """``url`` as the address that SGLang's own paths follow: without a trailing slash and OpenAI's ``/v1``. Raises
    ``ConfigError`` unless it is http(s)://host[:port][/path], without a query, which those paths would be part of."""
    try:
        address = urlsplit(url)
        usable = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:
        usable = False
    if not usable or re.search(r"[\s?#]", url):
        raise ConfigError(f"the SGLang URL must look like http://127.0.0.1:30000, got {shown_url(url)!r}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _drop(session: aiohttp.ClientSession) -> None:
    """Let go of what belongs to an ended loop: nothing can be awaited there, and sockets close when collected."""
    closing = session.close()
    with contextlib.suppress(StopIteration):
        closing.send(None)  # without a loop it has nothing to wait for
    closing.close()


def _within_file_limit(connections: int) -> int:
    """``connections``, or as many as this process may open. The usual soft limit of 1,024 files is a leftover of
    ``select``, which asyncio does not use; raising it to the hard limit is what that limit is for."""
    try:
        import resource
    except ImportError:
        return connections  # Windows has no such limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(ValueError, OSError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    fewer = connections if soft >= needed else min(connections, max(1, soft // 2))
    if fewer < connections:
        logger.warning("at most %d connections instead of %d: raise ulimit -Hn (%d)", fewer, connections, soft)
    return fewer


def _socket_with_keepalive(addr_info: tuple[Any, ...]) -> socket.socket:
    connection = socket.socket(*addr_info[:3])
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_KEEPALIVE.items():
        if hasattr(socket, name):  # macOS and Windows name them otherwise or not at all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
