"""The memory of a conversation at the gateway grows with its tokens and messages, not with its turns' square."""

from __future__ import annotations

from tests.gateway.protocols import assistant, user
from tests.harness.gateway import BODY, chat, serving

TURNS = 60
OBSERVATION = "the garden is green and the door of the house is open " * 8


def test_long_conversation_keeps_one_copy_of_its_tokens() -> None:
    messages = [user("Where is the garden?")]
    with serving("It is behind the house.", context_length=100_000) as case:
        for turn in range(TURNS):
            answer = chat(case, {**BODY, "messages": messages}, timeout=30).json()
            messages += [assistant(answer["choices"][0]["message"]["content"]), user(f"{turn}: {OBSERVATION}")]
        session = case.attempt._root
        assert session is not None
        turns = session.turns
        assert len(case.turns) == len(turns) == TURNS
        assert len(case.segments) == 1

        arrays = {id(base): base for turn in turns if (base := turn.prompt_ids.base) is not None}
        written = sum(min(array.nbytes, 4 * turns[-1].length) for array in arrays.values())
        assert written < 1.5 * 4 * turns[-1].length, "arrays that a buffer has outgrown are a small part"
        assert len({id(line) for line, _ in session._encoder._messages}) == 1
        assert all(turn.messages is None for turn in turns)
        assert all(turn.messages for turn in case.turns), "spans have them"
        assert len(case.attempt.recent.responses) == 1, "a continued answer is not kept for retries"
