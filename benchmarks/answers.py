"""Seeded conversations with a model, and its answers in the tokens that it would sample by its chat template."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.published import Published
from benchmarks.scripted_gateway import Sampled

Message = dict[str, Any]

_QUESTION: Message = {"role": "user", "content": "?"}
_WORDS = [
    "the",
    "file",
    "has",
    "two",
    "lines",
    "and",
    "a",
    "test",
    "fails",
    "with",
    "an",
    "error",
    "of",
    "type",
    "so",
    "é",
    "数字",
    "it",
]
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name}.",
            "parameters": {"type": "object", "properties": properties, "required": [*properties][:1]},
        },
    }
    for name, properties in {
        "read_file": {"path": {"type": "string"}, "limit": {"type": "integer"}},
        "run": {"command": {"type": "string"}, "env": {"type": "object"}},
        "search": {"query": {"type": "string"}, "kinds": {"type": "array", "items": {"type": "string"}}},
    }.items()
]
_VALUES: dict[str, list[Any]] = {
    "path": ["a.py", "dir/b c.txt", "é.md"],
    "limit": [1, 20],
    "command": ["ls -la", "echo 'a\nb' > c && cat c"],
    "env": [{"A": "1"}, {"B": {"c": [1, None]}}],
    "query": ["two words", "数字"],
    "kinds": [["a"], ["x", "y"]],
}


# -- conversations ----------------------------------------------------------------------------------------------------


@dataclass
class Said:
    """An answer to come. ``cut`` is the part of its tokens after which the limit ends it, ``split`` where it is encoded
    in two pieces, so that it has other tokens than the tokenizer's own."""

    message: Message
    cut: float | None = None
    split: float | None = None


@dataclass
class Play:
    """A conversation: its beginning, and for each answer what follows it. ``echo``: the client sends thinking back."""

    tools: list[Message] | None
    start: list[Message]
    answers: list[Said]
    after: list[list[Message]]
    echo: bool
    kinds: set[str] = field(default_factory=set)


def plays(model: Published, count: int, seed: int = 0) -> Iterator[Play]:
    for number in range(count):
        yield _play(random.Random(f"{seed}/{number}"), model)


def _play(rng: random.Random, model: Published) -> Play:
    tools = _TOOLS if rng.random() < 0.75 else None
    start: list[Message] = [{"role": "system", "content": f"You help. {_text(rng)}"}] if rng.random() < 0.7 else []
    start.append({"role": "user", "content": _text(rng)})
    play = Play(tools, start, [], [], rng.random() < 0.5)
    calls_made = 0
    for _ in range(rng.randint(2, 6)):
        thinking = _text(rng, 3) if rng.random() < 0.7 else ""
        n_calls = rng.choice([0, 1, 1, 2, 3]) if tools else 0
        content = "" if n_calls and rng.random() < 0.5 else _text(rng, 2)
        message: Message = {"role": "assistant", "content": content}
        if thinking:
            message["reasoning_content"] = thinking
        if n_calls:
            made = [_call(rng, model, calls_made + at) for at in range(n_calls)]
            calls_made += n_calls
            message["tool_calls"] = made
        said = Said(message)
        if rng.random() < 0.08:
            said.cut = rng.random()
        elif rng.random() < 0.15:
            said.split = rng.random()
        play.answers.append(said)
        play.after.append(_after(rng, message))
        kinds = {
            "thinking": thinking,
            "parallel calls": n_calls > 1,
            "call": n_calls == 1,
            "cut": said.cut is not None,
            "other tokens": said.split is not None,
        }
        play.kinds |= {name for name, is_there in kinds.items() if is_there}
    return play


def _after(rng: random.Random, said: Message) -> list[Message]:
    """What follows an answer: results of its calls, or a question; sometimes a reminder as well."""
    new: list[Message] = []
    for call in said.get("tool_calls", ()):
        result = rng.choice([_text(rng, 2), "Error: no such file", '{"ok": true}', "line 1\n\n  line 2\n"])
        new.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    if not new:
        new.append({"role": "user", "content": _text(rng)})
    if rng.random() < 0.1:
        role = rng.choice(["user", "user", "system"])
        new.append({"role": role, "content": f"<system-reminder>{_text(rng)}</system-reminder>"})
    return new


def _call(rng: random.Random, model: Published, number: int) -> Message:
    function = rng.choice(_TOOLS)["function"]
    names = [*function["parameters"]["properties"]][: rng.randint(1, 2)]
    arguments = {name: rng.choice(_VALUES[name]) for name in names}
    name = function["name"]
    made = {"name": name, "arguments": arguments}
    return {"id": model.ids.format(name=name, number=number), "type": "function", "function": made}


def _text(rng: random.Random, lines: int = 1) -> str:
    said = [" ".join(rng.choice(_WORDS) for _ in range(rng.randint(2, 9))) for _ in range(rng.randint(1, lines))]
    return "\n".join(said)


# -- what the model samples -------------------------------------------------------------------------------------------


