"""Teachers: the log-probs of a rollout's own tokens under other models, for on-policy distillation.

A teacher is a SGLang server with the policy's vocabulary; ids are sent as they are. Where a teacher fails the rollout
fails, with the reason ``teacher``.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_slime.data.results import MemberResult
from agl_slime.engine.client.transport import ClientSettings, checked_url
from agl_slime.engine.scoring import ScoreRequest, ScoringClient, vocabulary_digest
from agl_slime.errors import ConfigError, EngineError, EngineRequestError, RolloutError
from agl_slime.support.net import shown_url
from agl_slime.support.threads import run_in_thread
from agl_slime.types import Sample

TEACHER_KEY = "AGL_SLIME_TEACHER_KEY"
"""The environment variable with the API key of teachers."""


class TeacherError(RolloutError):
    """A teacher could not score the tokens of a rollout."""

    reason = "teacher"


@dataclass(frozen=True, slots=True)
class Teacher:
    """A teacher of the tasks whose ``source_name`` is ``source`` (empty: of all without one), at ``url``."""

    url: str
    source: str = ""
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Teacher:
        """``URL``, ``SOURCE=URL`` or ``SOURCE:WEIGHT=URL``. Raises ``ConfigError``."""
        if text.startswith(("http://", "https://")):
            return cls(checked_url(text))
        flag = f"--teacher-url {shown_url(text)!r}"
        head, _, url = text.partition("=")
        source, _, weight = head.partition(":")
        try:
            teacher = cls(checked_url(url), source, float(weight or 1))
        except ValueError as error:  # ConfigError is one
            raise ConfigError(f"{flag} must be URL, SOURCE=URL or SOURCE:WEIGHT=URL") from error
        if not 0 < teacher.weight < math.inf:
            raise ConfigError(f"{flag}: the weight {weight} must be above 0")
        return teacher


class Teachers:
    """Teachers by the ``source_name`` of tasks. The weights of several teachers of one source are normalised to a sum
    of 1: their log-probs are averaged, which is the reverse KL to each, weighted. An async context manager."""

    def __init__(self, teachers: Sequence[Teacher], *, settings: ClientSettings | None = None) -> None:
        if not teachers:
            raise ConfigError("there is no teacher; give --teacher-url URL")
        settings = settings or ClientSettings(total_timeout_s=600.0, api_key=os.environ.get(TEACHER_KEY))
        clients = {teacher.url: ScoringClient(base_url=teacher.url, settings=settings) for teacher in teachers}
        self._clients = list(clients.values())
        self._of: dict[str, list[tuple[float, ScoringClient]]] = {}
        for teacher in teachers:
            self._of.setdefault(teacher.source, []).append((teacher.weight, clients[teacher.url]))

    async def __aenter__(self) -> Teachers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        for client in self._clients:
            await client.aclose()

    async def check(self, tokenizer: Any) -> None:
        """Compare each teacher's vocabulary with ``tokenizer``'s, id by id. Raises ``ConfigError`` for another one, and
        ``EngineError`` when a teacher does not answer."""
        size = len(tokenizer)
        ids = [[token] for token in range(size)]
        texts = await run_in_thread(tokenizer.batch_decode, ids, skip_special_tokens=False)
        ours = vocabulary_digest(texts)
        for client in self._clients:
            flag = f"--teacher-url {client.shown_url}"
            client.vocab_size = size  # an id beyond it ends some servers
            try:
                theirs = await client.vocabulary_digest(size)
            except EngineRequestError as error:
                fix = "give the address of an SGLang server, not of a router"
                raise ConfigError(f"{flag}: its vocabulary is unknown ({error}); {fix}") from error
            if theirs != ours:
                why = f"its vocabulary differs from the policy's in some of {size} tokens"
                raise ConfigError(f"{flag}: {why}; give a teacher with the same tokenizer")

    async def __call__(self, member: MemberResult) -> MemberResult:
        """``member`` with ``teacher_log_probs`` on its Samples; a failed one with the reason ``teacher`` when they
        cannot be had. Validations and failures stay as they are."""
        if member.mode != "train" or not member.ok or not member.samples:
            return member
        try:
            await self.score(member.samples)
        except TeacherError as error:
            return replace(member, samples=(), failure=error.reason, failure_message=str(error))
        return member

    async def score(self, samples: Sequence[Sample]) -> None:
        """Set ``teacher_log_probs`` ``[response_length]`` on each sample, all or none. Raises ``TeacherError``."""
        scores = await asyncio.gather(*(self._score(sample) for sample in samples))
        for sample, log_probs in zip(samples, scores, strict=True):
            sample.teacher_log_probs = log_probs.tolist()

    async def _score(self, sample: Sample) -> NDArray[np.float32]:
        source = str((sample.metadata or {}).get("source_name") or "")
        teachers = self._of.get(source) or self._of.get("")
        if not teachers:
            raise TeacherError(f"no teacher for tasks of source_name {source!r}; give --teacher-url {source}=URL")
        if sample.multimodal_inputs:
            raise TeacherError("the rollout has images, which no teacher is sent; use tasks without images")
        sequence = ScoreRequest(sample.tokens, len(sample.tokens) - sample.response_length)
        results = await asyncio.gather(*(client.score([sequence]) for _, client in teachers))
        total, mean = sum(weight for weight, _ in teachers), np.zeros(sample.response_length, dtype=np.float32)
        for (weight, _), (scored,) in zip(teachers, results, strict=True):
            if isinstance(scored, EngineError):
                raise TeacherError(f"the teacher failed: {scored}") from scored
            mean += np.float32(weight / total) * scored.log_probs
        return mean
