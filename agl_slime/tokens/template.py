"""The text that a chat template adds to a conversation, derived from its renderings.

A template is a program: its text for the first messages may depend on later ones. So it is rendered with the new
messages and without them. If both renderings agree on the history, the difference is the addition. Answers are given in
parts, each in the field that the template reads (``fields``).

The template's own spelling of a sampled answer does not matter (white space in a call's JSON, padding around thinking):
the sampled tokens take its place. The comparison ignores white space and empty blocks (``<think>\n\n</think>``). If
the renderings of the history differ otherwise, the result is ``RewrittenHistory`` in place of an ``Addition``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import marshal
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agl_slime.errors import PromptError
from agl_slime.tokens.blanks import match_end
from agl_slime.tokens.codec import shared_length
from agl_slime.tokens.fields import AnswerFields, Message, Render
from agl_slime.tokens.formats import ToolParser, find_format
from agl_slime.tokens.reader import AnswerReader, opens_thinking, reader_for
from agl_slime.tokens.rendering import Renderer, rendered_or_none, renderer
from agl_slime.tokens.systems import LaterSystems, SystemMessages, text_of
from agl_slime.tokens.tokenizer import NO_TEMPLATE, ChatTokenizer, added_token_at, has_chat_template, template_source

T = TypeVar("T")

# Members of a group are claimed one after the other, so a few first prompts are enough.
_MAX_PROMPTS = 128
_MAX_KEY_BYTES = 2_000_000

# An answer in renderings that show the text after it; letters only, so that no template trims or splits it.
_SENTINEL = "SENTINELanswerSENTINEL"
_QUESTION: Message = {"role": "user", "content": "?"}
_QUESTIONS: list[Message] = [_QUESTION, {"role": "assistant", "content": _SENTINEL}, _QUESTION]


@dataclass(frozen=True, slots=True)
class Rendering:
    """Messages as text, and the generation prompt after them; ``None`` when that is in the text and not separable."""

    text: str
    generation_prompt: str | None


@dataclass(frozen=True, slots=True)
class Addition:
    """The text after a sampled answer: ``text`` up to the end of the new messages, then ``generation_prompt``.
    ``answer`` is the answer as the template itself writes it, with its own generation prompt. ``rendering`` is of the
    whole conversation, if that was rendered."""

    text: str
    generation_prompt: str
    answer: str
    rendering: Rendering | None


@dataclass(frozen=True, slots=True)
class RewrittenHistory:
    """The template renders the history differently with new messages; ``drops_thinking``: without earlier thinking."""

    drops_thinking: bool = False


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """A sampled answer: its ``text``, and the text of the stop token that the engine sampled at its end. ``closed`` is
    off for an answer that ended within its ``thinking``."""

    text: str
    stop_text: str = ""
    closed: bool = True
    thinking: str = ""


class ChatTemplate:
    """The chat template of a tokenizer with one set of tools and template arguments. ``prompt_cache`` has the first
    prompts of recent conversations, for the other members of a group; ``None`` if the template may render the same
    messages differently the next time."""

    begins_with_special_tokens = False
    """Whether the first prompt has the special tokens that the tokenizer adds to a text; templates write them."""

    def __init__(
        self,
        *,
        tokenizer: ChatTokenizer,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        later_systems: LaterSystems = "in_place",
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = [dict(tool) for tool in tools] if tools else None
        self.kwargs = dict(template_kwargs or {})
        self._has_tail = False
        self.generation_prompt_ids: dict[tuple[str, int], tuple[list[int], int]] = {}
        """By generation prompt and the id before it: its ids, and the number of open token boundaries before them."""
        self.source = template_source(tokenizer, self.kwargs)
        self._call_format = CallFormat(lambda messages, prompting: self._renderer(messages, prompting))
        self.fields = AnswerFields(self._render_calls, self.source)
        self._systems = SystemMessages(self.fields, later_systems)
        # a template that writes the time, or whose source is unknown, may render the same messages differently
        repeats = self.source and "strftime_now" not in self.source
        self.prompt_cache: PromptCache[Any] | None = PromptCache() if repeats else None

    def with_arguments(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        return type(self)(tokenizer=self.tokenizer, tools=self.tools, template_kwargs={**self.kwargs, **arguments})

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """The text of ``messages``, with a generation prompt or without; without the text that the template writes only
        at the end of a finished conversation."""
        if not generation_prompt and (parts := self._parts(messages)) is not None:
            return parts[0]
        text = self._render_arranged(messages, generation_prompt)
        return text if generation_prompt or not self._has_tail else text.removesuffix(self._tail)

    def _render_arranged(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        return self._render_calls(self._systems.arrange(messages), generation_prompt)

    def _render_calls(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        return self._renderer(self._call_format.convert(messages), generation_prompt)

    @functools.cached_property
    def _renderer(self) -> Renderer:
        return renderer(self.tokenizer, self.tools, self.kwargs)

    def render_prompt(self, messages: Sequence[Message]) -> Rendering:
        """The whole conversation, and the generation prompt of the next answer."""
        if (parts := self._parts(messages)) is not None:
            return Rendering(*parts)
        whole, closed = self.render(messages, generation_prompt=True), self.render(messages, generation_prompt=False)
        if not self._has_tail and not whole.startswith(closed):
            self._has_tail = True
            closed = closed.removesuffix(self._tail)
        return Rendering(closed, whole[len(closed) :]) if whole.startswith(closed) else Rendering(whole, None)

    def _parts(self, messages: Sequence[Message]) -> tuple[str, str] | None:
        return self._renderer.parts(self._call_format.convert(self._systems.arrange(messages)))

    @functools.cached_property
    def _tail(self) -> str:
        """The text at the end of a conversation without a generation prompt: Phi-3's end of text."""
        try:
            ends = [[self._render_arranged(_QUESTIONS[:n], prompting) for prompting in (False, True)] for n in (1, 3)]
        except PromptError:  # the rendering itself raises it again
            return ""
        closed, whole = ends[0]
        shared = shared_length(closed, whole)
        tails = {"", *(closed[start:] for start in range(shared + 1) if self.begins_with_added_token(whole[start:]))}
        fits = (tail for tail in tails if all(c.endswith(tail) and w.startswith(c.removesuffix(tail)) for c, w in ends))
        return min(fits, key=len, default="")

    @functools.cached_property
    def opens_thinking(self) -> bool:
        """Whether the generation prompt opens a block of thinking."""
        prompt = rendered_or_none(self._render_arranged, _QUESTIONS[:1], True)
        return prompt is not None and opens_thinking(prompt, self.fields.marks)

    @functools.cached_property
    def reader(self) -> AnswerReader:
        """The reader of answers to prompts of this template; it reads calls if there are tools and a parser."""
        return self.reader_with(find_format(self.tokenizer, self.kwargs) if self.tools else None)

    def reader_with(self, parser: ToolParser | None) -> AnswerReader:
        """``reader`` with another parser of calls, or none."""
        return reader_for(self.tokenizer, opened=self.opens_thinking, parser=parser, template_kwargs=self.kwargs)

    @functools.cached_property
    def closing(self) -> str:
        """The text after an answer: ``<|im_end|>\\n`` with ChatML, empty if the next role's marker ends an answer."""
        _, sentinel, closing = self.render(_QUESTIONS[:2], generation_prompt=False).rpartition(_SENTINEL)
        if not sentinel:
            raise PromptError(
                "the chat template does not write the content of answers; no conversation can be continued with it"
            )
        return closing

    @functools.cached_property
    def _added_tokens(self) -> tuple[str, ...]:
        return tuple(filter(None, getattr(self.tokenizer, "get_added_vocab", dict)()))

    def begins_with_added_token(self, text: str) -> bool:
        """Whether ``text`` begins with an added token: tokenizers split there, so no merge crosses its left edge."""
        return text.startswith(self._added_tokens)

    def addition(
        self, messages: Sequence[Message], answered: int, sampled: SampledAnswer, *, prompt: Rendering | None = None
    ) -> Addition | RewrittenHistory:
        """The text after the answer ``messages[answered - 1]``, which is ``sampled``; ``prompt`` is the rendering of
        the messages before it, if there is one."""
        history, answer, new = messages[: answered - 1], messages[answered - 1], messages[answered:]
        if prompt is None:
            prompt = self.render_prompt(history)
        if prompt.generation_prompt is None:
            return RewrittenHistory()  # the beginning of the answer cannot be located
        rendered = self.render_prompt([*history, answer, *new])
        written, generation_prompt = rendered.text, rendered.generation_prompt or ""
        answer_text = prompt.generation_prompt + sampled.text
        expected = prompt.text + answer_text
        done = len(prompt.text) if written.startswith(prompt.text) else 0
        mark = self.closing.rstrip() or self.closing
        if written.startswith((expected + mark)[done:], done):
            return Addition(written[len(expected) :], generation_prompt, answer_text, rendered)
        up_to_answer = self.render([*history, answer], generation_prompt=False)
        places = self._locate(written, up_to_answer, prompt.text, sampled)
        bare = self.fields.without_thinking(answer)
        if places and (bare == answer or self.render([*history, bare], generation_prompt=False) != up_to_answer):
            begin, end, rest = places
            return Addition(rest, generation_prompt, up_to_answer[begin:end], rendered)
        return RewrittenHistory(drops_thinking=self._drops_thinking([*history, answer], written))

    def _locate(self, written: str, rendering: str, prompt: str, sampled: SampledAnswer) -> tuple[int, int, str] | None:
        """Begin and end of an answer in ``rendering``, which ends with it, and the text of ``written`` after it.
        ``None`` if ``written`` has another history."""
        done = len(prompt) if written.startswith(prompt) and rendering.startswith(prompt) else 0
        begin = done or match_end(rendering, prompt)
        if begin is None:
            return None
        stop = sampled.stop_text
        body, mark = self._without_end(rendering, stop)
        if not mark and not stop and (mark := self._end_not_sampled(rendering, sampled.text)):
            body = rendering.removesuffix(mark)
        thinking = sampled.thinking
        if not sampled.closed and thinking and not stop and (cut := body.rfind(thinking, begin)) >= 0:
            body, mark = body[: cut + len(thinking)], ""  # the template closes the thinking
        if mark and (end := match_end(written, body + mark, done)) is not None:
            return begin, len(body), written[end - len(mark) :]
        end = match_end(written, body, done)
        if end is None:
            return None
        rest = written[end:]
        if mark and mark == stop:  # the end mark of an earlier answer replaces the sampled end mark
            rest = mark + rest[len(added_token_at(self.tokenizer, rest, 0)) :]
        return begin, len(body), rest

    def _without_end(self, rendering: str, stop_text: str) -> tuple[str, str]:
        """A rendering without the end mark of its last answer, and the mark."""
        text = rendering.rstrip()
        for mark in (stop_text, self.closing.rstrip()):
            if mark and text.endswith(mark):
                return text.removesuffix(mark), mark
        return rendering, ""

    def _end_not_sampled(self, rendering: str, text: str) -> str:
        """The token that ends an answer with calls in a rendering, if ``text`` was cut before it."""
        ends = (token for token in self._added_tokens if rendering.endswith(token) and token not in text)
        return max(ends, key=len, default="")

    def _drops_thinking(self, history: list[Message], written: str) -> bool:
        """Whether ``written`` is the history without all its thinking or the last answer's; marks of it may stay."""
        bare = [*map(self.fields.without_thinking, history)]
        marks = re.compile("|".join(map(re.escape, self.fields.marks)))
        for without in (bare, [*history[:-1], bare[-1]]):
            if without == history:
                continue
            try:
                text = self.render(without, generation_prompt=False)
            except PromptError:
                continue
            if match_end(marks.sub("", written), marks.sub("", self._without_end(text, "")[0])) is not None:
                return True
        return False


