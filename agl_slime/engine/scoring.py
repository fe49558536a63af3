"""Log-probs of given tokens by an engine: prefill only, nothing is sampled.

The request is SGLang's ``/generate`` with ``max_new_tokens`` 0 and ``logprob_start_len``; tokens before the start may
come from the prefix cache, the others are computed. Log-probs are at temperature 1 whatever the sampling temperature.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from agl_slime.engine.client.generation import count_of, read_pairs, version_of
from agl_slime.engine.client.prompt import outermost
from agl_slime.engine.client.transport import ClientSettings, HttpTransport
from agl_slime.errors import (
    EngineError,
    EngineProtocolError,
    EngineRequestError,
    EngineServerError,
    OutOfVocabularyError,
)

_VOCABULARY_PIECE = 16_384  # ids per request


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Token ids, of which those from ``start`` (at least 1) on are scored."""

    ids: Sequence[int]
    start: int = 1


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """``log_probs`` ``[len(ids) - start]`` by weights of ``version``; ``cached`` tokens were in the prefix cache."""

    log_probs: NDArray[np.float32]
    version: str = ""
    cached: int = 0


class ScoringClient(AbstractAsyncContextManager["ScoringClient"]):
    """A client that scores tokens with the SGLang at ``base_url``, a server or a router. At most ``in_flight`` requests
    of at most ``batch_tokens`` tokens (a longer sequence is alone) are sent at once, so that an engine that samples
    rollouts, too, is not flooded. From any event loop; ``aclose`` it."""

    def __init__(
        self,
        *,
        base_url: str,
        settings: ClientSettings | None = None,
        vocab_size: int | None = None,
        in_flight: int = 4,
        batch_tokens: int = 16_384,
    ) -> None:
        self.vocab_size = vocab_size
        self.batch_tokens = batch_tokens
        self._http = HttpTransport(base_url=base_url, settings=settings or ClientSettings(total_timeout_s=600.0))
        self.shown_url = self._http.shown_url
        self._in_flight = in_flight
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def score(self, sequences: Sequence[ScoreRequest]) -> list[ScoreResult | EngineError]:
        """The scores of each sequence in order, or its error after retries, which does not fail others of its batch."""
        batches = [*_batches(sequences, self.batch_tokens)]
        results = await asyncio.gather(*(self._score_batch(batch) for batch in batches))
        return [result for scored in results for result in scored]

    async def score_one(self, ids: Sequence[int], start: int = 1) -> ScoreResult:
        """The scores of ``ids[start:]``, requested alone. Raises ``EngineError``."""
        (scored,) = await self._score_batch([ScoreRequest(ids, start)])
        if isinstance(scored, EngineError):
            raise scored
        return scored

    async def vocabulary_digest(self, size: int) -> str:
        """``vocabulary_digest`` of the server's tokenizer over the ids below ``size``. Raises ``EngineError``."""
        texts: list[str] = []
        for first in range(0, size, _VOCABULARY_PIECE):
            tokens = [[token] for token in range(first, min(first + _VOCABULARY_PIECE, size))]
            answer = await self._http.call("POST", "/v1/detokenize", {"tokens": tokens, "skip_special_tokens": False})
            piece = answer.get("text")
            if not isinstance(piece, list) or len(piece) != len(tokens):
                raise EngineProtocolError(f"{self.shown_url}/v1/detokenize did not answer one text per token")
            texts += map(str, piece)
        return vocabulary_digest(texts)

    async def _score_batch(self, batch: Sequence[ScoreRequest]) -> list[ScoreResult | EngineError]:
        try:
            for sequence in batch:
                self._check(sequence)
            return [*await self._send(batch)]
        except EngineRequestError as error:
            if len(batch) == 1:
                return [error]
        except EngineError as error:
            return [error] * len(batch)
        alone = await asyncio.gather(*(self._score_batch([sequence]) for sequence in batch))
        return [result for (result,) in alone]

    def _check(self, sequence: ScoreRequest) -> None:
        if not 1 <= sequence.start < len(sequence.ids):
            range_text = f"start is {sequence.start} with {len(sequence.ids)} tokens"
            raise EngineRequestError(f"{range_text}; it must be at least 1 and below their number")
        wrong = outermost(sequence.ids)
        if self.vocab_size is not None and not 0 <= wrong < self.vocab_size:
            raise OutOfVocabularyError(f"token id {wrong} is outside the vocabulary of {self.vocab_size} ids")

    async def _send(self, batch: Sequence[ScoreRequest]) -> list[ScoreResult]:
        payload = {
            "input_ids": [sequence.ids for sequence in batch],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # the first reported token has no log-prob
            "logprob_start_len": [sequence.start - 1 for sequence in batch],
        }
        endpoint = f"{self.shown_url}/generate"
        async with self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._in_flight)):
            deadline = time.monotonic() + self._http.settings.total_timeout_s

            async def attempt() -> list[ScoreResult]:
                answers = await self._http.send("POST", "/generate", payload, deadline=deadline)
                if not isinstance(answers, list) or len(answers) != len(batch):
                    raise EngineProtocolError(f"{endpoint} did not answer one result per sequence")
                pairs = zip(answers, batch, strict=True)
                return [parse_scores(answer, sequence, endpoint=endpoint) for answer, sequence in pairs]

            return await self._http.retry(attempt, endpoint=endpoint, deadline=deadline)


def parse_scores(answer: Any, sequence: ScoreRequest, *, endpoint: str = "/generate") -> ScoreResult:
    """The scores in a ``/generate`` answer. Raises ``EngineProtocolError`` for another form, other tokens or a value
    that is not finite, ``EngineServerError`` for an aborted request."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise EngineProtocolError(f"{endpoint} answered {answer!r:.200}, which is not SGLang's form (no meta_info)")
    finish = meta.get("finish_reason")
    if isinstance(finish, dict) and finish.get("type") == "abort":
        raise EngineServerError(f"{endpoint} aborted the scoring: {finish.get('message')}")
    listed = meta.get("input_token_logprobs")
    scored = listed[1:] if isinstance(listed, list) else listed
    ids, values = read_pairs(scored, "input_token_logprobs", endpoint)
    if [*ids] != [*map(int, sequence.ids[sequence.start :])]:
        raise EngineProtocolError(f"{endpoint} scored other tokens than the {len(sequence.ids)} that were sent")
    log_probs = np.array(values, dtype=np.float32)
    if not np.isfinite(log_probs).all():
        raise EngineProtocolError(f"{endpoint} answered a log-prob that is NaN or infinite")
    return ScoreResult(log_probs, version_of(meta, endpoint) or "", count_of(meta, "cached_tokens", endpoint))


def vocabulary_digest(texts: Iterable[str]) -> str:
    """A digest of a vocabulary: of the text of each token id alone, in order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\xff")  # a byte that no UTF-8 has
    return digest.hexdigest()


def _batches(sequences: Sequence[ScoreRequest], most_tokens: int) -> Iterator[list[ScoreRequest]]:
    batch: list[ScoreRequest] = []
    tokens = 0
    for sequence in sequences:
        if batch and tokens + len(sequence.ids) > most_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(sequence)
        tokens += len(sequence.ids)
    if batch:
        yield batch
