"""Ready groups and their delivery to the trainer."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from agl_slime.data.ledger import Ledger
from agl_slime.data.results import Conversation, GroupResult, Outcome, instance_of, rollout_of
from agl_slime.types import Sample, sample_from_json, sample_to_json

logger = logging.getLogger(__name__)

_NUMBERS = "index", "group_index", "rollout_number"


class Delivery:
    """Ready groups, oldest first; delivered groups count as trained. Not thread-safe."""

    def __init__(self, ledger: Ledger) -> None:
        self.ready: deque[list[Sample]] = deque()
        self.conversations: dict[str, Conversation] = {}
        """Of the rollouts of ready groups."""
        self.versions = WeightVersions()
        self.refused = ""
        """Why the last group with weights of another run was refused."""
        self._ledger = ledger
        self.reserved: int | None = None  # number of leading groups that may be delivered; None: all
        self._next: dict[str, int] = dict.fromkeys(_NUMBERS, 0)

    def add(self, group: GroupResult) -> None:
        self._ledger.ready_many([member.rollout_id for member in group.succeeded])
        samples = [sample for member in group.succeeded for sample in member.samples]
        if group.instance_id is not None:
            for sample in samples:
                sample.metadata["instance_id"] = group.instance_id
        self.versions.observe(samples)
        self.ready.append(samples)
        self.conversations.update((member.rollout_id, member.conversation) for member in group.succeeded)

    @property
    def deliverable(self) -> int:
        return len(self.ready) if self.reserved is None else min(len(self.ready), self.reserved)

    def take(self, n: int) -> list[list[Sample]]:
        """Up to ``n`` groups to train on, with the policy's version as ``metadata["policy_version"]``. Groups that were
        sampled by weights which this run did not push are left out and count as failed."""
        n = min(n, self.deliverable)
        groups = [self.ready.popleft() for _ in range(n)]
        if self.reserved is not None:
            self.reserved -= n
        with self._ledger.batch():
            return [self._numbered(samples) for samples in groups if self._delivered(samples)]

    def give_back(self, groups: Sequence[list[Sample]]) -> None:
        """Take groups back; they are delivered again before newer ones."""
        self.ready.extendleft(reversed(groups))
        if self.reserved is not None:
            self.reserved += len(groups)

    def reserve(self, rollout_ids: Sequence[str] | None) -> int:
        """Limit delivery to the ready groups of these rollouts, in this order; ``None``: all groups, oldest first.
        Returns how many of the previously reserved groups were not delivered."""
        undelivered, order = self.reserved or 0, {name: place for place, name in enumerate(rollout_ids or ())}

        def place(samples: list[Sample]) -> int:  # by any member: another process may have them in another order
            return next((order[name] for sample in samples if (name := rollout_of(sample) or "") in order), len(order))

        self.ready = deque(sorted(self.ready, key=place))
        self.reserved = None if rollout_ids is None else sum(place(samples) < len(order) for samples in self.ready)
        return undelivered

    def reject(self, groups: Sequence[Sequence[Sample]], reason: str) -> None:
        """Count delivered groups as filtered for ``reason`` and not as trained."""
        with self._ledger.batch():
            for samples in groups:
                self._ledger.filter_trained(_rollouts_of(samples), reason)

    def placeholders(self, n: int, size: int) -> list[list[Sample]]:
        """Groups of unsampled (PENDING) samples, as slime's own data source returns them without a data set."""
        first = self._next["group_index"]
        self._next["group_index"] += n
        return [
            [Sample(group_index=group, index=group * size + member) for member in range(size)]
            for group in range(first, first + n)
        ]

    def state(self) -> dict[str, Any]:
        return {
            "groups": [[sample_to_json(sample) for sample in samples] for samples in self.ready],
            "members": [_rollouts_of(samples) for samples in self.ready],
            "instances": [instance_of(samples[0].metadata) if samples else None for samples in self.ready],
            "conversations": self._conversations_as_json(),
            "versions": self.versions.state(),
            **self._next,
        }

    def restore(self, state: dict[str, Any]) -> None:
        groups = [[sample_from_json(sample) for sample in samples] for samples in state["groups"]]
        numbers = {name: max(self._next[name], state[name]) for name in _NUMBERS}
        self.versions.restore(state["versions"])
        conversations = (state.get("conversations") or {}).items()
        self.conversations.update((name, Conversation(**fields)) for name, fields in conversations)
        for samples in groups:
            self.ready.append(samples)
            rollout_ids, instance_id = _rollouts_of(samples), instance_of(samples[0].metadata) if samples else None
            self._ledger.open_many([(rollout_id, instance_id) for rollout_id in rollout_ids])
            self._ledger.ready_many(rollout_ids)
        self._next = numbers

    def _conversations_as_json(self) -> dict[str, Any]:
        """Tasks and messages of a program may have values and keys that JSON has not: reports lack these."""
        fields = {rollout_id: asdict(conversation) for rollout_id, conversation in self.conversations.items()}
        return json.loads(json.dumps(fields, default=str, skipkeys=True))

    def _delivered(self, samples: list[Sample]) -> bool:
        rollout_ids, why = _rollouts_of(samples), self.versions.refusal(samples)
        for rollout_id in rollout_ids:
            self.conversations.pop(rollout_id, None)
        for sample in samples:
            sample.metadata["policy_version"] = self.versions.newest
        end = (Outcome.TRAINED, "") if why is None else (Outcome.FAILED, "foreign_weights")
        if self._ledger.close_many(rollout_ids, *end):  # 0 for a group that was given back
            instance_id = instance_of(samples[0].metadata) if samples else None
            if instance_id is not None:
                self._ledger.finish_instance(instance_id)
        if why is not None:
            self.refused = why
            logger.warning("A group is not trained on: rollout %s %s", rollout_ids[0], why)
        return why is None

    def _numbered(self, samples: list[Sample]) -> list[Sample]:
        """A group's samples, numbered for slime in the order of delivery: one ``group_index``, a ``rollout_id`` per
        member, an ``index`` each. A group that was given back keeps its numbers."""
        numbers = self._next
        if any(sample.group_index is None for sample in samples):
            for _, member in groupby(samples, key=rollout_of):
                for sample in member:
                    sample.group_index, sample.index = numbers["group_index"], numbers["index"]
                    sample.rollout_id = numbers["rollout_number"]
                    numbers["index"] += 1
                numbers["rollout_number"] += 1
            numbers["group_index"] += 1
        return samples


