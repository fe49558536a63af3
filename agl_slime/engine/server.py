"""SGLang's HTTP protocol over the embedded engine.

The event loop reads and writes JSON; the model runs in the engine's thread. Answers and errors have SGLang 0.5.15's
shapes, for the same client and tests. Unsupported features (grammars, penalties, LoRA, images) are refused with 400.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from transformers import PreTrainedTokenizerBase

from agl_slime.engine.engine import Engine
from agl_slime.engine.requests import BadRequest, Name, Request, Sampling, parse, parse_generate
from agl_slime.engine.weights import read_weights, renamed_for
from agl_slime.errors import AglSlimeError, ConfigError, EngineError
from agl_slime.support.http import json_response, listening, read_body
from agl_slime.support.net import has_token
from agl_slime.support.threads import run_in_thread, usable_cores

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_MAX_BODY_BYTES = 64 * 1024**2
_SMALL_PARAMETERS = 10_000_000
# Bound on a weight update or another control call; a generation takes as long as its tokens do.
_CONTROL_TIMEOUT_S = 120.0
# SGLang's own bound on a health check that generates.
_HEALTH_TIMEOUT_S = 20.0
# SGLang's other ways of an update, and slime's
_OTHER_WEIGHTS = ("init_weights_update_group", "update_weights_from_distributed", "update_weights_from_tensor")
_OTHER_WEIGHTS += ("pull_weights",)


class _PauseBody(BaseModel):
    mode: Literal["abort", "in_place", "retract"] = "abort"


class _AbortBody(BaseModel):
    rid: Name | None = None
    abort_all: bool = False


class _UpdateBody(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    model_path: str = Field(min_length=1, max_length=4096, pattern="^[^\0]*$")
    weight_version: Annotated[Name | None, BeforeValidator(lambda v: str(v) if isinstance(v, int) else v)] = None
    abort_all_requests: bool = False


class _DetokenizeBody(BaseModel):
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] | list[list[Annotated[int, Field(ge=0, lt=2**31)]]]
    skip_special_tokens: bool = True


class EmbeddedServer:
    """The routes. ``token``, when given, must come as ``Authorization: Bearer …`` with every request."""

    def __init__(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, *, model_path: str, token: str | None
    ) -> None:
        self.engine = engine
        self._tokenizer: Any = tokenizer
        self._model_path = model_path
        self._token = token
        self._updating = asyncio.Lock()  # one update at a time: an answer is of its own, and one checkpoint in memory
        self._most_characters = self.engine.context_length * max(map(len, self._tokenizer.get_vocab()))

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guarded])
        app.on_shutdown.append(self._end)  # before the sockets close
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.put("/generate", self._generate),
                web.post("/v1/detokenize", self._detokenize),
                web.post("/flush_cache", self._flush_cache),
                web.get("/flush_cache", self._flush_cache),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/abort_request", self._abort),
                web.post("/update_weights_from_disk", self._update_weights),
                *(web.post(f"/{name}", self._refuse_weights) for name in _OTHER_WEIGHTS),
                *(web.get(path, self._say(about)) for path, about in INFORMATION.items()),
                web.get("/health", self._health),
                web.get("/health_generate", self._health_generate),
            ]
        )
        return app

    def listening(self, *, host: str, port: int) -> AbstractAsyncContextManager[str]:
        """Serve while the block runs; yields the URL. ``port`` 0 takes a free one."""
        # handler_cancellation: a client that goes away ends its requests
        options = {"handler_cancellation": True, "shutdown_timeout": 0.5, "token": self._token}
        return listening(self.application(), host=host, port=port, backlog=4096, **options)

    async def _end(self, app: web.Application) -> None:
        """End what runs, so that open requests are answered."""
        self.engine.close()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check a request's token, and answer errors in SGLang's form."""
        try:
            if not has_token(request.headers.get("Authorization"), self._token):
                return json_response({"error": {"message": "Unauthorized"}}, status=401)
            return await handler(request)
        except (BadRequest, RecursionError) as error:
            body: dict[str, Any] = {"error": {"message": str(error)}}
            if request.path.startswith("/v1/"):
                body = {"object": "error", **body["error"], "type": "BadRequestError", "param": None, "code": 400}
            return json_response(body, status=400)
        except web.HTTPException as error:  # an unknown path, too large a body
            return json_response({"error": {"message": error.reason}}, status=error.status)
        except (TimeoutError, AglSlimeError) as error:
            return json_response({"error": {"message": str(error) or type(error).__name__}}, status=500)

    # -- generation ---------------------------------------------------------------------------------------------------

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        requests, single, stream = await read_body(http, lambda raw: parse_generate(_json(raw), encode=self._encode))
        if stream:
            return await self._stream(http, requests[0])
        await self._run(requests)
        answers = [self._generate_answer(request) for request in requests]
        return json_response(answers[0] if single else answers)

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
                await response.write(b"data: %s\n\n" % orjson.dumps(self._generate_answer(_so_far(request))))
        finally:
            running.cancel()
        await response.write(b"data: [DONE]\n\n")
        return response

    def _encode(self, text: str, **options: Any) -> list[int]:
        if len(text) > self._most_characters:
            limit = f"the {self.engine.context_length} tokens of the model's context length can stand for"
            raise BadRequest(f"The input ({len(text)} characters) is longer than {limit}.")
        return self._tokenizer.encode(text, **options)

    async def _run(self, requests: list[Request]) -> None:
        """Run requests until each has ended; when the client goes away they are aborted."""
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
        if failed := next((request.finish for request in requests if (request.finish or {}).get("status_code")), None):
            raise EngineError(failed["message"])

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
            sampled = zip(request.log_probs, request.output_ids, strict=True)
            meta["output_token_logprobs"] = [[log_prob, token, None] for log_prob, token in sampled]
            meta["output_token_logprobs_length"] = len(request.output_ids)
        if request.experts is not None:
            last = len(request.input_ids) + len(request.output_ids) - 1
            meta["routed_experts"] = _base64(request.experts[: max(0, last - (request.experts_start or 0))])
        if request.nucleus and request.finish is not None:
            meta["top_p_token_ids"] = _base64([token for ids in request.nucleus for token in ids])
            meta["top_p_token_offsets"] = _base64([0, *accumulate(map(len, request.nucleus))])
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

    async def _detokenize(self, http: web.Request) -> web.StreamResponse:
        body = await _body(http, _DetokenizeBody)
        options = {"skip_special_tokens": body.skip_special_tokens}
        if not body.tokens or isinstance(body.tokens[0], int):
            return json_response({"text": self._tokenizer.decode(body.tokens, **options)})
        return json_response({"text": await run_in_thread(self._tokenizer.batch_decode, body.tokens, **options)})

    # -- control ------------------------------------------------------------------------------------------------------

    async def _flush_cache(self, http: web.Request) -> web.Response:
        try:
            deadline = time.monotonic() + min(float(http.query.get("timeout", "0")), _CONTROL_TIMEOUT_S)
        except ValueError as error:
            raise BadRequest(f"timeout must be a number of seconds, got {http.query['timeout']!r}.") from error
        while not self.engine.idle and time.monotonic() < deadline:  # noqa: ASYNC110 - a rare call, bounded by its timeout
            await asyncio.sleep(0.01)
        if self.engine.idle:
            await _control(self.engine.flush())
            return web.Response(text="Cache flushed.\n")
        return web.Response(status=400, text="Cache not flushed because there are pending requests.\n")

    async def _pause(self, http: web.Request) -> web.Response:
        await _control(self.engine.pause((await _body(http, _PauseBody)).mode))
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        await _control(self.engine.resume())
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, http: web.Request) -> web.Response:
        body = await _body(http, _AbortBody)
        if body.rid or body.abort_all:
            await _control(self.engine.abort(None if body.abort_all else body.rid))
        return web.Response()

    async def _update_weights(self, http: web.Request) -> web.Response:
        body = await _body(http, _UpdateBody)
        if body.abort_all_requests:
            await _control(self.engine.abort())
        async with self._updating:
            try:
                tensors = await run_in_thread(read_weights, body.model_path, self.engine.weight_bytes)
                tensors = await run_in_thread(renamed_for, self.engine.model, tensors, body.model_path)
                await _control(self.engine.update_weights(tensors, version=body.weight_version))
            except ConfigError as error:
                return json_response({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
            self._model_path = body.model_path
            message = f"Succeeded to update model weights. Weight version: {self.engine.weight_version}."
        return json_response({"success": True, "message": message, "num_paused_requests": 0})

    async def _refuse_weights(self, http: web.Request) -> web.Response:
        fix = "give slime --update-weight-mode full --update-weight-transport disk"
        raise BadRequest(f"{http.path}: the embedded engine takes whole checkpoints from disk alone; {fix}.")

    # -- description and health --------------------------------------------------------------------------------------

    def _say(self, about: Callable[[Engine, str, str], dict[str, Any]]) -> Callable[..., Awaitable[web.Response]]:
        async def say(http: web.Request) -> web.Response:
            return json_response(about(self.engine, self._model_path, f"{http.scheme}://{http.host}"))

        return say

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.alive else 503)

    async def _health_generate(self, http: web.Request) -> web.Response:
        sampling = Sampling(max_new_tokens=1, top_k=1)
        request = Request(rid=f"HEALTH_CHECK_{time.time_ns()}", input_ids=[0], sampling=sampling)
        try:
            await asyncio.wait_for(self._run([request]), _HEALTH_TIMEOUT_S)
        except (TimeoutError, EngineError):
            return web.Response(status=503)
        return web.Response()


def _base64(values: Any) -> str:
    """An array as SGLang sends it: flat int32."""
    return base64.b64encode(np.asarray(values, dtype="<i4").tobytes()).decode("ascii")


def _so_far(request: Request) -> Request:
    """A consistent copy of a request that the engine's thread may be extending."""
    snapshot, n = copy.copy(request), len(request.log_probs)
    snapshot.output_ids, snapshot.log_probs = request.output_ids[:n], request.log_probs[:n]
    snapshot.tops = request.tops[:n]
    snapshot.versions = [version for version in request.versions if version[1] < max(n, 1)]
    return snapshot


async def _control(future: Future[T]) -> T:
    return await asyncio.wait_for(asyncio.wrap_future(future), _CONTROL_TIMEOUT_S)


async def _body(http: web.Request, model: type[M]) -> M:
    return await read_body(http, lambda raw: parse(model, _json(raw)))


def _json(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request; an empty body means no settings."""
    try:
        body = orjson.loads(raw or b"{}")
    except ValueError as error:
        raise BadRequest(f"The body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"The body must be a JSON object, got {type(body).__name__}.")
    return body


def load_server(
    model_path: str, *, token: str | None, torch_threads: int | None = None, cores: int | None = None, **limits: Any
) -> EmbeddedServer:
    """The server for a checkpoint directory, ``limits`` being the engine's. ``torch_threads`` is 1 for a model so small
    that more are slower, else ``cores``, by default all that this process may use. Raises ``ConfigError``."""
    if limits.get("deterministic"):
        # MKL, which reads this at its first product, then computes a row alike beside any number of rows
        os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
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
        single = limits.get("deterministic") or model.num_parameters() < _SMALL_PARAMETERS
        torch_threads = 1 if single else cores or usable_cores()
    if torch_threads < 1:
        raise ConfigError(f"torch_threads must be at least 1, got {torch_threads}")
    torch.set_num_threads(torch_threads)
    return EmbeddedServer(Engine(model.float(), tokenizer, **limits), tokenizer, model_path=model_path, token=token)


_WORKER_ID = str(uuid.uuid4())


def _info(engine: Engine, model_path: str, url: str) -> dict[str, Any]:
    """The fields of SGLang's ``/model_info`` and ``/server_info`` in one answer."""
    return {
        "model_path": model_path,
        "tokenizer_path": model_path,
        "served_model_name": model_path,
        "is_generation": True,
        "model_type": getattr(engine.config, "model_type", None),
        "architectures": getattr(engine.config, "architectures", None),
        "version": "embedded",
        "dtype": "float32",
        "status": "ready" if engine.alive else "failed",
        "weight_version": engine.weight_version,
        "context_length": engine.context_length,
        "vocab_size": engine.vocab_size,  # not SGLang's
        "max_running_requests": engine.max_running,
        "max_total_num_tokens": engine.max_total_tokens,
        "dp_size": 1,
        "tp_size": 1,
        "enable_return_routed_experts": engine.returns_routed_experts,
        "enable_memory_saver": False,  # slime asks for it before it uses an engine that runs already
        "tokens_sampled": engine.tokens_sampled,
    }


def _models(engine: Engine, model_path: str, url: str) -> dict[str, Any]:
    card = {"id": model_path, "object": "model", "created": int(time.time()), "owned_by": "sglang"}
    return {"object": "list", "data": [{**card, "root": model_path, "max_model_len": engine.context_length}]}


def _loads(engine: Engine, model_path: str, url: str) -> dict[str, Any]:
    running, waiting, tokens = engine.load()
    core = {
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_used_tokens": tokens,
        "max_total_num_tokens": engine.max_total_tokens,
        "token_usage": tokens / engine.max_total_tokens,
        "max_running_requests": engine.max_running,
    }
    return {"version": "embedded", "loads": [core]}


def _workers(engine: Engine, model_path: str, url: str) -> dict[str, Any]:
    """Itself, as sglang-router lists its workers."""
    running, waiting, _ = engine.load()
    worker = {
        "id": _WORKER_ID,
        "url": url,
        "model_id": model_path,
        "priority": 50,
        "cost": 1.0,
        "worker_type": "regular",
        "is_healthy": engine.alive,
        "load": running + waiting,
        "connection_mode": "HTTP",
        "metadata": {"tp_size": "1", "dp_size": "1", "model_path": model_path},
        "disable_health_check": False,
    }
    return {"workers": [worker], "total": 1, "stats": {"regular_count": 1}}


INFORMATION: Mapping[str, Callable[[Engine, str, str], dict[str, Any]]] = {
    **dict.fromkeys(("/model_info", "/get_model_info", "/server_info", "/get_server_info"), _info),
    "/v1/models": _models,
    "/v1/loads": _loads,
    "/workers": _workers,
}
