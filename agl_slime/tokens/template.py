"""What a chat template adds to a conversation, told from its renderings.

A template is a program: what it writes for the first messages may depend on those after them. The only sound question
to it is a rendering, so that is what is asked: with the new messages and without them. Where both agree on the history,
the difference is what the template adds. Answers are given in parts, each in the field that the template reads
(``fields``).

How the template spells a sampled answer makes no difference (white space in a call's JSON, padding around thinking):
the sampled tokens stand in its place. Compared is whether the template's own rendering of the history stays, up to
white space and empty blocks (``<think>\\n\\n</think>``). Where it does not, the template rewrites history, and there
is a ``RewrittenHistory`` in place of an ``Addition``.

Rendering everything in each turn would make a conversation of n turns cost n² renderings of messages. From
``WINDOW_FROM`` messages on, only the ends are rendered: the system messages, the last user message and what follows it
(at least the last ``TAIL`` messages). That is exact for templates that look no further back. Nobody can know a
template, so the whole conversation is rendered again each time it has doubled and compared with all that was written
before; a template that rewrote something the ends did not show is found then: the prompt forks, and this conversation
is rendered whole from there on. The cost stays linear.
"""

from __future__ import annotations

import functools
import marshal
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agl_slime.errors import PromptError
from agl_slime.tokens.blanks import match_end
from agl_slime.tokens.calls import CallFormat
from agl_slime.tokens.codec import shared_length
from agl_slime.tokens.fields import AnswerFields
from agl_slime.tokens.formats import find_format
from agl_slime.tokens.reader import AnswerReader, opens_thinking, reader_for
from agl_slime.tokens.rendering import renderer
from agl_slime.tokens.systems import SYSTEM_ROLES, LaterSystems, SystemMessages, text_of
from agl_slime.tokens.tokenizer import NO_TEMPLATE, ChatTokenizer, added_token_at, has_chat_template

Message = dict[str, Any]
T = TypeVar("T")

# of first prompts: members of a group are claimed one after the other, so a few are enough
_PROMPTS = 128
_HELD_BYTES = 2_000_000

WINDOW_FROM = 32
TAIL = 8

# Stands for an answer when the template is asked what it writes after one; made of letters, so that no template trims
# or splits it.
_SENTINEL = "SENTINELanswerSENTINEL"
_QUESTIONS: list[Message] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": _SENTINEL},
    {"role": "user", "content": "?"},
]


@dataclass(frozen=True, slots=True)
class Rendering:
    """Messages as text, and apart from it the ``generation_prompt`` of an answer to them; ``None`` when it cannot be told apart
    and is in the text."""

    text: str
    generation_prompt: str | None


@dataclass(frozen=True, slots=True)
class Addition:
    """``text`` is what the template writes after a sampled answer up to the end of the new messages, ``generation_prompt`` what
    it writes before the next one; ``answer`` the answer as the template itself writes it, with its generation_prompt.

    ``rendering`` is of the whole conversation, where that was rendered.
    """

    text: str
    generation_prompt: str
    answer: str
    rendering: Rendering | None


@dataclass(frozen=True, slots=True)
class RewrittenHistory:
    """The template writes the history in another way once the new messages follow. ``drops_thinking``: without earlier
    thinking, and else the same."""

    drops_thinking: bool = False


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """A sampled answer: its ``text``, and the text of the stop token that the engine sampled at its end. ``closed`` is
    off where it ended within its ``thinking``."""

    text: str
    stop_text: str = ""
    closed: bool = True
    thinking: str = ""


