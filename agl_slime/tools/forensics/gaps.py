"""The gap between two records of the same tokens' log-probs, and its cause: the counterfactual that reproduces it.

Numbers only. Each candidate is the log-probs that the tokens would have under one fault (the module ``counterfactual``
computes them); the first cause is the candidate that leaves least of the gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agl_slime.report.files import iter_jsonl
from agl_slime.tools.kept_rollouts import read_tokens

TOLERANCE = 1e-3
"""Nats per token, on average; a smaller gap is float32 arithmetic in another order."""
BFLOAT16_TOLERANCE = 0.05
"""Nats per token, on average; the rounding of an engine or a trainer in bfloat16 gives less (docs/measured.md: 0.017,
and 0.043 for a mixture of experts without replay)."""
LEAST_SHARE, SURE_SHARE = 0.5, 0.9  # of the gap that a cause explains: to be named, and to end the search
_NOISE = 0.02  # candidates that leave a gap within this share of it of each other are equal: the earlier is simpler
_MOST_WORST = 5


@dataclass(frozen=True, kw_only=True)
class KeptSample:
    """A kept Sample's tokens of one weight version: ``places`` are indices into ``ids``, ``sampler`` and ``trainer``
    the recorded log-probs there (NaN where there are none)."""

    rollout_id: str
    version: str
    ids: NDArray[np.int64]
    prompt_length: int
    places: NDArray[np.int64]
    sampler: NDArray[np.float32]
    trainer: NDArray[np.float32]
    pieces: Sequence[str] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    experts: NDArray[Any] | None = None
    """The engine's experts of each token but the last, ``[len(ids) - 1, layers, experts per token]``."""
    images: Mapping[str, NDArray[Any]] | None = None
    """The tensors of the model's processor, by name."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The run's sampling; weights of other versions, keyed by description; of a run with LoRA, the weights without the
    adapter; and prompts in other renderings by the fault's name and text."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    other_weights: Mapping[str, Path] = field(default_factory=dict)
    without_adapter: Path | None = None
    renderings: Sequence[tuple[str, str, Callable[[KeptSample], Sequence[int] | None]]] = ()


def read_kept(path: Path) -> Iterator[KeptSample]:
    """The kept Samples of a ``rollouts.jsonl`` that the engine sampled token by token, by weight version."""
    for line in iter_jsonl(path):
        head: Any = {"rollout_id": str(line["rollout_id"]), "messages": line.get("messages") or ()}
        for sample in line.get("samples") or ():
            yield from split_by_version(sample, **head)


def split_by_version(sample: Mapping[str, Any], **head: Any) -> Iterator[KeptSample]:
    """A described Sample (``report.rollouts.describe_tokens``) by weight version; nothing without the engine's tokens.
    ``head`` are the other fields."""
    if sample.get("token_source") != "engine" or sample.get("left_out"):
        return
    ids, start, mask, sampler, trainer = read_tokens(sample)
    of_version: dict[str, NDArray[np.bool_]] = {}
    for version, first, end in sample.get("weight_versions") or ():
        of_version.setdefault(str(version), np.zeros_like(mask))[first:end] = True
    for version, sampled in of_version.items():
        scored = np.flatnonzero(mask & sampled & np.isfinite(sampler))
        if len(scored):
            yield KeptSample(
                version=version,
                ids=ids.astype(np.int64),
                prompt_length=start,
                places=start + scored,
                sampler=sampler[scored],
                trainer=trainer[scored],
                pieces=sample.get("pieces") or (),
                **head,
            )


@dataclass(frozen=True)
class Candidate:
    """Log-probs of each sample's places as the fault ``cause`` would have made them; ``text`` is a clause on it."""

    cause: str
    text: str
    log_probs: Sequence[NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A candidate, the ``nats`` per token of the gap that it explains, and ``unexplained`` after it."""

    cause: str
    text: str
    nats: float
    unexplained: float


@dataclass(frozen=True)
class TokenGap:
    """A token with two different log-probs; ``place`` is its index in the Sample's tokens."""

    rollout_id: str
    place: int
    piece: str
    log_probs: tuple[float, float]

    @property
    def size(self) -> float:
        return abs(self.log_probs[1] - self.log_probs[0])

    def __str__(self) -> str:
        return "  {:9.3f} {:9.3f}  {!r} at {} of {}".format(*self.log_probs, self.piece, self.place, self.rollout_id)


def token_gaps(rollout_id: str, pieces: Sequence[Any], places: NDArray[Any], *columns: NDArray[Any]) -> list[TokenGap]:
    """The tokens at ``places`` with their log-probs in two ``columns``; ``pieces`` are the texts of all tokens, if they
    are known."""
    texts = {place: str(pieces[place]) if place < len(pieces) else "" for place in places.tolist()}
    rows = zip(places.tolist(), *(column.tolist() for column in columns), strict=True)
    return [TokenGap(rollout_id, place, texts[place], (first, second)) for place, first, second in rows]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The gap of ``tokens`` tokens in nats per token, between the model and the log-probs of sampler or trainer
    (``subject``), its causes, the best explanation first, and the worst tokens."""

    gap: float
    tokens: int
    subject: Literal["sampler", "trainer"] = "sampler"
    causes: Sequence[Cause] = ()
    worst: Sequence[TokenGap] = ()
    differences: Mapping[str, float] = field(default_factory=dict)
    """Mean differences between pairs of measurements, in nats per token."""

    @property
    def first(self) -> Cause | None:
        """The first cause, if any explains half of the gap."""
        best = self.causes[0] if self.causes else None
        return best if best is not None and best.nats >= LEAST_SHARE * max(self.gap, TOLERANCE) else None

    @property
    def sentence(self) -> str:
        if self.gap <= TOLERANCE:
            agree = f"{self.subject} and model agree: {self.gap:.2g} nats per token over {self.tokens} tokens."
            if (first := self.first) is None:
                return agree.capitalize()
            return f"{first.cause}: {first.text} ({first.nats:.3g} nats per token), and yet {agree}"
        gap = f"{self.gap:.3g} nats per token over {self.tokens} tokens"
        if (first := self.first) is None:
            rounding = f"; rounding to bfloat16 alone gives up to {BFLOAT16_TOLERANCE:g}"
            causes = f"no known cause explains half of it{rounding if self.gap <= BFLOAT16_TOLERANCE else ''}"
            return f"{self.subject.capitalize()} and model differ by {gap}, and {causes}."
        share = 100 * first.nats / self.gap
        return f"{first.cause}: {first.text} ({share:.0f} % of {gap}; {first.unexplained:.2g} left)."


def explain(
    samples: Sequence[KeptSample],
    recorded: Sequence[NDArray[Any]],
    expected: Sequence[NDArray[Any]],
    candidates: Iterable[Candidate],
) -> Diagnosis:
    """The diagnosis of ``recorded`` log-probs that should be the ``expected`` ones. ``candidates`` come simplest first
    and are not drawn further once one explains nine tenths of the gap."""
    gap, tokens = mean_gap(recorded, expected), sum(len(log_probs) for log_probs in recorded)
    if gap <= TOLERANCE:
        return Diagnosis(gap=gap, tokens=tokens)
    causes: list[Cause] = []
    for candidate in candidates:
        unexplained = mean_gap(recorded, candidate.log_probs)
        causes.append(
            Cause(cause=candidate.cause, text=candidate.text, nats=gap - unexplained, unexplained=unexplained)
        )
        if unexplained <= (1 - SURE_SHARE) * gap and unexplained <= TOLERANCE:
            break
    least = min((cause.unexplained for cause in causes), default=0.0)
    first = [cause for cause in causes if cause.unexplained <= least + _NOISE * gap][:1]
    causes = [*first, *sorted((cause for cause in causes if cause not in first), key=lambda cause: cause.unexplained)]
    columns = zip(samples, recorded, expected, strict=True)
    apart = [each for kept, *pair in columns for each in token_gaps(kept.rollout_id, kept.pieces, kept.places, *pair)]
    worst = sorted((each for each in apart if np.isfinite(each.size)), key=lambda each: -each.size)[:_MOST_WORST]
    return Diagnosis(gap=gap, tokens=tokens, causes=causes[:5], worst=worst)


def mean_gap(recorded: Sequence[NDArray[Any]], expected: Sequence[NDArray[Any]]) -> float:
    """Mean absolute difference over all tokens that both know; 0 without one."""
    if not recorded:
        return 0.0
    differences = np.abs(np.concatenate(recorded).astype(np.float64) - np.concatenate(expected))
    differences = differences[np.isfinite(differences)]
    return float(differences.mean()) if len(differences) else 0.0
