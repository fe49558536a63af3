"""An iteration's metrics from its groups. Means are over rollouts with a reward; a missing one never counts as 0."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from agl_slime import metric_names as names
from agl_slime.data.normalize import all_equal
from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.support.intervals import estimate, paired_difference
from agl_slime.support.threads import abandoned_threads
from agl_slime.types import Sample, staleness_of

# A larger share of failed rollouts in a batch or a validation is an alarm.
FAILED_SHARE = 0.2
# Characters of a rollout's error in the message of a stopped run.
_LONGEST_MESSAGE = 300


def collect_metrics(groups: Sequence[GroupResult], *, collect_s: float) -> dict[str, Any]:
    """``rollout/…``, ``trace/…`` and ``perf/tokens_per_s`` of the training rollouts of one iteration, which took
    ``collect_s`` seconds."""
    members = [member for group in groups for member in group.members]
    trained = [member for group in groups if group.ready for member in group.succeeded]
    sampled = sum(member.sampled_tokens for member in members)
    metrics: dict[str, Any] = {
        **_reward_metrics(members),
        **_length_metrics(members, trained),
        **_group_metrics(groups),
        **_sample_metrics(trained),
        names.COUNT: len(members),
        "rollout/cancelled_stragglers": sum(member.straggler for member in members),
        names.TOKENS_PER_S: sampled / collect_s if collect_s > 0 else None,
    }
    failures = Counter(member.failure for member in members if not member.ok and not member.straggler)
    if sampled:
        teach = [group for group in groups if group.ready and not all_equal(group.rewards)]
        used = sum(member.sampled_tokens for group in teach for member in group.members)
        metrics[names.NO_GRADIENT] = 1 - used / sampled
    metrics |= {names.FAILED: failures.total(), **_prefixed(f"{names.FAILED}/", failures)}
    metrics |= _prefixed("gateway/", sum((_gateway_counts(member) for member in members), Counter()))
    if hung := abandoned_threads():  # rewards, tools and sync agents that outlived their rollouts
        metrics["rollout/abandoned_threads"] = hung
    return metrics


def _prefixed(prefix: str, counts: Mapping[Any, int]) -> dict[str, int]:
    return {f"{prefix}{name}": count for name, count in counts.items()}


def _reward_metrics(members: Sequence[MemberResult]) -> dict[str, Any]:
    """The rewards, by name and by task source too."""
    rewards = [member.reward for member in members if member.reward is not None]
    by_name: dict[str, list[float]] = {}
    by_source: dict[str, list[float]] = {}
    missing: Counter[str] = Counter()
    for member in members:
        for name, value in member.rewards.items():
            by_name.setdefault(name, []).append(value)
        metadata = member.samples[0].metadata if member.samples else {}
        missing.update(metadata.get("rewards_missing", ()))
        if member.reward is not None and (source := metadata.get("source_name")):
            by_source.setdefault(source, []).append(member.reward)
    by_name.pop("primary", None)
    return {
        names.REWARD_MEAN: fmean(rewards) if rewards else None,
        names.REWARD_STD: pstdev(rewards) if rewards else None,
        names.REWARD_MIN: min(rewards, default=None),
        names.REWARD_MAX: max(rewards, default=None),
        **{f"reward/{name}": fmean(values) for name, values in sorted(by_name.items())},
        **{f"reward/{name}/missing": count for name, count in missing.items()},
        **{f"reward_of/{source}": fmean(values) for source, values in sorted(by_source.items())},
    }


def _length_metrics(members: Sequence[MemberResult], trained: Sequence[MemberResult]) -> dict[str, Any]:
    """Tokens, turns and tool calls of rollouts."""
    in_batch = {id(member) for member in trained}
    metrics: dict[str, Any] = {
        names.RESPONSE_TOKENS: _mean_length(members),
        names.TRAINED_TOKENS_MEAN: _mean_length(trained),
        names.DROPPED_TOKENS_MEAN: _mean_length([member for member in members if id(member) not in in_batch]),
        "rollout/turns_mean": fmean(member.turns for member in members) if members else None,
        "rollout/tokens_sampled": sum(member.sampled_tokens for member in trained),
    }
    metadata = [member.samples[0].metadata for member in members if member.samples]
    if tools := [each["tools"] for each in metadata if "tools" in each]:
        metrics[names.TOOL_CALLS] = sum(sum(each["calls"].values()) for each in tools)
        metrics[names.TOOL_ERRORS] = sum(each.get("errors", 0) for each in tools)
    return metrics


def _group_metrics(groups: Sequence[GroupResult]) -> dict[str, Any]:
    dropped = Counter(group.code or "group_incomplete" for group in groups if not group.ready)
    return {
        "rollout/groups_ready": sum(group.ready for group in groups),
        "rollout/groups_dropped": dropped.total(),
        "rollout/groups_zero_variance": sum(group.ready and all_equal(group.rewards) for group in groups),
        **_prefixed("rollout/dropped/", dropped),
    }


def _sample_metrics(trained: Sequence[MemberResult]) -> dict[str, Any]:
    samples = [sample for member in trained for sample in member.samples]
    forks = Counter(kind for sample in samples if (kind := sample.metadata.get("fork_reason")))
    return {
        names.TOKENS_UNDER_MASK: sum(
            sample.response_length if sample.loss_mask is None else sum(sample.loss_mask) for sample in samples
        ),
        "rollout/truncated": sum(sample.status == Sample.Status.TRUNCATED for sample in samples),
        names.FORKS: sum(max(len(member.samples) - 1, 0) for member in trained),
        **_prefixed(f"{names.FORKS}/", forks),
        names.RETOKENIZED: sum(sample.metadata.get("token_source") == "retokenized" for sample in samples),
    }


def _mean_length(members: Sequence[MemberResult]) -> float | None:
    """Mean sampled tokens of the members, without stragglers."""
    lengths = [member.sampled_tokens for member in members if not member.straggler]
    return fmean(lengths) if lengths else None


def staleness_metrics(groups: Sequence[GroupResult], version: str) -> dict[str, Any]:
    """``rollout/staleness_…``: by how many versions the sampled tokens of ready groups are behind ``version``, which
    trains on them; empty when versions are not whole numbers."""
    trained = [sample for group in groups if group.ready for member in group.succeeded for sample in member.samples]
    policy = int(version) if version.isdecimal() else None
    staleness = staleness_of(trained, lambda _: policy)
    return {} if staleness is None else dict(zip((names.STALENESS_MEAN, names.STALENESS_MAX), staleness, strict=True))


def reward_by_task(members: Sequence[MemberResult]) -> dict[str, float]:
    """The mean reward of each task with one, by a digest of the task; a member without a task is a task by itself."""
    by_task: dict[str, list[float]] = {}
    for member in members:
        if member.reward is not None:
            task = member.group_id if member.task is None else json.dumps(member.task, skipkeys=True, default=str)
            by_task.setdefault(hashlib.blake2b(task.encode(), digest_size=8).hexdigest(), []).append(member.reward)
    return {task: fmean(rewards) for task, rewards in by_task.items()}


def eval_metrics(members: Sequence[MemberResult], *, first: Mapping[str, float] | None = None) -> dict[str, Any]:
    """``val/…`` of a validation's rollouts: means over tasks with their intervals. ``first`` are the rewards by task of
    the validation from which the difference counts."""
    by_task = reward_by_task(members)
    rewards = [*(first or {}).values(), *(member.reward for member in members if member.reward is not None)]
    interval = estimate([*by_task.values()], rewards=rewards)
    mean, *bounds = (None,) * 3 if interval is None else (interval.mean, interval.low, interval.high)
    difference = paired_difference(first or {}, by_task, rewards=rewards)
    differences = () if difference is None else (difference.mean, difference.low, difference.high)
    failures = Counter(member.failure for member in members if not member.ok)
    return {
        names.VAL_REWARD_MEAN: mean,
        **dict(zip(names.VAL_INTERVAL, bounds, strict=True)),
        **dict(zip(names.VAL_DIFFERENCE, differences, strict=False)),
        names.VAL_COUNT: len(members),
        names.VAL_FAILED: failures.total(),
        **{f"{names.VAL_FAILED}/{reason}": count for reason, count in failures.items()},
    }


def _gateway_counts(member: MemberResult) -> Counter[str]:
    """A gateway's counts of a rollout, without requests per path."""
    recorded = member.samples[0].metadata.get("gateway") if member.samples else None
    counts = Counter({name: int(count) for name, count in (recorded or {}).items() if " " not in name})
    counts["refused/rollouts"] = int(any(name.startswith("refused/") for name in counts))
    return +counts


