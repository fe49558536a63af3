"""A stand-in for SGLang's HTTP server that fails on command: a real server on 127.0.0.1 and a free port, without a
model.

    async with ScriptedEngine() as engine:
        engine.script("/generate", Status(500), Status(500))          # the next two calls fail, the third is answered
        async with SGLangClient(base_url=engine.url) as client:
            generation = await client.generate([1, 2, 3], SamplingParams(max_new_tokens=8))
        assert list(generation.output_ids) == engine.continuation([1, 2, 3], 8)
        assert engine.calls["/generate"] == 3

Code without an event loop (a runner in a thread, a subprocess) uses ``with in_thread(ScriptedEngine()) as engine``.

The next id is a function of all ids before it (``next_id``), and so is its log-prob (``log_prob``): a generation that
is aborted and resumed from its partial ids must equal one uninterrupted request. Both can be replaced, as can
``decode``; ``answering`` makes a fixed answer.

As in SGLang: stop strings are searched in this request's tokens, after each token; the checks are, in order, abort,
length, stop string, stop token; an aborted request answers 200 with its partial ids, or, when it was still queued,
without ids and counts; a pause aborts running requests and queues new ones; ``/flush_cache`` is refused while requests
run, except under a pause with "retract"; an update with ``flush_cache`` while requests run loads the weights and
answers 400; a rid in use is refused; ``/abort_request`` matches by prefix.

Each request consumes one fault, in the order of arrival; ``always`` sets one for every request. ``calls`` counts
requests by path, ``received`` keeps them, and ``await engine.arrived("/generate", n)`` waits for the n-th request
instead of sleeping.
"""

import asyncio
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web

from agl_slime.engine.client.transport import ClientSettings
from agl_slime.tokens.codec import shared_length
from tests.harness.engine_faults import (
    PIECES,
    Abort,
    Fault,
    GenerationFault,
    NewVersion,
    Received,
    Running,
    answer_of,
    decode_pieces,
    digest,
    log_prob_of,
    wait_for,
)

# retries within milliseconds; long limits, because a busy machine is no hanging engine
QUICK = ClientSettings(
    backoff_base_s=0.001, backoff_cap_s=0.01, max_attempts=3, idle_timeout_s=30.0, total_timeout_s=60.0
)


