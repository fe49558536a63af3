"""Traits of a rollout that a program can see without a model: phrases, tools, the answer's shape and length, refusals,
echoes. Word n-grams of the prompt are not phrases of the answer: they vary with the task."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from agl_slime.tokens.formats import get_tool_parser
from agl_slime.tokens.systems import text_of

MOST_WORDS = 2_000  # of a rollout's answers, from their beginning
LONGEST_PHRASE, ECHO, LOOP, LONGEST_SHAPE = 3, 6, 4, 24
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+|[^\w\s]")
_REFUSAL = re.compile(
    r"\b(?:i\s?['’]?a?m sorry|as an ai\b|(?:i (?:cannot|can['’]?t|won['’]?t|will not)|unable to|not able to)"
    r" (?:help|assist|answer|provide|comply))"
)
_NON_LATIN = re.compile(r"[\u0370-\u1fff\u3040-\ud7af]")
_TRUNCATED = frozenset({"length", "truncated"})
_HERMES = get_tool_parser("hermes")


class Trait(NamedTuple):  # a tuple: millions are hashed
    """A trait by its ``kind`` and, where a kind has several, its ``text``."""

    kind: str
    text: str = ""

    def __str__(self) -> str:
        return _SENTENCES[self.kind].format(self.text)


_SENTENCES = {
    "rewarded without a tool": "a high reward without a tool call",
    "no tool": "no tool call",
    "refusal": "a refusal",
    "echo": f"an echo of {ECHO} words of the prompt",
    "truncated": "an answer cut off at the length limit",
    "loop": f"the same {LOOP} words, {LOOP} times",
    "non-Latin": "letters that are not Latin",
    "empty": "an empty answer",
    "tool": "a call of {}",
    "tools": "the calls {} one after the other",
    "shape": "an answer shaped like '{}' (a: words, 9: digits)",
    "longer": "an answer of more than {} words",
    "shorter": "an answer of fewer than {} words",
    "phrase": "the phrase '{}'",
}
KINDS = tuple(_SENTENCES)
"""Kinds of traits, the most readable first."""


@dataclass(frozen=True, kw_only=True)
class RolloutTraits:
    """A kept rollout's traits; ``reward`` is None where it is no finite number, ``words`` the length of its answers."""

    rollout_id: str
    iteration: int
    group: str
    reward: float | None
    words: int
    calls: int
    traits: frozenset[Trait]


def read_traits(line: Mapping[str, Any]) -> RolloutTraits | None:
    """The traits of a line of ``rollouts.jsonl``; None without an answer or an iteration."""
    messages = [message for message in line.get("messages") or () if isinstance(message, Mapping)]
    answers = [message for message in messages if message.get("role") == "assistant"]
    iteration, reward = line.get("iteration"), line.get("reward")
    if not answers or not isinstance(iteration, int):
        return None
    texts: list[str] = []
    tools: list[str] = []
    for answer in answers:
        written, called = _HERMES.parse(text_of(answer)), answer.get("tool_calls")
        texts.append(written.content.strip())
        tools += [call.name for call in written.calls]
        tools += [_name(call) for call in (called if isinstance(called, list) else ())]
    counts = line["tools"].get("calls") if isinstance(line.get("tools"), Mapping) else None
    tools = tools or sorted(counts if isinstance(counts, Mapping) else ())  # messages alone have the calls in order
    words = _words("\n".join(texts))[:MOST_WORDS]
    prompt = _words("\n".join(text_of(message) for message in messages if message.get("role") != "assistant"))
    stops = {line.get("stop_reason"), *(sample.get("stop_reason") for sample in line.get("samples") or ())}
    return RolloutTraits(
        rollout_id=str(line.get("rollout_id")),
        iteration=iteration,
        group=str(line.get("group_id")),
        reward=float(reward) if isinstance(reward, int | float) and math.isfinite(reward) else None,
        words=len(words),
        calls=len(tools),
        traits=frozenset([*_of_words(words, prompt), *_of_texts(texts), *_of_tools(tools), *_of_stops(stops)]),
    )


def _words(text: str) -> list[str]:
    return _WORD.findall(re.sub(r"\d+", "9", text.lower()))


def _of_words(words: list[str], prompt: list[str]) -> Iterator[Trait]:
    for n in range(1, LONGEST_PHRASE + 1):
        prompt_ngrams = set(_ngrams(prompt, n))
        for ngram in set(_ngrams(words, n)) - prompt_ngrams:
            if n > 1 or ngram[0].isalnum():
                yield Trait("phrase", " ".join(ngram))
    if not set(_ngrams(words, ECHO)).isdisjoint(_ngrams(prompt, ECHO)):
        yield Trait("echo")
    if max(Counter(_ngrams(words, LOOP)).values(), default=0) >= LOOP:
        yield Trait("loop")


def _ngrams(words: list[str], n: int) -> Iterable[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(n)), strict=False)


def _of_texts(texts: list[str]) -> Iterator[Trait]:
    whole = "\n".join(texts)
    if _REFUSAL.search(whole.lower()):
        yield Trait("refusal")
    if _NON_LATIN.search(whole):
        yield Trait("non-Latin")
    last = texts[-1]
    shape = re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "9", re.sub(r"\s+", " ", last)))
    shape = re.sub(r"a(?: a)+", "a", shape)
    if not last:
        yield Trait("empty")
    elif len(shape) <= LONGEST_SHAPE:
        yield Trait("shape", shape)


def _of_tools(tools: list[str]) -> Iterator[Trait]:
    if not tools:
        yield Trait("no tool")
    yield from (Trait("tool", name) for name in set(tools))
    yield from (Trait("tools", " → ".join(pair)) for pair in set(pairwise(tools)))


def _of_stops(stops: set[Any]) -> Iterator[Trait]:
    if stops & _TRUNCATED:
        yield Trait("truncated")


def _name(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    return str(function.get("name")) if isinstance(function, Mapping) else "?"