class PlainTextTemplate(ChatTemplate):
    """The template of a tokenizer without one: the contents of messages of role ``text`` and of answers, joined."""

    begins_with_special_tokens = True

    @functools.cached_property
    def closing(self) -> str:
        return ""

    def _render_calls(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        if {message.get("role") for message in messages} - {"text", "assistant"}:
            raise PromptError(NO_TEMPLATE)
        return "".join(map(text_of, messages))

    def _parts(self, messages: Sequence[Message]) -> tuple[str, str] | None:
        return self._render_arranged(messages, False), ""


def chat_template(
    tokenizer: ChatTokenizer,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    later_systems: LaterSystems = "in_place",
) -> ChatTemplate:
    """The template of the tokenizer, or the one in ``template_kwargs``."""
    exists = has_chat_template(tokenizer) or (template_kwargs or {}).get("chat_template")
    kind = ChatTemplate if exists else PlainTextTemplate
    return kind(tokenizer=tokenizer, tools=tools, template_kwargs=template_kwargs, later_systems=later_systems)


class PromptCache(Generic[T]):
    """Results by the first messages of recent conversations, for the other members of a group: the last 128, or fewer
    with more than 2 MB of messages (20 MB of results). Thread-safe; two threads may both compute a result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: dict[bytes, T] = {}  # the most recently used last

    def get(self, messages: Sequence[Any], make: Callable[[], T]) -> T:
        """The cached result for these messages, or ``make()``."""
        key = _key(messages)
        if key is None:
            return make()
        with self._lock:
            cached = self._results.pop(key, None)
        result = make() if cached is None else cached
        with self._lock:
            self._results[key] = result
            while len(self._results) > _MAX_PROMPTS or sum(map(len, self._results)) > _MAX_KEY_BYTES:
                del self._results[next(iter(self._results))]
        return result


def _key(messages: Sequence[Any]) -> bytes | None:
    """A key that is equal for equal types, order and values: a template may distinguish ``1`` from ``True``, a list
    from a tuple. ``None`` for values of other types than Python's own, whose text is unpredictable."""
    try:
        # format 2 writes equal values as equal bytes; later formats mark identical objects
        return marshal.dumps(list(messages), 2)
    except ValueError:
        return None


_OBJECTS = {"id": "call00000", "type": "function", "function": {"name": "SENTINELname", "arguments": {"x": 1}}}


class CallFormat:
    """The form that one template accepts; ``render`` is the template's."""

    def __init__(self, render: Render) -> None:
        self._rendered = functools.partial(rendered_or_none, render, generation_prompt=True)

    def convert(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not any(message.get("tool_calls") for message in messages):
            return messages
        if self._takes_arguments_as_text:
            messages = [_with_arguments_as_text(message) for message in messages]
        return [*self._with_ids(messages)]

    @functools.cached_property
    def _takes_arguments_as_text(self) -> bool:
        """Whether the template refuses arguments as objects and accepts JSON in a string (DeepSeek-V3)."""
        called: list[Message] = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [_OBJECTS]}]
        as_text = [_with_arguments_as_text(message) for message in called]
        return self._rendered(called) is None and self._rendered(as_text) is not None

    @functools.cached_property
    def _with_ids(self) -> Callable[[Sequence[Message]], Iterable[Message]]:
        """Gives calls ids that the template accepts: nine letters and digits (Mistral), ids that name the function,
        whose name is not written apart (Kimi), or any."""
        call: Message = {**_OBJECTS, "id": "SENTINEL_id"}
        called: list[Message] = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
        called.append({"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "r"})
        if self._takes_arguments_as_text:
            called = [_with_arguments_as_text(message) for message in called]
        short = functools.partial(_with_ids, _short)
        if (text := self._rendered(called)) is None:
            return short if self._rendered([*short(called)]) is not None else iter
        named = call["id"] in text and call["function"]["name"] not in text
        return functools.partial(_with_ids, _naming) if named else iter


def _with_arguments_as_text(message: Message) -> Message:
    """``message`` with the arguments of its calls as JSON in strings."""

    def convert(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            return dict(call)
        function = {**function, "arguments": json.dumps(arguments or {}, ensure_ascii=False)}
        return {**call, "function": function} if "function" in call else function

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [convert(call) for call in calls]} if calls else message


def _with_ids(new_id: Callable[[str, str, int], str], messages: Iterable[Message]) -> Iterator[Message]:
    """``messages`` with ids of calls by id, function and place in the conversation. Results without an id belong to the
    last answer's calls, in their order."""
    ids: dict[Any, str] = {}
    count, last = 0, iter(())
    for message in messages:
        if calls := message.get("tool_calls"):
            named: list[Message] = []
            for number, call in enumerate(calls, count):
                identity, name = str(call.get("id") or ""), str(call.get("function", call).get("name"))
                named.append({**call, "id": new_id(identity, name, number)})
                ids[identity] = named[-1]["id"]
            count, last = count + len(calls), (call["id"] for call in named)
            message = {**message, "tool_calls": named}
        elif message.get("role") == "tool":
            client_id = message.get("tool_call_id")
            identity = ids.get(client_id) or new_id(str(client_id), "", 0) if client_id else next(last, "")
            message = {**message, "tool_call_id": identity}
        yield message


def _naming(identity: str, name: str, number: int) -> str:
    """As Kimi's models write them."""
    fits = not name or re.fullmatch(rf"(?:functions\.)?{re.escape(name)}(?::\d+)?", identity)
    return identity if fits else f"functions.{name}:{number}"


def _short(identity: str, name: str, number: int) -> str:
    """Nine letters and digits, equal for equal ids."""
    fits = len(identity) == 9 and identity.isascii() and identity.isalnum()
    return identity if fits else hashlib.blake2b(identity.encode("utf-8", "surrogatepass")).hexdigest()[:9]
