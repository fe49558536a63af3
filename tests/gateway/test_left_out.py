"""Which answers are trained: incrementally, answer by answer, and by the rule as a search of all answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.gateway.branches import TimedAnswer, UntrainedTurns


@dataclass(eq=False)
class Answer:
    """As ``tree.Node``."""

    turn: int
    continued: bool = False


def searched(answers: list[TimedAnswer], branches: str) -> list[int]:
    if branches == "all":
        return []
    if branches == "last":
        parents = {answer.node: answer.parent for answer in answers}
        path, node = [], answers[-1].node
        while node is not None:
            path.append(node)
            node = parents[node]
        return sorted(answer.node.turn for answer in answers if answer.node not in path)
    last_request: dict[Any, int] = {}
    for answer in answers:
        last_request[answer.place] = max(last_request.get(answer.place, 0), answer.requested_at)
    repeated = (answer for answer in answers if last_request[answer.place] > answer.answered_at)
    return sorted(answer.node.turn for answer in repeated if not answer.node.continued)


@pytest.mark.parametrize("branches", ["used", "last", "all"])
@given(st.data())
def test_left_out_answers_are_the_same_incrementally_and_by_full_search(branches: Any, data: st.DataObject) -> None:
    """Requests begin and are answered in any order; each continues an answer that existed when it began, or asks for
    that answer once more."""
    left_out, answers, clock = UntrainedTurns(branches), [], 0
    pending: list[tuple[int, Any, bool]] = []
    for turn in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0 if pending else 1, 2))):
            clock += 1
            parent = data.draw(st.sampled_from([None, *(answer.node for answer in answers)]))
            pending.append((clock, parent, data.draw(st.booleans())))
        begun, parent, extends = pending.pop(data.draw(st.integers(0, len(pending) - 1)))
        clock += 1
        if parent is not None and extends:
            parent.continued = True
        place: Any = (0, None if parent is None else parent.turn)
        node: Any = Answer(turn)
        answers.append(TimedAnswer(node, parent, place, begun, clock))
        left_out.add(answers[-1])
        assert list(left_out.turns) == searched(answers, branches)