def format_failures(members: Sequence[MemberResult]) -> str:
    """The reasons of failed rollouts, most frequent first, each with an example of its message."""
    counts = Counter(member.failure for member in members if not member.ok)
    examples = {member.failure: " ".join(member.failure_message.split()) for member in members if not member.ok}
    reasons = []
    for reason, count in counts.most_common(5):
        example = examples[reason]
        example = example if len(example) <= _LONGEST_MESSAGE else example[:_LONGEST_MESSAGE] + "..."
        reasons.append(f"{count} x {reason}" + (f" ({example})" if example else ""))
    return "; ".join(reasons) + (f"; and {len(counts) - 5} other reasons" if len(counts) > 5 else "")


def fork_examples(members: Sequence[MemberResult]) -> dict[str, str]:
    """For agents behind a gateway, a sentence on the first rollout with each kind of fork, and on the first with a
    refused request."""
    examples: dict[str, str] = {}
    for member in members:
        if (counts := _gateway_counts(member)).get("refused/rollouts") and "refused" not in examples:
            kinds = ", ".join(
                f"{count} x {name}"
                for name, count in counts.items()
                if name.startswith("refused/") and name[8:].isdecimal()
            )
            examples["refused"] = f"requests were refused ({kinds}), first seen in rollout {member.rollout_id}"
        for number, sample in enumerate(member.samples):
            kind = sample.metadata.get("fork_reason")
            if kind and kind not in examples and "gateway" in sample.metadata:
                text = f"conversations fork ({kind}), first seen in rollout {member.rollout_id}"
                examples[kind] = f"{text}: Sample {number + 1} of {len(member.samples)}"
    return examples
