"""``Gateway``: an HTTP server with an address for each attempt, on a thread with an event loop.

    /rollout/{rollout_id}/attempt/{attempt_id}/v1/chat/completions       with the attempt's secret as API key
    /k/{secret}/rollout/{rollout_id}/attempt/{attempt_id}/v1/…           for clients that send another key
    /v1/…                                                                the key names the attempt

``/v1`` may be left out. The engine samples answers from token ids, and each answer is written as a span before it is
sent. Agents that block their event loop do not block the gateway's.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import entry_points
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from agl_slime.agent.access import LLM_RESOURCE, EngineAccess, run_parameters
from agl_slime.errors import AglSlimeError, ConfigError, GatewayRequestError
from agl_slime.gateway.anthropic import AnthropicMessages, CountTokens
from agl_slime.gateway.attempt import MAX_REQUESTS, Attempt
from agl_slime.gateway.bodies import Request
from agl_slime.gateway.calls import Call, CallResult, Choice
from agl_slime.gateway.chat import ChatCompletions
from agl_slime.gateway.completions import Completions
from agl_slime.gateway.errors import RETRY_AFTER_S, THREADS_UNSUPPORTED, explain_once, is_gone, refusal_of
from agl_slime.gateway.pending import PendingResponse
from agl_slime.gateway.protocol import Protocol, list_of_models
from agl_slime.gateway.responses import Compact, InputTokens, Responses, new_conversation
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.gateway.vllm import Generate, Tokenize
from agl_slime.store.recording import Recording
from agl_slime.support.agl_types import LLM, NamedResources, ProxyLLM
from agl_slime.support.http import json_response, listening, read_body, whole_body
from agl_slime.support.memory import return_freed_memory
from agl_slime.support.net import http_url, public_host, require_token, same_secret
from agl_slime.support.threads import LoopThread, run_in_thread, run_in_thread_if

T = TypeVar("T")
Address = Mapping[str, "str | None"]
"""The parts of a request's address, as in ``_ADDRESS``."""

logger = logging.getLogger(__name__)

_ADDRESS = re.compile(
    r"(?:/k/(?P<secret>[^/]+))?"
    # /controller/NAME and /proxy are of Agent Lightning 1.0
    r"(?:/controller/[A-Za-z0-9._-]{1,64}(?=/))?"
    r"(?:(?:/proxy(?=/rollout))?/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+)"
    r"(?:/mode/(?P<mode>[^/]+)/(?:openai|anthropic))?)?(?:/role/(?P<role>[^/]+))?"
    r"(?:/v1)*(?P<path>/.*)?",
    re.DOTALL,
)
PROTOCOLS: dict[str, Protocol] = {
    "/chat/completions": ChatCompletions(),
    "/completions": Completions(),
    "/responses": Responses(),
    "/responses/compact": Compact(),
    "/responses/input_tokens": InputTokens(),
    "/messages": AnthropicMessages(),
    "/messages/count_tokens": CountTokens(),
    "/inference/v1/generate": Generate(),
    "/tokenize": Tokenize(),
}
"""The clients' protocols by path, without ``/v1``. Packages add theirs as entry points of the group
``agl_slime.protocols``, which ``Gateway`` loads (``add_installed_protocols``)."""
_OTHER_PATHS = ("/", "/models", "/conversations", "/seen")
_INLINE_LOG_PROBS_MAX = 2_000  # an answer with more is written in a thread: a thousand take some milliseconds
_RETRY_HEADER = "x-stainless-retry-count"  # of the SDKs of OpenAI and Anthropic
_MAX_SILENCE_S = 15.0  # of a stream
_STOP_S = 5.0
_MAX_ENDED = 10_000
_RETURN_MEMORY_EVERY_S = 30.0

TOKEN_VARIABLE = "AGL_SLIME_GATEWAY_TOKEN"


def add_installed_protocols() -> None:
    """Add protocols by entry points. Raises ``ConfigError`` for one without ``Protocol``, or with another's path."""
    for point in entry_points(group="agl_slime.protocols"):
        if type(PROTOCOLS.get(point.name)).__module__ == point.module:
            continue
        try:
            protocol = point.load()()
        except Exception as error:
            raise ConfigError(f"the protocol {point.name} by {point.value} cannot be loaded: {error!r}") from error
        if not isinstance(protocol, Protocol) or not point.name.startswith("/") or point.name in served_paths():
            problem = "must be a subclass of agl_slime.gateway.protocol.Protocol at a path that is not served yet"
            raise ConfigError(f"the entry point {point.name} = {point.value} of agl_slime.protocols {problem}")
        PROTOCOLS[point.name] = protocol