def first_rollout(samples: Sequence[Sample]) -> str:
    """The rollout id of a group's first sample, which names the group; empty for a sample from elsewhere."""
    return (rollout_of(samples[0]) if samples else None) or ""


def _rollouts_of(samples: Iterable[Sample]) -> list[str]:
    """The rollouts of a group's samples, without repeats; samples from elsewhere have none."""
    named = (rollout_of(sample) for sample in samples)
    return list(dict.fromkeys(rollout_id for rollout_id in named if rollout_id is not None))


# No rollout is this many versions behind.
_KEPT_VERSIONS = 1_000


class WeightVersions:
    """The weight versions that this run has pushed. Not thread-safe.

    Before the first push every version that an engine reports is accepted. After it only pushed versions are: another
    version means that another run updates the same engine.
    """

    def __init__(self) -> None:
        self.newest: int | None = None
        """The highest version so far, if versions are whole numbers."""
        self._current: str | None = None
        self._accepted: dict[str, None] = {}  # an ordered set
        self._pushed = False

    def push(self, version: str, *, named: bool = False) -> None:
        """Note that the run pushed this version, or starts with it; ``named``: the engine reports exactly this name."""
        self._pushed = self._pushed or named or self._current not in (None, version)
        self._current = version
        self._accept([version])

    def observe(self, samples: Iterable[Sample]) -> None:
        """Accept the versions of these samples, if nothing was pushed yet."""
        if not self._pushed:
            self._accept(_names(samples))

    def refusal(self, samples: Iterable[Sample]) -> str | None:
        """Why these samples cannot be trained on; ``None`` if they can."""
        foreign = [name for name in _names(samples) if name not in self._accepted] if self._pushed else []
        if not foreign:
            return None
        return (
            f"was sampled by weights of version {foreign[0]!r}, which this run did not push (its current version is "
            f"{self._current!r}): another run updates the same engine; give each run its own engines"
        )

    def state(self) -> dict[str, Any]:
        return {"current": self._current, "known": [*self._accepted], "pushed": self._pushed}

    def restore(self, state: dict[str, Any]) -> None:
        names, current, pushed = [*state["known"]], state["current"], state["pushed"]
        self._accept(names)
        self._current, self._pushed = current, pushed

    def _accept(self, names: Iterable[str]) -> None:
        for name in names:
            self._accepted[name] = None
            if name.isdecimal():
                self.newest = max(int(name), self.newest or 0)
        while len(self._accepted) > _KEPT_VERSIONS:
            del self._accepted[next(iter(self._accepted))]


def _names(samples: Iterable[Sample]) -> dict[str, None]:
    return {str(name): None for sample in samples for name in getattr(sample, "weight_versions", None) or ()}
