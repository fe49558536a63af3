"""Onsets of behaviours in a run: the iteration at which the share of rollouts with a trait, steady before, rose.

Each trait has counts of rollouts per iteration. A rise is a binomial likelihood ratio of two shares over one, with
Bonferroni's correction for all traits and iterations; an onset must also explain the counts better than every slow
curve (learning from the first iterations on, or over a third of the run). Overdispersion of the counts (rollouts of a
group are alike) divides both ratios, as in quasi-likelihood (Wedderburn 1974).

A trait is seen without a model: phrases, tools, the answer's shape and length, refusals, echoes. Word n-grams of the
prompt are not phrases of the answer: they vary with the task.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from numpy.typing import NDArray

from agl_slime.errors import ConfigError
from agl_slime.support.terminal import print_line
from agl_slime.tokens.formats import get_tool_parser
from agl_slime.tokens.systems import text_of
from agl_slime.tools.kept_rollouts import kept_rollouts

MOST_WORDS = 2_000  # of a rollout's answers, from their beginning
LONGEST_PHRASE, ECHO, LOOP, LONGEST_SHAPE = 3, 6, 4, 24
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+|[^\w\s]")
_REFUSAL = re.compile(
    r"\b(?:i\s?['’]?a?m sorry|as an ai\b|(?:i (?:cannot|can['’]?t|won['’]?t|will not)|unable to|not able to)"
    r" (?:help|assist|answer|provide|comply))"
)
_NON_LATIN = re.compile(r"[\u0370-\u1fff\u3040-\ud7af]")
_TRUNCATED = frozenset({"length", "truncated"})
_HERMES = get_tool_parser("hermes")


class Trait(NamedTuple):  # a tuple: millions are hashed
    """A trait by its ``kind`` and, where a kind has several, its ``text``."""

    kind: str
    text: str = ""

    def __str__(self) -> str:
        return _SENTENCES[self.kind].format(self.text)


_SENTENCES = {
    "rewarded without a tool": "a high reward without a tool call",
    "no tool": "no tool call",
    "refusal": "a refusal",
    "echo": f"an echo of {ECHO} words of the prompt",
    "truncated": "an answer cut off at the length limit",
    "loop": f"the same {LOOP} words, {LOOP} times",
    "non-Latin": "letters that are not Latin",
    "empty": "an empty answer",
    "tool": "a call of {}",
    "tools": "the calls {} one after the other",
    "shape": "an answer shaped like '{}' (a: words, 9: digits)",
    "longer": "an answer of more than {} words",
    "shorter": "an answer of fewer than {} words",
    "phrase": "the phrase '{}'",
}
KINDS = tuple(_SENTENCES)
"""Kinds of traits, the most readable first."""


@dataclass(frozen=True, kw_only=True)
class RolloutTraits:
    """A kept rollout's traits; ``reward`` is None where it is no finite number, ``words`` the length of its answers."""

    rollout_id: str
    iteration: int
    group: str
    reward: float | None
    words: int
    calls: int
    traits: frozenset[Trait]


def read_traits(line: Mapping[str, Any]) -> RolloutTraits | None:
    """The traits of a line of ``rollouts.jsonl``; None without an answer or an iteration."""
    messages = [message for message in line.get("messages") or () if isinstance(message, Mapping)]
    answers = [message for message in messages if message.get("role") == "assistant"]
    iteration, reward = line.get("iteration"), line.get("reward")
    if not answers or not isinstance(iteration, int):
        return None
    texts: list[str] = []
    tools: list[str] = []
    for answer in answers:
        written, called = _HERMES.parse(text_of(answer)), answer.get("tool_calls")
        texts.append(written.content.strip())
        tools += [call.name for call in written.calls]
        tools += [_name(call) for call in (called if isinstance(called, list) else ())]
    counts = line["tools"].get("calls") if isinstance(line.get("tools"), Mapping) else None
    tools = tools or sorted(counts if isinstance(counts, Mapping) else ())  # messages alone have the calls in order
    words = _words("\n".join(texts))[:MOST_WORDS]
    prompt = _words("\n".join(text_of(message) for message in messages if message.get("role") != "assistant"))
    stops = {line.get("stop_reason"), *(sample.get("stop_reason") for sample in line.get("samples") or ())}
    truncated = [Trait("truncated")] if stops & _TRUNCATED else []
    return RolloutTraits(
        rollout_id=str(line.get("rollout_id")),
        iteration=iteration,
        group=str(line.get("group_id")),
        reward=float(reward) if isinstance(reward, int | float) and math.isfinite(reward) else None,
        words=len(words),
        calls=len(tools),
        traits=frozenset([*_of_words(words, prompt), *_of_texts(texts), *_of_tools(tools), *truncated]),
    )


