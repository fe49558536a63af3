"""Merging and forking on bare token ids, where text plays no part."""

from __future__ import annotations

import pytest

from agl_slime.errors import TraceError
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.segments import Segment, merge_turns
from tests.harness.samples import turn


def turns_in(segments: list[Segment]) -> list[list[int]]:
    return [[at.turn for at in segment.placements] for segment in segments]


def test_no_turns_make_no_segments():
    assert merge_turns([]) == []


def test_an_answer_that_is_continued_at_once_stays_one_segment():
    """No token between the two: a generation that was taken up again by the agent."""
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


def test_concurrent_branches_continue_in_their_segments():
    """Turns of two branches alternate, as those of a parallel agent do."""
    turns = [
        turn([1], [2]),
        turn([1, 2, 9], [3]),
        turn([1, 2, 8], [4]),
        turn([1, 2, 9, 3, 7], [5]),
        turn([1, 2, 8, 4, 7], [6]),
    ]
    segments = merge_turns(turns)
    assert turns_in(segments) == [[0, 1, 3], [2, 4]]
    assert [segment.fork_reason for segment in segments] == [None, ForkReason.BRANCH]


def test_two_equal_answers_to_one_prompt_are_both_trained():
    segments = merge_turns([turn([1], [2]), turn([1], [2]), turn([1, 2, 9], [3])])
    assert turns_in(segments) == [[0], [1, 2]]
    assert [segment.fork_reason for segment in segments] == [None, ForkReason.BRANCH]


def test_a_prompt_that_is_part_of_an_earlier_prompt_is_a_branch():
    assert merge_turns([turn([1, 2, 3], [4]), turn([1, 2], [5])])[1].fork_reason == ForkReason.BRANCH


def test_continuing_an_answer_that_prefixes_another_is_a_branch():
    """The last prompt goes on from the first answer; that the third answer has the same first token is chance, not an
    edit."""
    turns = [turn([1, 2], [3]), turn([1, 2, 3, 9], [8]), turn([1, 2], [3, 4]), turn([1, 2, 3, 5], [6])]
    assert [segment.fork_reason for segment in merge_turns(turns)] == [None, ForkReason.BRANCH, ForkReason.BRANCH]


def test_one_later_answer_that_is_kept_after_a_change_shows_an_edit():
    """Observation 50 became 60, the answer to it stayed, the answer after that was dropped."""
    turns = [
        turn([1], [10, 11]),
        turn([1, 10, 11, 50], [20, 21]),
        turn([1, 10, 11, 50, 20, 21, 51], [30, 31]),
        turn([1, 10, 11, 60, 20, 21, 52], [40]),
    ]
    assert [segment.fork_reason for segment in merge_turns(turns)] == [None, ForkReason.EDITED_HISTORY]


def test_edited_history_is_found_by_the_most_recent_conversation():
    """Two conversations share the system prompt; the second one's history is changed."""
    turns = [turn([1, 2, 70], [10]), turn([1, 2, 80], [20, 21]), turn([1, 2, 81, 20, 21, 90], [30])]
    assert [segment.fork_reason for segment in merge_turns(turns)] == [
        None,
        ForkReason.NEW_CONTEXT,
        ForkReason.EDITED_HISTORY,
    ]


def test_an_empty_prompt_is_refused():
    with pytest.raises(TraceError, match="turn 0 has an empty prompt"):
        merge_turns([turn([], [1])])


def test_turns_that_sampled_nothing_contribute_nothing():
    assert turns_in(merge_turns([turn([1], []), turn([], []), turn([1], [2])])) == [[2]]


# -- turns that say what they go on from -----------------------------------------------------------------------------


def test_turn_is_placed_by_its_base_turn():
    """By its tokens the third turn would be an edit; the conversation knew that its template did it."""
    turns = [
        turn([1], [10, 11]),
        turn([1, 10, 11, 50], [20], base_turn=0, kept_tokens=3),
        turn([1, 10, 60], [30], base_turn=1, kept_tokens=2, fork=ForkReason.TEMPLATE),
    ]
    segments = merge_turns(turns)
    assert turns_in(segments) == [[0, 1], [2]]
    assert segments[1].fork_reason == ForkReason.TEMPLATE


def test_the_second_turn_that_extends_another_is_a_branch():
    turns = [turn([1], [2]), *(turn([1, 2, n], [3], base_turn=0, kept_tokens=2) for n in (8, 9))]
    segments = merge_turns(turns)
    assert (turns_in(segments), segments[1].fork_reason) == ([[0, 1], [2]], ForkReason.BRANCH)


def test_turn_after_one_without_samples_continues_that_ones_base():
    turns = [
        turn([1], [2]),
        turn([1, 2, 9, 9], [], base_turn=0, kept_tokens=2),
        turn([1, 2, 9, 8], [3], base_turn=1, kept_tokens=3, fork=ForkReason.BRANCH),
    ]
    assert turns_in(merge_turns(turns)) == [[0, 2]]


def test_wrong_base_turn_is_corrected_by_the_tokens():
    """A trajectory of which the first turns were taken out: the numbers mean other turns now."""
    turns = [
        turn([1], [2]),
        turn([5], [6], base_turn=0, kept_tokens=1),
        turn([5, 6, 7], [8], base_turn=1, kept_tokens=2),
    ]
    assert turns_in(merge_turns(turns)) == [[0], [1, 2]]
    assert turns_in(merge_turns(turns[1:])) == [[0, 1]]
    assert turns_in(
        merge_turns([turns[0], turn([9], [9]), turns[2], turn([1, 2, 3], [4], base_turn=7, kept_tokens=2)])
    ) == [
        [0, 3],
        [1],
        [2],
    ]
