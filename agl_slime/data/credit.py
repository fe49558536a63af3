"""Credit: the advantage of each response token, from the rewards of rollouts, roles and turns.

A rollout stays one Sample, whose ``metadata["reward_spans"]`` (``convert_trajectory``) has its turns' rewards.

``group``: a token has the advantage of its turn's reward, else of the rollout's. A role is compared with the same role
of the group, single turns with the group's single turns.
``turn``: the advantage of the rollout's reward, plus that of the turn's reward among the rewards of turns with the same
number in the group: turn-level GRPO, MT-GRPO (Zeng et al., arXiv:2505.11821) with a weight of 1.
``anchor``: the advantage of the rollout's reward, plus that of the discounted return from the turn on, among the turns
of the group that answer the same text: GiGPO's anchor states (Feng et al., arXiv:2505.10978), discount 0.95 and weight
1. It needs no rewards of turns; the text is what was added since the answer before, all of the prompt at first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agl_slime.data.normalize import all_equal, is_counted, normalization_key, normalize_rewards, reward_value
from agl_slime.errors import ConfigError, RewardError, TrainerError
from agl_slime.types import Sample

Credit = Literal["group", "turn", "anchor"]
CREDITS = ("group", "turn", "anchor")
_DISCOUNT = 0.95


class TokenRewards(float):
    """The advantages of a Sample's response tokens, float32; as a number their mean under the loss mask, for logs."""

    values: NDArray[np.float32]

    def __new__(cls, values: NDArray[Any], mean: float) -> TokenRewards:
        number = super().__new__(cls, mean)
        number.values = values.astype(np.float32)
        return number

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenRewards, (self.values, float(self))


@dataclass(frozen=True)
class _Part:
    """Response tokens of one sample that share a reward, with its group and its rollout for normalization."""

    sample: int
    reward: float
    spans: Sequence[tuple[int, int]]
    key: tuple[Hashable, Hashable]
    whole: bool = False


class RewardTerm(NamedTuple):
    """Rewards by name and weight, normalized as one sum; with ``ties`` in groups where the term before is equal."""

    weights: Sequence[tuple[str, float]]
    ties: bool


def reward_terms(text: str) -> list[RewardTerm]:
    """The terms of ``right=1,format=0.2+length=0.1,polite?``. A term, between commas, is normalized by itself in its
    group, then weighed and added, as in GDPO (Liu et al., arXiv:2601.05242) without its normalization of the batch;
    ``+`` adds rewards before; ``?`` counts only in groups in which the term before is equal. Raises ``ConfigError``."""
    terms = []
    for part in filter(None, text.split(",")):
        pairs = [word.strip().partition("=") for word in part.rstrip("?").split("+")]
        try:
            weights = tuple((name, float(weight or 1)) for name, _, weight in pairs)
        except ValueError:
            weights = (("", math.nan),)
        terms.append(RewardTerm(weights, part.endswith("?")))
        if not all(name and math.isfinite(weight) for name, weight in weights) or terms[0].ties:
            example = "right=1,format=0.2 or right,format?"
            raise ConfigError(f"rewards is {text!r}; write names with weights, as in {example}")
    return terms


def token_advantages(
    samples: Sequence[Sample],
    *,
    key: str | None = None,
    rewards: str = "",
    credit: Credit = "group",
    normalized: bool = True,
    std: bool = True,
    advantages: Callable[[Sequence[float], Sequence[int]], Sequence[float]] | None = None,
    penalties: Sequence[float] | None = None,
) -> list[NDArray[np.float64]]:
    """The advantage of each response token of ``samples``; 0 for a sample that is not counted. ``rewards`` are
    ``reward_terms``, of which turns have the first, or ``key`` is the one reward's name; ``std`` and ``advantages`` are
    as for ``normalize_rewards``, ``penalties`` are added to each sample's rewards.

    Raises:
        TrainerError: a span outside of its response.
        RewardError: a missing or non-finite reward, or siblings that differ in reward or group.
    """
    counted = [i for i, sample in enumerate(samples) if is_counted(sample)]
    penalty_of, terms = penalties or [0.0] * len(samples), reward_terms(rewards)
    key = terms[0].weights[0][0] if terms else key

    def normalize(values: Sequence[float], keys: Iterable[tuple[Hashable, Hashable]]) -> Sequence[float]:
        if not normalized or not values:
            return values
        groups, rollouts = zip(*keys, strict=True)
        columns: dict[str, Any] = {"group_indices": groups, "rollout_ids": rollouts}
        return normalize_rewards(values, **columns, std=std, advantages=advantages)

    parts = [part for i in counted for part in _rewarded_parts(samples[i], i, key, penalty_of[i], credit)]
    if credit == "anchor":
        parts += _anchored_parts(samples, counted, key)
    values = normalize([part.reward for part in parts], (part.key for part in parts))
    if any(len(term.weights) > 1 or term.weights[0][1] != 1 for term in terms) or len(terms) > 1:
        sums = _sum_of_terms([(i, samples[i], penalty_of[i]) for i in counted], terms, normalize)
        values = [sums[part.sample] if part.whole else value for part, value in zip(parts, values, strict=True)]
    advantages_of = [np.zeros(sample.response_length) for sample in samples]
    for part, reward in zip(parts, values, strict=True):
        for start, end in part.spans:
            tokens = advantages_of[part.sample][start:end]
            tokens[:] = reward if credit == "group" else tokens + reward
    return advantages_of


