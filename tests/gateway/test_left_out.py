"""Which answers are trained, told answer by answer, against the rule written as a search of all of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.gateway.branches import TimedAnswer, UntrainedTurns


class Answer:
    """As ``tree.Node``, counting how often it is looked at."""

    looks = 0

    def __init__(self, turn: int) -> None:
        self._turn, self.went_on = turn, False

    @property
    def turn(self) -> int:
        type(self).looks += 1
        return self._turn

    @property
    def continued(self) -> bool:
        type(self).looks += 1
        return self.went_on


def searched(answers: list[TimedAnswer], branches: str) -> list[int]:
    if branches == "all":
        return []
    if branches == "last":
        parents = {answer.node: answer.parent for answer in answers}
        kept, at = [], answers[-1].node
        while at is not None:
            kept.append(at)
            at = parents[at]
        return sorted(answer.node.turn for answer in answers if answer.node not in kept)
    again = {one.place: max(other.requested_at for other in answers if other.place == one.place) for one in answers}
    return sorted(one.node.turn for one in answers if not one.node.went_on and again[one.place] > one.answered_at)


@pytest.mark.parametrize("branches", ["used", "last", "all"])
@given(st.data())
def test_left_out_answers_are_the_same_incrementally_and_by_full_search(branches: Any, data: st.DataObject) -> None:
    """Requests begin and are answered in any order; each goes on from an answer that was there when it began, or
    asks for that one again."""
    left_out, answers, clock = UntrainedTurns(branches), [], 0
    asked: list[tuple[int, Any, bool]] = []
    for turn in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0 if asked else 1, 2))):
            clock += 1
            parent = data.draw(st.sampled_from([None, *(answer.node for answer in answers)]))
            asked.append((clock, parent, data.draw(st.booleans())))
        begun, parent, goes_on = asked.pop(data.draw(st.integers(0, len(asked) - 1)))
        clock += 1
        if parent is not None and goes_on:
            parent.went_on = True
        place: Any = (0, None if parent is None else parent.turn)
        node: Any = Answer(turn)
        answers.append(TimedAnswer(node, parent, place, begun, clock))
        left_out.add(answers[-1])
        assert list(left_out.turns) == searched(answers, branches)


@pytest.mark.parametrize("branches", ["used", "last"])
def test_an_answer_costs_the_same_however_many_came_before_it(branches: Any) -> None:
    left_out, last, Answer.looks = UntrainedTurns(branches), None, 0
    for turn in range(2_000):
        node: Any = Answer(turn)
        left_out.add(TimedAnswer(node, last, (0, turn), 2 * turn, 2 * turn + 1))
        if last is not None:
            last.went_on = True
        last = node
    assert left_out.turns == ()
    assert Answer.looks <= 3 * 2_000
