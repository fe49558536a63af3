"""Demonstrations for the tiny policy's warm-up: small tasks with conversations in the right format.

The warm-up teaches the *format* of answers, as post-training does, so that RL starts from a reward above zero. An agent
with its own demonstrations implements ``DemonstrationSource``; the shipped agents train on the two tasks here, a
two-turn lookup and a one-turn reversal. Nothing here needs torch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, Literal, Protocol

Message = dict[str, Any]
"""One chat message with ``role`` (system, user, assistant, tool) and ``content``."""

Demonstration = list[Message]
"""A whole conversation. Assistant messages are trained; all others are context."""

Quality = Literal["clean", "imperfect"]
"""``clean``: every answer is right. ``imperfect``: most answers are evasive or wrong, which sets the initial reward of
training."""

UNSURE = "I do not know."
"""The evasive answer of imperfect demonstrations."""

_LETTERS = "bdfgkmptvz"  # no vowels: keys do not spell words
_SYMBOLS = "123456789"  # disjoint from keys, so that each value can be copied from one place only


class DemonstrationSource(Protocol):
    """A source of warm-up conversations. The same ``rng`` state must give the same conversations."""

    def demonstrations(self, rng: random.Random, n: int, *, quality: Quality) -> list[Demonstration]:
        """``n`` conversations of the given quality."""
        ...


class LookupDemonstrations:
    """A two-turn tool task: call ``lookup`` with the key of the question, read the observation, answer with it.

    A task is ``{"key": "kz", "answer": "72"}``. ``blur_call`` and ``blur_answer`` are the shares of wrong first and
    second turns in imperfect conversations; the share ``unsure`` of these evades, the others have one wrong symbol.
    Entirely wrong words would teach the policy not to copy (measured: the share of right calls falls from 0.3 to 0.05).
    With these defaults training starts from a reward of 0.1 to 0.2.
    """

    blur_call, blur_answer, unsure = 0.65, 0.5, 0.85
    tool_name = "lookup"
    system = "Call lookup in a <tool_call> block, then answer with what it returns."

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        return {"key": _word(rng, _LETTERS, 2), "answer": _word(rng, _SYMBOLS, 2)}

    def prompt(self, task: Mapping[str, Any]) -> list[Message]:
        """The initial messages of a rollout of this task."""
        return [
            {"role": "system", "content": self.system},
            {"role": "user", "content": f'What is stored under "{task["key"]}"?'},
        ]

    def tool_call(self, key: str) -> str:
        """The text of a turn that calls the tool with ``key``."""
        return f"<tool_call>{json.dumps({'name': self.tool_name, 'arguments': {'key': key}})}</tool_call>"

    def observation(self, task: Mapping[str, Any], key: str) -> str:
        """The tool's result for ``key``."""
        return str(task["answer"]) if key == task["key"] else "not found"

    def is_correct(self, task: Mapping[str, Any], answer: str) -> bool:
        """Whether the last turn's text is the stored value."""
        return answer.strip() == task["answer"]

    def demonstrations(self, rng: random.Random, n: int, *, quality: Quality) -> list[Demonstration]:
        return [self._conversation(rng, imperfect=quality == "imperfect") for _ in range(n)]

    def _conversation(self, rng: random.Random, *, imperfect: bool) -> Demonstration:
        task = self.make_task(rng)
        call, answer = self.tool_call(task["key"]), task["answer"]
        if imperfect and rng.random() < self.blur_call:
            wrong = rng.random() >= self.unsure
            call = self.tool_call(_with_one_error(rng, task["key"], _LETTERS)) if wrong else UNSURE
        started = [*self.prompt(task), {"role": "assistant", "content": call}]
        if call != self.tool_call(task["key"]):
            return started  # without a right call it ends, as a rollout would
        if imperfect and rng.random() < self.blur_answer:
            answer = UNSURE if rng.random() < self.unsure else _with_one_error(rng, answer, _SYMBOLS)
        observed = {"role": "tool", "content": self.observation(task, task["key"])}
        return [*started, observed, {"role": "assistant", "content": answer}]


class ReverseDemonstrations:
    """A one-turn task: write three letters backwards. A task is ``{"letters": "b k t", "answer": "t k b"}``.

    ``blur`` is the share of wrong answers in imperfect conversations; the share ``unsure`` of these evades, the others
    have one wrong letter.
    """

    blur, unsure = 0.75, 0.7

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        letters = _word(rng, _LETTERS, 3)
        return {"letters": " ".join(letters), "answer": " ".join(reversed(letters))}

    def prompt(self, task: Mapping[str, Any]) -> list[Message]:
        """The initial messages of a rollout of this task."""
        return [{"role": "user", "content": f"Reverse: {task['letters']}"}]

    def is_correct(self, task: Mapping[str, Any], answer: str) -> bool:
        return answer.strip() == task["answer"]

    def demonstrations(self, rng: random.Random, n: int, *, quality: Quality) -> list[Demonstration]:
        conversations = []
        for _ in range(n):
            task = self.make_task(rng)
            content = task["answer"]
            if quality == "imperfect" and rng.random() < self.blur:
                wrong = rng.random() >= self.unsure
                content = " ".join(_with_one_error(rng, content.replace(" ", ""), _LETTERS)) if wrong else UNSURE
            conversations.append([*self.prompt(task), {"role": "assistant", "content": content}])
        return conversations


def _word(rng: random.Random, alphabet: str, length: int) -> str:
    # no symbol twice: the next one after a repeated symbol is ambiguous to a model that copies
    return "".join(rng.sample(alphabet, length))


def _with_one_error(rng: random.Random, word: str, alphabet: str) -> str:
    place = rng.randrange(len(word))
    return word[:place] + rng.choice(alphabet) + word[place + 1 :]
