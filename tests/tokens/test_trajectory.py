"""A rollout as its reward function and the report see it."""

from __future__ import annotations

import pytest

from agl_slime.tokens.trajectory import Trajectory
from agl_slime.tokens.turn import Turn


def turn(text: str, **fields: object) -> Turn:
    return Turn(prompt_ids=[1], response_ids=[2, 3], log_probs=[-1.0, -1.0], text=text, **fields)  # type: ignore[arg-type]


def trajectory(*turns: Turn, **fields: object) -> Trajectory:
    return Trajectory(rollout_id="ro", attempt_id="at", task={"q": 1}, turns=turns, **fields)  # type: ignore[arg-type]


def test_the_response_is_the_last_answer():
    assert trajectory(turn("look up"), turn("Paris")).response == "Paris"
    assert trajectory().response == ""


def test_messages_are_the_last_calls_and_its_answer():
    messages = [{"role": "user", "content": "?"}]
    assert trajectory(turn("a"), turn("b", messages=messages)).messages == (
        *messages,
        {"role": "assistant", "content": "b"},
    )


def test_without_messages_there_are_the_answers():
    assert trajectory(turn("a"), turn("b")).messages == (
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    )
    assert trajectory().messages == ()


def test_sampled_tokens_are_counted_over_all_turns():
    assert trajectory(turn("a"), turn("b")).sampled_tokens == 4


@pytest.mark.parametrize(
    ("last", "stop_reason", "truncated"),
    [("stop", "", False), ("length", "", True), ("stop", "max_turns", True), ("length", "stop", True)],
)
def test_a_rollout_is_truncated_when_it_or_its_last_call_was_cut_off(last: str, stop_reason: str, truncated: bool):
    assert trajectory(turn("a", finish_reason=last), stop_reason=stop_reason).truncated is truncated