class Speaker:
    """Writes answers as the model does: the part of its template's rendering after the opening of an answer."""

    def __init__(self, model: Published, tokenizer: Any, renderer: Any) -> None:
        self.model, self.tokenizer, self.renderer = model, tokenizer, renderer
        self._stops = {token: tokenizer.convert_tokens_to_ids(token) for token in model.stops}
        self._later_systems, self._added = True, {*tokenizer.get_added_vocab().values()}
        call = _example(model)
        self._as_text = self._refused([_QUESTION, call]) and not self._refused([_QUESTION, self._with_text(call)])
        opening = self.render([_QUESTION], None, opening=True)
        found = re.search(r"(</?think[^<]*(</think[^<]*)?|<\|channel>thought\s*<channel\|>)$", opening)
        self.opened = found[0] if found else ""
        """What the template writes of thinking before an answer."""
        self.header = opening.removesuffix(self.opened).removeprefix(self.render([_QUESTION], None, opening=False))
        self._shut = "</think" in self.opened or "<channel|>" in self.opened
        self.thinks = not self._shut and "REASON" in self._answer(
            {"role": "assistant", "content": "yes", "reasoning_content": "REASON"}
        )
        several, one = [_QUESTION, _example(model, 2)], [_QUESTION, call]
        self.parallel = not self._refused(self._shown(several)) and (
            self.render(several, None, opening=False) != self.render(one, None, opening=False)
        )
        mixed = {**call, "content": "yes", "reasoning_content": "REASON"}
        self._content_beside = not self._refused(self._shown([_QUESTION, mixed]))
        later = [{"role": "user", "content": "FIRST"}, {"role": "system", "content": "LATER"}, _QUESTION]
        text = "" if self._refused(later) else self.render(later, None, opening=False)
        self._later_systems = 0 <= text.find("FIRST") < text.find("LATER")

    def render(self, messages: Sequence[Message], tools: Any, *, opening: bool) -> str:
        """The template's text; raises the template's error."""
        shown = self.fitted(self._shown(messages))
        how: dict[str, Any] = {"tokenize": False, "add_generation_prompt": opening, "tools": tools, **self.model.kwargs}
        return self.tokenizer.apply_chat_template(shown, **how)

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """``messages`` with the arguments of calls in the form that the template takes."""
        return [self._with_text(message) if self._as_text else message for message in messages]

    def fitted(self, messages: Sequence[Message]) -> list[Message]:
        """``messages`` with later system messages as the user's, where the template refuses, drops
        or moves them."""
        if self._later_systems:
            return [*messages]
        return [{**each, "role": "user"} if n and each["role"] == "system" else each for n, each in enumerate(messages)]

    def moved(self, messages: Sequence[Message]) -> bool:
        """Whether there are later system messages that the template does not write where they stand."""
        return not self._later_systems and any(each["role"] == "system" for each in messages[1:])

    def sampled(self, said: Said) -> Sampled:
        calls = bool(said.message.get("tool_calls"))
        if calls and not self._content_beside:
            said.message["content"] = ""
        text = self._answer(said.message)
        stop = self.model.stop(calls)
        for end in self._stops:
            text = text.rpartition(end)[0] or text
        for part in ("content", "reasoning_content"):  # some write no content beside calls
            if part in said.message and said.message[part].strip() not in text:
                said.message[part] = ""
        ids = self.encode(text)
        if said.split is not None and len(text) > 2:
            at = 1 + int(said.split * (len(text) - 1))
            pieces = [*self.encode(text[:at]), *self.encode(text[at:])]
            if self._marks(pieces) == self._marks(ids):  # a mark that is spelt out is none
                ids = pieces
        if said.cut is not None:
            return Sampled(ids[: 1 + int(said.cut * (len(ids) - 1))], "length")
        return Sampled([*ids, self._stops[stop]])

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _answer(self, message: Message) -> str:
        """The same after any history; a short one is quick to render."""
        prompt = self.render([_QUESTION], None, opening=True)
        whole = self.render([_QUESTION, message], None, opening=False)
        if whole.startswith(prompt):
            return self._thought(whole[len(prompt) :].removeprefix(self.header), message)
        # the template does not open answers that are there as it opens one to come (R1)
        closed = self.render([_QUESTION], None, opening=False)
        opening, rest = prompt[len(closed) :], whole[len(closed) :]
        text = rest.removeprefix(opening.removesuffix(self.opened)).removeprefix(self.header)
        if not self.opened or self._shut:
            return text
        text = text.removeprefix("<think>")
        if (thinking := message.get("reasoning_content", "")) in text and "</think>" in text:
            return text
        return f"{thinking}\n</think>\n\n{text.rpartition('</think>')[2].lstrip()}"

    def _thought(self, text: str, message: Message) -> str:
        """``text`` with the thinking that the template leaves out of an answer that calls nothing (Kimi K2)."""
        thinking = message.get("reasoning_content", "")
        at = text.find("</think>")
        empty = at == 0 or (at > 0 and text[:at].strip() == "<think>")
        return text[:at] + thinking + text[at:] if empty and thinking not in text else text

    def _marks(self, ids: Sequence[int]) -> int:
        return sum(token in self._added for token in ids)

    def _refused(self, messages: list[Message]) -> bool:
        try:
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        except Exception:
            return True
        return False

    @staticmethod
    def _with_text(message: Message) -> Message:
        """The arguments of calls as JSON in strings, for templates that refuse objects."""
        if not message.get("tool_calls"):
            return message
        calls = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}


def _example(model: Published, calls: int = 1) -> Message:
    made = [_call(random.Random(0), model, number) for number in range(calls)]
    return {"role": "assistant", "content": "", "tool_calls": made}
