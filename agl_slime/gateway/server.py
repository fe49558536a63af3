"""The gateway: an HTTP server with an address for each attempt, on a thread and an event loop of its own.

    /rollout/{rollout_id}/attempt/{attempt_id}/v1/chat/completions       with the attempt's secret as API key
    /k/{secret}/rollout/{rollout_id}/attempt/{attempt_id}/v1/…           for clients that send a key of their own
    /v1/…                                                                the key alone says which attempt it is

``/v1`` may be left out. What is asked is sampled by the engine from token ids, and written as a span before the answer
goes out. Agents that block their event loop cannot block this one.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Self, TypeVar

from aiohttp import web

from agl_slime.errors import AglSlimeError, ConfigError, GatewayRequestError
from agl_slime.gateway.anthropic import AnthropicMessages, CountTokens
from agl_slime.gateway.attempt import Attempt
from agl_slime.gateway.bodies import Request
from agl_slime.gateway.calls import Answered, Call, Choice
from agl_slime.gateway.chat import ChatCompletions
from agl_slime.gateway.completions import Completions
from agl_slime.gateway.errors import RETRY_AFTER_S, THREADS_UNSUPPORTED, explain_once, is_gone, refusal_of
from agl_slime.gateway.protocol import Protocol, list_of_models
from agl_slime.gateway.responses import Compact, InputTokens, Responses, new_conversation
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.gateway.work import Work
from agl_slime.rollout.access import LLM_RESOURCE, EngineAccess, ServedResources, run_parameters
from agl_slime.support.agl import LLM, NamedResources, ProxyLLM
from agl_slime.support.http import json_response, listening, read_body
from agl_slime.support.memory import return_freed_memory
from agl_slime.support.net import same_secret
from agl_slime.support.threads import LoopThread, run_in_thread

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ADDRESS = re.compile(
    r"(?:/k/(?P<secret>[^/]+))?"
    # the second form is Agent Lightning 1.0's, whose controllers may have names
    r"(?:/controller/[A-Za-z0-9._-]{1,64}(?=/))?"
    r"(?:(?:/proxy(?=/rollout))?/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+)"
    r"(?:/mode/(?P<mode>[^/]+)/(?:openai|anthropic))?)?(?:/role/(?P<role>[^/]+))?"
    r"(?:/v1)*(?P<path>/.*)?",
    re.DOTALL,
)
_PROTOCOLS: dict[str, Protocol] = {
    "/chat/completions": ChatCompletions(),
    "/completions": Completions(),
    "/responses": Responses(),
    "/responses/compact": Compact(),
    "/responses/input_tokens": InputTokens(),
    "/messages": AnthropicMessages(),
    "/messages/count_tokens": CountTokens(),
}
_OTHER_PATHS = ("/", "/models", "/conversations", "/seen")
# An answer of more log-probs is written in a thread: a thousand take some milliseconds.
_TOLD_AT_ONCE = 2_000
_RETRY_HEADER = "x-stainless-retry-count"  # of the SDKs of OpenAI and Anthropic
_STOP_S = 5.0
_ENDED_KEPT = 10_000
_RETURN_EVERY_S = 30.0


class Gateway:
    """Serves the attempts that ``open`` was called for, from ``start`` to ``stop``. One per runner."""

    defaults: Mapping[str, Mapping[str, Any]] = {}
    """Fields of requests that say nothing of them, by what the protocol's ids begin with."""

    def __init__(self, settings: GatewaySettings | None = None, *, access: EngineAccess | None = None) -> None:
        self.settings = settings or GatewaySettings()
        self.access = access or EngineAccess()
        self.url = ""
        self._since = datetime.now(UTC)
        self._attempts: dict[tuple[str, str], Attempt] = {}
        self._returned = time.monotonic()  # when freed memory was given back
        self._by_secret: dict[str, Attempt] = {}
        self._ended: dict[str, None] = {}  # of the last attempts, by all that names them: they get 410 and not 404
        self._stop: asyncio.Event | None = None
        self._thread: LoopThread | None = None
        self._starting = threading.Lock()

    # -- from any thread ----------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Listen, unless it does. Raises ``ConfigError`` when the address cannot be listened on."""
        with self._starting:
            if self._thread is None:
                self._start()
        return self

    def _start(self) -> None:
        self._thread = thread = LoopThread(self._serve, name="agl-slime-gateway")
        thread.start()
        if thread.failure is not None:
            self._thread = None
            where = f"{self.settings.host}:{self.settings.port}"
            raise ConfigError(f"the gateway cannot listen on {where}: {thread.failure}") from thread.failure

    def stop(self) -> None:
        """Cut everything off. Safe to call twice."""
        if self._thread is not None and self._stop is not None:
            self._thread.call(self._stop.set)
            self._thread.join(_STOP_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def open(
        self, rollout_id: str, attempt_id: str, resources: NamedResources, write: Callable[..., None], **more: Any
    ) -> tuple[Attempt | None, NamedResources]:
        """Serve an attempt; returns it, and the resources with this gateway's address in the place of the engine's.
        ``None`` where no model of the resources is one to go through here: a ``ProxyLLM`` is somebody else's."""
        main = resources.get(LLM_RESOURCE) or next((r for r in resources.values() if isinstance(r, LLM)), None)
        if not isinstance(main, LLM) or isinstance(main, ProxyLLM):
            return None, resources
        self.start()
        same = {
            name: llm
            for name, llm in resources.items()
            if isinstance(llm, LLM) and not isinstance(llm, ProxyLLM) and llm.endpoint == main.endpoint
        }
        roles = {LLM_RESOURCE: main, **{name: llm for name, llm in same.items() if llm is not main}}
        attempt = Attempt(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            roles=roles,
            settings=self.settings,
            access=self.access,
            write=write,
            **more,
        )
        self._attempts[rollout_id, attempt_id] = attempt
        self._by_secret[attempt.secret] = attempt
        served = {
            name: self._address(attempt, llm, LLM_RESOURCE if llm is main else name) for name, llm in same.items()
        }
        return attempt, ServedResources({**resources, **served})

    def _address(self, attempt: Attempt, llm: LLM, role: str) -> LLM:
        address = f"{self.url}/k/{attempt.secret}/rollout/{attempt.rollout_id}/attempt/{attempt.attempt_id}"
        if role != LLM_RESOURCE:
            address += f"/role/{role}"
        sampling = for_clients(llm.sampling_parameters)
        return LLM(endpoint=f"{address}/v1", model=llm.model, api_key=attempt.secret, sampling_parameters=sampling)

    async def close(self, attempt: Attempt) -> None:
        """End an attempt: what is under way is cut off, and its last span is written."""
        try:
            if not attempt.end() and self._thread is not None:
                self._on_loop(attempt.cut)
                await run_in_thread(attempt.quiet.wait, _STOP_S)
        finally:
            self._forget(attempt)
            attempt.write_summary()
        if self._may_return_memory():
            await run_in_thread(return_freed_memory)

    def _may_return_memory(self) -> bool:
        """Whether what has been freed is to go back to the machine now: where no attempt waits for that, and not all
        the time."""
        if self._attempts or time.monotonic() - self._returned <= _RETURN_EVERY_S:
            return False
        self._returned = time.monotonic()
        return True

    def _forget(self, attempt: Attempt) -> None:
        attempt.forget()
        self._attempts.pop((attempt.rollout_id, attempt.attempt_id), None)
        self._by_secret.pop(attempt.secret, None)
        self._has_ended(attempt.secret, f"{attempt.rollout_id}/{attempt.attempt_id}")

    def _has_ended(self, *names: str) -> None:
        self._ended |= dict.fromkeys(names)
        while len(self._ended) > _ENDED_KEPT:
            self._ended.pop(next(iter(self._ended)), None)

    def _on_loop(self, callback: Callable[[], Any]) -> None:
        if self._thread is not None:
            self._thread.call(callback)

    # -- the gateway's thread -----------------------------------------------------------------------------------------

    async def _serve(self, ready: Callable[[], None]) -> None:
        self._stop = asyncio.Event()
        app = web.Application(client_max_size=int(self.settings.max_body_mb * 1024**2))
        app.router.add_route("*", "/{path:.*}", self._handle)
        # a client that hangs up cancels the work on its request, and that the engine's
        options: Any = {"handler_cancellation": True, "shutdown_timeout": 0.1}
        where = self.settings
        try:
            async with listening(app, host=where.host, port=where.port, backlog=4096, **options) as self.url:
                await self._begin()
                ready()
                await self._stop.wait()
                for attempt in list(self._attempts.values()):
                    attempt.end()
                    attempt.cut()
        finally:
            await self._finish()
            await self.access.aclose()

    async def _begin(self) -> None:
        """What is to be done beside serving, on the gateway's loop."""

    async def _finish(self) -> None:
        """The end of that."""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        found = _ADDRESS.fullmatch(request.path)
        path = (found["path"] or "/") if found is not None else request.path
        protocol = _protocol_of(path, request)
        attempt: Attempt | None = None
        try:
            named = found.groupdict() if found is not None else {}
            if (answer := await self._unnamed(request, path, named)) is not None:
                return answer
            attempt = await self._attempt(request, named)
            role = (found["role"] if found is not None else None) or LLM_RESOURCE
            return await self._routed(request, path, attempt, role)
        except asyncio.CancelledError as error:
            if attempt is None or not attempt.closed:
                raise  # the client has hung up
            refusal = refusal_of(error)
        except Exception as error:
            if is_gone(error):
                return web.Response()
            refusal = self._refusal(error, f"{request.method} {path}")
        if attempt is not None and refusal.code != THREADS_UNSUPPORTED:  # which its client expects
            attempt.seen[f"refused/{refusal.status}"] += 1
            explain_once(refusal, attempt.rollout_id)
            await self._was_refused(attempt, path, refusal)
        headers = {"Retry-After": str(RETRY_AFTER_S)} if refusal.status in (429, 503) else {}
        return json_response(protocol.error(refusal), status=refusal.status, headers=headers)

    async def _unnamed(self, request: web.Request, path: str, named: dict[str, str | None]) -> web.Response | None:
        """An answer that belongs to no attempt; ``None`` when there is none at this address."""
        return None

    async def _was_refused(self, attempt: Attempt, path: str, refusal: GatewayRequestError) -> None:
        """A request of ``attempt`` is refused: for who writes that down."""

    @staticmethod
    def _shown(request: web.Request, named: dict[str, str | None]) -> list[str]:
        """What a client shows that it may ask: in the address, as bearer token, as Anthropic's key."""
        bearer = request.headers.get("Authorization", "").partition(" ")[2].strip()
        return [key for key in (named.get("secret"), bearer, request.headers.get("x-api-key")) if key]

    async def _attempt(self, request: web.Request, named: dict[str, str | None]) -> Attempt:
        """The attempt that the address or the key names, and the secret opens."""
        rollout, attempt_id, shown = named.get("rollout"), named.get("attempt"), self._shown(request, named)
        attempt = next((found for key in shown if (found := self._by_secret.get(key)) is not None), None)
        if rollout is None or attempt_id is None:
            if attempt is not None:
                return attempt
            if any(key in self._ended for key in shown):
                raise GatewayRequestError("the rollout of this key has ended", status=410, code="rollout_ended")
            raise GatewayRequestError("the API key names no rollout that runs here", status=401, code="invalid_api_key")
        meant = self._attempts.get((rollout, attempt_id))
        if meant is None:
            if f"{rollout}/{attempt_id}" in self._ended:
                raise GatewayRequestError(f"rollout {rollout} has ended", status=410, code="rollout_ended")
            told = f"there is no attempt {attempt_id} of a rollout {rollout} here"
            raise GatewayRequestError(told, status=404, code="unknown_rollout")
        if not any(same_secret(key, meant.secret) for key in shown):
            told = f"the key does not open rollout {rollout}: send LLM.api_key, or use LLM.endpoint as it is"
            raise GatewayRequestError(told, status=401, code="invalid_api_key")
        return meant

    async def _routed(self, request: web.Request, path: str, attempt: Attempt, role: str) -> web.StreamResponse:
        protocol = _PROTOCOLS.get(path) if request.method == "POST" else None
        attempt.came(f"{request.method} {path}", served=protocol is not None or path in _OTHER_PATHS)
        if request.method in ("HEAD", "OPTIONS") or path == "/":
            return web.Response()
        if request.method == "GET" and path.startswith("/models"):
            name = path.removeprefix("/models").strip("/")
            return json_response(list_of_models(attempt.roles, name, since=self._since))
        if request.method == "GET" and path == "/seen":
            return json_response(attempt.seen)
        if request.method == "POST" and path == "/conversations":
            return await self._conversation(request, attempt)
        if protocol is None:
            served = ", ".join(f"/v1{path}" for path in (*_PROTOCOLS, *_OTHER_PATHS[1:]))
            told = f"{request.method} {path:.80} is not served here; there are {served}"
            raise GatewayRequestError(told, status=404, code="unknown_url")
        raw = await request.read()
        asked = attempt.bodies.look(request.path, raw)
        attempt.begin(asked.key)
        try:
            return await self._asked(request, asked, protocol, attempt, role)
        finally:
            attempt.done()

    async def _conversation(self, request: web.Request, attempt: Attempt) -> web.Response:
        attempt.begin(b"")
        try:
            if attempt.seen["POST /conversations"] > attempt.settings.max_requests:
                told = f"rollout {attempt.rollout_id} has begun {attempt.settings.max_requests} conversations, the most"
                raise GatewayRequestError(told, status=429, code="rate_limit_exceeded")
            made, begun = await read_body(request, lambda raw: new_conversation(raw, attempt.kept))
            attempt.kept[made["id"]] = begun
            return json_response(made)
        finally:
            attempt.done()

    async def _asked(
        self, request: web.Request, asked: Request, protocol: Protocol, attempt: Attempt, role: str
    ) -> web.StreamResponse:
        defaults = self.defaults.get(protocol.prefix, {})
        body, call = await attempt.bodies.read(asked, protocol, attempt.kept, defaults, self.settings)
        if protocol.counts:
            return json_response(protocol.counted(await attempt.count(call)))
        if call.model in (*attempt.settings.untrained_models, *attempt.settings.trained_models):
            role = call.model
        elif role not in attempt.roles:
            raise GatewayRequestError(f"there is no model {role!r:.80} here", status=404, code="unknown_model")
        retry = request.headers.get(_RETRY_HEADER, "0") not in ("", "0")
        decode = await attempt.decoder()
        with attempt.work(call, role=role, key=asked.key, retry=retry, prefix=protocol.prefix) as work:
            if call.stream:
                answer = await self._streamed(request, protocol, body, call, work, decode)
            else:
                answered = await work.result()
                answer = await _off_loop(call, answered, lambda a: json_response(protocol.answer(body, a, decode)))
            work.told = True
            return answer

    async def _streamed(
        self, http: web.Request, protocol: Protocol, body: Any, call: Call, work: Work, decode: Any
    ) -> web.StreamResponse:
        """Events as they come. What fails before the first one is an answer with a status, and later an event."""
        head = Answered(id=work.id, created=work.created, model=call.model, choices=(Choice(),) * call.n)
        stream = protocol.stream(body, head, decode)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        at = 0
        try:
            while True:
                came = await work.wait(at, self.settings.keep_alive_s)
                at, progress, ended = work.version, work.progress, work.task.done()
                if ended and not response.prepared:
                    await work.result()  # raises what went wrong
                if not response.prepared:
                    await response.prepare(http)
                    await response.write(b"".join(stream.begin()))
                if ended:
                    answered = await work.result()
                    await response.write(await _off_loop(call, answered, stream.finish))
                    return response
                if events := stream.update(work.texts) if came else stream.keep_alive():
                    await response.write(events)
                    work.delivered = progress
        except (Exception, asyncio.CancelledError) as error:
            if not response.prepared or is_gone(error, unless=work.task):
                raise
            await response.write(stream.error(self._refusal(error, "a stream")))
            return response

    def _refusal(self, error: BaseException, what: str) -> GatewayRequestError:
        """What to answer; ``what`` was asked goes to the log, without the address, which holds a secret."""
        refusal = refusal_of(error, most_mb=self.settings.max_body_mb)
        if refusal.status == 500 and not isinstance(error, AglSlimeError):
            logger.error("%s failed.", what, exc_info=error)
        return refusal


def for_clients(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters by the names that an OpenAI client takes: agents hand them on as they are."""
    known = {name: value for name, value in sampling.items() if name not in run_parameters(sampling)}
    return {"max_tokens" if name == "max_new_tokens" else name: value for name, value in known.items()}


def _protocol_of(path: str, request: web.Request) -> Protocol:
    """The protocol whose errors a client reads."""
    known = _PROTOCOLS.get(path)
    default = "/messages" if "anthropic-version" in request.headers else "/chat/completions"
    return known or _PROTOCOLS[default]


async def _off_loop(call: Call, answered: Answered, write: Callable[[Answered], T]) -> T:
    """The answer written; in a thread where it may have many log-probs."""
    few = answered.output_tokens * (1 + call.top_log_probs) <= _TOLD_AT_ONCE
    return write(answered) if few else await run_in_thread(write, answered)
