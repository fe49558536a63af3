"""The groups that wait to be trained on, in the order in which they were finalized, and how old their weights are.

Weight versions are names; those that are whole numbers, as this package and slime give them, can be compared. The
policy's version is what the loop says, or the newest one that any sample has seen, whichever is newer.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
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
        back = [(samples, self.origin(samples)) for samples in groups]
        self.groups.extendleft(
            ReadyGroup(samples, origin.rollout_ids, origin.instance_id) for samples, origin in reversed(back)
        )

    def remove(self, unfit: Callable[[Sequence[Sample]], bool]) -> list[ReadyGroup]:
        """Take out the groups whose samples are ``unfit``."""
        judged = [(group, unfit(group.samples)) for group in self.groups]
        self.groups = deque(group for group, gone in judged if not gone)
        return [group for group, gone in judged if gone]


def _index(samples: Sequence[Sample]) -> int:
    return samples[0].group_index if samples and samples[0].group_index is not None else -1


class PolicyVersion:
    """The newest known version, and how many versions behind it tokens may be (``None`` is any number)."""

    def __init__(self, *, max_staleness: int | None = None) -> None:
        self.max_staleness = max_staleness
        self.newest: int | None = None

    def advance(self, version: str | int | None) -> bool:
        """The policy is at ``version`` now, at least; whether that is news."""
        number = _number(version)
        if number is None or (self.newest is not None and number <= self.newest):
            return False
        self.newest = number
        return True

    def lag(self, samples: Iterable[Sample]) -> int:
        """Versions between the oldest token of ``samples`` and the policy; 0 where that is not known."""
        versions = [number for number in map(_number, versions_of(samples)) if number is not None]
        return max(0, self.newest - min(versions)) if versions and self.newest is not None else 0

    def too_old(self, samples: Iterable[Sample]) -> bool:
        """Whether some token of ``samples`` is older than allowed."""
        return self.max_staleness is not None and self.lag(samples) > self.max_staleness


def versions_of(samples: Iterable[Sample]) -> list[str]:
    """The weight versions that ``samples`` were sampled with, each once."""
    return list(dict.fromkeys(name for sample in samples for name in getattr(sample, "weight_versions", None) or ()))


def _number(version: str | int | None) -> int | None:
    try:
        return int(version) if version is not None else None
    except ValueError:
        return None
