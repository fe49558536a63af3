"""Which answers of a rollout are trained, where its agent has thrown some away."""

from __future__ import annotations

from dataclasses import dataclass

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


def left_out(answers: list[AnswerInTime], branches: Branches) -> list[int]:
    """Turns that the setting does not train, as far as can be told now."""
    if branches == "all":
        return []
    if branches == "last":
        parents = {id(answer.node): answer.parent for answer in answers}
        kept: set[int] = set()
        at: Node | None = answers[-1].node
        while at is not None:
            kept.add(at.turn)
            at = parents[id(at)]
        return [answer.node.turn for answer in answers if answer.node.turn not in kept]
    again: dict[tuple[int, int], int] = {}  # when the same was last asked for
    for answer in answers:
        again[answer.place] = max(answer.asked, again.get(answer.place, 0))
    return [a.node.turn for a in answers if not a.node.continued and again[a.place] > a.given]
