"""SGLang's HTTP protocol over the embedded engine.

The event loop reads and writes JSON; the model runs in the engine's thread. Answers and errors have the shapes of
SGLang 0.5.15, so the same client and tests serve both. What is not built here (grammars, penalties, LoRA,
images) is refused with status 400.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from transformers import PreTrainedTokenizerBase

from agl_slime.engine.chat import chat_requests, completion_requests, openai_answer
from agl_slime.engine.engine import Engine
from agl_slime.engine.requests import BadRequest, Request, Sampling, parse_generate
from agl_slime.engine.weights import read_weights
from agl_slime.errors import AglSlimeError, ConfigError, EngineError
from agl_slime.support.net import has_token
from agl_slime.support.threads import usable_cores

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MAX_BODY_BYTES = 256 * 1024**2
_INFO_PATHS = ("/model_info", "/get_model_info", "/server_info", "/get_server_info")
_SMALL_PARAMETERS = 10_000_000
# Bound on a weight update or another control call; a generation takes as long as its tokens do.
_CONTROL_TIMEOUT_S = 120.0
# SGLang's own bound on a health check that generates.
_HEALTH_TIMEOUT_S = 20.0


class EmbeddedServer:
    """The routes. ``token``, when given, must come as ``Authorization: Bearer …`` with every request."""

    def __init__(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, *, model_path: str, token: str | None
    ) -> None:
        self.engine = engine
        self._tokenizer: Any = tokenizer
        self._model_path = model_path
        self._token = token
        self._worker_id = str(uuid.uuid4())

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guarded])
        app.on_shutdown.append(self._end)  # before the sockets close
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.put("/generate", self._generate),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
                web.post("/flush_cache", self._flush_cache),
                web.get("/flush_cache", self._flush_cache),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/abort_request", self._abort),
                web.post("/update_weights_from_disk", self._update_weights),
                *(web.get(path, self._info) for path in _INFO_PATHS),
                web.get("/v1/models", self._models),
                web.get("/v1/loads", self._loads),
                web.get("/workers", self._workers),
                web.get("/health", self._health),
                web.get("/health_generate", self._health_generate),
            ]
        )
        return app

    async def _end(self, app: web.Application) -> None:
        """End what runs, so that open requests are answered."""
        self.engine.close()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every request: its token is looked at, and errors are answered in SGLang's form."""
        try:
            if not has_token(request.headers.get("Authorization"), self._token):
                return _answer({"error": {"message": "Unauthorized"}}, status=401)
            return await handler(request)
        except BadRequest as error:
            openai = {"object": "error", "message": str(error), "type": "BadRequestError", "param": None, "code": 400}
            return _answer(
                openai if request.path.startswith("/v1/") else {"error": {"message": str(error)}}, status=400
            )
        except (AglSlimeError, asyncio.TimeoutError) as error:
            return _answer({"error": {"message": str(error) or type(error).__name__}}, status=500)

    # -- generation ---------------------------------------------------------------------------------------------------

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await _object(http)
        requests, single = parse_generate(body, encode=self._tokenizer.encode)
        if body.get("stream"):
            return await self._stream(http, requests[0])
        await self._run(requests)
        answers = [self._generate_answer(request) for request in requests]
        return _answer(answers[0] if single else answers)

    async def _stream(self, http: web.Request, request: Request) -> web.StreamResponse:
        """Events that each hold all that was sampled so far; of steps that came meanwhile, the last."""
        loop, stepped = asyncio.get_running_loop(), asyncio.Event()
        request.on_token = partial(loop.call_soon_threadsafe, stepped.set)
        running = asyncio.ensure_future(self._run([request]))
        running.add_done_callback(lambda _: stepped.set())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            while not running.done():
                await stepped.wait()
                stepped.clear()
                if running.done():
                    running.result()
                if not response.prepared:
                    await response.prepare(http)
                await response.write(b"data: %s\n\n" % json.dumps(self._generate_answer(_so_far(request))).encode())
        finally:
            running.cancel()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _chat(self, http: web.Request) -> web.Response:
        body = await _object(http)
        return await self._openai(body, chat_requests(body, tokenizer=self._tokenizer))

    async def _completions(self, http: web.Request) -> web.Response:
        body = await _object(http)
        return await self._openai(body, completion_requests(body, encode=self._tokenizer.encode))

    async def _openai(self, body: dict[str, Any], requests: list[Request]) -> web.Response:
        await self._run(requests)
        body["model"] = str(body.get("model") or self._model_path)
        return _answer(openai_answer(requests, body, tokenizer=self._tokenizer, text=self._text))

    async def _run(self, requests: list[Request]) -> None:
        """Until every request has ended; when the client goes away they are aborted."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Queue[Request] = asyncio.Queue()
        for request in requests:
            request.on_finish = partial(loop.call_soon_threadsafe, ended.put_nowait)
        self.engine.submit(*requests)
        try:
            for _ in requests:
                await ended.get()
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
            "completion_tokens": len(request.output_ids),
        }
        if request.latency_s is not None:
            meta["e2e_latency"] = request.latency_s
        if request.started:
            # none of no tokens, which is what max_new_tokens = 0 gives
            ends = [*(start for _, start in request.versions[1:]), len(request.output_ids)][: len(request.versions)]
            meta["prompt_tokens"] = len(request.input_ids)
            meta["cached_tokens"] = request.cached_tokens
            meta["num_retractions"] = request.retractions
            meta["reasoning_tokens"] = 0  # as SGLang counts without a reasoning parser
            meta["weight_versions"] = [
                {"version": version, "start": start, "end": end}
                for (version, start), end in zip(request.versions, ends, strict=True)
            ]
        if request.return_logprob:
            meta["input_token_logprobs"] = [[log_prob, token, None] for log_prob, token in request.input_log_probs]
            meta["output_token_logprobs"] = [
                [log_prob, token, None] for log_prob, token in zip(request.log_probs, request.output_ids, strict=True)
            ]
            meta["output_token_logprobs_length"] = len(request.output_ids)
        if request.top_logprobs:
            meta["output_top_logprobs"] = [[[value, token, None] for value, token in top] for top in request.tops]
        return {"text": self._text(request), "output_ids": request.output_ids, "meta_info": meta}

    def _text(self, request: Request) -> str:
        sampling = request.sampling
        matched = (request.finish or {}).get("matched")
        ids = request.output_ids
        if isinstance(matched, int) and not sampling.no_stop_trim:
            ids = ids[:-1]
        text = str(self._tokenizer.decode(ids, skip_special_tokens=sampling.skip_special_tokens))
        if isinstance(matched, str) and matched in text:
            return text[: text.index(matched) + (len(matched) if sampling.no_stop_trim else 0)]
        return text

    # -- control ------------------------------------------------------------------------------------------------------

    async def _flush_cache(self, http: web.Request) -> web.Response:
        try:
            deadline = time.monotonic() + float(http.query.get("timeout", "0"))
        except ValueError as error:
            raise BadRequest(f"timeout must be a number of seconds, got {http.query['timeout']!r}.") from error
        while not self.engine.idle and time.monotonic() < deadline:  # noqa: ASYNC110 - a rare call, bounded by its timeout
            await asyncio.sleep(0.01)
        if self.engine.idle:
            await _control(self.engine.flush())
            return web.Response(text="Cache flushed.\n")
        return web.Response(status=400, text="Cache not flushed because there are pending requests.\n")

    async def _pause(self, http: web.Request) -> web.Response:
        mode = (await _object(http)).get("mode", "abort")
        if mode not in ("abort", "in_place", "retract"):
            raise BadRequest(f"mode must be abort, in_place or retract, got {mode!r}.")
        await _control(self.engine.pause(mode))
        return _answer({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
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
        message = f"Succeeded to update model weights. Weight version: {self.engine.weight_version}."
        return _answer({"success": True, "message": message, "num_paused_requests": 0})

    # -- what it is and how it does -----------------------------------------------------------------------------------

    async def _models(self, http: web.Request) -> web.Response:
        card = {"id": self._model_path, "object": "model", "created": int(time.time()), "owned_by": "sglang"}
        card |= {"root": self._model_path, "max_model_len": self.engine.context_length}
        return _answer({"object": "list", "data": [card]})

    async def _info(self, http: web.Request) -> web.Response:
        """Of the model and of the server in one: each of SGLang's two answers has some of these."""
        return _answer(
            {
                "model_path": self._model_path,
                "tokenizer_path": self._model_path,
                "served_model_name": self._model_path,
                "is_generation": True,
                "model_type": getattr(self.engine.config, "model_type", None),
                "architectures": getattr(self.engine.config, "architectures", None),
                "version": "embedded",
                "dtype": "float32",
                "status": "ready" if self.engine.alive else "failed",
                "weight_version": self.engine.weight_version,
                "context_length": self.engine.context_length,
                "vocab_size": self.engine.vocab_size,  # not SGLang's
                "max_running_requests": self.engine.max_running,
                "max_total_num_tokens": self.engine.max_total_tokens,
                "dp_size": 1,
                "tp_size": 1,
                "enable_memory_saver": False,  # slime asks for it before it uses an engine that runs already
                "tokens_sampled": self.engine.tokens_sampled,
            }
        )

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.alive else 503)

    async def _health_generate(self, http: web.Request) -> web.Response:
        sampling = Sampling(max_new_tokens=1, top_k=1)
        request = Request(rid=f"HEALTH_CHECK_{time.time_ns()}", input_ids=[0], sampling=sampling)
        try:
            await asyncio.wait_for(self._run([request]), _HEALTH_TIMEOUT_S)
        except (asyncio.TimeoutError, EngineError):
            return web.Response(status=503)
        return web.Response()

    async def _loads(self, http: web.Request) -> web.Response:
        (running, waiting, tokens), rows = self.engine.load(), self.engine.max_running
        capacity = self.engine.max_total_tokens
        core = {
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_used_tokens": tokens,
            "max_total_num_tokens": capacity,
            "token_usage": tokens / capacity,
            "max_running_requests": rows,
        }
        return _answer({"version": "embedded", "loads": [core]})

    async def _workers(self, http: web.Request) -> web.Response:
        """Itself, as sglang-router lists its workers."""
        running, waiting, _ = self.engine.load()
        worker = {
            "id": self._worker_id,
            "url": f"{http.scheme}://{http.host}",
            "model_id": self._model_path,
            "priority": 50,
            "cost": 1.0,
            "worker_type": "regular",
            "is_healthy": self.engine.alive,
            "load": running + waiting,
            "connection_mode": "HTTP",
            "metadata": {"tp_size": "1", "dp_size": "1", "model_path": self._model_path},
            "disable_health_check": False,
        }
        return _answer({"workers": [worker], "total": 1, "stats": {"regular_count": 1}})


