"""What a chat template adds to a conversation, told from its renderings.

A template is a program: what it writes for the first messages may depend on those after them. The only sound question
to it is a rendering, so that is what is asked: with the new messages and without them. Where both agree on what is
held, the difference is what the template adds. Agreement is meant up to white space and empty blocks
(``<think>\\n\\n</think>``): templates trim and pad answers, and the tokens that were sampled are the truth about those.
Where a template leaves out or moves anything else, it rewrites history and ``Addition`` is ``None``.

Rendering everything in each turn would make a conversation of n turns cost n² renderings of messages. From
``WINDOW_FROM`` messages on, only the ends are rendered: the system messages, the last user message and what follows it
(at least the last ``TAIL`` messages). That is exact for templates that look no further back. Nobody can know a
template, so the whole conversation is rendered again each time it has doubled and compared with all that was written
before; a template that rewrote something the ends did not show is found then: the prompt forks, and this conversation
is rendered whole from there on. The cost stays linear.
"""

from __future__ import annotations

import functools
import json
import marshal
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agl_slime.errors import PromptError
from agl_slime.tokens.codec import shared_length
from agl_slime.tokens.reader import opens_thinking, thinking_marks
from agl_slime.tokens.rendering import renderer
from agl_slime.tokens.tokenizer import NO_TEMPLATE, ChatTokenizer, has_chat_template

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
_BLANK = re.compile(r"\s+|<(\w+)>\s*</\1>")
_QUESTIONS: list[Message] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": _SENTINEL},
    {"role": "user", "content": "?"},
]
_CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
_SYSTEM_ROLES = frozenset({"system", "developer"})


@dataclass(frozen=True, slots=True)
class Rendering:
    """Messages as text, and apart from it the ``opening`` of an answer to them; ``None`` when it cannot be told apart
    and is in the text."""

    text: str
    opening: str | None


@dataclass(frozen=True, slots=True)
class Addition:
    """``text`` is what the template writes after a sampled answer up to the end of the new messages, ``opening`` what
    it writes before the next one.

    ``rendering`` is what both were told from, where that was the whole conversation.
    """

    text: str
    opening: str
    rendering: Rendering | None