@dataclass(kw_only=True, eq=False)
class ScriptedEngine:
    """See the module's docstring."""

    vocab_size: int = len(PIECES)  # larger ids are refused
    context_length: int = 4096  # longer prompts are refused
    model_path: str = "/models/scripted"
    dtype: str = "auto"
    weight_version: str = "default"
    token_s: float = 0.0  # seconds per token; 0: a generation is one step of the event loop
    latency_s: float = 0.0  # seconds before each ``/generate`` answer
    eos_id: int | None = None  # ends a generation
    lists_versions: bool = True  # answers ``weight_versions`` as newer servers do, else only ``weight_version``
    workers: Sequence[str] | None = None  # URLs; with them it answers as a router: ``/workers``, and 404
    next_id: Callable[[Sequence[int]], int] | None = None  # as ``log_prob``, a function of all ids so far
    deterministic: bool = False  # as with --enable-deterministic-inference the request's seed decides, 42 by default
    log_prob: Callable[[Sequence[int]], float] = log_prob_of
    decode: Callable[[Sequence[int]], str] = decode_pieces
    expand: Callable[[list[int], list[str]], list[int]] | None = None  # a prompt's ids by ``image_data``; None: refused

    def __post_init__(self) -> None:
        self.next_id = self.next_id or self._next_id
        self.calls: Counter[str] = Counter()
        self.received: list[Received] = []
        self.log: list[str] = []
        """Paths of the control calls (everything but /generate) in order of arrival."""
        self._scripts: dict[str, deque[Fault]] = {}
        self._always: dict[str, Fault] = {}
        self._requests: dict[str, Running] = {}
        self._waiting: set[str] = set()
        self._ended: deque[tuple[int, ...]] = deque(maxlen=1)
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._paused, self._pause_mode = False, ""

    # -- for tests ---------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def running(self) -> int:
        """Requests between arrival and answer, without requests that a pause queues."""
        return len(self._requests) - len(self._waiting)

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def rids(self) -> list[str]:
        """The rids of all /generate requests in order of arrival."""
        return [received.payload["rid"] for received in self.received if received.path == "/generate"]

    @property
    def seeds(self) -> list[int]:
        """The sampling seeds of all /generate requests in order of arrival."""
        payloads = (received.payload for received in self.received if received.path == "/generate")
        return [payload["sampling_params"]["sampling_seed"] for payload in payloads]

    def script(self, path: str, *faults: Fault) -> None:
        """The next ``len(faults)`` requests to ``path`` meet these faults, one each."""
        self._scripts.setdefault(path, deque()).extend(faults)

    def always(self, path: str, fault: Fault | None) -> None:
        """Every request to ``path`` meets ``fault`` once its script is used up; None: back to normal."""
        if fault is None:
            self._always.pop(path, None)
        else:
            self._always[path] = fault

    async def arrived(self, path: str, n: int = 1) -> None:
        """Wait until ``n`` requests to ``path`` have come in since the start."""
        async with self._arrival:
            await self._arrival.wait_for(lambda: self.calls[path] >= n)

    async def idle(self) -> None:
        """Wait until no request is running or queued."""
        async with self._arrival:
            await self._arrival.wait_for(lambda: not self._requests)

    def continuation(self, prompt_ids: Sequence[int], n: int) -> list[int]:
        """The ids of an uninterrupted generation of ``n`` tokens, without stops."""
        ids = list(prompt_ids)
        for _ in range(n):
            ids.append(self.next_id(ids))
        return ids[len(prompt_ids) :]

    def continuation_log_probs(self, prompt_ids: Sequence[int], n: int) -> list[float]:
        ids = list(prompt_ids) + self.continuation(prompt_ids, n)
        return [self.log_prob(ids[:end]) for end in range(len(prompt_ids) + 1, len(ids) + 1)]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        """Listen on 127.0.0.1; ``port`` 0 takes a free one. May be started again after ``stop``, as a server that
        restarts."""
        self.closing = asyncio.Event()
        self._arrival = asyncio.Condition()
        self._unpaused = asyncio.Condition()
        self._paused = False
        self._requests.clear()
        self._waiting.clear()
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, backlog=4096)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            self.closing.set()
            self._abort(self._requests)
            await self._unpause()
            await self._runner.cleanup()
            self._runner = None

    async def sample(self, payload: dict[str, Any], fault: Abort | NewVersion | None = None) -> dict[str, Any]:
        """The answer of ``/generate`` to ``payload``, without HTTP."""
        return await self._sample(payload, Running(), fault)

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path, raw = request.path, await request.read()
        payload = json.loads(raw) if raw else {}
        self.received.append(Received(path, payload, dict(request.headers)))
        if path != "/generate":
            self.log.append(path)
        self.calls[path] += 1
        async with self._arrival:
            self._arrival.notify_all()
        script = self._scripts.get(path)
        fault = script.popleft() if script else self._always.get(path)
        if path == "/generate" and (fault is None or isinstance(fault, GenerationFault)):
            return await self._generate(payload, fault, request)

        async def answer() -> web.StreamResponse:
            if path != "/generate":
                return await self._control(path, payload)
            return await self._generate(payload, None, request)

        return await answer() if fault is None else await fault.apply(self, request, answer)

    async def _generate(self, payload: dict[str, Any], fault: Fault | None, http: web.Request) -> web.StreamResponse:
        if self.workers is not None:
            return web.json_response({"error": "this scripted router passes nothing on"}, status=503)
        rid: str = payload["rid"]
        if images := payload.get("image_data"):
            if self.expand is None:
                return web.json_response({"error": {"message": "The model reads no images."}}, status=400)
            payload = {**payload, "input_ids": self.expand(payload["input_ids"], images)}
        if (refusal := self._refusal(payload)) is not None:
            return web.json_response({"error": {"message": refusal}}, status=400)
        running = self._requests[rid] = Running()
        try:
            if self._paused:
                self._waiting.add(rid)
                await self._resumed()
                self._waiting.discard(rid)
            if self.latency_s:
                await wait_for(running.aborted, self.latency_s)
            if payload.get("stream"):
                return await self._stream(payload, running, fault, http)
            return web.json_response(await self._sample(payload, running, fault))
        finally:
            self._waiting.discard(rid)
            del self._requests[rid]
            async with self._arrival:
                self._arrival.notify_all()

    async def _stream(
        self, payload: dict[str, Any], running: Running, fault: Fault | None, http: web.Request
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)

        async def send(answer: dict[str, Any]) -> None:
            await response.write(f"data: {json.dumps(answer)}\n\n".encode())

        running.on_token = send
        await send(await self._sample(payload, running, fault))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _refusal(self, payload: dict[str, Any]) -> str | None:
        prompt, params, rid = payload["input_ids"], payload["sampling_params"], payload["rid"]
        total = len(prompt) + params["max_new_tokens"]
        if rid in self._requests:
            return f"Duplicate request ID detected: {rid}"
        if not prompt:
            return "input_ids cannot be empty."
        if max(prompt) >= self.vocab_size:
            return f"The input_ids {prompt} contains values greater than the vocab size ({self.vocab_size})."
        if len(prompt) >= self.context_length:
            limit = f"the model's context length ({self.context_length} tokens)"
            return f"The input ({len(prompt)} tokens) is longer than {limit}."
        if total > self.context_length:
            return (
                f"Requested token count exceeds the model's maximum context length of {self.context_length} tokens. "
                f"You requested a total of {total} tokens: {len(prompt)} tokens from the input messages "
                f"and {params['max_new_tokens']} tokens for the completion."
            )
        return None

    async def _sample(self, payload: dict[str, Any], running: Running, fault: Fault | None) -> dict[str, Any]:
        prompt, params, rid = payload["input_ids"], payload["sampling_params"], payload["rid"]
        limit: int = params["max_new_tokens"]
        stops: list[str] = params.get("stop", [])
        stop_ids = {*params.get("stop_token_ids", []), *([] if self.eos_id is None else [self.eos_id])}
        abort_after = fault.n_tokens if isinstance(fault, Abort) else math.inf
        ids, log_probs, spans = list(prompt), [], [[self.weight_version, 0, 0]]
        finish: dict[str, Any] | None = None
        if abort_after == 0 or running.aborted.is_set():
            return answer_of(rid, "", [], [], {"type": "abort", "message": "Aborted"}, {})
        while finish is None:
            if self.token_s:
                await asyncio.sleep(self.token_s)
            if self._paused and not running.aborted.is_set():
                await self._resumed()
            seeded = [*ids, params.get("sampling_seed", 42)]
            token = digest(seeded) % self.vocab_size if self.deterministic else self.next_id(ids)
            ids.append(token)
            log_probs.append(self.log_prob(ids))
            n = len(log_probs)
            if isinstance(fault, NewVersion) and n - 1 == fault.n_tokens:
                self.weight_version = fault.version
            if spans[-1][0] != self.weight_version:
                spans.append([self.weight_version, n - 1, n - 1])
            spans[-1][2] = n
            text = self.decode(ids[len(prompt) :]) if stops else ""
            stop = next((stop for stop in stops if stop in text), None)
            if running.aborted.is_set() or n >= abort_after:
                finish = {"type": "abort", "message": "Aborted"}
            elif n >= limit:
                finish = {"type": "length", "length": limit}
            elif stop is not None or token in stop_ids:
                finish = {"type": "stop", "matched": token if stop is None else stop}
            if running.on_token is not None and finish is None:
                so_far = ids[len(prompt) :]
                await running.on_token(answer_of(rid, self.decode(so_far), so_far, log_probs, None, {}))
        matched = None if params.get("no_stop_trim") else finish.get("matched")
        text = self.decode(ids[len(prompt) : -1] if isinstance(matched, int) else ids[len(prompt) :])
        if isinstance(matched, str):
            text = text[: text.index(matched)]
        counts: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(log_probs),
            "cached_tokens": max((shared_length(prompt, ids) for ids in self._ended), default=0),
            "weight_version": spans[-1][0],
        }
        if self.lists_versions:
            counts["weight_versions"] = [dict(zip(("version", "start", "end"), span, strict=True)) for span in spans]
        if top := payload.get("top_logprobs_num"):
            pairs = zip(log_probs, ids[len(prompt) :], strict=True)
            counts["output_top_logprobs"] = [[[p - n, token, None] for n in range(top)] for p, token in pairs]
        self._ended.append(tuple(ids))
        return answer_of(rid, text, ids[len(prompt) :], log_probs, finish, counts)

    async def _control(self, path: str, payload: dict[str, Any]) -> web.StreamResponse:
        """SGLang's answers beside ``/generate``; or, with ``workers``, a router's."""
        model = {"model_path": self.model_path, "is_generation": True, "weight_version": self.weight_version}
        match path, self.workers:
            case "/get_model_info", _:
                return web.json_response(model)
            case "/workers", [*urls]:
                listed = [
                    {"id": str(i), "url": url, "worker_type": "regular", "is_healthy": True}
                    for i, url in enumerate(urls)
                ]
                return web.json_response({"workers": listed, "total": len(listed)})
            case "/health", None:
                return web.Response()
            case "/model_info", None:
                return web.json_response(model)
            case "/server_info", None:
                return web.json_response({"version": "0.5.15", "dtype": self.dtype, "model_path": self.model_path})
            case "/flush_cache", None:
                if self.running and not (self._paused and self._pause_mode == "retract"):
                    return web.Response(text=f"Flush cache failed: {self.running} running requests.\n", status=400)
                self._ended.clear()
                return web.Response(text="Cache flushed.\n")
            case "/pause_generation", None:
                self._paused, self._pause_mode = True, payload.get("mode", "abort")
                if self._pause_mode == "abort":
                    self._abort(rid for rid in self._requests if rid not in self._waiting)
                return web.json_response({"status": "ok"})
            case "/continue_generation", None:
                await self._unpause()
                return web.json_response({"status": "ok"})
            case "/abort_request", None:
                self._abort(rid for rid in self._requests if payload.get("abort_all") or rid.startswith(payload["rid"]))
                return web.Response()
            case "/update_weights_from_disk", None:
                self.model_path = payload["model_path"]
                if payload.get("flush_cache", True) and self.running:
                    message = "Weights were updated, but the cache was not flushed because requests are still running."
                    return web.json_response({"success": False, "message": message}, status=400)
                self.weight_version = payload.get("weight_version") or self.weight_version
                message = "Succeeded to update model weights."
                return web.json_response({"success": True, "message": message, "num_paused_requests": 0})
        return web.json_response({"detail": "Not Found"}, status=404)

    def _abort(self, rids: Iterable[str]) -> None:
        for rid in rids:
            self._requests[rid].aborted.set()

    async def _resumed(self) -> None:
        async with self._unpaused:
            await self._unpaused.wait_for(lambda: not self._paused)

    async def _unpause(self) -> None:
        async with self._unpaused:
            self._paused = False
            self._unpaused.notify_all()

    def _next_id(self, ids: Sequence[int]) -> int:
        return digest(ids) % self.vocab_size
