"""SGLang's HTTP protocol over the embedded engine.

The event loop reads and writes JSON; the model runs in the engine's thread. Answers and errors have the shapes of
SGLang 0.5.15, so the same client and tests serve both. What is not built here (streaming, grammars, penalties, LoRA,
images) is refused with status 400.
"""

from __future__ import annotations

import asyncio
import datetime
import hmac
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from transformers import PreTrainedTokenizerBase

from agl_slime.engine.chat import chat_answer, chat_requests, completion_answer, completion_requests
from agl_slime.engine.engine import Engine
from agl_slime.engine.requests import BadRequest, Request, Sampling, parse_generate
from agl_slime.engine.weights import read_weights
from agl_slime.errors import AglSlimeError, ConfigError, EngineError

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 256 * 1024**2
CONTROL_TIMEOUT_S = 120.0
"""Bound on a weight update or another control call; a generation takes as long as its tokens do."""
HEALTH_TIMEOUT_S = 20.0
"""SGLang's own bound on a health check that generates."""


class EmbeddedServer:
    """The routes. ``token``, when given, must come as ``Authorization: Bearer …`` with every request."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model_path: str,
        served_model_name: str | None = None,
        token: str | None = None,
    ) -> None:
        self.engine = engine
        self._tokenizer: Any = tokenizer
        self._model_path = model_path
        self._name = served_model_name
        self._token = token
        self._worker_id = str(uuid.uuid4())
        self._started_at = datetime.datetime.now(datetime.timezone.utc).isoformat()

    def application(self) -> web.Application:
        middlewares: list[Any] = [self._errors, self._authorize]  # bound methods; aiohttp's type names functions only
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
        get, post, both = ("GET",), ("POST",), ("GET", "POST")
        routes: list[tuple[str, tuple[str, ...], Handler]] = [
            ("/generate", ("POST", "PUT"), self._generate),
            ("/v1/chat/completions", post, self._chat),
            ("/v1/completions", post, self._completions),
            ("/v1/models", get, self._models),
            ("/model_info", get, self._model_info),
            ("/get_model_info", get, self._model_info),
            ("/server_info", get, self._server_info),
            ("/get_server_info", get, self._server_info),
            ("/health", get, self._health),
            ("/health_generate", get, self._health_generate),
            ("/flush_cache", both, self._flush_cache),
            ("/pause_generation", post, self._pause),
            ("/continue_generation", post, self._continue),
            ("/abort_request", post, self._abort),
            ("/update_weights_from_disk", post, self._update_weights),
            ("/v1/loads", get, self._loads),
            ("/workers", get, self._workers),
        ]
        for path, methods, handler in routes:
            for method in methods:
                app.router.add_route(method, path, handler)
        return app

    # -- generation ---------------------------------------------------------------------------------------------------

    async def _generate(self, http: web.Request) -> web.Response:
        requests, single = parse_generate(await _json(http), encode=self._encode)
        await self._run(requests)
        answers = [self._generate_answer(request) for request in requests]
        return _answer(answers[0] if single else answers)

    async def _chat(self, http: web.Request) -> web.Response:
        body = await _json(http)
        requests = chat_requests(body, tokenizer=self._tokenizer)
        await self._run(requests)
        return _answer(
            chat_answer(
                requests,
                body,
                model=str(body.get("model") or self._served_name),
                tokenizer=self._tokenizer,
                text=self._text,
            )
        )

    async def _completions(self, http: web.Request) -> web.Response:
        body = await _json(http)
        requests = completion_requests(body, encode=self._encode)
        await self._run(requests)
        return _answer(completion_answer(requests, model=str(body.get("model") or self._served_name), text=self._text))

    async def _run(self, requests: list[Request]) -> None:
        """Until every request has ended; when the client goes away they are aborted."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        left = len(requests)

        def finished() -> None:
            nonlocal left
            left -= 1
            if left == 0 and not done.done():
                done.set_result(None)

        def ended(_: Request) -> None:
            loop.call_soon_threadsafe(finished)

        for request in requests:
            request.on_finish = ended
        self.engine.submit(*requests)
        try:
            await done
        except asyncio.CancelledError:
            for request in requests:
                self.engine.abort(request.rid)
            raise
        if self.engine.failure is not None:
            raise EngineError(f"the embedded engine has stopped: {self.engine.failure}")

    def _generate_answer(self, request: Request) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish,
            "weight_version": self.engine.weight_version,
            "e2e_latency": time.perf_counter() - request.created,
        }
        if request.started:
            ends = [start for _, start in request.versions[1:]] + [len(request.output_ids)]
            meta |= {
                "prompt_tokens": len(request.input_ids),
                "completion_tokens": len(request.output_ids),
                "cached_tokens": 0,  # prompts are always computed: for contexts this short a prefix cache would cost more than it saves
                "weight_versions": [
                    {"version": version, "start": start, "end": end}
                    for (version, start), end in zip(request.versions, ends, strict=True)
                ],
            }
        else:
            meta["completion_tokens"] = 0
        if request.return_logprob:
            meta["input_token_logprobs"] = [[log_prob, token, None] for log_prob, token in request.input_log_probs]
            meta["output_token_logprobs"] = [
                [log_prob, token, None] for log_prob, token in zip(request.log_probs, request.output_ids, strict=True)
            ]
            meta["output_token_logprobs_length"] = len(request.output_ids)
        return {"text": self._text(request), "output_ids": request.output_ids, "meta_info": meta}

    def _text(self, request: Request) -> str:
        sampling = request.sampling
        matched = (request.finish or {}).get("matched")
        ids = request.output_ids
        if isinstance(matched, int) and not sampling.no_stop_trim:
            ids = ids[:-1]
        text = str(self._tokenizer.decode(ids, skip_special_tokens=sampling.skip_special_tokens))
        if isinstance(matched, str) and matched in text:
            end = text.index(matched) + (len(matched) if sampling.no_stop_trim else 0)
            return text[:end]
        return text

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    # -- control ------------------------------------------------------------------------------------------------------

    async def _flush_cache(self, http: web.Request) -> web.Response:
        # there is no prefix cache to flush; the answer tells, as SGLang's does, whether anything still runs on the old
        # state
        try:
            deadline = time.monotonic() + float(http.query.get("timeout", "0"))
        except ValueError as error:
            raise BadRequest(f"timeout must be a number of seconds, got {http.query['timeout']!r}.") from error
        while not self.engine.idle and time.monotonic() < deadline:  # noqa: ASYNC110 - a rare call, bounded by its timeout
            await asyncio.sleep(0.01)
        if self.engine.idle:
            return web.Response(text="Cache flushed.\n")
        load = self.engine.load()
        return web.Response(
            status=400,
            text=f"Cache not flushed because there are pending requests. #queue-req: {load.waiting}, #running-req: {load.running}\n",
        )

    async def _pause(self, http: web.Request) -> web.Response:
        mode = (await _object(http)).get("mode", "abort")
        if mode not in ("abort", "in_place", "retract"):
            raise BadRequest(f"mode must be abort, in_place or retract, got {mode!r}.")
        await _control(self.engine.pause(mode))
        return _answer({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        await _object(http)
        await _control(self.engine.resume())
        return _answer({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, http: web.Request) -> web.Response:
        body = await _object(http)
        rid, everything = body.get("rid") or None, bool(body.get("abort_all"))
        if rid is not None or everything:
            await _control(self.engine.abort(None if everything else str(rid)))
        return web.Response()

    async def _update_weights(self, http: web.Request) -> web.Response:
        body = await _object(http)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path:
            raise BadRequest(f"model_path must be the directory of a checkpoint, got {path!r}.")
        if body.get("abort_all_requests"):
            await _control(self.engine.abort())
        try:
            tensors = await asyncio.get_running_loop().run_in_executor(None, read_weights, path)
            await _control(self.engine.update_weights(tensors, version=None if version is None else str(version)))
        except ConfigError as error:
            return _answer({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
        self._model_path = path
        message = "Succeeded to update model weights." + (
            "" if version is None else f" Weight version updated to {version}."
        )
        return _answer({"success": True, "message": message, "num_paused_requests": 0})

    # -- what it is and how it does -----------------------------------------------------------------------------------

    @property
    def _served_name(self) -> str:
        return self._name or self._model_path

    async def _models(self, http: web.Request) -> web.Response:
        card = {
            "id": self._served_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "sglang",
            "root": self._served_name,
            "max_model_len": self.engine.context_length,
        }
        return _answer({"object": "list", "data": [card]})

    async def _model_info(self, http: web.Request) -> web.Response:
        return _answer(
            {
                "model_path": self._model_path,
                "tokenizer_path": self._model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.engine.weight_version,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": self.engine.model_type,
                "architectures": self.engine.architectures,
                "vocab_size": self.engine.vocab_size,  # this and the next are not SGLang's
                "max_model_len": self.engine.context_length,
            }
        )

    async def _server_info(self, http: web.Request) -> web.Response:
        load = self.engine.load()
        return _answer(
            {
                "model_path": self._model_path,
                "served_model_name": self._served_name,
                "version": "embedded",
                "status": "ready" if self.engine.alive else "failed",
                "started_at": self._started_at,
                "weight_version": self.engine.weight_version,
                "context_length": self.engine.context_length,
                "vocab_size": self.engine.vocab_size,
                "max_running_requests": load.max_running,
                "max_total_num_tokens": load.max_tokens,
                "dp_size": 1,
                "tp_size": 1,
                "enable_memory_saver": False,  # slime asks for it before it uses an engine that runs already
                "paused": self.engine.paused,
                "tokens_sampled": self.engine.tokens_sampled,
            }
        )

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.alive else 503)

    async def _health_generate(self, http: web.Request) -> web.Response:
        if not self.engine.alive:
            return web.Response(status=503)
        request = Request(
            rid=f"HEALTH_CHECK_{time.time_ns()}", input_ids=[0], sampling=Sampling(max_new_tokens=1, top_k=1)
        )
        try:
            await asyncio.wait_for(self._run([request]), HEALTH_TIMEOUT_S)
        except asyncio.TimeoutError:
            return web.Response(status=503)
        return web.Response()

    async def _loads(self, http: web.Request) -> web.Response:
        load = self.engine.load()
        core = {
            "dp_rank": 0,
            "timestamp": time.time(),
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_used_tokens": load.used_tokens,
            "num_total_tokens": load.used_tokens,
            "max_total_num_tokens": load.max_tokens,
            "token_usage": load.used_tokens / load.max_tokens,
            "gen_throughput": load.tokens_per_s,
            "cache_hit_rate": 0.0,
            "utilization": load.running / load.max_running,
            "max_running_requests": load.max_running,
        }
        return _answer(
            {
                "timestamp": datetime.datetime.now(datetime.timezone.utc).isoformat(),
                "version": "embedded",
                "loads": [core],
            }
        )

    async def _workers(self, http: web.Request) -> web.Response:
        """Itself, in the form in which sglang-router lists its workers: a client need not know whether it talks to a
        router."""
        load = self.engine.load()
        url = f"{http.scheme}://{http.host}"
        worker = {
            "id": self._worker_id,
            "url": url,
            "model_id": self._served_name,
            "priority": 50,
            "cost": 1.0,
            "worker_type": "regular",
            "is_healthy": self.engine.alive,
            "load": load.running + load.waiting,
            "connection_mode": "HTTP",
            "metadata": {
                "tp_size": "1",
                "dp_size": "1",
                "served_model_name": self._served_name,
                "model_path": self._model_path,
            },
            "disable_health_check": False,
        }
        return _answer(
            {"workers": [worker], "total": 1, "stats": {"prefill_count": 0, "decode_count": 0, "regular_count": 1}}
        )

    # -- around every route -------------------------------------------------------------------------------------------

    @web.middleware
    async def _errors(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(http)
        except BadRequest as error:
            if http.path.startswith("/v1/"):
                return _answer(
                    {"object": "error", "message": str(error), "type": "BadRequestError", "param": None, "code": 400},
                    status=400,
                )
            return _answer({"error": {"message": str(error)}}, status=400)
        except (AglSlimeError, asyncio.TimeoutError) as error:
            return _answer({"error": {"message": str(error) or type(error).__name__}}, status=500)

    @web.middleware
    async def _authorize(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        if self._token is not None:
            given = http.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                return _answer({"error": {"message": "Unauthorized"}}, status=401)
        return await handler(http)


async def _control(future: Future[T]) -> T:
    return await asyncio.wait_for(asyncio.wrap_future(future), CONTROL_TIMEOUT_S)


async def _json(http: web.Request) -> Any:
    try:
        return json.loads(await http.read())
    except ValueError as error:
        raise BadRequest(f"The body is not JSON: {error}") from error


async def _object(http: web.Request) -> dict[str, Any]:
    """The JSON object of a control call; an empty body means no settings."""
    body = await _json(http) if await http.read() else {}
    if not isinstance(body, dict):
        raise BadRequest(f"The body must be a JSON object, got {type(body).__name__}.")
    return body


def _answer(body: Any, *, status: int = 200) -> web.Response:
    return web.Response(
        body=json.dumps(body, ensure_ascii=False, allow_nan=False).encode(),
        status=status,
        content_type="application/json",
    )


def load_server(
    model_path: str | Path,
    *,
    engine_settings: Any = None,
    served_model_name: str | None = None,
    token: str | None = None,
) -> EmbeddedServer:
    """The server for a checkpoint directory. Raises ``ConfigError`` when it cannot be loaded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    path = Path(model_path)
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, attn_implementation="sdpa").float()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the checkpoint in {str(model_path)!r} cannot be loaded: {error}") from error
    engine = Engine(model, tokenizer, settings=engine_settings)
    return EmbeddedServer(
        engine, tokenizer, model_path=str(model_path), served_model_name=served_model_name, token=token
    )