class ChatTemplate:
    """The chat template of a tokenizer with one set of tools and template arguments.

    ``first_prompts`` is what conversations keep of their beginnings for others that begin in the same way; ``None``
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
    ) -> None:
        self.tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools] if tools else None
        self._kwargs = dict(template_kwargs or {})
        self._has_tail = False
        self.openings: dict[tuple[str, int], tuple[list[int], int]] = {}
        """Openings of answers as ids, by the id before them; how many merge with that."""
        source = self._kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None)
        # a template that writes the time, or one that nobody can look into, may render the same messages differently
        # the next time
        repeats = isinstance(source, str) and "strftime_now" not in source
        self.first_prompts: FirstPrompts[Any] | None = FirstPrompts() if repeats else None

    def render(self, messages: Sequence[Message], *, opening: bool) -> str:
        """The text of ``messages``, with the opening of an answer after them or without; without what the template
        writes at the end of a finished conversation only."""
        text = self._apply(messages, opening=opening)
        return text if opening or not self._has_tail else text.removesuffix(self._tail)

    def _apply(self, messages: Sequence[Message], *, opening: bool) -> str:
        return self._as_is(self._with_systems_first(messages), opening=opening)

    def _as_is(self, messages: Sequence[Message], *, opening: bool) -> str:
        if any(message.get("tool_calls") for message in messages) and self._writes_arguments_as_text:
            messages = [_with_arguments_as_text(message) for message in messages]
        return self._rendered(messages, opening)

    @functools.cached_property
    def _rendered(self) -> Callable[[Sequence[Message], bool], str]:
        return renderer(self.tokenizer, self._tools, self._kwargs)

    @functools.cached_property
    def _writes_arguments_as_text(self) -> bool:
        """Whether arguments of calls are to be JSON in a string (DeepSeek-V3), and objects are refused."""
        objects: list[Message] = [*_QUESTIONS[:1], {"role": "assistant", "content": "", "tool_calls": [_CALL]}]
        texts = [_with_arguments_as_text(message) for message in objects]

        def refused(messages: list[Message]) -> bool:
            try:
                self._rendered(messages, True)
            except PromptError:
                return True
            return False

        return refused(objects) and not refused(texts)

    def _with_systems_first(self, messages: Sequence[Message]) -> Sequence[Message]:
        """``messages`` with the system's and the developer's as one at the beginning, where the template refuses or
        drops them elsewhere (SGLang merges them as well); a developer's are the system's where it knows only those."""
        roles = [message.get("role") for message in messages]
        if _SYSTEM_ROLES.isdisjoint(roles[1:]) and roles[:1] != ["developer"]:
            return messages
        if "developer" in roles and not self._writes_developers:
            messages = [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]
        systems = [message for message in messages if message.get("role") in _SYSTEM_ROLES]
        if systems == messages[:1] or self._writes_systems:
            return messages
        merged = {"role": systems[0]["role"], "content": "\n\n".join(filter(None, map(_text_of, systems)))}
        return [merged, *(message for message in messages if message.get("role") not in _SYSTEM_ROLES)]

    @functools.cached_property
    def _writes_systems(self) -> bool:
        """Whether a system message is written wherever it stands."""
        return self._writes("system", "system", "user", "assistant", "system", "user")

    @functools.cached_property
    def _writes_developers(self) -> bool:
        return self._writes("developer", "user")

    def _writes(self, *roles: str) -> bool:
        messages = [{"role": role, "content": f"{_SENTINEL}{n}"} for n, role in enumerate(roles)]
        try:
            text = self._as_is(messages, opening=True)
        except PromptError:
            return False
        return all(message["content"] in text for message in messages)

    def render_prompt(self, messages: Sequence[Message]) -> Rendering:
        """The whole conversation, and the opening of the next answer."""
        whole, closed = self.render(messages, opening=True), self.render(messages, opening=False)
        if not self._has_tail and not whole.startswith(closed):
            self._has_tail = True
            closed = closed.removesuffix(self._tail)
        return Rendering(closed, whole[len(closed) :]) if whole.startswith(closed) else Rendering(whole, None)

    @functools.cached_property
    def _tail(self) -> str:
        """What is written at the end of a conversation, and not where an answer follows: Phi-3's end of text."""
        try:
            ends = [[self._apply(_QUESTIONS[:n], opening=opening) for opening in (False, True)] for n in (1, 3)]
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
            opening = self._apply(_QUESTIONS[:1], opening=True)
        except PromptError:
            return False
        source = self._kwargs.get("chat_template") or getattr(self.tokenizer, "chat_template", None)
        return opens_thinking(opening, thinking_marks(source))

    @functools.cached_property
    def closing(self) -> str:
        """What the template writes after an answer; ``<|im_end|>\\n`` with ChatML, nothing where the next role's marker
        ends an answer."""
        _, found, closing = self.render(_QUESTIONS[:2], opening=False).rpartition(_SENTINEL)
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

    def addition(self, messages: Sequence[Message], held: int, *, asked: Rendering | None = None) -> Addition | None:
        """What follows the answer ``messages[held - 1]``; ``None`` when the template renders what is held differently
        once the new messages follow.

        ``asked`` is the rendering of the messages before that answer, where it is known.
        """
        before, answer, new = messages[: held - 1], messages[held - 1], messages[held:]
        if asked is None:
            asked = self.render_prompt(before)
        if asked.opening is None:
            return None  # nobody can tell where an answer begins
        rendered = self.render_prompt([*before, answer, *new])
        written, sampled = rendered.text, asked.text + asked.opening + str(answer.get("content") or "")
        done = len(asked.text) if written.startswith(asked.text) else 0
        text = self._after_answer(written, sampled, done, [*before, answer])
        return None if text is None else Addition(text, rendered.opening or "", rendered)

    def _after_answer(self, written: str, sampled: str, done: int, messages: Sequence[Message]) -> str | None:
        """What ``written`` adds to the answer that ``sampled`` ends with, its closing first, if all before is the same
        but for white space and empty blocks; the first ``done`` characters are the same."""
        mark = self.closing.rstrip() or self.closing
        if written.startswith((sampled + mark)[done:], done):
            return written[len(sampled) :]
        alone = self.render(messages, opening=False)  # the answer as the template writes it when nothing follows
        if written.startswith(alone) and same_but_for_blanks(alone[done:], (sampled + mark)[done:]):
            return self.closing + written[len(alone) :]
        end = _end_of_same(written, sampled + mark, done) if mark.strip() else None
        return None if end is None or not written.endswith(mark, done, end) else written[end - len(mark) :]


