"""Signs that a run learns nothing although its reward looks fine. Pure functions over the rollouts of finished groups;
each returns sentences to show.

A tool call that never parses, or answers that have become all alike, are the two ways in which agents have failed for
days with a good reward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class HasSamples(Protocol):
    """What is asked of a rollout's result; ``agl_slime.groups.results.MemberResult`` has it."""

    @property
    def samples(self) -> Sequence[Any]: ...


def tool_never_fired(members: Iterable[HasSamples], *, min_rollouts: int = 32) -> list[str]:
    """One sentence per tool that was on offer in at least ``min_rollouts`` rollouts and was called in none; malformed
    calls are told along."""
    offered: Counter[str] = Counter()
    called: set[str] = set()
    malformed = 0
    for member in members:
        tools = member.samples[0].metadata.get("tools") if member.samples else None
        if not isinstance(tools, dict):
            continue
        offered.update(tools.get("offered", ()))
        called.update(name for name, n in tools.get("calls", {}).items() if n)
        malformed += int(tools.get("malformed", 0))
    hint = (
        f"; {malformed} calls could not be parsed, so compare the tool_parser with the model's format"
        if malformed
        else ""
    )
    return [
        f"tool {name!r} was never called in {rollouts} rollouts{hint}"
        for name, rollouts in offered.items()
        if rollouts >= min_rollouts and name not in called
    ]


def answers_all_alike(group: Sequence[HasSamples]) -> bool:
    """Whether all rollouts of a group of at least two sampled exactly the same tokens: there is nothing to compare,
    whatever the reward says."""
    sampled = [tuple(_trained_tokens(sample) for sample in member.samples) for member in group if member.samples]
    return len(sampled) > 1 and len(set(sampled)) == 1


def alike_answers(groups: Iterable[Sequence[HasSamples]], *, max_share: float = 0.5, min_groups: int = 4) -> list[str]:
    """A sentence when the answers are all alike in more than ``max_share`` of at least ``min_groups`` groups."""
    judged = [answers_all_alike(group) for group in groups if sum(bool(member.samples) for member in group) > 1]
    alike = sum(judged)
    if len(judged) < min_groups or alike <= max_share * len(judged):
        return []
    return [
        f"in {alike} of {len(judged)} groups all answers are the same to the token: the policy has collapsed, or its temperature is too low"
    ]


def _trained_tokens(sample: Any) -> tuple[int, ...]:
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * len(response)
    return tuple(token for token, trained in zip(response, mask, strict=True) if trained)
