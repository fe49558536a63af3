"""The autopsy of a run in progress: a few sampled turns of each batch are scored again by the engine and, before its
step, by the trainer; where they differ, the causes are searched for and named in a warning and an alarm.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from agl_slime.engine.client.generation import SamplingParams
from agl_slime.engine.scoring import ScoreRequest, ScoreResult, ScoringClient
from agl_slime.errors import AglSlimeError, EngineError, format_exception
from agl_slime.metric_names import AUTOPSY, AUTOPSY_CAUSE
from agl_slime.report.files import RunDir
from agl_slime.report.rollouts import Pieces, describe_tokens
from agl_slime.tools.forensics.autopsy import case_of, diagnose, is_plain, measure, weights_of, with_engine
from agl_slime.tools.forensics.gaps import (
    BFLOAT16_TOLERANCE,
    TOLERANCE,
    Diagnosis,
    KeptSample,
    mean_gap,
    split_by_version,
)
from agl_slime.train.local.settings import WeightsDtype
from agl_slime.types import Sample, flat_samples

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MOST_DIAGNOSES = 3  # in a run
_ENGINE_LIMIT_S = 10.0  # after the training step, for scores that the engine still owes


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Turns of a batch that are being scored: the trainer's log-probs are in ``samples``, the engine's come later."""

    iteration: int
    samples: list[KeptSample]
    engine: Future[list[ScoreResult | EngineError]]


@dataclass(kw_only=True)
class RunAutopsy:
    """Scores ``turns`` Samples of each batch again. Made on the run's event loop, where it asks the engine;
    ``begin`` and ``finish`` are called from the training thread, before and after the step. An engine that fails to
    answer costs the run nothing but these figures."""

    run: RunDir
    pushed: Path
    """The directory of the weights that were pushed."""
    client: ScoringClient
    trainer_scores: Callable[[Sequence[Sample]], Sequence[Any]]
    """The trainer's log-probs of the tokens under the mask of each Sample (``LocalTrainer.score``)."""
    sampling: SamplingParams
    turns: int
    seed: int
    tokenizer: Any
    dtype: WeightsDtype
    """The dtype of engine and trainer, whichever is the lower."""
    warn: Callable[[str, str], None]
    """Called with a text and its key."""

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._diagnoses = 0
        self._pieces = Pieces(self.tokenizer)

    def begin(self, groups: Sequence[Sequence[Sample]], *, iteration: int) -> Scoring | None:
        """Ask engine and trainer for their log-probs; ``None`` when no Sample fits."""
        fit = [sample for sample in flat_samples(groups) if _fits(sample)]
        chosen = random.Random(f"{self.seed}.{iteration}").sample(fit, min(self.turns, len(fit)))
        if not chosen:
            return None
        request = self.client.score([ScoreRequest(sample.tokens) for sample in chosen])
        engine = asyncio.run_coroutine_threadsafe(request, self._loop)
        scores = self.trainer_scores(chosen)
        columns = zip(chosen, scores, strict=True)
        kept_samples = [_kept_sample(sample, log_probs, self._pieces) for sample, log_probs in columns]
        return Scoring(iteration=iteration, samples=kept_samples, engine=engine)

    def finish(self, scoring: Scoring | None) -> dict[str, float]:
        """The metrics of the iteration: mean differences in nats per token, and the cause if there is one, which is
        warned of. The weights that sampled are still the engine's."""
        if scoring is None:
            return {}
        samples = scoring.samples
        gaps = {"sampler": mean_gap([sample.sampler for sample in samples], [sample.trainer for sample in samples])}
        if (prefill := self._prefill(scoring)) is not None and is_plain(self.sampling):
            gaps["decode"] = mean_gap([sample.sampler for sample in samples], prefill)
        metrics = {f"{AUTOPSY}/{name}": value for name, value in gaps.items()}
        tolerance = BFLOAT16_TOLERANCE if self.dtype == "bfloat16" else TOLERANCE
        if max(gaps.values()) > tolerance and self._diagnoses < _MOST_DIAGNOSES:
            self._diagnoses += 1
            if (diagnosis := self._diagnose(samples)) is not None and diagnosis.first is not None:
                self._warn(scoring.iteration, diagnosis)
                metrics[f"{AUTOPSY_CAUSE}/{diagnosis.first.cause}"] = diagnosis.first.nats
        return metrics

    def _prefill(self, scoring: Scoring) -> list[np.ndarray] | None:
        """The engine's log-probs, if it gave all of them with the weights that sampled."""
        scored = self._answer(scoring.engine) or []
        log_probs = []
        for sample, answer in zip(scoring.samples, scored, strict=False):
            if isinstance(answer, ScoreResult) and answer.version == sample.version:
                log_probs.append(answer.log_probs[sample.places - 1])
        return log_probs if len(log_probs) == len(scoring.samples) else None

    def _answer(self, future: Future[T]) -> T | None:
        """The engine's answer; ``None`` when it gives none in time."""
        try:
            return future.result(_ENGINE_LIMIT_S)
        except (AglSlimeError, TimeoutError, CancelledError) as error:
            future.cancel()
            logger.debug("the engine did not score turns again: %s", format_exception(error))
            return None

    def _diagnose(self, samples: list[KeptSample]) -> Diagnosis | None:
        """By forward passes of the weights that sampled, and by further scores of the engine; ``None`` where these
        weights cannot be had."""
        version, weights = samples[0].version, weights_of(self.run, self.pushed)
        if version not in weights:
            return None
        # the trainer scored these Samples before its step
        case = replace(case_of(self.run.settings() or {}, weights, samples, version), recomputed=True)
        try:
            diagnosis = diagnose(case)
            measured = self._answer(asyncio.run_coroutine_threadsafe(measure(self.client, samples), self._loop))
            if measured is not None and measured.versions == {version}:
                diagnosis = with_engine(diagnosis, measured, case)
        except Exception as error:  # no memory for a further model, for example
            logger.warning("The difference of engine and trainer was not explained: %s", format_exception(error))
            return None
        return diagnosis

    def _warn(self, iteration: int, diagnosis: Diagnosis) -> None:
        assert diagnosis.first is not None
        text = f"engine and trainer differ in iteration {iteration}: {diagnosis.sentence}"
        if diagnosis.worst:
            worst = diagnosis.worst[0]
            text += f" Worst token: {worst.piece!r} at {worst.place} of {worst.rollout_id},"
            text += " recorded {:.3f}, expected {:.3f}.".format(*worst.log_probs)
        self.warn(text, f"autopsy:{diagnosis.first.cause}")


def _fits(sample: Sample) -> bool:
    """Whether all trained tokens are the engine's, of the policy's version, and can be scored without images."""
    metadata = sample.metadata or {}
    versions = {str(version) for version, *_ in metadata.get("weight_spans") or ()}
    if sample.remove_sample or sample.rollout_log_probs is None or versions != {str(metadata.get("policy_version"))}:
        return False
    return not sample.multimodal_inputs


def _kept_sample(sample: Sample, scores: Any, pieces: Pieces) -> KeptSample:
    described = describe_tokens(sample, pieces, scores=(scores, np.zeros_like(scores)))
    rollout_id, experts = str(sample.metadata.get("agl_rollout_id")), sample.rollout_routed_experts
    (kept_sample,) = split_by_version(described, rollout_id=rollout_id)
    return kept_sample if experts is None else replace(kept_sample, experts=np.asarray(experts))