def _words(text: str) -> list[str]:
    return _WORD.findall(re.sub(r"\d+", "9", text.lower()))


def _of_words(words: list[str], prompt: list[str]) -> Iterator[Trait]:
    for n in range(1, LONGEST_PHRASE + 1):
        prompt_ngrams = set(_ngrams(prompt, n))
        for ngram in set(_ngrams(words, n)) - prompt_ngrams:
            if n > 1 or ngram[0].isalnum():
                yield Trait("phrase", " ".join(ngram))
    if not set(_ngrams(words, ECHO)).isdisjoint(_ngrams(prompt, ECHO)):
        yield Trait("echo")
    if max(Counter(_ngrams(words, LOOP)).values(), default=0) >= LOOP:
        yield Trait("loop")


def _ngrams(words: list[str], n: int) -> Iterable[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(n)), strict=False)


def _of_texts(texts: list[str]) -> Iterator[Trait]:
    whole = "\n".join(texts)
    if _REFUSAL.search(whole.lower()):
        yield Trait("refusal")
    if _NON_LATIN.search(whole):
        yield Trait("non-Latin")
    last = texts[-1]
    shape = re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "9", re.sub(r"\s+", " ", last)))
    shape = re.sub(r"a(?: a)+", "a", shape)
    if not last:
        yield Trait("empty")
    elif len(shape) <= LONGEST_SHAPE:
        yield Trait("shape", shape)


def _of_tools(tools: list[str]) -> Iterator[Trait]:
    if not tools:
        yield Trait("no tool")
    yield from (Trait("tool", name) for name in set(tools))
    yield from (Trait("tools", " → ".join(pair)) for pair in set(pairwise(tools)))


