"""The one way to SGLang: every endpoint that this package uses, with typed answers and typed errors.

Invariant: what ``generate`` returns was sampled by the engine token by token for the prompt that was given; however
often the engine aborted, failed or was sent to again, no id appears twice, none is missing, and no id of an abandoned
attempt is mixed in (a retry starts under a new request id, and the abandoned one is aborted).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Literal

import aiohttp

from agl_slime.engine.client.describe import EngineDescription, dtype_of, engine_version, parse_workers
from agl_slime.engine.client.generation import (
    Decode,
    Generation,
    ImageInput,
    PartRequest,
    SamplingParams,
    broken_off,
    parse_generation,
)
from agl_slime.engine.client.prompt import outermost
from agl_slime.engine.client.resumable import Progress, ResumableGeneration, text_receiver
from agl_slime.engine.client.retry import check_event, context_limit
from agl_slime.engine.client.transport import ClientSettings, HttpTransport
from agl_slime.errors import (
    ContextOverflowError,
    EngineError,
    EngineProtocolError,
    EngineRequestError,
    EngineServerError,
    EngineUnreachableError,
    OutOfVocabularyError,
)
from agl_slime.support.backoff import Backoff
from agl_slime.support.threads import run_in_thread

logger = logging.getLogger(__name__)

# sglang-router's "manual" and "consistent hashing" policies keep requests with one key on one worker, so that the turns
# of a rollout find their prefix cache
_ROUTING_KEY_HEADER = "X-SMG-Routing-Key"

# aborts: best effort, so few at a time and not for long
_ABORTERS, _ABORT_TIMEOUT_S = 32, 2.0  # for requests that no caller waits for any more

PauseMode = Literal["abort", "retract", "in_place"]
"""The fate of running requests while SGLang is paused. ``abort``: they answer with their tokens so far, and
``generate`` resumes them; ``retract``: they stay in the engine and their KV cache is recomputed afterwards;
``in_place``: they stay, and resume with their KV cache."""

_LONG_ANSWER = 4_000  # ids; a longer resumed answer is joined in a thread: decoding takes 1 ms per 2,000


class SGLangClient(AbstractAsyncContextManager["SGLangClient"]):
    """A client of one SGLang server or router, for thousands of concurrent calls.

    It may be made in one thread and used in another: connections are opened in the event loop that first needs them.
    Use it as an async context manager, or call ``aclose``. It raises the errors of ``agl_slime.errors``.

    ``vocab_size`` and ``context_length``, when given, refuse an impossible request before it is sent;
    ``context_length`` also shortens ``max_new_tokens`` to the room that is left, since SGLang refuses prompt +
    max_new_tokens beyond it. A resumed generation needs ``eos_token_ids``, all end tokens of the model
    (``end_token_ids``; ids that the server stops at are added), and the tokenizer's ``decode``, without which a
    character that an abort has split is U+FFFD in the text.
    """

    def __init__(
        self,
        *,
        base_url: str,
        settings: ClientSettings | None = None,
        vocab_size: int | None = None,
        context_length: int | None = None,
        eos_token_ids: Collection[int] = (),
        decode: Decode | None = None,
    ) -> None:
        self.settings = settings or ClientSettings()
        self.vocab_size = vocab_size
        self.context_length = context_length
        self._eos_token_ids = frozenset(eos_token_ids)
        self._decode = decode
        self._http = HttpTransport(base_url=base_url, settings=self.settings)
        self.base_url = self._http.base_url
        # requests that no caller waits for any more, and the tasks that abort them (referenced here, or they could be
        # garbage-collected while they run)
        self._unwanted: deque[str] = deque()
        self._aborters: set[asyncio.Task[None]] = set()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; unsent aborts get a moment to be sent."""
        here = asyncio.get_running_loop()
        if aborters := [task for task in self._aborters if task.get_loop() is here]:
            await asyncio.wait(aborters, timeout=_ABORT_TIMEOUT_S)
            self._unwanted.clear()
        await self._http.aclose()

    # -- generation ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        routing_key: str | None = None,
        rid: str | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        top_log_probs: int = 0,
        resume: Generation | None = None,
        on_part: Callable[[Generation], None] | None = None,
        experts_start: int = 0,
        images: ImageInput | None = None,
        oldest_version: int | None = None,
    ) -> Generation:
        """Sample one continuation of ``input_ids``.

        Args:
            input_ids: The prompt's token ids, at least one.
            sampling: ``max_new_tokens`` counts the whole answer, resumed parts included.
            routing_key: Calls with one key reach one worker behind a router (one key per rollout keeps its prefix
                cache).
            rid: Request id of the first attempt; later attempts and parts derive theirs from it. SGLang aborts by
                prefix: no rid may begin another.
            on_progress: Called with the text so far while it is sampled, where the server streams. A stream that breaks
                off counts as an abort: its tokens were sampled.
            top_log_probs: How many of the likeliest tokens to report for each place.
            resume: The aborted generation of an earlier call with the same arguments, to be continued.
            on_part: Called with the tokens so far whenever the engine aborts.
            experts_start: With ``sampling.routed_experts``, the first token without known experts.
            images: The prompt's images as they are sent; ``input_ids`` are all tokens of the prompt.
            oldest_version: Answers of weights with a lower number are refused: a worker has missed an update.

        Raises ``OutOfVocabularyError`` and ``ContextOverflowError`` (before sending if the client knows the sizes),
        ``EngineRequestError`` if refused, ``EngineProtocolError`` for an impossible answer, ``EngineError`` at last.
        """
        started = time.monotonic()
        deadline = started + self.settings.total_timeout_s
        context_length = min(filter(None, (self.context_length, sampling.context_length)), default=None)
        self._check_prompt(input_ids, context_length)
        rid = rid or uuid.uuid4().hex
        rids = _request_ids(rid)
        resumable = ResumableGeneration(
            prompt_ids=input_ids,
            sampling=sampling.seeded(rid),
            eos_token_ids=self._eos_token_ids,
            context_length=context_length,
            decode=self._decode,
            experts_start=experts_start,
            images=images,
            vocab_size=self.vocab_size,
            oldest_version=oldest_version,
        )
        if resume is not None:
            resumable.add(resume)
        # aborted in the queue, time and again: do not spin against an engine that keeps emptying it
        emptied = Backoff(base_s=self.settings.backoff_base_s, cap_s=self.settings.backoff_cap_s)
        while not resumable.done:
            request = resumable.next_request()
            try:
                progress = partial(resumable.progress, request)
                on_event = on_progress and text_receiver(
                    lambda *so_far, progress=progress: on_progress(progress(*so_far)), resumable.reader()
                )
                part = await self._send_part(request, rids, routing_key, deadline, on_event=on_event, top=top_log_probs)
            except ContextOverflowError as error:
                limit, length = context_limit(error), len(request.input_ids)
                if limit is not None and length < limit < length + request.sampling.max_new_tokens:
                    # the prompt fits and prompt + max_new_tokens does not: ask again within the server's limit
                    self.context_length = limit
                    resumable.limit_context(limit)
                elif resumable.sampled:
                    resumable.give_up("length")  # aborted with a full context: there is no room to resume
                else:
                    raise
                continue
            if isinstance(part.matched_stop, int) and part.matched_stop not in sampling.stop_token_ids:
                self._eos_token_ids |= {part.matched_stop}
            long = bool(resumable.sampled) and resumable.sampled + len(part.output_ids) > _LONG_ANSWER
            await run_in_thread(resumable.add, part) if long else resumable.add(part)
            if part.finish_reason != "abort" or resumable.done:
                continue
            if on_part is not None:
                on_part(resumable.so_far)
            if resumable.resumed >= self.settings.resume_limit:
                times = f"{resumable.resumed + 1} times (ClientSettings.resume_limit)"
                raise EngineServerError(f"{self._http.shown_url} aborted one generation {times}: find out who does")
            if part.output_ids:
                emptied.reset()
            else:
                await emptied.pause(EngineServerError("aborted in the queue"))
        return resumable.result(latency_s=time.monotonic() - started)

    async def _send_part(
        self,
        request: PartRequest,
        rids: Iterator[str],
        routing_key: str | None,
        deadline: float,
        *,
        on_event: Callable[[Any], None] | None,
        top: int,
    ) -> Generation:
        """One part with its retries, each under the next of ``rids``."""
        headers = {_ROUTING_KEY_HEADER: routing_key} if routing_key else None
        payload = request.to_payload()
        if on_event is not None:
            payload["stream"] = True
        if top:
            payload["top_logprobs_num"] = top
        endpoint = f"{self._http.shown_url}/generate"

        async def attempt() -> Generation:
            rid = next(rids)
            sent = time.monotonic()
            streamed: deque[Any] = deque(maxlen=1)

            def keep(event: Any) -> None:
                check_event(event, endpoint=endpoint)
                streamed.append(event)
                if on_event is not None:
                    on_event(event)

            options: Any = {"headers": headers, "deadline": deadline, "on_event": on_event and keep}
            try:
                answer = await self._http.send("POST", "/generate", {**payload, "rid": rid}, **options)
            except aiohttp.ClientConnectorError:
                raise  # it never arrived
            except (asyncio.CancelledError, TimeoutError, aiohttp.ClientError, OSError) as error:
                # it may still run there without a caller and occupy the batch
                self._abort_soon(rid)
                if isinstance(error, asyncio.CancelledError) or not streamed:
                    raise
                answer = streamed[0]
            answer = broken_off(answer) if streamed else answer
            return parse_generation(answer, request=request, latency_s=time.monotonic() - sent, endpoint=endpoint)

        return await self._http.retry(attempt, endpoint=endpoint, deadline=deadline)

    def _check_prompt(self, input_ids: Sequence[int], context_length: int | None) -> None:
        if len(input_ids) == 0:
            raise EngineRequestError("the prompt has no token ids; give at least one")
        wrong = outermost(input_ids)
        if self.vocab_size is not None and not 0 <= wrong < self.vocab_size:
            place = f"outside the model's vocabulary of {self.vocab_size} ids"
            raise OutOfVocabularyError(f"the prompt holds token id {wrong}, {place}")
        if context_length is not None and len(input_ids) >= context_length:
            problem = f"leaves no room in the context of {context_length}"
            raise ContextOverflowError(f"the prompt has {len(input_ids)} tokens and {problem}")

    # -- control ------------------------------------------------------------------------------------------------------

    async def model_info(self, **limits: Any) -> dict[str, Any]:
        """The server's ``/model_info``: model_path, weight_version, ..."""
        return await self._ask("model_info", **limits)

    async def server_info(self) -> dict[str, Any]:
        """The server's ``/server_info``: its flags; empty where it has no such route."""
        try:
            return await self._ask("server_info")
        except EngineRequestError:
            return {}

    async def dtype(self) -> str:
        """The dtype that the server computes in (bfloat16, ...); empty where it is unknown."""
        return dtype_of(await self.server_info())

    async def weight_version(self) -> str:
        return engine_version(await self.model_info(), self._http.shown_url)

    async def workers(self, *, least: int = 1) -> tuple[str, ...]:
        """URLs of all workers behind a router, unhealthy ones included; the URL itself when it is none. Weights and
        pauses go to workers, since a router answers 404 to those.

        Raises ``EngineProtocolError`` when a router has no worker at all; with ``least`` 0 it may have none.
        """
        try:
            listed = await self._http.call("GET", "/workers")
        except EngineRequestError:
            return (self.base_url,)  # plain SGLang has no /workers
        workers = parse_workers(listed, endpoint=f"{self._http.shown_url}/workers")
        if len(workers) < least:
            fix = "start some with --worker-urls"
            raise EngineProtocolError(f"the router at {self._http.shown_url} has no workers; {fix}")
        return workers

    async def flush_cache(self) -> None:
        """Empty the prefix cache. Raises ``EngineRequestError`` (400) while requests run or wait: pause first."""
        await self._post("/flush_cache")

    async def lists_weight_versions(self) -> bool:
        """Whether answers say which version sampled which token (0.5.23), or only the last (0.5.15); samples one."""
        payload = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "rid": uuid.uuid4().hex}
        meta = (await self._http.call("POST", "/generate", payload)).get("meta_info")
        return isinstance(meta, dict) and bool(meta.get("weight_versions"))

    async def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Stop sampling; later requests wait for ``continue_generation``."""
        await self._post("/pause_generation", {"mode": mode})

    async def continue_generation(self, *, timeout_s: float | None = None) -> None:
        """Undo ``pause_generation``; harmless when nothing is paused."""
        await self._post("/continue_generation", {}, timeout_s=timeout_s)

    async def abort(self, rid: str | None = None) -> None:
        """Abort the requests whose id begins with ``rid``; None: all. They answer with their tokens so far."""
        await self._post("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def update_weights_from_disk(self, path: str, version: str, *, timeout_s: float = 600.0) -> None:
        """Load the checkpoint directory ``path`` (as the server sees it) under weight version ``version``.

        ``flush_cache`` is sent as False although SGLang's default is True: with requests pending, True ends a 0.5.15
        server (an assertion in its scheduler) and makes 0.5.23 answer 400 after it has taken the weights. Flush by
        itself while paused, as ``DiskWeightSync`` does. ``timeout_s`` covers a large model from a shared disk.

        Raises:
            EngineRequestError: The server could not load it; the text has its reason.
        """
        payload = {"model_path": path, "weight_version": version, "flush_cache": False}
        answer = await self._http.call("POST", "/update_weights_from_disk", payload, timeout_s=timeout_s)
        if answer.get("success") is not True:
            raise EngineRequestError(f"{self._http.shown_url}/update_weights_from_disk answered {str(answer)[:500]}")

    async def probe(self, *, timeout_s: float = 10.0) -> EngineDescription:
        """Describe the server, once at start-up: a wrong URL is one sentence then, not a run that fails minutes later.

        Raises ``EngineUnreachableError`` (no answer within ``timeout_s``), ``EngineProtocolError`` (it is not SGLang),
        ``EngineServerError`` (5xx, as while it starts) or ``EngineRequestError`` (another API key is wanted).
        """
        url = self._http.shown_url
        try:
            # one retry for a hiccup; an address without a server fails at once
            info = await asyncio.wait_for(self.model_info(timeout_s=timeout_s, max_attempts=2), timeout_s)
            if not isinstance(model_path := info.get("model_path"), str):
                raise EngineProtocolError("its /model_info names no model_path")
            return EngineDescription(base_url=url, model_path=model_path, weight_version=engine_version(info, url))
        except (EngineUnreachableError, TimeoutError) as error:
            cause = str(error) or f"no answer within {timeout_s:g} s"
            fix = "check the URL, that the server is up and that no firewall stands between"
            raise EngineUnreachableError(f"no SGLang at {url}: {cause}; {fix}") from error
        except (EngineRequestError, EngineProtocolError) as error:
            if error.status in (401, 403):
                raise
            raise EngineProtocolError(f"{url} answers but is not SGLang: {error}; check the port") from error
        except EngineServerError as error:
            fix = "check the port, or wait until the server has started"
            raise EngineServerError(f"{url} answers but does not serve: {error}; {fix}") from error

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _ask(self, name: str, **limits: Any) -> dict[str, Any]:
        try:
            return await self._http.call("GET", f"/{name}", **limits)
        except EngineRequestError as error:
            if error.status not in (404, 405):
                raise
            # sglang-router forwards only the older path, to one of its workers
            return await self._http.call("GET", f"/get_{name}", **limits)

    async def _post(self, path: str, payload: Any = None, **limits: Any) -> None:
        await self._http.call("POST", path, payload, json=False, **limits)

    def _abort_soon(self, rid: str) -> None:
        """Ask the engine to abort ``rid``, without waiting; SGLang sees seconds later that the connection is gone."""
        self._unwanted.append(rid)
        if len(self._aborters) < _ABORTERS:
            task = asyncio.get_running_loop().create_task(self._send_aborts())
            self._aborters.add(task)
            task.add_done_callback(self._aborters.discard)

    async def _send_aborts(self) -> None:
        while self._unwanted:
            rid = self._unwanted.popleft()
            try:
                await self._post("/abort_request", {"rid": rid}, timeout_s=_ABORT_TIMEOUT_S, max_attempts=1)
            except EngineError as error:
                # unreachable, or a router, which does not pass aborts on: asking for the rest would be as vain
                logger.debug("abort of %s not sent: %s", rid, error)
                self._unwanted.clear()


def _request_ids(first: str) -> Iterator[str]:
    """``first``, then others for the retries and resumed parts. The number stands in front: SGLang aborts by prefix,
    and aborting a lost attempt must not hit the next one."""
    yield first
    for n in itertools.count(1):
        yield f"{n}.{first}"
