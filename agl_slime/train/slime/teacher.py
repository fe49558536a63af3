"""``teacher_log_probs`` on Samples for slime's on-policy distillation (``--use-opd --opd-type sglang``)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from agl_slime.data.results import rollout_of
from agl_slime.data.teacher import TeacherError, Teachers
from agl_slime.types import Sample, flat_samples

logger = logging.getLogger(__name__)


async def check_once(teachers: Teachers, tokenizer: Any) -> None:
    """``teachers.check`` on an event loop that ends afterwards. Raises ``ConfigError`` and ``EngineError``."""
    async with teachers:
        await teachers.check(tokenizer)


async def score_delivered(groups: Sequence[Sequence[Sample]], teachers: Teachers) -> None:
    """Score the samples of groups that another process counts as complete: a rollout that the teacher fails on stays in
    its group and out of the loss (``remove_sample``), with its own log-probs in place of the teacher's."""
    rollouts: dict[object, list[Sample]] = {}
    for sample in flat_samples(groups):
        if sample.teacher_log_probs is None:
            rollouts.setdefault(rollout_of(sample) or id(sample), []).append(sample)
    async with teachers:  # the connections are of this event loop, which ends
        results = await asyncio.gather(*map(teachers.score, rollouts.values()), return_exceptions=True)
    for samples, error in zip(rollouts.values(), results, strict=True):
        if isinstance(error, TeacherError):
            logger.warning("Rollout %s is not trained on: %s", rollout_of(samples[0]), error)
            for sample in samples:
                sample.remove_sample = True
                sample.teacher_log_probs = list(sample.rollout_log_probs or [0.0] * sample.response_length)
        elif isinstance(error, BaseException):
            raise error
