"""A rollout as its reward function and the report see it."""

from __future__ import annotations

import pytest

from agl_slime.tokens.trajectory import Trajectory
from agl_slime.tokens.turn import Turn


def turn(text: str, **fields: object) -> Turn:
    return Turn(prompt_ids=[1], response_ids=[2, 3], log_probs=[-1.0, -1.0], text=text, **fields)  # type: ignore[arg-type]


def trajectory(*turns: Turn, **fields: object) -> Trajectory:
    return Trajectory(rollout_id="ro", attempt_id="at", task={"q": 1}, turns=turns, **fields)  # type: ignore[arg-type]


def test_response_and_messages_are_those_of_the_last_call():
    messages = [{"role": "user", "content": "?"}]
    a, b = ({"role": "assistant", "content": text} for text in "ab")
    two = trajectory(turn("a"), turn("b", messages=messages))
    assert (two.response, two.messages, two.sampled_tokens) == ("b", (*messages, b), 4)
    assert trajectory(turn("a"), turn("b")).messages == (a, b)  # the answers, if no call has messages
    assert (trajectory().response, trajectory().messages) == ("", ())


@pytest.mark.parametrize(
    ("last", "stop_reason", "truncated"),
    [("stop", "", False), ("length", "", True), ("stop", "max_turns", True), ("length", "stop", True)],
)
def test_a_rollout_is_truncated_when_it_or_its_last_call_was_cut_off(last: str, stop_reason: str, truncated: bool):
    assert trajectory(turn("a", finish_reason=last), stop_reason=stop_reason).truncated is truncated
