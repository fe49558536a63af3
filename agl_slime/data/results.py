"""Results of rollouts and groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from agl_slime.tokens.turn import Messages, Trajectory, Turn
from agl_slime.types import Sample

if TYPE_CHECKING:  # Agent Lightning takes seconds to import
    from agl_slime.support.agl import EnqueueRolloutRequest

STRAGGLER_REASONS = ("group_timeout", "group_dropped")
"""Why a straggler (a member in flight when its group was finalized) was cancelled."""


def instance_of(metadata: Mapping[str, Any]) -> str | None:
    """The instance (task) in a rollout's metadata."""
    instance_id = metadata.get("instance_id")
    return None if instance_id is None else str(instance_id)


class Outcome(StrEnum):
    """The outcome of a rollout; a reason accompanies each.

    ``TRAINED``: delivered to the trainer. ``FILTERED``: succeeded, but its group was not trained on. ``FAILED``: no
    reward, no trace, an exception, a timeout. ``CANCELLED``: stopped on purpose. ``VALIDATED``: a validation rollout,
    never trained on.
    """

    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    CANCELLED = "cancelled"
    VALIDATED = "validated"


def describe_turn(turn: Turn) -> dict[str, Any]:
    """A model call: the call that it continues, the tokens kept from it, and the reason of a fork."""
    return {
        "base": turn.base_turn,
        "kept_tokens": turn.kept_tokens,
        "fork": turn.fork.value if turn.fork is not None else None,
        "prompt_tokens": len(turn.prompt_ids),
        "tokens": len(turn.response_ids),
        "seconds": round(turn.latency_s, 4),
        "finish": turn.finish_reason,
        "untrained": turn.untrained,
        "resumed": turn.resumed,
        "cached_tokens": turn.cached_tokens,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What reports have of a rollout beside its samples, and checkpoints keep in place of its trajectory."""

    task: Any = None
    messages: Messages = ()
    stop_reason: str = ""
    timeline: Mapping[str, Any] | None = None
    turns: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberResult:
    """A finished member of a group: samples and a reward, or a failure with its reason. ``reward`` is the primary one
    of ``rewards``, ``sampled_tokens`` the engine's count, ``request`` enqueues a failed rollout again, ``timeline``
    comes from ``data.read.timeline_of``."""

    rollout_id: str
    group_id: str
    mode: str = "train"
    group_size: int | None = None
    samples: tuple[Sample, ...] = ()
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    sampled_tokens: int = 0
    turns: int = 0
    failure: str | None = None
    failure_message: str = ""
    outcome_if_failed: Outcome = Outcome.FAILED
    task: Any = None
    instance_id: str | None = None
    request: EnqueueRolloutRequest | None = None
    trajectory: Trajectory | Conversation | None = None
    timeline: Mapping[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def conversation(self) -> Conversation:
        """Of this rollout; after a restart the kept one."""
        if isinstance(self.trajectory, Conversation):
            return self.trajectory
        conversation = Conversation(task=self.task, timeline=self.timeline)
        if self.trajectory is None:
            return conversation
        messages, stop_reason = self.trajectory.messages, self.trajectory.stop_reason
        turns = tuple(map(describe_turn, self.trajectory.turns))
        return replace(conversation, messages=messages, stop_reason=stop_reason, turns=turns)

    @property
    def straggler(self) -> bool:
        """Whether the rollout was cancelled because its group was finalized without it."""
        return self.failure in STRAGGLER_REASONS


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """A finalized group: ``ready`` to train on, or dropped for ``reason`` (a sentence) and ``code`` (a metric name).
    ``members`` include retried attempts and cancelled stragglers."""

    group_id: str
    mode: str
    size: int
    members: tuple[MemberResult, ...]
    ready: bool
    reason: str = ""
    code: str = ""

    @property
    def instance_id(self) -> str | None:
        """The group's instance (task), if its rollouts name one."""
        return next((member.instance_id for member in self.members if member.instance_id is not None), None)

    @property
    def succeeded(self) -> tuple[MemberResult, ...]:
        return tuple(member for member in self.members if member.ok)

    @property
    def rewards(self) -> list[float]:
        """The primary rewards of all members with a reward."""
        return [member.reward for member in self.members if member.reward is not None]


OnEnd = Callable[[str, GroupResult | None], None]
"""Called with a group's id and the finalized group; with ``None`` when a restart lost it, or its source has ended."""


def rollout_of(sample: Sample) -> str | None:
    """The rollout id of a sample; ``None`` for a sample from elsewhere."""
    return sample.metadata.get("agl_rollout_id")


def reward_of(sample: Sample) -> Any:
    """The reward of the sample's rollout; ``sample.reward`` may be a reward of its turns, or all of them by name."""
    return sample.metadata.get("reward", sample.reward)


def group_of(samples: Sequence[Sample], conversations: Mapping[str, Conversation]) -> GroupResult:
    """A ready group, rebuilt after a restart from its samples and ``conversations``: without failed members."""
    by_rollout: dict[str, list[Sample]] = {}
    for sample in samples:
        by_rollout.setdefault(rollout_of(sample) or "", []).append(sample)
    instance_id = instance_of(samples[0].metadata)
    group_id = next(iter(by_rollout))
    members = tuple(
        MemberResult(
            rollout_id=name,
            group_id=group_id,
            group_size=len(by_rollout),
            samples=tuple(siblings),
            reward=reward_of(siblings[0]),
            rewards=siblings[0].metadata.get("rewards") or {"primary": reward_of(siblings[0])},
            sampled_tokens=sum(sum(sample.loss_mask or ()) for sample in siblings),
            turns=sum(sample.metadata.get("turns", 1) for sample in siblings),
            instance_id=instance_id,
            task=(conversation := conversations.get(name, Conversation())).task,
            trajectory=conversation,
            timeline=conversation.timeline,
        )
        for name, siblings in by_rollout.items()
    )
    return GroupResult(group_id=group_id, mode="train", size=len(by_rollout), members=members, ready=True)