class NoTemplate(ChatTemplate):
    """Of a tokenizer without one: what a text (a message of role ``text``), its answers and further texts say, as it
    is."""

    begins_with_special_tokens = True

    @functools.cached_property
    def closing(self) -> str:
        return ""

    def _as_is(self, messages: Sequence[Message], *, opening: bool) -> str:
        if {message.get("role") for message in messages} - {"text", "assistant"}:
            raise PromptError(NO_TEMPLATE)
        return "".join(map(_text_of, messages))


def chat_template(
    tokenizer: ChatTokenizer,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """That of the tokenizer, or of the arguments."""
    there = has_chat_template(tokenizer) or (template_kwargs or {}).get("chat_template")
    kind = ChatTemplate if there else NoTemplate
    return kind(tokenizer=tokenizer, tools=tools, template_kwargs=template_kwargs)


def _with_arguments_as_text(message: Message) -> Message:
    """``message`` with the arguments of its calls as JSON in strings."""

    def of(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            return dict(call)
        function = {**function, "arguments": json.dumps(arguments or {}, ensure_ascii=False)}
        return {**call, "function": function} if "function" in call else function

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [of(call) for call in calls]} if calls else message


def _text_of(message: Message) -> str:
    """The content of a message, a string or a list of parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def ends_of(before: Sequence[Message], new: Sequence[Message], users: Sequence[int]) -> list[Message]:
    """The part of the history that a template may look at when it writes ``new`` after an answer; ``users`` are the
    places of users' messages in it."""
    if len(before) < WINDOW_FROM or not users:
        return list(before)
    user = users[-1]
    system = next(i for i, message in enumerate(before) if message.get("role") not in _SYSTEM_ROLES)
    tail = user + 1
    if all(message.get("role") == "tool" for message in new):
        # templates group tool results and tell the steps after the last user message apart: begin at an answer, and
        # keep that user message
        latest = min(len(before) - 1, max(user + 1, len(before) - TAIL))
        tail = next((i for i in range(latest, user, -1) if before[i].get("role") == "assistant"), user + 1)
    return [*before[: min(system, user)], before[user], *before[tail:]]


def same_but_for_blanks(a: str, b: str) -> bool:
    """Whether two texts differ in white space and empty blocks at most."""
    return a == b or squash(a) == squash(b)


def squash(text: str) -> str:
    """``text`` without white space and empty blocks."""
    return _BLANK.sub("", text)


def _end_of_same(written: str, sampled: str, done: int) -> int | None:
    """Where ``written`` has said what ``sampled`` says, from character ``done`` of both on; ``None`` when it says
    something else."""
    wanted = squash(sampled[done:])
    at, found = done, 0
    for blank in _BLANK.finditer(written, done):
        piece = written[at : blank.start()]
        if found + len(piece) >= len(wanted):
            break
        if not wanted.startswith(piece, found):
            return None
        at, found = blank.end(), found + len(piece)
    end = at + len(wanted) - found
    return end if written[at:end] == wanted[found:] else None


class FirstPrompts(Generic[T]):
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
