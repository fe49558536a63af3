"""Merging and forking on bare token ids, where text plays no part."""

from __future__ import annotations

import pytest

from agl_slime.errors import TraceError
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.turn import Turn
from tests.harness.samples import turn

BRANCH, EDITED, NEW, TEMPLATE = (
    ForkReason.BRANCH,
    ForkReason.EDITED_HISTORY,
    ForkReason.NEW_CONTEXT,
    ForkReason.TEMPLATE,
)


def test_an_answer_that_is_continued_at_once_stays_one_segment():
    """No token between the two: the agent took the generation up again."""
    [segment] = merge_turns([turn([1], [2, 3]), turn([1, 2, 3], [4])])
    assert segment.loss_mask.tolist() == [0, 1, 1, 1]
    assert [(at.start, at.end) for at in segment.placements] == [(1, 3), (3, 4)]


def test_fork_has_shared_history_as_context_and_trains_its_turn_only():
    root, left, right = turn([1], [2]), turn([1, 2, 9], [3]), turn([1, 2, 8], [4])
    first, second = merge_turns([root, left, right])
    assert (first.token_ids.tolist(), first.loss_mask.tolist()) == ([1, 2, 9, 3], [0, 1, 0, 1])
    assert (second.token_ids.tolist(), second.loss_mask.tolist()) == ([1, 2, 8, 4], [0, 0, 0, 1])
    assert second.log_probs is not None
    assert second.log_probs.tolist() == [0.0, 0.0, 0.0, -0.5]


def test_an_empty_prompt_is_refused_and_a_turn_without_samples_skipped():
    with pytest.raises(TraceError, match="turn 0 has an empty prompt"):
        merge_turns([turn([], [1])])
    assert merge_turns([]) == merge_turns([turn([], [])]) == []


FOUR = [turn([1], [2]), turn([1, 2, 9], [3]), turn([1, 2, 8], [4]), turn([1, 2, 9, 3, 7], [5])]
STALE = [turn([1], [2]), turn([5], [6], base_turn=0, kept_tokens=1), turn([5, 6, 7], [8], base_turn=1, kept_tokens=2)]


@pytest.mark.parametrize(
    ("turns", "segments", "reasons"),
    [
        pytest.param([*FOUR, turn([1, 2, 8, 4, 7], [6])], [[0, 1, 3], [2, 4]], [BRANCH], id="branches alternate"),
        pytest.param([turn([1], [2]), turn([1], [2]), turn([1, 2, 9], [3])], [[0], [1, 2]], [BRANCH], id="equal"),
        pytest.param([turn([1, 2, 3], [4]), turn([1, 2], [5])], [[0], [1]], [BRANCH], id="part of a prompt"),
        # the last prompt extends the first answer; the first token that the third answer shares with it is chance
        pytest.param(
            [turn([1, 2], [3]), turn([1, 2, 3, 9], [8]), turn([1, 2], [3, 4]), turn([1, 2, 3, 5], [6])],
            [[0, 1], [2], [3]],
            [BRANCH, BRANCH],
            id="prefix of another answer",
        ),
        # observation 50 became 60, the answer to it stayed, the answer after that was dropped
        pytest.param(
            [
                turn([1], [10, 11]),
                turn([1, 10, 11, 50], [20, 21]),
                turn([1, 10, 11, 50, 20, 21, 51], [30, 31]),
                turn([1, 10, 11, 60, 20, 21, 52], [40]),
            ],
            [[0, 1, 2], [3]],
            [EDITED],
            id="a later answer after a change",
        ),
        # two conversations share the system prompt; the history of the second is changed
        pytest.param(
            [turn([1, 2, 70], [10]), turn([1, 2, 80], [20, 21]), turn([1, 2, 81, 20, 21, 90], [30])],
            [[0], [1], [2]],
            [NEW, EDITED],
            id="edit of the most recent conversation",
        ),
        pytest.param([turn([1], []), turn([], []), turn([1], [2])], [[2]], [], id="without samples"),
        # by its tokens the third turn would be an edit; the conversation recorded the template as the reason
        pytest.param(
            [
                turn([1], [10, 11]),
                turn([1, 10, 11, 50], [20], base_turn=0, kept_tokens=3),
                turn([1, 10, 60], [30], base_turn=1, kept_tokens=2, fork=TEMPLATE),
            ],
            [[0, 1], [2]],
            [TEMPLATE],
            id="placed by its base turn",
        ),
        pytest.param(
            [turn([1], [2]), *(turn([1, 2, n], [3], base_turn=0, kept_tokens=2) for n in (8, 9))],
            [[0, 1], [2]],
            [BRANCH],
            id="the second turn on one base",
        ),
        pytest.param(
            [
                turn([1], [2]),
                turn([1, 2, 9, 9], [], base_turn=0, kept_tokens=2),
                turn([1, 2, 9, 8], [3], base_turn=1, kept_tokens=3, fork=BRANCH),
            ],
            [[0, 2]],
            [],
            id="base without samples",
        ),
        # a trajectory without its first turns, whose numbers mean other turns now
        pytest.param(STALE, [[0], [1, 2]], [BRANCH], id="stale base"),
        pytest.param(STALE[1:], [[0, 1]], [], id="stale base, first turn gone"),
        pytest.param(
            [STALE[0], turn([9], [9]), STALE[2], turn([1, 2, 3], [4], base_turn=7, kept_tokens=2)],
            [[0, 3], [1], [2]],
            [NEW, BRANCH],
            id="base that does not exist",
        ),
    ],
)
def test_turns_are_merged_or_fork_for_a_reason(turns: list[Turn], segments: list[list[int]], reasons: list[ForkReason]):
    merged = merge_turns(turns)
    assert [[at.turn for at in segment.placements] for segment in merged] == segments
    assert [segment.fork_reason for segment in merged] == [None, *reasons]