def _so_far(request: Request) -> Request:
    """A copy of what the engine's thread may be adding to."""
    now = copy.copy(request)
    n = len(request.log_probs)
    now.output_ids, now.log_probs, now.versions = request.output_ids[:n], request.log_probs[:n], [*request.versions]
    now.tops = request.tops[:n]
    return now


async def _control(future: Future[T]) -> T:
    return await asyncio.wait_for(asyncio.wrap_future(future), _CONTROL_TIMEOUT_S)


async def _object(http: web.Request) -> dict[str, Any]:
    """The JSON object of a request; an empty body means no settings."""
    try:
        body = json.loads(await http.read() or b"{}")
    except ValueError as error:
        raise BadRequest(f"The body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"The body must be a JSON object, got {type(body).__name__}.")
    return body


def _answer(body: Any, *, status: int = 200) -> web.Response:
    return web.json_response(body, status=status, dumps=partial(json.dumps, ensure_ascii=False, allow_nan=False))


def load_server(
    model_path: str, *, token: str | None, torch_threads: int | None = None, cores: int | None = None, **limits: Any
) -> EmbeddedServer:
    """The server for a checkpoint directory, ``limits`` being the engine's. ``torch_threads`` is by default 1 for
    a model so small that more are slower, else ``cores``, which is by default what this process may use. Raises
    ``ConfigError``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(model_path, local_files_only=True, attn_implementation="sdpa")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the checkpoint in {model_path!r} cannot be loaded: {error}") from error
    if torch_threads is None:
        torch_threads = 1 if model.num_parameters() < _SMALL_PARAMETERS else cores or usable_cores()
    if torch_threads < 1:
        raise ConfigError(f"torch_threads must be at least 1, got {torch_threads}")
    torch.set_num_threads(torch_threads)
    return EmbeddedServer(Engine(model.float(), tokenizer, **limits), tokenizer, model_path=model_path, token=token)
