"""The groups that wait to be trained on, in the order in which they settled."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agl_slime.types import Sample

# Groups that were handed out and may be given back; slime does that within a step or two.
_REMEMBERED_OUT = 4096


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
        self._handed_out: OrderedDict[int, tuple[list[str], str | None]] = (
            OrderedDict()
        )  # not the samples: they are large

    def __len__(self) -> int:
        return len(self.groups)

    def put(self, group: ReadyGroup) -> None:
        self.groups.append(group)

    def take(self, n: int) -> list[ReadyGroup]:
        """Up to ``n`` groups, oldest first."""
        taken = [self.groups.popleft() for _ in range(min(n, len(self.groups)))]
        for group in taken:
            self._handed_out[_index(group.samples)] = group.rollout_ids, group.instance_id
            if len(self._handed_out) > _REMEMBERED_OUT:
                self._handed_out.popitem(last=False)
        return taken

    def put_back(self, groups: Sequence[list[Sample]]) -> None:
        """These come before all others again; what was known of them when they were handed out still is."""
        back = []
        for samples in groups:
            rollout_ids, instance_id = self._handed_out.pop(_index(samples), ([], None))
            back.append(ReadyGroup(samples, rollout_ids, instance_id))
        self.groups.extendleft(reversed(back))

    def remove(self, unfit: Callable[[Sequence[Sample]], bool]) -> list[ReadyGroup]:
        """Take out the groups whose samples are ``unfit``."""
        removed = [group for group in self.groups if unfit(group.samples)]
        if removed:
            gone = {id(group) for group in removed}
            self.groups = deque(group for group in self.groups if id(group) not in gone)
        return removed


def _index(samples: Sequence[Sample]) -> int:
    return samples[0].group_index if samples and samples[0].group_index is not None else -1
