"""A conversation, as text for people and templates and as token ids for the engine.

The next prompt is the last prompt and its answer, verbatim, plus the tokens of the text that the chat template adds;
sampled text is never tokenized again. If the template renders the history differently once more messages follow, or the
agent edited the history, the prompt forks: it keeps the longest unchanged prefix, renders the rest, and the fork is
classified and counted. A fork costs context tokens, never a sampled one: each is trained where it was sampled.

New text follows a special token (an end of turn); tokenizers split there before BPE, so no merge crosses it.
Where there is none (a partial answer that is continued), ``open_boundaries`` counts the token boundary: the ids left of
it are still the engine's, those right of it a valid encoding.

From ``_WINDOW_FROM`` messages on only a window is rendered: the system messages, the last user message and the messages
after it (at least the last ``_WINDOW_TAIL``). To check, the whole conversation is rendered each time its length has
doubled (``docs/decisions/003-history-windows.md``).
"""

from __future__ import annotations

import copy
import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

from agl_slime.engine.client.generation import Generation
from agl_slime.engine.client.prompt import PromptIds
from agl_slime.errors import ConfigError
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.blanks import TextDigest
from agl_slime.tokens.codec import TokenArray, TokenBuffer, common_prefix, shared_length, token_array
from agl_slime.tokens.fields import AnswerMessages
from agl_slime.tokens.forks import ForkReason, classify_edit, explain_once
from agl_slime.tokens.reader import AnswerReader
from agl_slime.tokens.systems import SYSTEM_ROLES
from agl_slime.tokens.template import Addition, ChatTemplate, Message, Rendering, RewrittenHistory, SampledAnswer
from agl_slime.tokens.thinking import thinking_argument
from agl_slime.tokens.tokenizer import encode_text, longest_prefix


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A sampled answer: message ``n_messages - 1``, ids ``[start:end]``; ``continued`` is its text before sampling."""

    n_messages: int
    start: int
    end: int
    continued: str
    stop_text: str  # of the stop token that the engine sampled at its end; empty without one
    history_end: int  # ids ``[:history_end]`` are the prompt without its generation prompt; 0 if not separable


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt: ids ``[:keep]`` of the last prompt and answer, then ``added``."""

    keep: int
    added: TokenArray
    history_end: int  # as in ``SampledTurn``
    open_boundaries: int
    rendering: Rendering | None  # of the whole conversation without a partial answer, if it was rendered
    more_text: tuple[str, ...] = ()  # without a rendering: the last answer as the template writes it, and the new text
    fork: ForkReason | None = None

    @property
    def length(self) -> int:
        return self.keep + len(self.added)


# Tokenizing takes about a millisecond per this many characters; a longer text is worth a thread.
LONG_TEXT_CHARS = 8_000
_WINDOW_FROM, _WINDOW_TAIL = 32, 8  # messages
_MAX_GENERATION_PROMPTS = 256  # kept per template; most have one