class ChatTemplate:
    """The chat template of a tokenizer with one set of tools and template arguments.

    ``prompt_cache`` is what conversations keep of their beginnings for others that begin in the same way; ``None``
    where the template may write something else the next time.
    """

    begins_with_special_tokens = False
    """Whether what the tokenizer puts before and after a text belongs to the first prompt; templates write it."""

    def __init__(
        self,
        *,
        tokenizer: ChatTokenizer,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        later_systems: LaterSystems = "in_place",
    ) -> None:
        self.tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools] if tools else None
        self.kwargs = dict(template_kwargs or {})
        self._has_tail = False
        self.generation_prompt_ids: dict[tuple[str, int], tuple[list[int], int]] = {}
        """Openings of answers as ids, by the id before them; how many merge with that."""
        source = self.kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None)
        self.source = source if isinstance(source, str) else ""
        self._calls = CallFormat(lambda messages, generation_prompt: self._rendered(messages, generation_prompt))
        self.fields = AnswerFields(self._in_place, self.source)
        self._systems = SystemMessages(self.fields, later_systems)
        # a template that writes the time, or one that nobody can look into, may render the same messages differently
        # the next time
        repeats = isinstance(source, str) and "strftime_now" not in source
        self.prompt_cache: PromptCache[Any] | None = PromptCache() if repeats else None

    def with_arguments(self, more: Mapping[str, Any]) -> ChatTemplate:
        """The same template with ``more`` arguments."""
        return type(self)(tokenizer=self.tokenizer, tools=self._tools, template_kwargs={**self.kwargs, **more})

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """The text of ``messages``, with the generation_prompt of an answer after them or without; without what the template
        writes at the end of a finished conversation only."""
        text = self._apply(messages, generation_prompt=generation_prompt)
        return text if generation_prompt or not self._has_tail else text.removesuffix(self._tail)

    def _apply(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        return self._in_place(self._systems.placed(messages), generation_prompt)

    def _in_place(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        return self._rendered(self._calls.fitted(messages), generation_prompt)

    @functools.cached_property
    def _rendered(self) -> Callable[[Sequence[Message], bool], str]:
        return renderer(self.tokenizer, self._tools, self.kwargs)

    def render_prompt(self, messages: Sequence[Message]) -> Rendering:
        """The whole conversation, and the generation_prompt of the next answer."""
        whole, closed = self.render(messages, generation_prompt=True), self.render(messages, generation_prompt=False)
        if not self._has_tail and not whole.startswith(closed):
            self._has_tail = True
            closed = closed.removesuffix(self._tail)
        return Rendering(closed, whole[len(closed) :]) if whole.startswith(closed) else Rendering(whole, None)

    @functools.cached_property
    def _tail(self) -> str:
        """What is written at the end of a conversation, and not where an answer follows: Phi-3's end of text."""
        try:
            ends = [
                [
                    self._apply(_QUESTIONS[:n], generation_prompt=generation_prompt)
                    for generation_prompt in (False, True)
                ]
                for n in (1, 3)
            ]
        except PromptError:  # it says so again when it is used
            return ""
        closed, whole = ends[0]
        shared = shared_length(closed, whole)
        tails = {"", *(closed[at:] for at in range(shared + 1) if self.begins_with_added_token(whole[at:]))}
        fits = (tail for tail in tails if all(c.endswith(tail) and w.startswith(c.removesuffix(tail)) for c, w in ends))
        return min(fits, key=len, default="")

    @functools.cached_property
    def opens_thinking(self) -> bool:
        """Whether a block of thinking is opened before an answer."""
        try:
            generation_prompt = self._apply(_QUESTIONS[:1], generation_prompt=True)
        except PromptError:
            return False
        return opens_thinking(generation_prompt, self.fields.marks)

    @functools.cached_property
    def reader(self) -> AnswerReader:
        """How answers to prompts of this template are read: calls where it offers tools, and somebody reads them."""
        parser = find_format(self.tokenizer, self.kwargs) if self._tools else None
        how: Any = {"opened": self.opens_thinking, "template_kwargs": self.kwargs}
        return reader_for(self.tokenizer, offered=parser is not None, parser=parser, **how)

    @functools.cached_property
    def closing(self) -> str:
        """What the template writes after an answer; ``<|im_end|>\\n`` with ChatML, nothing where the next role's marker
        ends an answer."""
        _, found, closing = self.render(_QUESTIONS[:2], generation_prompt=False).rpartition(_SENTINEL)
        if not found:
            raise PromptError(
                "the chat template does not write the content of answers; no conversation can be continued with it"
            )
        return closing

    @functools.cached_property
    def _added_tokens(self) -> tuple[str, ...]:
        return tuple(filter(None, getattr(self.tokenizer, "get_added_vocab", dict)()))

    def begins_with_added_token(self, text: str) -> bool:
        """Whether ``text`` begins with a token that the tokenizer cuts out before it merges anything, so that nothing
        merges across its left edge."""
        return text.startswith(self._added_tokens)

    def addition(
        self, messages: Sequence[Message], held: int, said: SampledAnswer, *, asked: Rendering | None = None
    ) -> Addition | RewrittenHistory:
        """What follows the answer ``messages[held - 1]``, whose message is that of ``said``.

        ``asked`` is the rendering of the messages before that answer, where it is known.
        """
        before, answer, new = messages[: held - 1], messages[held - 1], messages[held:]
        if asked is None:
            asked = self.render_prompt(before)
        if asked.generation_prompt is None:
            return RewrittenHistory()  # nobody can tell where an answer begins
        rendered = self.render_prompt([*before, answer, *new])
        written, sampled = rendered.text, asked.text + asked.generation_prompt + said.text
        done = len(asked.text) if written.startswith(asked.text) else 0
        mark = self.closing.rstrip() or self.closing
        if written.startswith((sampled + mark)[done:], done):
            return Addition(
                written[len(sampled) :], rendered.generation_prompt or "", asked.generation_prompt + said.text, rendered
            )
        alone = self.render([*before, answer], generation_prompt=False)
        places = self._places(written, alone, asked.text, said)
        bare = self.fields.without_thinking(answer)
        if places is not None and (bare == answer or self.render([*before, bare], generation_prompt=False) != alone):
            begin, end, after = places
            return Addition(after, rendered.generation_prompt or "", alone[begin:end], rendered)
        return RewrittenHistory(drops_thinking=self._drops_thinking(before, bare, written))

    def _places(self, written: str, alone: str, asked: str, said: SampledAnswer) -> tuple[int, int, str] | None:
        """Where an answer begins and ends in ``alone``, the rendering that ends with it, and what ``written`` says
        after it. ``None`` when that begins in another way."""
        done = len(asked) if written.startswith(asked) and alone.startswith(asked) else 0
        begin = done or match_end(alone, asked)
        if begin is None:
            return None
        body, mark = self._without_end(alone, said.stop_text)
        if not mark and not said.stop_text and (mark := self._end_not_sampled(alone, said.text)):
            body = alone.removesuffix(mark)
        if not said.closed and said.thinking and not said.stop_text and (cut := body.rfind(said.thinking, begin)) >= 0:
            body, mark = body[: cut + len(said.thinking)], ""  # the template closes the thinking
        if mark and (end := match_end(written, body + mark, done)) is not None:
            return begin, len(body), written[end - len(mark) :]
        end = match_end(written, body, done)
        if end is None:
            return None
        after = written[end:]
        if mark and mark == said.stop_text:  # what ends an earlier answer stands for what ended the last one
            after = mark + after[len(added_token_at(self.tokenizer, after, 0)) :]
        return begin, len(body), after

    def _without_end(self, alone: str, stop_text: str) -> tuple[str, str]:
        """A rendering without the mark that ends its last answer, and the mark."""
        text = alone.rstrip()
        for mark in (stop_text, self.closing.rstrip()):
            if mark and text.endswith(mark):
                return text.removesuffix(mark), mark
        return alone, ""

    def _end_not_sampled(self, alone: str, text: str) -> str:
        """The token that ends an answer with calls in a rendering, where ``text`` was cut before it."""
        ends = (token for token in self._added_tokens if alone.endswith(token) and token not in text)
        return max(ends, key=len, default="")

    def _drops_thinking(self, before: Sequence[Message], bare: Message, written: str) -> bool:
        """Whether ``written`` is the history without its thinking, of which marks may stay."""
        without = [*map(self.fields.without_thinking, before), bare]
        try:
            text = self.render(without, generation_prompt=False)
        except PromptError:
            return False
        marks = re.compile("|".join(map(re.escape, self.fields.marks)))
        return match_end(marks.sub("", written), marks.sub("", self._without_end(text, "")[0])) is not None


class PlainTextTemplate(ChatTemplate):
    """Of a tokenizer without one: what a text (a message of role ``text``), its answers and further texts say, as it
    is."""

    begins_with_special_tokens = True

    @functools.cached_property
    def closing(self) -> str:
        return ""

    def _in_place(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        if {message.get("role") for message in messages} - {"text", "assistant"}:
            raise PromptError(NO_TEMPLATE)
        return "".join(map(text_of, messages))


def chat_template(
    tokenizer: ChatTokenizer,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    later_systems: LaterSystems = "in_place",
) -> ChatTemplate:
    """That of the tokenizer, or of the arguments."""
    there = has_chat_template(tokenizer) or (template_kwargs or {}).get("chat_template")
    kind = ChatTemplate if there else PlainTextTemplate
    return kind(tokenizer=tokenizer, tools=tools, template_kwargs=template_kwargs, later_systems=later_systems)


def history_window(before: Sequence[Message], new: Sequence[Message], users: Sequence[int]) -> list[Message]:
    """The part of the history that a template may look at when it writes ``new`` after an answer; ``users`` are the
    places of users' messages in it."""
    if len(before) < WINDOW_FROM or not users:
        return list(before)
    user = users[-1]
    system = next(i for i, message in enumerate(before) if message.get("role") not in SYSTEM_ROLES)
    tail = user + 1
    if all(message.get("role") == "tool" for message in new):
        # templates group tool results and tell the steps after the last user message apart: begin at an answer, and
        # keep that user message
        latest = min(len(before) - 1, max(user + 1, len(before) - TAIL))
        tail = next((i for i in range(latest, user, -1) if before[i].get("role") == "assistant"), user + 1)
    return [*before[: min(system, user)], before[user], *before[tail:]]


class PromptCache(Generic[T]):
    """What was made of the first messages of recent conversations, for the other members of a group: the last 128, or
    as many as belong to 2 MB of messages (20 MB of results). Thread-safe; of two threads both may make it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[bytes, T] = {}  # those used last at the end

    def get(self, messages: Sequence[Any], make: Callable[[], T]) -> T:
        """What ``make()`` gave for these messages before, or gives now."""
        key = _key(messages)
        if key is None:
            return make()
        with self._lock:
            held = self._held.pop(key, None)
        made = make() if held is None else held
        with self._lock:
            self._held[key] = made
            while len(self._held) > _PROMPTS or sum(map(len, self._held)) > _HELD_BYTES:
                del self._held[next(iter(self._held))]
        return made


def _key(messages: Sequence[Any]) -> bytes | None:
    """Messages are equal when their types, their order and their values are: a template may tell ``1`` from ``True``, a
    list from a tuple. ``None`` when there is a value that is not Python's own, whose text nobody can know."""
    try:
        # format 2 writes equal values as equal bytes; later ones note which objects are the same object
        return marshal.dumps(list(messages), 2)
    except ValueError:
        return None
