"""``UntrainedTurns``: the answers that are not trained because the agent discarded them."""

from __future__ import annotations

from dataclasses import dataclass, field

from agl_slime.gateway.settings import Branches
from agl_slime.gateway.tree import Node


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """An answer, the answer that its request continued, its ``place`` in a tree, and the ticks of the attempt's clock
    at its request and at its end."""

    node: Node
    parent: Node | None
    place: tuple[int, int]
    requested_at: int
    answered_at: int


@dataclass
class UntrainedTurns:
    """The ``turns`` that the setting ``branches`` excludes from training, after each answer. The cost of an answer does
    not grow with the number of earlier answers."""

    branches: Branches
    turns: tuple[int, ...] = ()
    _untrained: set[int] = field(default_factory=set)
    _latest: dict[tuple[int, int], list[TimedAnswer]] = field(default_factory=dict)  # not requested again, by place
    _parents: dict[Node, Node | None] = field(default_factory=dict)
    _branch: dict[Node, None] = field(default_factory=dict)  # from the first answer to the last

    def add(self, answer: TimedAnswer) -> None:
        """Add the next answer, in order of ``answered_at``."""
        if self.branches == "all":
            return
        dropped, restored = self._drop_retried(answer) if self.branches == "used" else self._move_branch(answer)
        if dropped or restored:
            self._untrained.difference_update(node.turn for node in restored)
            self._untrained.update(node.turn for node in dropped)
            self.turns = tuple(sorted(self._untrained))

    def _drop_retried(self, answer: TimedAnswer) -> tuple[list[Node], list[Node]]:
        """Drop answers that were requested again after they ended and were never continued."""
        dropped, parent = [], answer.parent
        earlier = self._latest.setdefault(answer.place, [])
        while earlier and earlier[0].answered_at < answer.requested_at:
            node = earlier.pop(0).node
            dropped += [] if node.continued else [node]
        earlier.append(answer)
        restored = [parent] if parent is not None and parent.continued and parent.turn in self._untrained else []
        return dropped, restored

    def _move_branch(self, answer: TimedAnswer) -> tuple[list[Node], list[Node]]:
        """Drop answers that are not on the branch of the last answer."""
        dropped, added, node = [], [], answer.node
        self._parents[node] = answer.parent
        while node is not None and node not in self._branch:
            added.append(node)
            node = self._parents[node]
        while self._branch and next(reversed(self._branch)) is not node:
            dropped.append(self._branch.popitem()[0])
        self._branch.update(dict.fromkeys(reversed(added)))
        return dropped, [node for node in added if node.turn in self._untrained]