class ChatContext:
    """A conversation that grows by messages (``add``) and by sampled answers (``add_answer``).

    ``messages`` may be edited in any way between two prompts. If the last message is the assistant's, the next answer
    continues its text. ``forks`` counts forked prompts by reason; ``open_boundaries`` counts open token boundaries.
    ``kept_tokens`` is the number of tokens that the last answered prompt shared with the prompt and answer before it,
    and ``fork`` the reason if that was not all of them. With ``keep_stop_token`` an answer that ended with a stop token
    is continued after that token; without it, removing the token is a fork. With ``copies=False`` messages are not
    copied to detect edits, as only lists of messages are edited, and answers that were not sampled here are expected in
    parts, from a client. ``reader`` splits answers into parts, by default the template's own.

    The content of an answer's message is the whole sampled text, for people and agents; the template gets its parts in
    the fields that it reads.
    """

    def __init__(
        self,
        *,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        keep_stop_token: bool = False,
        copies: bool = True,
        reader: AnswerReader | None = None,
    ) -> None:
        if not messages:
            raise ConfigError("the prompt has no messages; build_prompt must return at least one")
        self.template = template
        self._keep_stop_token = keep_stop_token
        self._copies = copies
        self._tokenizer = template.tokenizer
        self._answers = AnswerMessages(template.fields, reader or template.reader, all_raw=copies)
        self.messages: list[Message] = [dict(message) if copies else cast(Message, message) for message in messages]
        self.forks: Counter[ForkReason] = Counter()
        self.open_boundaries = 0
        self.kept_tokens = 0
        self.fork: ForkReason | None = None
        self._tokens = TokenBuffer()
        self._turns: list[SampledTurn] = []
        self._history: list[Message] = []  # the messages of ``_tokens`` as they were, to detect edits
        self._users: list[int] = []  # indices of the users' messages in it
        self._last_prompt: tuple[Plan, list[Message]] | None = None  # with the messages it was rendered from
        self._rendering: Rendering | None = None  # of the messages before the last answer
        self._digest = TextDigest()  # of those messages and the generation prompt after them
        self._rendered_at = 0  # number of messages when the whole conversation was last rendered
        self._windows_exact = True  # a window of the conversation shows the addition
        self._checked_steps: frozenset[frozenset[tuple[Any, Any]]] = frozenset()  # pairs of roles of such windows

    @property
    def token_ids(self) -> TokenArray:
        """The last prompt and its answer: a read-only view that never changes and shares the conversation's memory."""
        return self._tokens.ids

    def add(self, *messages: Mapping[str, Any]) -> None:
        """Append messages of the user, of tools, of the environment."""
        self.messages.extend(dict(message) for message in messages)

    def prompt_ids(self) -> list[int]:
        """Token ids of the whole conversation, with the generation prompt of the next answer."""
        _, unchanged, make = self._prepare_prompt()
        return [*self._finish_prompt(unchanged, make)]

    async def prompt(self) -> PromptIds:
        """``prompt_ids()``; in a thread if much text has to be tokenized, as at most forks."""
        chars, unchanged, make = self._prepare_prompt()
        if chars <= LONG_TEXT_CHARS:
            return self._finish_prompt(unchanged, make)
        return await run_in_thread(self._finish_prompt, unchanged, make)

    def _finish_prompt(self, unchanged: int, make: Callable[[], Plan]) -> PromptIds:
        plan = make()
        new = self.messages[unchanged:]
        self._last_prompt = plan, [*self._history[:unchanged], *(map(dict, new) if self._copies else new)]
        return self._tokens.prompt(plan.keep, plan.added)

    def add_answer(self, prompt_ids: Sequence[int], generation: Generation) -> Message:
        """Append the answer that was sampled after ``prompt_ids``, the result of the last ``prompt_ids()``."""
        plan, prompt_messages = self._last_prompt or (None, [])
        length = len(prompt_ids)
        if plan is None or plan.length != length:
            last = f"of {plan.length} tokens" if plan else "and there is none"
            raise ConfigError(f"prompt_ids must be the last result of prompt_ids(), {last}; got {length} tokens")
        self._last_prompt = None
        self.kept_tokens, self.fork = self._compare_prompt(plan, prompt_ids)
        while self._turns and self._turns[-1].end > plan.keep:
            self._turns.pop()
        self._rendering = plan.rendering
        if plan.rendering is not None:
            self._digest = TextDigest(plan.rendering.text)
        elif plan.more_text:
            self._digest.add(*plan.more_text)
        self._tokens.cut(plan.keep)
        self._tokens.extend(plan.added)
        self._tokens.extend(generation.output_ids)
        self.open_boundaries += plan.open_boundaries
        if self.fork is not None:
            self.forks[self.fork] += 1
            explain_once(self.fork, self._thinking_hint if self.fork is ForkReason.DROPPED_THINKING else str)
        continues = _continues(prompt_messages)
        continued = _content(prompt_messages[-1]) if continues else ""
        beginning = self.messages.pop() if continues else {"role": "assistant"}
        message: Message = {**beginning, "content": continued + answer_text(generation)}
        self._answers.add_sampled(message["content"], () if continued else generation.output_ids)
        self.messages.append(message)
        history = [*(prompt_messages[:-1] if continues else prompt_messages), message]
        place = len(history), plan.length, len(self._tokens)
        self._turns.append(SampledTurn(*place, continued, self._stop_text(generation), plan.history_end))
        unchanged = shared_length(history, self._history)
        self._history[unchanged:] = map(_copy_of, history[unchanged:]) if self._copies else history[unchanged:]
        del self._users[bisect_left(self._users, unchanged) :]
        self._users += [place for place in range(unchanged, len(history)) if history[place].get("role") == "user"]
        return message

    def branch(self, messages: Sequence[Mapping[str, Any]]) -> ChatContext:
        """Another conversation with these tokens: its next prompt keeps the part that is in ``messages``."""
        branch = copy.copy(self)
        branch.messages = [dict(message) for message in messages]
        branch.forks, branch.open_boundaries, branch._last_prompt = Counter(), 0, None
        branch._turns, branch._history, branch._digest = [*self._turns], [*self._history], self._digest.copy()
        branch._users = [*self._users]
        branch._tokens = TokenBuffer(self.token_ids)
        return branch

    # -- the next prompt -----------------------------------------------------------------------------------------------

    def _prepare_prompt(self) -> tuple[int, int, Callable[[], Plan]]:
        """About how many characters the next prompt tokenizes, the number of unchanged messages, and its maker."""
        messages = self.messages
        if not messages:
            raise ConfigError("the conversation has no messages any more; there is nothing to ask")
        if not self._turns:
            cache = self.template.prompt_cache
            make = self._plan_whole if cache is None else functools.partial(cache.get, messages, self._plan_whole)
            return _chars(messages), 0, make
        last = self._turns[-1]
        unchanged = shared_length(messages, self._history)
        if _continues(messages) and len(messages) == last.n_messages and unchanged >= last.n_messages - 1:
            if _content(messages[-1]).startswith(last.continued):
                return _chars(messages[-1:]), unchanged, functools.partial(self._plan_continued, last)
            unchanged = last.n_messages - 1  # the answer was edited from its start
        if unchanged < last.n_messages:
            reason = self._classify_edit(unchanged)
        elif isinstance(addition := self._addition(self._complete, last), Addition):
            make = functools.partial(self._plan_added, last, addition)
            return _chars(messages[last.n_messages :]), unchanged, make
        else:
            unchanged = last.n_messages - 1
            reason = ForkReason.DROPPED_THINKING if addition.drops_thinking else ForkReason.TEMPLATE
        return _chars(messages), unchanged, lambda: replace(self._plan_fork(unchanged), fork=reason)

    @property
    def _complete(self) -> list[Message]:
        """The messages without a partial answer at their end."""
        return self.messages[:-1] if _continues(self.messages) else self.messages

    def _plan_added(self, turn: SampledTurn, addition: Addition) -> Plan:
        """The tokens up to the end of ``turn``, then the text that the template adds."""
        text = addition.text.removeprefix(turn.stop_text)
        plan = self._plan_pieces(turn.end, text, addition.generation_prompt, addition.rendering)
        if addition.rendering is not None:
            return plan
        return replace(plan, more_text=(addition.answer, addition.text))

    def _full_addition(
        self, messages: Sequence[Message], turn: SampledTurn, *, new: int, prompt: Rendering | None = None
    ) -> Addition | RewrittenHistory:
        """The template's addition after the answer of ``turn``, for these messages, the last ``new`` of them new."""
        answer = self.messages[turn.n_messages - 1]
        converted = self._answers.convert(answer)
        thinking = str(converted.message.get(self.template.fields.thinking or "") or "")
        sampled = SampledAnswer(_content(answer), turn.stop_text, converted.closed, thinking)
        return self.template.addition(self._converted(messages, turn.end), len(messages) - new, sampled, prompt=prompt)

    def _converted(self, messages: Sequence[Message], keep: int) -> list[Message]:
        """``messages`` in the template's fields, after the first ``keep`` ids."""
        turns = (turn for turn in self._turns if turn.end <= keep)
        return self._answers.messages(messages, lambda: {id(self.messages[turn.n_messages - 1]) for turn in turns})

    def _addition(self, messages: Sequence[Message], turn: SampledTurn) -> Addition | RewrittenHistory:
        """The template's addition after the answer of ``turn``, from a window of the history where that is exact."""
        answered = turn.n_messages
        history, new = messages[: answered - 1], messages[answered:]
        window = _history_window(history, new, self._users) if self._windows_exact else history
        if len(window) == len(history):
            return self._full_addition(messages, turn, new=len(new), prompt=self._rendering)
        windowed = [*window, *messages[answered - 1 :]]
        by_window = self._full_addition(windowed, turn, new=len(new))
        step = frozenset(pairwise(message.get("role") for message in windowed))
        if step in self._checked_steps and len(messages) < 2 * self._rendered_at:
            return replace(by_window, rendering=None) if isinstance(by_window, Addition) else by_window
        self._checked_steps |= {step}
        self._rendered_at = len(messages)
        full = self._full_addition(messages, turn, new=len(new))
        self._windows_exact = _texts(full) == _texts(by_window)
        if not isinstance(full, Addition) or full.rendering is None:
            return full
        # the window was exact now; so must all windows since the last full rendering have been
        if self._digest.matches(full.rendering.text, full.answer, full.text):
            return full
        self._windows_exact = False
        return RewrittenHistory()

    def _plan_continued(self, last: SampledTurn) -> Plan:
        """A continuation of the last answer, with as many of its own tokens as its message still contains."""
        text = _content(self.messages[-1])[len(last.continued) :]
        ids = self.token_ids[last.start : last.end].tolist()
        if last.stop_text:
            ids = ids[:-1]
        n, kept_text = longest_prefix(self._tokenizer, ids, text)
        keep = last.end if self._keep_stop_token and n == len(ids) else last.start + n
        fork = None if keep == last.end else ForkReason.BRANCH if n == len(ids) else ForkReason.EDITED_HISTORY
        added, boundary = self._encode_after(text[len(kept_text) :], self.token_ids[:keep])
        return Plan(keep, token_array(added), last.history_end, boundary, self._rendering, fork=fork)

    def _plan_fork(self, unchanged: int) -> Plan:
        """A prompt that keeps the longest prefix that the template still renders in the same way, and renders the rest.
        The first ``unchanged`` messages are as they were."""
        base = self._complete
        messages = self._answers.messages(base)
        whole = self.template.render(messages, generation_prompt=False)
        unchanged = min(unchanged, len(base))
        turns = [turn for turn in self._turns if turn.history_end and turn.n_messages - 1 <= unchanged]

        def rewritten(turn: SampledTurn) -> bool:
            return not whole.startswith(self.template.render(messages[: turn.n_messages - 1], generation_prompt=False))

        n_same = bisect_left(turns, True, key=rewritten)  # after the first rewritten prompt all are
        if not n_same:
            return self._plan_whole()
        turn = turns[n_same - 1]
        if turn.n_messages <= unchanged:  # its answer may be kept as well
            addition = self._full_addition(base, turn, new=len(base) - turn.n_messages)
            if isinstance(addition, Addition):
                return self._plan_added(turn, addition)
        return self._plan_whole(turn)

    def _plan_whole(self, turn: SampledTurn | None = None) -> Plan:
        """The conversation as the template renders it, after the kept history of ``turn``."""
        converted = self._converted(self._complete, turn.start if turn else 0)
        rendered = self.template.render_prompt(converted)
        keep = skip = 0
        if turn is not None:
            keep = turn.history_end
            skip = len(self.template.render(converted[: turn.n_messages - 1], generation_prompt=False))
        return self._plan_pieces(keep, rendered.text[skip:], rendered.generation_prompt or "", rendered)

    def _plan_pieces(self, keep: int, text: str, generation_prompt: str, rendering: Rendering | None) -> Plan:
        """The first ``keep`` ids, then ``text``, ``generation_prompt`` and the conversation's partial answer."""
        # encoded apart where no merge crosses its left edge: the ids before it can be kept when the answer is dropped
        separate = self.template.begins_with_added_token(generation_prompt)
        partial = _content(self.messages[-1]) if _continues(self.messages) else ""
        history_end, boundaries, added = 0, 0, []
        pieces = (text, generation_prompt, partial) if separate else (text + generation_prompt, partial)
        for number, piece in enumerate(pieces):
            previous = added or self.token_ids[:keep]
            cache = self.template.generation_prompt_ids if separate and number == 1 and len(previous) else {}
            if (encoded := cache.get(key := (piece, int(previous[-1]) if len(previous) else -1))) is None:
                if len(cache) >= _MAX_GENERATION_PROMPTS:
                    cache.clear()
                encoded = cache[key] = self._encode_after(piece, previous)
            ids, boundary = encoded
            added += ids
            boundaries += boundary
            if separate and number == 0:
                history_end = keep + len(added)
        return Plan(keep, token_array(added), history_end, boundaries, rendering)

    def _classify_edit(self, unchanged: int) -> ForkReason:
        """Whether the history was edited, or the conversation returned to an earlier point."""
        current, previous = self.messages[unchanged:], self._history[unchanged:]
        replaced = bool(current) and current[0].get("role") == previous[0].get("role") == "assistant"
        still_there = any(message.get("role") == "assistant" and message in current for message in previous)
        return classify_edit(replaced=replaced, still_there=still_there)

    def _compare_prompt(self, plan: Plan, prompt_ids: Sequence[int]) -> tuple[int, ForkReason | None]:
        """The number of tokens that the new prompt shares with the last prompt and answer, and why not all."""
        length = len(self._tokens)
        if plan.fork is None:
            return length, None
        shared = common_prefix(self.token_ids, token_array(prompt_ids))
        if shared == length:
            return length, None
        nothing_sampled = shared <= self._turns[0].start and shared < len(prompt_ids)
        new = plan.fork is ForkReason.BRANCH and nothing_sampled
        return shared, ForkReason.NEW_CONTEXT if new else plan.fork

    def _thinking_hint(self) -> str:
        setting = thinking_argument(self.template)
        return f" The template argument {setting} keeps it." if setting else ""

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _encode_after(self, text: str, previous: Sequence[int] | TokenArray) -> tuple[list[int], int]:
        """``text`` as ids that follow ``previous``, and 1 if a merge might have reached across the boundary."""
        if not text:
            return [], 0
        if len(previous):
            # encoded behind its left neighbour: a tokenizer may put a blank before the first word of a text
            last = int(previous[-1])
            both = self._encode(self._tokenizer.decode([last], skip_special_tokens=False) + text)
            if both[:1] == [last]:
                return both[1:], 0
        special = not len(previous) and self.template.begins_with_special_tokens
        ids = self._encode(text, add_special_tokens=special)
        return ids, int(len(previous) > 0 and not self.template.begins_with_added_token(text))

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if not text.isascii():  # tokenizers refuse a lone surrogate (of a file's name, of JSON that was cut)
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return encode_text(self._tokenizer, text, add_special_tokens=add_special_tokens)

    def _stop_text(self, generation: Generation) -> str:
        """The text of the stop token that ends the answer; empty when it ended otherwise."""
        matched = generation.matched_stop  # at the token limit, too
        ended = isinstance(matched, int) or (generation.finish_reason == "stop" and matched is None)
        if not ended or not generation.output_ids:
            return ""
        return self._tokenizer.decode([generation.output_ids[-1]], skip_special_tokens=False)


