"""The groups that wait to be trained on, in the order in which they were finalized."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agl_slime.types import Sample

# Groups that were delivered and may be given back; slime does that within a step or two.
_REMEMBERED_DELIVERED = 4096


@dataclass(slots=True)
class ReadyGroup:
    """Samples of one group, the rollouts that they come from, and the task that the group is one try at."""

    samples: list[Sample]
    rollout_ids: list[str] = field(default_factory=list)
    instance_id: str | None = None


class ReadyGroups:
    """A queue of groups. Not thread-safe."""

    def __init__(self) -> None:
        self.groups: deque[ReadyGroup] = deque()
        self._delivered: OrderedDict[int, ReadyGroup] = OrderedDict()  # without the samples: they are large

    def __len__(self) -> int:
        return len(self.groups)

    def take(self, n: int) -> list[ReadyGroup]:
        """Up to ``n`` groups, oldest first."""
        taken = [self.groups.popleft() for _ in range(min(n, len(self.groups)))]
        for group in taken:
            self._delivered[_index(group.samples)] = ReadyGroup([], group.rollout_ids, group.instance_id)
            if len(self._delivered) > _REMEMBERED_DELIVERED:
                self._delivered.popitem(last=False)
        return taken

    def origin(self, samples: Sequence[Sample]) -> ReadyGroup:
        """What was known of a group when it was delivered, without its samples."""
        return self._delivered.get(_index(samples)) or ReadyGroup([])

    def put_back(self, groups: Sequence[list[Sample]]) -> None:
        """These come before all others again; what was known of them when they were delivered still is."""
        for samples in reversed(groups):
            origin = self.origin(samples)
            self.groups.appendleft(ReadyGroup(samples, origin.rollout_ids, origin.instance_id))

    def remove(self, unfit: Callable[[Sequence[Sample]], bool]) -> list[ReadyGroup]:
        """Take out the groups whose samples are ``unfit``."""
        judged = [(group, unfit(group.samples)) for group in self.groups]
        self.groups = deque(group for group, gone in judged if not gone)
        return [group for group, gone in judged if gone]


def _index(samples: Sequence[Sample]) -> int:
    return samples[0].group_index if samples and samples[0].group_index is not None else -1
