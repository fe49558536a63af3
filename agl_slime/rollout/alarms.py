"""Signs that a run learns nothing although its reward looks fine, as sentences about the rollouts of finished groups: a
tool call that never parses, and answers that have become all alike, are how agents have failed for days unseen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any


def tool_never_fired(members: Iterable[Any], *, min_rollouts: int = 32) -> list[str]:
    """One sentence per tool that was on offer in at least ``min_rollouts`` rollouts and was called in none."""
    metadata = [member.samples[0].metadata.get("tools") for member in members if member.samples]
    tools = [each for each in metadata if isinstance(each, dict)]
    offered = Counter(name for each in tools for name in each.get("offered", ()))
    called = {name for each in tools for name, n in each.get("calls", {}).items() if n}
    malformed = sum(int(each.get("malformed", 0)) for each in tools)
    hint = f"; {malformed} calls could not be parsed: compare tool_parser with the model's format" if malformed else ""
    silent = {name: n for name, n in offered.items() if n >= min_rollouts and name not in called}
    return [f"tool {name!r} was never called in {rollouts} rollouts{hint}" for name, rollouts in silent.items()]


def alike_answers(groups: Iterable[Sequence[Any]], *, max_share: float = 0.5, min_groups: int = 4) -> list[str]:
    """A sentence when the answers are all alike in more than ``max_share`` of at least ``min_groups`` groups."""
    sampled = [[tuple(map(_trained_tokens, member.samples)) for member in group if member.samples] for group in groups]
    judged = [len(set(answers)) == 1 for answers in sampled if len(answers) > 1]
    alike, n = sum(judged), len(judged)
    if n < min_groups or alike <= max_share * n:
        return []
    return [f"in {alike} of {n} groups all answers are the same to the token: the policy or its sampling has collapsed"]


def fork_examples(members: Iterable[Any]) -> dict[str, str]:
    """Of agents behind a gateway, one rollout for each class of forks, as a sentence."""
    found: dict[str, str] = {}
    for member in members:
        for number, sample in enumerate(member.samples):
            kind = sample.metadata.get("fork_reason")
            if kind and kind not in found and "gateway" in sample.metadata:
                text = f"conversations fork ({kind}), first seen in rollout {member.rollout_id}"
                found[kind] = f"{text}: Sample {number + 1} of {len(member.samples)}"
    return found


def _trained_tokens(sample: Any) -> tuple[int, ...]:
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * len(response)
    return tuple(token for token, trained in zip(response, mask, strict=True) if trained)
