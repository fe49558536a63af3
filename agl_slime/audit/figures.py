"""What one record of a run says that others must say too, computed here anew."""

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

MOST_TOKENS = 65_536  # of a Sample that is kept
STRAGGLERS = ("group_timeout", "group_dropped")


def began_with(metrics: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The weight versions that a run may have begun with, each as of before its first iteration: slime's is 1."""
    first = min(metrics, key=lambda row: row["iteration"], default=None)
    told = "0" if first is None else str(first["weights/version"])
    if first is None or not told.isdecimal():
        return {"0": 0}
    untrained = "train/short_batch" in first or "train/waiting_groups" in first
    return {"0": 0, str(int(told) - (not untrained)): 0}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    return one == other


def sealed_again(sample: dict[str, Any]) -> list[Any]:
    """Digest, trained tokens and their versions; ``ValueError`` where columns do not stand beside each other."""
    tokens = np.frombuffer(base64.b64decode(sample["tokens"], validate=True), "<i4")
    length = len(tokens) - sample["prompt_length"]
    columns = [sample[name] for name in ("engine_log_probs", "trainer_log_probs", "advantages")]
    engine, *rest = (np.frombuffer(base64.b64decode(text, validate=True), "<f4") for text in columns)
    spans = [*sample["trained"], *sample["turn_spans"], *(span[1:] for span in sample["weight_versions"])]
    fits = all(len(span) == 2 and 0 <= span[0] <= span[1] <= length + sample["left_out"] for span in spans)
    if sample["left_out"] and len(tokens) < MOST_TOKENS:
        raise ValueError(f"leaves tokens out, and has {len(tokens)}")
    if not fits or {len(engine), *map(len, rest)} != {length} or len(sample["pieces"]) != len(tokens):
        raise ValueError("has tokens, pieces, spans and figures of different lengths")
    mask = np.zeros(length, dtype=bool)
    for start, end in sample["trained"]:
        mask[start:end] = True
    if any(not np.isnan(column[~mask]).all() for column in (engine, *rest)):
        raise ValueError("has figures outside of the loss mask")
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
    """What the trainer told of the trained tokens of a Sample: of all of them (``whole``), or of some (``told``)."""

    told: bool
    whole: bool
    digest: str
    difference: float
    """Most that its log-probs differ from the engine's."""


def scores_of(sample: dict[str, Any]) -> Scores:
    """The trainer's figures of a Sample that ``sealed_again`` has read."""
    names = ("trainer_log_probs", "advantages", "engine_log_probs")
    trainer, advantages, engine = (np.frombuffer(base64.b64decode(sample[name]), "<f4") for name in names)
    mask = np.zeros(len(trainer), dtype=bool)
    for start, end in sample["trained"]:
        mask[start:end] = True
    known = np.isfinite(trainer[mask]) & np.isfinite(advantages[mask])
    told = bool((np.isfinite(trainer[mask]) | np.isfinite(advantages[mask])).any())
    content = trainer[mask].tobytes() + advantages[mask].tobytes()
    apart = np.abs(trainer[mask] - engine[mask])
    apart = apart[np.isfinite(apart)]
    digest = hashlib.blake2b(content, digest_size=8).hexdigest() if told else ""
    return Scores(told, bool(known.all()), digest, float(apart.max()) if len(apart) else 0.0)


def sums_of(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What metrics.jsonl says of the groups that an iteration has collected."""
    columns = ("rewards", "outcomes", "reasons", "tokens", "turns", "samples")
    rows = [(group["ready"], zip(*(group[name] for name in columns), strict=False)) for group in groups]
    members = [(ready, *row) for ready, of_group in rows for row in of_group]
    rewards = [reward for _, reward, *_ in members if reward is not None]
    whole = [(ready and not why, tokens) for ready, _, _, why, tokens, *_ in members if why not in STRAGGLERS]
    lengths = {True: [n for into, n in whole if into], False: [n for into, n in whole if not into]}
    why = Counter(reason for *_, reason, _, _, _ in members if reason and reason not in STRAGGLERS)
    same = [group for group in groups if group["ready"] and len({*group["rewards"]} - {None}) == 1]
    found: dict[str, Any] = {f"rollout/failed/{reason}": n for reason, n in why.items()}
    found |= {f"rollout/dropped/{c}": n for c, n in Counter(g["code"] for g in groups if not g["ready"]).items()}
    found |= {"rollout/count": len(members), "rollout/failed": why.total()}
    found |= {"rollout/reward_mean": fmean(rewards), "rollout/reward_std": pstdev(rewards)} if rewards else {}
    found |= {"rollout/reward_min": min(rewards, default=0), "rollout/reward_max": max(rewards, default=0)}
    found |= {
        "rollout/groups_ready": sum(group["ready"] for group in groups),
        "rollout/groups_zero_variance": len(same),
    }
    found["rollout/groups_dropped"] = sum(not group["ready"] for group in groups)
    found["rollout/tokens_sampled"] = sum(lengths[True])
    found["rollout/cancelled_stragglers"] = len(members) - len(whole)
    found["rollout/turns_mean"] = fmean(turns for *_, turns, _ in members) if members else 0
    found["rollout/response_tokens_mean"] = fmean(n for _, n in whole) if whole else 0
    found["rollout/response_tokens_mean_trained"] = fmean(lengths[True]) if lengths[True] else 0
    found["rollout/response_tokens_mean_dropped"] = fmean(lengths[False]) if lengths[False] else 0
    found["trace/forks"] = sum(max(n - 1, 0) for ready, _, _, why, _, _, n in members if ready and not why)
    return found
