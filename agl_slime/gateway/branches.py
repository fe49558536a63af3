"""Which answers of a rollout are trained, where its agent has thrown some away."""

from __future__ import annotations

from dataclasses import dataclass, field

from agl_slime.gateway.settings import Branches
from agl_slime.gateway.tree import Node


@dataclass(frozen=True, slots=True)
class AnswerInTime:
    """An answer in time: the one that its request went on from, its ``place`` in a tree, and the ticks of the
    attempt's clock at which it was asked for and given."""

    node: Node
    parent: Node | None
    place: tuple[int, int]
    asked: int
    given: int


@dataclass
class LeftOut:
    """The turns that the setting does not train, as far as can be told after each answer. An answer costs what it
    changes, however many came before it."""

    branches: Branches
    turns: tuple[int, ...] = ()
    _left: set[int] = field(default_factory=set)
    _places: dict[tuple[int, int], list[AnswerInTime]] = field(default_factory=dict)  # what was not asked for again
    _parents: dict[Node, Node | None] = field(default_factory=dict)
    _line: dict[Node, None] = field(default_factory=dict)  # to the last answer, from the first one on

    def add(self, answer: AnswerInTime) -> None:
        """The next answer, in the order in which they were given."""
        if self.branches == "all":
            return
        gone, back = self._asked_again(answer) if self.branches == "used" else self._moved(answer)
        if gone or back:
            self._left.difference_update(node.turn for node in back)
            self._left.update(node.turn for node in gone)
            self.turns = tuple(sorted(self._left))

    def _asked_again(self, answer: AnswerInTime) -> tuple[list[Node], list[Node]]:
        """Left out are answers that were asked for again after they were given, and that nothing went on from."""
        gone, parent = [], answer.parent
        same = self._places.setdefault(answer.place, [])
        while same and same[0].given < answer.asked:
            node = same.pop(0).node
            gone += [] if node.continued else [node]
        same.append(answer)
        back = [parent] if parent is not None and parent.continued and parent.turn in self._left else []
        return gone, back

    def _moved(self, answer: AnswerInTime) -> tuple[list[Node], list[Node]]:
        """Left out is what the last answer does not go on from."""
        gone, back, at = [], [], answer.node
        self._parents[at] = answer.parent
        while at is not None and at not in self._line:
            back.append(at)
            at = self._parents[at]
        while self._line and next(reversed(self._line)) is not at:
            gone.append(self._line.popitem()[0])
        self._line.update(dict.fromkeys(reversed(back)))
        return gone, [node for node in back if node.turn in self._left]