def _texts(addition: Addition | RewrittenHistory) -> tuple[str, str] | None:
    return (addition.text, addition.generation_prompt) if isinstance(addition, Addition) else None


def _content(message: Message) -> str:
    return str(message.get("content") or "")


def _chars(messages: Sequence[Message]) -> int:
    return sum(map(len, map(_content, messages)))


def _continues(messages: Sequence[Message]) -> bool:
    """Whether the last message is an assistant's, which the next answer continues."""
    return len(messages) > 1 and messages[-1].get("role") == "assistant"


def _copy_of(message: Message) -> Message:
    """A copy that later edits do not reach; ``deepcopy`` of a few strings takes too long."""
    return {key: value if type(value) is str else copy.deepcopy(value) for key, value in message.items()}


def answer_text(generation: Generation) -> str:
    """The sampled text with the stop string, whose tokens are sampled although the engine omits it from the text."""
    matched = generation.matched_stop
    if isinstance(matched, str) and not generation.text.endswith(matched):
        return generation.text + matched
    return generation.text


def _history_window(history: Sequence[Message], new: Sequence[Message], users: Sequence[int]) -> list[Message]:
    """The messages that a template may look at when it writes ``new`` after an answer; ``users`` has users' indices."""
    if len(history) < _WINDOW_FROM or not users:
        return list(history)
    user = users[-1]
    system = next(i for i, message in enumerate(history) if message.get("role") not in SYSTEM_ROLES)
    tail = user + 1
    if all(message.get("role") == "tool" for message in new):
        # templates group tool results and treat steps after the last user message apart: keep it, begin at an answer
        latest = min(len(history) - 1, max(user + 1, len(history) - _WINDOW_TAIL))
        tail = next((i for i in range(latest, user, -1) if history[i].get("role") == "assistant"), user + 1)
    return [*history[: min(system, user)], history[user], *history[tail:]]
