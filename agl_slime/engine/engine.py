"""Continuous batching over the slot model, in a thread of its own.

Why not transformers' ContinuousBatching: on a CPU it reaches less than half of this engine's tokens per second, takes
log-probs after top-p where SGLang takes them before, reports 0 for greedy tokens, has no stop strings, and an empty or
too long prompt ends its loop. Why not batched ``generate``: new requests wait until a batch's longest one has ended.

All public methods may be called from any thread; they hand work to the engine's thread, which alone touches the model.
A single-worker executor, each step queueing the next one, was measured slower by some 10 % of tokens per CPU second.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch
import transformers  # its models take seconds to import, when one is made

from agl_slime.engine.experts import ExpertCapture, routers_of
from agl_slime.engine.requests import BadRequest, Request
from agl_slime.engine.sampling import RowParams, sample, uniforms
from agl_slime.engine.slots import SlotModel
from agl_slime.engine.weights import load_weights
from agl_slime.errors import ConfigError, EngineError

T = TypeVar("T")

_ROOM_TOKENS = 256  # cache places reserved at admission for an answer; few answers are longer
_ABORTED = {"type": "abort", "message": "", "status_code": None, "err_type": None}
_NOT_FINITE = "the model's logits are not finite: load other weights"
_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


class Engine:
    """Serves requests until ``close``; ``submit`` returns at once, and ``on_finish`` is called in the engine's thread.

    ``max_running`` rows decode together; the rest wait in order of arrival. ``context_length`` counts the tokens of
    prompt and response together, by default the model's; ``max_total_tokens`` bounds the KV cache, by
    default to a quarter of the machine's memory; ``prefill_tokens`` limits one prefill, so that running rows do
    not wait long. Rows that no longer fit return to the queue, the newest first, and are prefilled again.
    ``deterministic``: an answer depends on its prompt and seed alone, to the last bit (``attention.InvariantStep``).
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        tokenizer: transformers.PreTrainedTokenizerBase,
        *,
        max_running: int = 128,
        context_length: int | None = None,
        max_total_tokens: int | None = None,
        prefill_tokens: int = 4096,
        prefix_cache: bool = True,
        return_routed_experts: bool | None = None,
        deterministic: bool = False,
        seed: int = 0,
    ) -> None:
        has_experts = bool(routers_of(model))
        if deterministic and has_experts:
            raise ConfigError("deterministic: the batch of an expert has tokens of all requests; leave it out")
        if return_routed_experts is None:
            return_routed_experts = has_experts
        self.max_running = max_running
        self.config: Any = model.config
        self.vocab_size = int(self.config.vocab_size)
        self.weight_version = "default"
        self.eos_ids = _eos_ids(model, tokenizer)
        self.paused = False
        self.failure: BaseException | None = None
        self.tokens_sampled = 0
        self.model = model
        self._tokenizer = tokenizer
        self._slots = SlotModel(
            model,
            slots=max_running,
            context=int(context_length or self.config.max_position_embeddings),
            max_total_tokens=max_total_tokens,
            prefix_cache=prefix_cache,
            capture=ExpertCapture(model) if return_routed_experts else None,
            deterministic=deterministic,
        )
        self.returns_routed_experts = return_routed_experts
        self.context_length, self.max_total_tokens = self._slots.context, self._slots.capacity
        self._prefill_tokens = prefill_tokens
        self._random = random.Random(seed)
        self._wake = threading.Condition()  # its lock guards these four:
        self._commands: deque[Callable[[], None]] = deque()
        self._updates: deque[Callable[[], None]] = deque()  # commands that wait for the running requests to end
        self._by_rid: dict[str, Request] = {}
        self._closed = False
        # the engine's thread only:
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._last_ids = torch.zeros(0, dtype=torch.long)
        self._params: RowParams | None = None
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    # -- called from other threads ------------------------------------------------------------------------------------

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none. Raises ``BadRequest`` for a wrong one, ``EngineError`` when stopped."""
        for request in requests:
            request.check(context_length=self.context_length, vocab_size=self.vocab_size, eos_ids=self.eos_ids)
        with self._wake:
            if stopped := self._stopped():
                raise stopped
            if duplicate := next((request.rid for request in requests if request.rid in self._by_rid), None):
                raise BadRequest(f"Duplicate request ID detected: {duplicate}")
            for request in requests:
                self._by_rid[request.rid] = request
                request.seed = self._random.getrandbits(63) if request.seed is None else request.seed
            self._commands.append(lambda: self._waiting.extend(requests))
            self._wake.notify()

    def abort(self, rid: str | None = None) -> Future[int]:
        """End the request ``rid``, or all; running ones keep their tokens. The result is the number of ended ones."""
        return self._call(lambda: self._abort(rid))

    def pause(self, mode: str = "abort") -> Future[None]:
        """Stop sampling. ``abort`` ends every request, ``in_place`` keeps running ones with their cache, ``retract``
        queues them again to be prefilled. New requests wait."""
        return self._call(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        return self._call(lambda: setattr(self, "paused", False))

    def update_weights(self, tensors: dict[str, torch.Tensor], *, version: str | None = None) -> Future[None]:
        """Put new weights in place. At once when paused; else the running requests end first and queued ones wait.
        Fails with ``ConfigError`` and unchanged weights when they do not fit."""
        return self._call(lambda: self._update(tensors, version), self._updates)

    def flush(self) -> Future[None]:
        """Forget the cached prefixes of ended requests."""
        return self._call(self._slots.flush)

    def load(self) -> tuple[int, int, int]:
        """Running and waiting requests, and tokens in the slots; exact only between steps."""
        running = list(self._running)
        used = sum(len(request.input_ids) + len(request.output_ids) for request in running)
        with self._wake:
            return len(running), max(0, len(self._by_rid) - len(running)), used

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits; in a pause waiting ones do not count: SGLang can be flushed meanwhile."""
        with self._wake:
            return not (self._running if self.paused else self._by_rid)

    @property
    def summary(self) -> str:
        """One sentence on the model and the memory that it takes."""
        parameters, slots = self.model.num_parameters(), self._slots
        kind, threads = type(self.model).__name__, torch.get_num_threads()
        return (
            f"{kind} of {parameters / 1e6:,.1f} M parameters ({_size(self.weight_bytes)}, float32) on "
            f"{threads} torch thread{'s' * (threads > 1)}; "
            f"the KV cache of a token takes {_size(slots.bytes_per_token)}: "
            f"at most {self.max_running} requests at once, {self.context_length:,} tokens each, "
            f"{slots.capacity:,} together ({_size(slots.capacity * slots.bytes_per_token)})"
        )

    @property
    def weight_bytes(self) -> int:
        return 4 * self.model.num_parameters()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    def close(self, timeout_s: float = 1.0) -> None:
        """Abort everything and end the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def _stopped(self) -> EngineError | None:
        stopped = self._closed or self.failure is not None
        return EngineError(f"the embedded engine has stopped: {self.failure or 'closed'}") if stopped else None

    def _call(self, function: Callable[[], T], queue: deque[Callable[[], None]] | None = None) -> Future[T]:
        future: Future[T] = Future()
        with self._wake:
            if stopped := self._stopped():
                future.set_exception(stopped)
            else:
                (self._commands if queue is None else queue).append(partial(_resolve, future, function))
                self._wake.notify()
        return future

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._receive():
                    while self._updates and (self.paused or not self._running):
                        self._updates.popleft()()
                    if not self.paused and not self._updates:
                        self._admit()
                    if not self.paused and self._running:
                        self._step()
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._shut_down()

    def _shut_down(self) -> None:
        """End every command and request with the engine's failure, also a request in a failed prefill."""
        with self._wake:
            self._closed = True
            requests = list(self._by_rid.values())
        for command in [*self._commands, *self._updates]:
            command()
        for request in requests:
            if request.finish is None:
                self._end_aborted(request)

    def _receive(self) -> bool:
        """Take in what other threads left; sleeps while there is nothing to do. False ends the loop."""
        with self._wake:
            self._wake.wait_for(
                lambda: (
                    self._closed
                    or self._commands
                    or self._updates
                    or (not self.paused and (self._running or self._waiting))
                )
            )
            if self._closed:
                return False
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        return True

    def _admit(self) -> None:
        """Prefill waiting requests, once per step: running rows decode between two prefills."""
        batch: list[Request] = []
        budget, longest = self._prefill_tokens, self._slots.longest
        while self._waiting:
            request = self._waiting[0]
            length = len(request.input_ids) + len(request.output_ids)
            longest = max(longest, length + min(request.limit - len(request.output_ids), _ROOM_TOKENS))
            rows = len(self._running) + len(batch) + 1
            equal = bool(batch) and request.input_ids == batch[-1].input_ids  # is computed once
            budget -= 0 if equal else length
            if (batch and budget < 0) or not (rows <= 1 or self._slots.fits(rows, longest)):
                break
            batch.append(self._waiting.popleft())
        if batch:
            self._prefill(batch)

    def _prefill(self, batch: list[Request]) -> None:
        prompts = [request.input_ids + request.output_ids for request in batch]
        scored = [request.logprob_start_len >= 0 and not request.started for request in batch]
        starts = [min(request.logprob_start_len, len(request.input_ids) - 1) for request in batch]
        # tokens to be scored are computed, not copied from another row
        reuse = [start if score else len(prompt) for start, score, prompt in zip(starts, scored, prompts, strict=True)]
        filled = self._slots.prefill(prompts, reuse=reuse)
        for row, request in enumerate(batch):
            if scored[row]:
                request.input_log_probs = self._input_log_probs(filled.hidden[row], request.input_ids, starts[row])
            if not request.started:
                request.cached_tokens = filled.cached[row]
            request.started = True
        sampled = sample(filled.logits, RowParams.for_requests(batch), uniforms(batch))
        self._running.extend(batch)
        self._last_ids = torch.cat([self._last_ids, sampled[0]])
        self._params = None
        self._append_sampled(len(self._running) - len(batch), *sampled)

    def _input_log_probs(self, hidden: torch.Tensor, ids: list[int], start: int) -> list[tuple[float | None, int]]:
        """Log-probs at temperature 1 of the prompt's tokens from ``start`` on; the first reported place has none, as in
        SGLang. ``hidden`` are the states of the prompt's last tokens."""
        followed = hidden[len(hidden) - len(ids) + start : -1]
        values = self._slots.log_probs(followed, ids[start + 1 :])
        return [(None, ids[start]), *zip(values, ids[start + 1 :], strict=True)]

    def _step(self) -> None:
        while not self._slots.fits(len(self._running), self._slots.longest + 1):  # the last to come waits again
            self._retract(len(self._running) - 1)
        if self._params is None:
            self._params = RowParams.for_requests(self._running)
        logits = self._slots.decode(self._last_ids)
        sampled = sample(logits, self._params, uniforms(self._running))
        self._last_ids = sampled[0]
        self._append_sampled(0, *sampled)

    def _append_sampled(
        self,
        first: int,
        ids: torch.Tensor,
        log_probs: torch.Tensor,
        tops: Sequence[Any],
        nuclei: Mapping[int, list[int]],
    ) -> None:
        """Hand the sampled tokens to the rows from ``first`` on, and end the rows that are done."""
        version = self.weight_version
        done: list[int] = []
        for row, (token, log_prob) in enumerate(zip(ids.tolist(), log_probs.tolist(), strict=True), first):
            request = self._running[row]
            if not math.isfinite(log_prob):
                request.finish = {**_ABORTED, "message": _NOT_FINITE, "status_code": 500}
                done.append(row)
                continue
            if not request.versions or request.versions[-1][0] != version:
                request.versions.append((version, len(request.output_ids)))
            request.output_ids.append(token)
            if request.top_logprobs:
                request.tops.append(tops[row - first][: request.top_logprobs])
            request.log_probs.append(log_prob)
            if request.sampling.nucleus:
                request.nucleus.append(nuclei.get(row - first, []))
            if request.may_end(token):
                request.finish = request.reason_to_end(token, self._tokenizer)
            if request.finish is not None:
                done.append(row)
            elif request.on_token is not None:
                request.on_token()
        self.tokens_sampled += len(ids)
        for row in reversed(done):
            self._end(self._remove(row))

    def _remove(self, row: int) -> Request:
        request = self._running[row]
        if request.experts_start is not None:
            request.experts = self._slots.routed(row, request.experts_start)
        moved = self._slots.release(row)
        if moved is not None:
            self._running[row] = self._running[moved]
            self._last_ids[row] = self._last_ids[moved]
        self._running.pop()
        self._last_ids = self._last_ids[: len(self._running)]
        self._params = None
        return request

    def _retract(self, row: int) -> None:
        """Queue a running request again, before all others; the last row first keeps the order of arrival."""
        request = self._remove(row)
        request.retractions += 1
        self._waiting.appendleft(request)

    def _end(self, request: Request) -> None:
        request.latency_s = time.perf_counter() - request.created
        with self._wake:
            self._by_rid.pop(request.rid, None)
        request.on_finish(request)

    def _abort(self, rid: str | None) -> int:
        ended = [request for request in self._waiting if rid in (None, request.rid)]
        self._waiting = deque(request for request in self._waiting if rid not in (None, request.rid))
        rows = [row for row, request in enumerate(self._running) if rid in (None, request.rid)]
        for request in [*ended, *(self._remove(row) for row in reversed(rows))]:
            self._end_aborted(request)
        return len(ended) + len(rows)

    def _end_aborted(self, request: Request) -> None:
        message = "Aborted" if request.started else "Abort in waiting queue"
        request.finish = {**_ABORTED, "message": message}
        self._end(request)

    def _pause(self, mode: str) -> None:
        self.paused = True
        if mode == "abort":
            self._abort(None)
        elif mode == "retract":
            for row in reversed(range(len(self._running))):
                self._retract(row)

    def _update(self, tensors: dict[str, torch.Tensor], version: str | None) -> None:
        load_weights(self.model, tensors)
        self._slots.invalidate_cache()
        if version is not None:
            self.weight_version = version


def _size(count: float) -> str:
    unit = next((unit for unit in ("GB", "MB") if count >= _UNITS[unit]), "kB")
    return f"{count / _UNITS[unit]:.2f} {unit}"


def _eos_ids(model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase) -> frozenset[int]:
    listed = [getattr(source, "eos_token_id", None) for source in (model.config, model.generation_config, tokenizer)]
    ids = (i for each in listed for i in (each if isinstance(each, (list, tuple)) else (each,)))
    return frozenset(i for i in ids if i is not None)


def _resolve(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
