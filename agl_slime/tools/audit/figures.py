"""Figures that several files of a run have, recomputed from single records."""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import numpy as np

MOST_TOKENS = 65_536  # of a kept Sample
STRAGGLERS = ("group_timeout", "group_dropped")
EQUAL_REWARDS = 1e-6  # the tolerance of data/normalize.py


def start_versions(metrics: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The possible initial weight versions of a run (1 for slime), each mapped to iteration 0."""
    first = min(metrics, key=lambda row: row["iteration"], default=None)
    version = "0" if first is None else str(first["weights/version"])
    if first is None or not version.isdecimal():
        return {"0": 0}
    untrained = "train/short_batch" in first or "train/waiting_groups" in first
    return {"0": 0, str(int(version) - (not untrained)): 0}


def same(first: Any, second: Any) -> bool:
    if isinstance(first, int | float) and isinstance(second, int | float):
        return math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-12)
    return first == second


def recompute_digest(sample: dict[str, Any]) -> list[Any]:
    """Digest, number of trained tokens and their count by weight version; ``ValueError`` for misaligned columns."""
    columns = [sample[name] for name in ("tokens", "engine_log_probs", "trainer_log_probs", "advantages")]
    try:
        tokens, engine, *rest = (np.frombuffer(base64.b64decode(text, validate=True), "<f4") for text in columns)
    except ValueError:
        raise ValueError("has tokens, log-probs or advantages that are no base64 of 32-bit numbers") from None
    length = len(tokens) - sample["prompt_length"]
    spans = [*sample["trained"], *sample["turn_spans"], *(span[1:] for span in sample["weight_versions"])]
    fits = all(len(span) == 2 and 0 <= span[0] <= span[1] <= length + sample["left_out"] for span in spans)
    if sample["left_out"] and len(tokens) < MOST_TOKENS:
        raise ValueError(f"leaves tokens out, and has only {len(tokens)}")
    fits = fits and sample["left_out"] >= 0 <= sample["prompt_length"]
    if not fits or {len(engine), *map(len, rest)} != {length} or len(sample["pieces"]) != len(tokens):
        raise ValueError("has tokens, pieces, spans, log-probs or advantages of different lengths")
    mask = np.zeros(length, dtype=bool)
    for start, end in sample["trained"]:
        mask[start:end] = True
    if any(not np.isnan(column[~mask]).all() for column in (engine, *rest)):
        raise ValueError("has log-probs or advantages outside of the loss mask")
    log_probs = engine[mask]
    if np.isnan(log_probs).all():
        log_probs = log_probs[:0]
    content = tokens.tobytes() + mask.tobytes() + log_probs.tobytes()
    versions = Counter[str]()
    for version, start, end in sample["weight_versions"]:
        versions[version] += int(mask[start:end].sum())
    return [hashlib.blake2b(content, digest_size=8).hexdigest(), int(mask.sum()), +versions]


@dataclass(frozen=True)
class Scores:
    """The trainer's log-probs and advantages of a Sample: ``present`` for some trained tokens, ``complete`` for all."""

    present: bool
    complete: bool
    digest: str
    difference: float
    """Largest difference between the log-probs of trainer and engine."""


def scores_of(sample: dict[str, Any]) -> Scores:
    """The trainer's scores of a Sample that ``recompute_digest`` accepted."""
    names = ("trainer_log_probs", "advantages", "engine_log_probs")
    trainer, advantages, engine = (np.frombuffer(base64.b64decode(sample[name]), "<f4") for name in names)
    mask = np.zeros(len(trainer), dtype=bool)
    for start, end in sample["trained"]:
        mask[start:end] = True
    complete = bool((np.isfinite(trainer[mask]) & np.isfinite(advantages[mask])).all())
    present = bool((np.isfinite(trainer[mask]) | np.isfinite(advantages[mask])).any())
    content = trainer[mask].tobytes() + advantages[mask].tobytes()
    differences = np.abs(trainer[mask] - engine[mask])
    differences = differences[np.isfinite(differences)]
    digest = hashlib.blake2b(content, digest_size=8).hexdigest() if present else ""
    return Scores(present, complete, digest, float(differences.max()) if len(differences) else 0.0)


def group_metrics(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The metrics of an iteration by the groups that it collected."""
    columns = ("rewards", "outcomes", "reasons", "tokens", "turns", "samples")
    rows = [(group["ready"], zip(*(group[name] for name in columns), strict=False)) for group in groups]
    members = [(ready, *row) for ready, of_group in rows for row in of_group]
    rewards = [reward for _, reward, *_ in members if reward is not None]
    lengths = [(ready and not why, n) for ready, _, _, why, n, *_ in members if why not in STRAGGLERS]
    trained, dropped = ([n for delivered, n in lengths if delivered is kind] for kind in (True, False))
    failures = Counter(why for _, _, _, why, *_ in members if why and why not in STRAGGLERS)
    ready_rewards = [[reward for reward in g["rewards"] if reward is not None] for g in groups if g["ready"]]
    equal = [group for group in ready_rewards if group and max(group) - min(group) <= EQUAL_REWARDS]
    metrics: dict[str, Any] = {f"rollout/failed/{reason}": n for reason, n in failures.items()}
    metrics |= {f"rollout/dropped/{c}": n for c, n in Counter(g["code"] for g in groups if not g["ready"]).items()}
    if rewards:
        metrics |= {"rollout/reward_mean": fmean(rewards), "rollout/reward_std": pstdev(rewards)}
    return metrics | {
        "rollout/count": len(members),
        "rollout/failed": failures.total(),
        "rollout/reward_min": min(rewards, default=0),
        "rollout/reward_max": max(rewards, default=0),
        "rollout/groups_ready": sum(group["ready"] for group in groups),
        "rollout/groups_zero_variance": len(equal),
        "rollout/groups_dropped": sum(not group["ready"] for group in groups),
        "rollout/tokens_sampled": sum(trained),
        "rollout/cancelled_stragglers": len(members) - len(lengths),
        "rollout/turns_mean": fmean(turns for *_, turns, _ in members) if members else 0,
        "rollout/response_tokens_mean": fmean(n for _, n in lengths) if lengths else 0,
        "rollout/response_tokens_mean_trained": fmean(trained) if trained else 0,
        "rollout/response_tokens_mean_dropped": fmean(dropped) if dropped else 0,
        "trace/forks": sum(max(n - 1, 0) for ready, _, _, why, _, _, n in members if ready and not why),
    }