def served_paths() -> frozenset[str]:
    """Paths of the clients' protocols, without ``/v1``."""
    return frozenset((*PROTOCOLS, *_OTHER_PATHS[1:]))


class ServedResources(dict[str, Any]):
    """Resources that also answer to ``llm``, the model's name in agents written for other runs. Iteration lists the
    model once: ``@agl.rollout`` takes the first model and warns about others."""

    def __missing__(self, name: str) -> Any:
        if name != "llm":
            raise KeyError(name)
        return self.get(LLM_RESOURCE) or next(value for value in self.values() if isinstance(value, LLM))


class Gateway:
    """Serves the attempts that were opened with ``open``, from ``start`` to ``stop``. One per runner."""

    defaults: Mapping[str, Mapping[str, Any]] = {}
    """Defaults of request fields, by prefix of the protocol's ids."""
    addresses = _ADDRESS
    """The form of the addresses that are served."""

    def __init__(self, settings: GatewaySettings | None = None, *, access: EngineAccess | None = None) -> None:
        add_installed_protocols()
        self.settings = settings or GatewaySettings()
        self.access = access or EngineAccess()
        self.url = ""
        self._since = datetime.now(UTC)
        self._attempts: dict[tuple[str, str], Attempt] = {}
        self._returned_memory_at = time.monotonic()
        self._by_secret: dict[str, Attempt] = {}
        self._ended: dict[str, None] = {}  # keys and ids of the last ended attempts: they get 410, not 404
        self._stop: asyncio.Event | None = None
        self._thread: LoopThread | None = None
        self._starting = threading.Lock()
        self._services = ExitStack()  # closed after the last request

    # -- from any thread ----------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start listening. Safe to call twice. Raises ``ConfigError`` if the address cannot be bound."""
        with self._starting:
            if self._thread is None:
                self._thread = thread = LoopThread(self._serve, name="agl-slime-gateway")
                thread.start()
                if thread.failure is not None:
                    self._thread = None
                    address = f"{self.settings.host}:{self.settings.port}"
                    raise ConfigError(f"the gateway cannot listen on {address}: {thread.failure}") from thread.failure
        return self

    def stop(self) -> None:
        """Cancel all requests and stop listening. Safe to call twice."""
        if self._thread is not None and self._stop is not None:
            self._thread.call(self._stop.set)
            self._thread.join(_STOP_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def open(
        self, rollout_id: str, attempt_id: str, resources: NamedResources, write: Callable[..., None], **options: Any
    ) -> tuple[Attempt | None, NamedResources]:
        """Serve an attempt; returns it, and the resources with this gateway's address in place of the engine's. The
        attempt is ``None`` if the resources have no ``LLM``, or a ``ProxyLLM``, which has another gateway."""
        main = resources.get(LLM_RESOURCE) or next((r for r in resources.values() if isinstance(r, LLM)), None)
        if not isinstance(main, LLM) or isinstance(main, ProxyLLM):
            return None, resources
        self.start()
        llms = {
            name: llm
            for name, llm in resources.items()
            if isinstance(llm, LLM) and not isinstance(llm, ProxyLLM) and llm.endpoint == main.endpoint
        }
        roles = {LLM_RESOURCE: main, **{name: llm for name, llm in llms.items() if llm is not main}}
        attempt = self._make_attempt(rollout_id, attempt_id, roles=roles, write=write, **options)
        self._by_secret[attempt.secret] = attempt
        served = {
            name: self._address(attempt, llm, LLM_RESOURCE if llm is main else name) for name, llm in llms.items()
        }
        return attempt, ServedResources({**resources, **served})

    def _make_attempt(self, rollout_id: str, attempt_id: str, **options: Any) -> Attempt:
        options |= {"settings": self.settings, "access": self.access}
        attempt = Attempt(rollout_id=rollout_id, attempt_id=attempt_id, **options)
        self._attempts[rollout_id, attempt_id] = attempt
        return attempt

    def _address(self, attempt: Attempt, llm: LLM, role: str) -> LLM:
        address = f"{self.url}/k/{attempt.secret}/rollout/{attempt.rollout_id}/attempt/{attempt.attempt_id}"
        if role != LLM_RESOURCE:
            address += f"/role/{role}"
        sampling = client_sampling(llm.sampling_parameters)
        return LLM(endpoint=f"{address}/v1", model=llm.model, api_key=attempt.secret, sampling_parameters=sampling)

    async def close(self, attempt: Attempt) -> None:
        """End an attempt: cancel its pending responses and write its last span."""
        try:
            if not attempt.end() and self._thread is not None:
                self._call_soon(attempt.cancel_pending)
                await run_in_thread(attempt.idle.wait, _STOP_S)
        finally:
            self._forget(attempt)
            attempt.write_summary()
        if self._may_return_memory():
            await run_in_thread(return_freed_memory)

    def _may_return_memory(self) -> bool:
        """Whether to return freed memory to the machine now: no attempt would wait for it, and not too often."""
        if self._attempts or time.monotonic() - self._returned_memory_at <= _RETURN_MEMORY_EVERY_S:
            return False
        self._returned_memory_at = time.monotonic()
        return True

    def _forget(self, attempt: Attempt) -> None:
        attempt.forget()
        self._attempts.pop((attempt.rollout_id, attempt.attempt_id), None)
        self._by_secret.pop(attempt.secret, None)
        self._note_ended(attempt.secret, f"{attempt.rollout_id}/{attempt.attempt_id}")

    def _note_ended(self, *names: str) -> None:
        self._ended |= dict.fromkeys(names)
        while len(self._ended) > _MAX_ENDED:
            self._ended.pop(next(iter(self._ended)), None)

    def _call_soon(self, callback: Callable[[], Any]) -> None:
        if self._thread is not None:
            self._thread.call(callback)

    # -- the gateway's thread -----------------------------------------------------------------------------------------

    async def _serve(self, ready: Callable[[], None]) -> None:
        self._stop = asyncio.Event()
        app = web.Application(client_max_size=int(self.settings.max_body_mb * 1024**2))
        app.router.add_route("*", "/{path:.*}", self._handle)
        # a client that disconnects cancels its request, here and at the engine
        options: Any = {"handler_cancellation": True, "shutdown_timeout": 0.1}
        settings = self.settings
        try:
            async with listening(app, host=settings.host, port=settings.port, backlog=4096, **options) as local:
                own_url = http_url(public_host(settings.host), urlsplit(local).port or 80)
                self.url = (settings.public_url or own_url).rstrip("/")
                self._start_services()
                ready()
                await self._stop.wait()
                for attempt in list(self._attempts.values()):
                    attempt.end()
                    attempt.cancel_pending()
        finally:
            self._services.close()
            await self.access.aclose()

    def _start_services(self) -> None:
        """Hook on the gateway's loop before requests are served; what it begins, ``_services`` ends."""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        match = self.addresses.fullmatch(request.path)
        address = match.groupdict() if match is not None else {"path": request.path}
        path = address["path"] or "/"
        default = "/messages" if "anthropic-version" in request.headers else "/chat/completions"
        protocol = PROTOCOLS.get(path) or PROTOCOLS[default]  # of errors
        attempt: Attempt | None = None
        try:
            if (answer := await self._service_response(request, path, address)) is not None:
                return answer
            attempt = await self._find_attempt(request, address)
            return await self._route(request, path, attempt, address.get("role") or LLM_RESOURCE)
        except asyncio.CancelledError as error:
            if attempt is None or not attempt.closed:
                raise  # the client has disconnected
            refusal = refusal_of(error)
        except Exception as error:
            if is_gone(error):
                return web.Response()
            refusal = self._refusal(error, f"{request.method} {path}")
        if attempt is not None and refusal.code != THREADS_UNSUPPORTED:  # a client expects this refusal
            if request.method == "GET" and refusal.code == "unknown_url":  # a harness looks for another server's API
                attempt.counts["unknown_gets"] += 1
            else:
                attempt.counts[f"refused/{refusal.status}"] += 1
                explain_once(refusal, attempt.rollout_id)
                await self._record_refusal(attempt, path, refusal)
        headers = {"Retry-After": str(RETRY_AFTER_S)} if refusal.status in (429, 503) else {}
        return json_response(protocol.error(refusal), status=refusal.status, headers=headers)

    async def _service_response(self, request: web.Request, path: str, address: Address) -> web.Response | None:
        """Hook: the response at an address that belongs to no attempt; ``None`` at other addresses."""
        return None

    async def _record_refusal(self, attempt: Attempt, path: str, refusal: GatewayRequestError) -> None:
        """Hook: called for each refused request of an attempt."""

    @staticmethod
    def _keys(request: web.Request, address: Address) -> list[str]:
        """The keys of a request: in the address, the bearer token, Anthropic's header."""
        bearer = request.headers.get("Authorization", "").partition(" ")[2].strip()
        return [key for key in (address.get("secret"), bearer, request.headers.get("x-api-key")) if key]

    async def _find_attempt(self, request: web.Request, address: Address) -> Attempt:
        """The attempt of the address or the key, whose secret the request has. Raises ``GatewayRequestError``."""
        rollout, attempt_id, keys = address.get("rollout"), address.get("attempt"), self._keys(request, address)
        if rollout is None or attempt_id is None:
            if (attempt := next(filter(None, map(self._by_secret.get, keys)), None)) is not None:
                return attempt
            if any(key in self._ended for key in keys):
                raise GatewayRequestError("the rollout of this key has ended", status=410, code="rollout_ended")
            raise GatewayRequestError("the API key names no rollout that runs here", status=401, code="invalid_api_key")
        attempt = self._attempts.get((rollout, attempt_id))
        if attempt is None:
            if f"{rollout}/{attempt_id}" in self._ended:
                raise GatewayRequestError(f"rollout {rollout} has ended", status=410, code="rollout_ended")
            message = f"there is no attempt {attempt_id} of a rollout {rollout} here"
            raise GatewayRequestError(message, status=404, code="unknown_rollout")
        if not any(same_secret(key, attempt.secret) for key in keys):
            message = f"the key does not open rollout {rollout}: send LLM.api_key, or use LLM.endpoint as it is"
            raise GatewayRequestError(message, status=401, code="invalid_api_key")
        return attempt

    async def _route(self, request: web.Request, path: str, attempt: Attempt, role: str) -> web.StreamResponse:
        protocol = PROTOCOLS.get(path) if request.method == "POST" else None
        attempt.count_request(f"{request.method} {path}", served=protocol is not None or path in _OTHER_PATHS)
        if request.method in ("HEAD", "OPTIONS") or path == "/":
            return web.Response()
        if request.method == "GET" and path.startswith("/models"):
            name = path.removeprefix("/models").strip("/")
            return json_response(list_of_models(attempt.roles, name, since=self._since))
        if request.method == "GET" and path == "/seen":
            return json_response(attempt.counts)
        if request.method == "POST" and path == "/conversations":
            return await self._create_conversation(request, attempt)
        if protocol is None:
            served = ", ".join(f"/v1{path}" for path in sorted(served_paths()))
            message = f"{request.method} {path:.80} is not served here; there are {served}"
            raise GatewayRequestError(message, status=404, code="unknown_url")
        protocol.check_headers(request.headers)
        body = attempt.bodies.identify(request.path, await whole_body(request))
        attempt.admit(body.key)
        try:
            return await self._respond(request, body, protocol, attempt, role)
        finally:
            attempt.release()

    async def _create_conversation(self, request: web.Request, attempt: Attempt) -> web.Response:
        attempt.admit(b"")
        try:
            if attempt.counts["POST /conversations"] > MAX_REQUESTS:
                message = f"rollout {attempt.rollout_id} has begun {MAX_REQUESTS} conversations, the most"
                raise GatewayRequestError(message, status=429, code="rate_limit_exceeded")
            conversation, messages = await read_body(request, lambda raw: new_conversation(raw, attempt.histories))
            attempt.histories[conversation["id"]] = messages
            return json_response(conversation)
        finally:
            attempt.release()

    async def _respond(
        self, http: web.Request, request: Request, protocol: Protocol, attempt: Attempt, role: str
    ) -> web.StreamResponse:
        defaults = self.defaults.get(protocol.prefix, {})
        body, call = await attempt.bodies.read(request, protocol, attempt.histories, defaults, self.settings)
        if protocol.counts_only:
            return json_response(protocol.count_answer(await attempt.prompt_ids(call)))
        if call.model in (*attempt.settings.untrained_models, *attempt.settings.trained_models):
            role = call.model
        elif role not in attempt.roles:
            raise GatewayRequestError(f"there is no model {role!r:.80} here", status=404, code="unknown_model")
        retry = http.headers.get(_RETRY_HEADER, "0") not in ("", "0")
        decode = await attempt.decoder()
        with attempt.respond(call, role=role, key=request.key, retry=retry, prefix=protocol.prefix) as pending:
            if call.stream:
                response = await self._stream(http, protocol, body, call, pending, decode)
            else:
                result = await pending.result()
                response = await _off_loop(call, result, lambda r: json_response(protocol.answer(body, r, decode)))
            pending.received = True
            return response

    async def _stream(
        self, http: web.Request, protocol: Protocol, body: Any, call: Call, pending: PendingResponse, decode: Any
    ) -> web.StreamResponse:
        """Send events while the answer is sampled; a failure before the first is a status, a later one an event."""
        head = CallResult(id=pending.id, created=pending.created, model=call.model, choices=(Choice(),) * call.n)
        stream = protocol.stream(body, head, decode)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        version = 0
        try:
            while True:
                changed = await pending.wait(version, _MAX_SILENCE_S)
                version, progress, ended = pending.version, pending.progress, pending.task.done()
                if ended and not response.prepared:
                    await pending.result()  # raises the error, if any
                if not response.prepared:
                    await response.prepare(http)
                    await response.write(b"".join(stream.begin()))
                if ended:
                    await response.write(await _off_loop(call, await pending.result(), stream.finish))
                    return response
                if events := stream.update(pending.texts) if changed else stream.keep_alive():
                    await response.write(events)
                    pending.delivered = progress
        except (Exception, asyncio.CancelledError) as error:
            if not response.prepared or is_gone(error, unless=pending.task):
                raise
            await response.write(stream.error(self._refusal(error, "a stream")))
            return response

    def _refusal(self, error: BaseException, request: str) -> GatewayRequestError:
        """The refusal for an error; an unexpected one is logged with ``request``, without its address and secret."""
        refusal = refusal_of(error, most_mb=self.settings.max_body_mb)
        if refusal.status == 500 and not isinstance(error, AglSlimeError):
            logger.error("%s failed.", request, exc_info=error)
        return refusal


def client_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters under OpenAI's names, without the run's internal ones: agents pass them to a client."""
    public = {name: value for name, value in sampling.items() if name not in run_parameters(sampling)}
    return {"max_tokens" if name == "max_new_tokens" else name: value for name, value in public.items()}


async def _off_loop(call: Call, result: CallResult, write: Callable[[CallResult], T]) -> T:
    """Write a result, in a thread if it may have many log-probs."""
    many = result.output_tokens * (1 + call.top_log_probs) > _INLINE_LOG_PROBS_MAX
    return await run_in_thread_if(many, lambda: write(result))


class TokenGateway(Gateway):
    """A gateway that others than its runner use: one ``token`` opens all addresses, in ``/k/TOKEN`` or as API key. It
    is optional on a loopback address. Raises ``ConfigError`` without one elsewhere."""

    wrong_key = f"the key is missing or wrong: send the gateway's token ({TOKEN_VARIABLE})"

    def __init__(
        self, *, token: str | None, settings: GatewaySettings | None = None, access: EngineAccess | None = None
    ) -> None:
        super().__init__(settings, access=access)
        require_token(self.settings.host, token, setting=TOKEN_VARIABLE)
        self._token = token

    def _is_authorized(self, request: web.Request, address: Address) -> bool:
        return not self._token or any(same_secret(key, self._token) for key in self._keys(request, address))

    def _check_token(self, request: web.Request, address: Address) -> None:
        if not self._is_authorized(request, address):
            raise GatewayRequestError(self.wrong_key, status=401, code="invalid_api_key")

    def _record(self, rollout_id: str, attempt_id: str, *, llm: LLM, store: Any, **options: Any) -> Attempt:
        """Begin an attempt whose spans go to ``store``."""
        recording = Recording(rollout_id, attempt_id, store=store, forgets=True)
        options |= {"write": recording.add_instant, "flush": recording.write}
        return self._make_attempt(rollout_id, attempt_id, roles={LLM_RESOURCE: llm}, **options)
