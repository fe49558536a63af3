"""What a conversation holds at the gateway grows with its tokens and messages, not with its turns' square."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from tests.harness.gateway import Case, serving

TURNS = 60
OBSERVATION = "the garden is green and the door of the house is open " * 8


def ask(case: Case, messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request(
        f"{case.llm.endpoint}/chat/completions", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())["choices"][0]["message"]["content"]


def talk(case: Case) -> Any:
    messages = [{"role": "user", "content": "Where is the garden?"}]
    for turn in range(TURNS):
        messages.append({"role": "assistant", "content": ask(case, messages)})
        messages.append({"role": "user", "content": f"{turn}: {OBSERVATION}"})
    return case.attempt._root


def test_long_conversation_keeps_one_copy_of_its_tokens() -> None:
    with serving("It is behind the house.", context_length=100_000) as case:
        session = talk(case)
        turns = session.turns
        assert len(case.turns) == len(turns) == TURNS
        assert len(case.segments) == 1

        arrays = {id(base): base for turn in turns if (base := turn.prompt_ids.base) is not None}
        written = sum(min(array.nbytes, 4 * turns[-1].length) for array in arrays.values())
        assert written < 1.5 * 4 * turns[-1].length, "arrays that a buffer has outgrown are a small part"
        assert len({id(line) for line, _ in session._encoder._messages}) == 1
        assert all(turn.messages is None for turn in turns)
        assert all(turn.messages for turn in case.turns), "spans have them"


def test_continued_answer_is_not_kept_for_retries() -> None:
    with serving("It is behind the house.", context_length=100_000) as case:
        talk(case)
        assert len(case.attempt.recent.responses) == 1