def _name(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    return str(function.get("name")) if isinstance(function, Mapping) else "?"


ALPHA = 0.01  # nominal probability of any false rise in a run without change
SLOW_ALPHA = 0.1  # nominal probability that an onset beats slow curves by chance, for any trait that rises
LEAST_BEFORE, LEAST_AFTER = 5, 3  # iterations
LEAST_HITS, LEAST_GROUPS = 6, 3
_RISES = (1, 2, 4, 8, 16)  # iterations from the first share to the second
_NEAR = 12  # iterations from the best step within which the onset is looked for
_MOST = 1_000  # traits that rise most
_QUANTILES = np.linspace(0.05, 0.95, 10)  # of the answers' lengths: the limits of long and short ones
_SMALL = 1e-4
Floats, Indices = NDArray[np.float64], NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Onset:
    """A behaviour's begin: ``iteration``, the shares of rollouts with it on both sides, the ``first`` rollouts since
    then. ``pays``: mean reward with it minus without, in the ``groups`` that have both (None without).
    ``reward_before``, ``reward_after``, and ``correlation`` of share and mean reward over iterations. ``also``: traits
    of nearly the same rollouts."""

    trait: Trait
    iteration: int
    share_before: float
    share_after: float
    first: Sequence[str]
    pays: float | None
    groups: int
    reward_before: float | None
    reward_after: float | None
    correlation: float | None
    also: Sequence[Trait] = ()

    @property
    def sentence(self) -> str:
        text = f"{str(self.trait)[:1].upper()}{str(self.trait)[1:]} began in iteration {self.iteration}: "
        text += f"{self.share_before:.0%} of the rollouts before, {self.share_after:.0%} after; "
        if self.pays is None:
            text += "no group has rewards with and without it"
        else:
            text += f"it pays {self.pays:+.2g} ({self.groups} groups with both)"
        if self.reward_before is not None and self.reward_after is not None:
            text += f"; the mean reward went from {self.reward_before:.2g} to {self.reward_after:.2g}"
        if self.correlation is not None:
            text += f" (correlation with the share {self.correlation:+.2f})"
        return f"{text}."


@dataclass(frozen=True)
class _Rise:
    """A trait's rise from the iteration with index ``start`` on, and the shares of rollouts with it."""

    trait: Trait
    hits: Indices
    ratio: float
    start: int
    share_before: float
    share_after: float


def find_onsets(rollouts: Iterable[RolloutTraits], *, least_rise: float = 0.15) -> list[Onset]:
    """The onsets of a run, the earliest first; the order of rollouts within an iteration does not matter."""
    rollouts = sorted(rollouts, key=lambda each: (each.iteration, each.rollout_id, each.group, str(each.reward)))
    iterations, index = np.unique([rollout.iteration for rollout in rollouts], return_inverse=True)
    if len(iterations) < LEAST_BEFORE + LEAST_AFTER:
        return []
    n = np.bincount(index).astype(np.float64)
    hits = {trait: numbers for trait, numbers in _hits(rollouts).items() if LEAST_HITS <= len(numbers) < len(rollouts)}
    traits = sorted(hits)
    if not traits:
        return []
    counts = np.stack([np.bincount(index[hits[trait]], minlength=len(n)) for trait in traits]).astype(np.float64)
    ratios, steps = _steps(counts, n, least_rise=least_rise)
    threshold = math.log(len(traits) * len(n) / ALPHA)
    order = np.lexsort((np.arange(len(traits)), -ratios))[:_MOST]
    best = order[ratios[order] >= threshold]
    slow, rises, margin = _slow_curves(len(n)), [], 0.0
    if len(best):  # n-grams of one phrase have the same counts and are one test
        margin = math.log(len(np.unique(counts[best], axis=0)) / SLOW_ALPHA)
    for number in best.tolist():
        trait, limits = traits[number], {"threshold": threshold, "margin": margin, "least_rise": least_rise}
        fit = _onset(counts[number], n, int(steps[number]), slow, **limits)
        if fit is not None and _supported(rollouts, index, hits[trait], fit[0]):
            start, *shares = fit
            rises.append(_Rise(trait, hits[trait], float(ratios[number]), start, *shares))
    onsets = [_describe(group, rollouts, index, iterations) for group in _merged(rises, index)]
    return sorted(onsets, key=lambda onset: (onset.iteration, onset.trait))


def _hits(rollouts: Sequence[RolloutTraits]) -> dict[Trait, Indices]:
    """The rollouts with each trait, and with traits that depend on the whole run: length, reward without a tool."""
    counts = Counter(trait for rollout in rollouts for trait in rollout.traits)
    hits: dict[Trait, list[int]] = defaultdict(list)
    words = np.array([rollout.words for rollout in rollouts])
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    high = (min(rewards) + max(rewards)) / 2 if rewards else math.inf
    with_tools = any(rollout.calls for rollout in rollouts)
    for number, rollout in enumerate(rollouts):
        for trait in rollout.traits:
            if counts[trait] >= LEAST_HITS and (with_tools or trait.kind != "no tool"):
                hits[trait].append(number)
        if with_tools and not rollout.calls and rollout.reward is not None and rollout.reward > high:
            hits[Trait("rewarded without a tool")].append(number)
    arrays = {trait: np.array(numbers) for trait, numbers in hits.items()}
    for limit in {int(np.quantile(words, quantile)) for quantile in _QUANTILES}:
        arrays[Trait("longer", str(limit))] = np.flatnonzero(words > limit)
        arrays[Trait("shorter", str(limit))] = np.flatnonzero(words < limit)
    return arrays


def _log_likelihood(hits: Floats, n: Floats, share: Floats) -> Floats:
    share = np.clip(share, _SMALL, 1 - _SMALL)
    return hits * np.log(share) + (n - hits) * np.log1p(-share)


def _steps(counts: Floats, n: Floats, *, least_rise: float) -> tuple[Floats, Indices]:
    """The best likelihood ratio of a rise for each trait, and the index of the first iteration after it."""
    splits = np.arange(LEAST_BEFORE, len(n) - LEAST_AFTER + 1)
    total, all_hits = n.sum(), counts.sum(axis=1, keepdims=True)
    n_before, hits_before = np.cumsum(n)[splits - 1], np.cumsum(counts, axis=1)[:, splits - 1]
    n_after, hits_after = total - n_before, all_hits - hits_before
    share_before, share_after = hits_before / n_before, hits_after / n_after
    ratio = _log_likelihood(hits_before, n_before, share_before) + _log_likelihood(hits_after, n_after, share_after)
    ratio -= _log_likelihood(all_hits, total, all_hits / total)
    ratio[share_after - share_before < least_rise] = -math.inf
    best = np.argmax(ratio, axis=1)
    return ratio[np.arange(len(counts)), best], splits[best]


def _slow_curves(length: int) -> Floats:
    """Curves from 0 to 1 that learning may follow, over a third of the run or more, or from the first iterations on."""
    t = np.arange(length, dtype=np.float64)
    curves = [_logistic(t, centre, length / 3) for centre in np.linspace(0, length, 13)]
    for rise in (length / 2, length, 2 * length):
        curves += [_logistic(t, centre, rise) for centre in np.linspace(-length / 2, 1.5 * length, 13)]
    for rise in length / np.array([32, 16, 8, 6, 4]):
        curves += [_logistic(t, start + rise / 2, rise) for start in (-rise / 4, 0)]
    curves += [1 - np.exp(-t / (length / part)) for part in (32, 16, 8, 4, 2, 1)]
    low, high = np.min(curves, axis=1, keepdims=True), np.max(curves, axis=1, keepdims=True)
    return (np.stack(curves) - low) / (high - low)


def _logistic(t: Floats, centre: float, rise: float) -> Floats:
    """``rise``: iterations from a tenth to nine tenths."""
    return 1 / (1 + np.exp(np.clip(-(t - centre) * 2 * math.log(9) / rise, -60, 60)))


def _fit(curves: Floats, hits: Floats, n: Floats) -> tuple[Floats, Floats, Floats]:
    """Log-likelihood, share at 0 and at 1 of each curve, fitted by weighted least squares, weights renewed."""
    share = np.broadcast_to(hits.sum() / n.sum(), curves.shape)
    low = high = np.zeros(len(curves))
    for _ in range(4):
        share = np.clip(share, 0.01, 0.99)
        weights = n / (share * (1 - share))
        whole, observed = weights.sum(axis=1), weights * (hits / n)
        mean, level = (weights * curves).sum(axis=1) / whole, observed.sum(axis=1) / whole
        spread = (weights * (curves - mean[:, None]) ** 2).sum(axis=1)
        slope = (observed * (curves - mean[:, None])).sum(axis=1) / np.maximum(spread, 1e-12)
        low, high = np.clip(level - slope * mean, 0, 1), np.clip(level + slope * (1 - mean), 0, 1)
        share = low[:, None] + (high - low)[:, None] * curves
    return _log_likelihood(hits, n, share).sum(axis=1), low, high


def _onset(
    hits: Floats, n: Floats, step: int, slow: Floats, *, threshold: float, margin: float, least_rise: float
) -> tuple[int, float, float] | None:
    """The index of the first iteration of a rise with the shares before and after it; None where a constant or a slow
    curve explains the counts nearly as well."""
    length, t = len(n), np.arange(len(n))
    starts = range(max(LEAST_BEFORE, step - _NEAR), min(length - LEAST_AFTER, step + _NEAR) + 1)
    durations = [duration for duration in _RISES if duration <= max(4, length // 6)]
    ramps = [(start, duration) for start in starts for duration in durations if start + duration <= length]
    quick = np.stack([np.clip((t - start + 1) / duration, 0, 1) for start, duration in ramps])
    likelihood, low, high = _fit(quick, hits, n)
    likelihood = np.where(high - low >= least_rise, likelihood, -math.inf)
    best = int(np.argmax(likelihood))
    share = np.clip(low[best] + (high[best] - low[best]) * quick[best], _SMALL, 1 - _SMALL)
    overdispersion = max(1.0, float(((hits - n * share) ** 2 / (n * share * (1 - share))).sum() / (length - 4)))
    constant = _log_likelihood(hits.sum(), n.sum(), hits.sum() / n.sum())
    if likelihood[best] - constant < overdispersion * threshold:
        return None
    if likelihood[best] - _fit(slow, hits, n)[0].max() < overdispersion * margin:
        return None
    return ramps[best][0], float(low[best]), float(high[best])


def _supported(rollouts: Sequence[RolloutTraits], index: Indices, hits: Indices, start: int) -> bool:
    """Whether several iterations and groups show the trait from its onset on."""
    later = hits[index[hits] >= start]
    groups = {rollouts[number].group for number in later}
    return len(np.unique(index[later])) >= LEAST_AFTER and len(groups) >= LEAST_GROUPS


def _merged(rises: Sequence[_Rise], index: Indices) -> list[list[_Rise]]:
    """Rises of nearly the same rollouts as one group, the most readable of the strong ones first."""
    groups: list[list[_Rise]] = []
    for rise in sorted(rises, key=lambda each: (-each.ratio, each.trait)):
        for group in groups:
            if _alike(group[0], rise, index):
                group.append(rise)
                break
        else:
            groups.append([rise])

    def readable(rise: _Rise, strongest: float) -> tuple[bool, int, int, Trait]:
        return rise.ratio < 0.8 * strongest, KINDS.index(rise.trait.kind), -len(rise.trait.text), rise.trait

    return [sorted(group, key=lambda rise, best=group[0].ratio: readable(rise, best)) for group in groups]


def _alike(rise: _Rise, stronger: _Rise, index: Indices) -> bool:
    """Whether two traits rise at about the same time and correlate from then on, or one mostly comes with the other."""
    if abs(rise.start - stronger.start) > _NEAR:
        return False
    if rise.trait.kind == stronger.trait.kind and rise.trait.kind in ("longer", "shorter"):
        return True
    first = int(np.searchsorted(index, min(rise.start, stronger.start)))
    a, b = (np.isin(np.arange(first, len(index)), each.hits) for each in (rise, stronger))
    both, smaller = float((a & b).mean()), float(min(a.mean(), b.mean()))
    spread = math.sqrt(a.var() * b.var())
    phi = (both - a.mean() * b.mean()) / spread if spread else 0.0
    return bool(phi >= 0.6 or (phi >= 0.2 and both >= 0.6 * smaller))


def _describe(
    group: Sequence[_Rise], rollouts: Sequence[RolloutTraits], index: Indices, iterations: NDArray[Any]
) -> Onset:
    rise = group[0]
    hits = set(rise.hits.tolist())
    later = range(int(np.searchsorted(index, rise.start)), len(rollouts))
    pays, groups = _pays([rollouts[number] for number in later], [number in hits for number in later])
    rewards: dict[int, list[float]] = defaultdict(list)
    for number, rollout in zip(index, rollouts, strict=True):
        if rollout.reward is not None:
            rewards[int(number)].append(rollout.reward)
    shares = np.bincount(index[rise.hits], minlength=len(iterations)) / np.bincount(index)
    return Onset(
        trait=rise.trait,
        iteration=int(iterations[rise.start]),
        share_before=rise.share_before,
        share_after=rise.share_after,
        first=[*dict.fromkeys(rollouts[number].rollout_id for number in later if number in hits)][:3],
        pays=pays,
        groups=groups,
        reward_before=_mean(value for number, values in rewards.items() if number < rise.start for value in values),
        reward_after=_mean(value for number, values in rewards.items() if number >= rise.start for value in values),
        correlation=_correlation(shares, rewards),
        also=[each.trait for each in group[1:]],
    )


def _pays(rollouts: Sequence[RolloutTraits], having: Sequence[bool]) -> tuple[float | None, int]:
    """Mean reward with minus without a trait within groups, each weighted by n_with n_without / n, and the number of
    groups with both."""
    groups: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for rollout, has in zip(rollouts, having, strict=True):
        if rollout.reward is not None:
            groups[rollout.group][not has].append(rollout.reward)
    mixed = [(np.array(with_it), np.array(without)) for with_it, without in groups.values() if with_it and without]
    if not mixed:
        return None, 0
    weights = [len(a) * len(b) / (len(a) + len(b)) for a, b in mixed]
    return float(np.average([a.mean() - b.mean() for a, b in mixed], weights=weights)), len(mixed)


def _mean(values: Iterable[float]) -> float | None:
    numbers = [*values]
    return math.fsum(numbers) / len(numbers) if numbers else None


def _correlation(shares: Floats, rewards: Mapping[int, Sequence[float]]) -> float | None:
    places = sorted(rewards)
    means = np.array([math.fsum(rewards[iteration]) / len(rewards[iteration]) for iteration in places])
    if len(places) < LEAST_BEFORE or means.std() < 1e-12 or shares[places].std() < 1e-12:
        return None
    return float(np.corrcoef(shares[places], means)[0, 1])


def onset(run_dir: tyro.conf.Positional[Path], least_rise: float = 0.15, most: int = 10) -> None:
    """Name behaviours that began during a run: phrases, tool calls, the answer's shape and length, refusals, echoes of
    the prompt, rewards without a tool; each with its iteration, first rollouts and effect on the reward. Reads kept
    rollouts (train with --keep-rollouts all); needs no model and no network.

    Args:
        run_dir: The directory of a run.
        least_rise: Least rise of the share of rollouts that show a behaviour.
        most: Behaviours that are shown.
    """
    if not 0 < least_rise < 1:
        raise ConfigError(f"--least-rise {least_rise}: must be between 0 and 1")
    rollouts = [rollout for line in kept_rollouts(run_dir) if (rollout := read_traits(line)) is not None]
    iterations = len({rollout.iteration for rollout in rollouts})
    if iterations < LEAST_BEFORE + LEAST_AFTER:
        least = f"an onset needs {LEAST_BEFORE + LEAST_AFTER}"
        raise ConfigError(f"{run_dir}: kept rollouts with answers are of {iterations} iterations; {least}")
    onsets = find_onsets(rollouts, least_rise=least_rise)
    print_line(f"Behaviours that began: {len(onsets)}, in {len(rollouts)} kept rollouts of {iterations} iterations.")
    for begun in onsets[:most]:
        print_line(f"\n{begun.sentence}\n  first rollouts: {', '.join(begun.first)}")
        if begun.also:
            print_line(f"  in nearly the same rollouts: {'; '.join(map(str, begun.also[:3]))}")
