"""When a group whose members have all ended is fit to train on.

Policies are small frozen objects; a group is judged once, when its last member has ended. They see results, not samples, and return a reason when
they refuse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agl_slime.errors import ConfigError
from agl_slime.groups.outcome import MemberResult


class GroupPolicy(Protocol):
    def refuse(self, *, size: int, members: Sequence[MemberResult]) -> str | None:
        """Why the group of ``size`` expected members is not fit to train on; ``None`` when it is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteGroup:
    """Every member must have succeeded: what slime's default rollout function needs, which asserts exact group sizes."""

    def refuse(self, *, size: int, members: Sequence[MemberResult]) -> str | None:
        good = sum(member.ok for member in members)
        return None if good == size else f"{size - good} of {size} rollouts failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimumViableGroup:
    """At least ``min_ratio`` of the members, and never fewer than ``min_members``, must have succeeded.

    A baseline from the survivors is still a baseline of the same prompt; 0.7 is the ratio that slime's rollout buffer documents for filtered groups.
    With one member there is nothing to compare, so ``min_members`` is 2 for groups that were meant to have more than one.
    """

    min_ratio: float = 0.7
    min_members: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.min_ratio <= 1:
            raise ConfigError(f"min_ratio must lie in (0, 1], got {self.min_ratio}")

    def refuse(self, *, size: int, members: Sequence[MemberResult]) -> str | None:
        good = sum(member.ok for member in members)
        needed = min(size, max(self.min_members, math.ceil(self.min_ratio * size)))
        return None if good >= needed else f"{good} of {size} rollouts succeeded, {needed} are needed"