def token_rewards(samples: Sequence[Sample], **rule: Any) -> list[float]:
    """The advantages of each sample's tokens (``token_advantages``) in a form that passes for a number."""
    pairs = zip(samples, token_advantages(samples, **rule), strict=True)
    of_masks = ((values, values[mask_of(sample)]) for sample, values in pairs)
    return [TokenRewards(values, float(masked.mean()) if len(masked) else 0.0) for values, masked in of_masks]


def mask_of(sample: Sample) -> NDArray[np.bool_]:
    """The loss mask of the response; False throughout for a removed Sample."""
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    return np.asarray(mask, dtype=np.bool_) & (not sample.remove_sample)


def reward_spans(sample: Sample, i: int) -> dict[str, tuple[float, list[tuple[int, int]]]]:
    """The rewards of turns and roles in sample ``i``, each with its spans of the response."""
    spans: dict[str, tuple[float, list[tuple[int, int]]]] = {}
    for name, reward, start, end in (sample.metadata or {}).get("reward_spans") or ():
        if not (math.isfinite(reward) and 0 <= start < end <= sample.response_length):
            place = f"metadata['reward_spans'] of sample {i} has [{name!r}, {reward}, {start}, {end}]"
            raise TrainerError(f"{place} with a response of {sample.response_length} tokens.")
        spans.setdefault(name, (float(reward), []))[1].append((start, end))
    return spans


def _rewarded_parts(sample: Sample, i: int, key: str | None, penalty: float, credit: Credit) -> Iterator[_Part]:
    """The rewarded parts of sample ``i``: the rollout first, unless all its tokens belong to turns with rewards."""
    of_turns = reward_spans(sample, i)
    if credit != "group" or not of_turns or _has_unrewarded_tokens(sample, of_turns):
        reward = reward_value(sample, i, key=key) + penalty
        yield _Part(i, reward, [(0, sample.response_length)], normalization_key(sample), whole=True)
    for name, (reward, spans) in of_turns.items() if credit != "anchor" else ():
        reward += penalty if credit == "group" else 0.0
        yield _Part(i, reward, spans, normalization_key(sample, name, by_number=credit == "turn"))


def _has_unrewarded_tokens(sample: Sample, of_turns: Mapping[str, tuple[float, list[tuple[int, int]]]]) -> bool:
    """Whether a token under the mask is in no span of a turn's reward."""
    unrewarded = mask_of(sample)
    for _, spans in of_turns.values():
        for start, end in spans:
            unrewarded[start:end] = False
    return bool(unrewarded.any())


def _sum_of_terms(
    used: Sequence[tuple[int, Sample, float]], terms: Sequence[RewardTerm], normalize: Callable[..., Sequence[float]]
) -> dict[int, float]:
    """The sum of the normalized terms of each sample, from its number, and its penalty, which joins the first term. A
    sample without a term's rewards has no part in it."""
    sums, before = {i: 0.0 for i, _, _ in used}, dict[Hashable, list[float]]()
    for number, term in enumerate(terms):
        names = [name for name, _ in term.weights]
        having = [each for each in used if isinstance(each[1].reward, Mapping) and {*names} <= each[1].reward.keys()]
        if used and not having:
            named = [sample.reward for _, sample, _ in used if isinstance(sample.reward, Mapping)]
            available = sorted({name for rewards in named for name in rewards})
            raise RewardError(f"no rollout has the rewards {' and '.join(names)}, only {', '.join(available) or 'one'}")
        alone = len(names) == 1
        values = [
            math.fsum((1.0 if alone else weight) * reward_value(sample, i, key=name) for name, weight in term.weights)
            + (0.0 if number else penalty)
            for i, sample, penalty in having
        ]
        keys = [normalization_key(sample, "") for _, sample, _ in having]
        weight = term.weights[0][1] if alone else 1.0
        for (i, _, _), (group, _), value in zip(having, keys, normalize(values, keys), strict=True):
            sums[i] += weight * value if not term.ties or all_equal(before.get(group) or [0.0]) else 0.0
        before = {}
        for (group, _), value in zip(keys, values, strict=True):
            before.setdefault(group, []).append(value)
    return sums


def _anchored_parts(samples: Sequence[Sample], counted: Sequence[int], key: str | None) -> list[_Part]:
    """The turns of ``samples``, with the discounted returns of their rollouts from each turn on."""
    rollouts: dict[object, list[int]] = {}
    for i in counted:
        rollouts.setdefault(i if samples[i].rollout_id is None else ("rollout", samples[i].rollout_id), []).append(i)
    parts = []
    for name, numbers in rollouts.items():
        turns = [(i, start, end) for i in numbers for start, end in runs_of(mask_of(samples[i]))]
        first = {(i, spans[0][0]): reward for i in numbers for reward, spans in reward_spans(samples[i], i).values()}
        rest = reward_value(samples[numbers[0]], numbers[0], key=key)
        for number, (i, start, end) in reversed([*enumerate(turns)]):
            rest += first.get((i, start), 0.0)
            group = samples[i].group_index
            anchor = (group, _text_before(samples[i], start))
            parts.append(_Part(i, rest, [(start, end)], (None if group is None else anchor, (name, number))))
            rest *= _DISCOUNT
    return parts


def runs_of(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The runs of 1 in the mask, as ``[start, end)``."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    return [*zip(edges[::2], edges[1::2], strict=True)]


def _text_before(sample: Sample, start: int) -> bytes:
    """The ids between the answer before ``start`` and ``start``; all from the prompt's begin for the first answer."""
    before = np.flatnonzero(mask_of(sample)[:start])
    prompt = len(sample.tokens) - sample.response_length
    begin = prompt + int(before[-1]) + 1 if len(before) else 0
    return np.asarray(sample.tokens[begin : prompt + start], dtype=np.int64).tobytes()
