"""One conversation, kept as text for people and templates and as token ids for the engine.

The next prompt is what is held, verbatim, plus the tokens of what the chat template adds after it; the text of an
answer is never tokenized again. Where that cannot be, because the template renders the history differently once more
messages follow or because the agent edited the history, the prompt forks: it keeps the longest part of what is held
that still stands, renders the rest, and the fork is classified and counted. A fork costs tokens of context, never a
sampled one: what was sampled is trained where it was sampled.

New text follows a special token (an end of turn); tokenizers split there before byte-pair encoding, so no merge crosses
it. Where there is none (a partial answer that is continued),
``open_boundaries`` counts it: the ids left of it are still the engine's, those right of it a valid encoding.
"""

from __future__ import annotations

import copy
import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

from agl_slime.errors import ConfigError
from agl_slime.sglang.generation import Generation
from agl_slime.sglang.prompt import PromptIds
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.codec import TokenArray, TokenBuffer, common_prefix, shared_length, token_array
from agl_slime.tokens.digest import TextDigest
from agl_slime.tokens.fields import AnswerMessages, thinking_argument
from agl_slime.tokens.forks import ForkReason, classify_edit, explain_once
from agl_slime.tokens.plans import Plan, SampledTurn
from agl_slime.tokens.reader import AnswerReader
from agl_slime.tokens.template import (
    Addition,
    ChatTemplate,
    Message,
    Rendering,
    RewrittenHistory,
    SampledAnswer,
    history_window,
)
from agl_slime.tokens.tokenizer import longest_prefix

# Tokenizing takes about a millisecond per this many characters; more of those are worth a thread.
LONG_TEXT_CHARS = 8_000
_OPENINGS = 256  # kept of a template; most have one


class ChatContext:
    """A conversation that grows by messages (``add``) and by sampled answers (``add_answer``).

    ``messages`` may be edited in any way between two prompts. A conversation that ends with an assistant message is
    continued: the next answer goes on with that message's text. ``forks`` counts the prompts that did not continue what
    was held, by reason; ``open_boundaries`` the open token boundaries. ``kept_tokens`` is how many tokens of what was
    held the last answered prompt began with, and ``fork`` why it did not begin with all of them. With
    ``keep_stop_token`` an answer that ended with a stop token is continued after it, not without it, which would fork.
    With ``copies`` off nobody edits a message, only lists of them: none is copied to notice that, and answers that were
    not sampled here come in parts from a client. ``reader`` tells the parts of answers, by default the template's own.

    The content of an answer's message is all that was sampled, for people and agents; the template gets its parts in
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
        self._template = template
        self._keep_stop_token = keep_stop_token
        self._copies = copies
        self._tokenizer = template.tokenizer
        self._forms = AnswerMessages(template.fields, reader or template.reader, all_raw=copies)
        self.messages: list[Message] = [dict(each) if copies else cast(Message, each) for each in messages]
        self.forks: Counter[ForkReason] = Counter()
        self.open_boundaries = 0
        self.kept_tokens = 0
        self.fork: ForkReason | None = None
        self._tokens = TokenBuffer()
        self._turns: list[SampledTurn] = []
        self._seen: list[Message] = []  # the held messages as they were, to notice edits
        self._users: list[int] = []  # places of users' messages among those
        self._asked: tuple[Plan, list[Message]] | None = None  # the last prompt and the messages that it was made of
        self._rendering: Rendering | None = None  # of the messages before the last answer
        self._written = TextDigest()  # the text of those messages and of the generation_prompt after them
        self._whole_at = 0  # number of messages when the whole conversation was last rendered
        self._windows = True  # the ends of the conversation show what the template adds
        self._steps: frozenset[frozenset[tuple[Any, Any]]] = frozenset()  # roles in a row for which they do

    @property
    def template(self) -> ChatTemplate:
        return self._template

    @property
    def token_ids(self) -> TokenArray:
        """What is held: the last prompt and its answer. A read-only view, which stays as it is: prompts of one
        conversation share its memory."""
        return self._tokens.ids

    def add(self, *messages: Mapping[str, Any]) -> None:
        """Append messages of the user, of tools, of the environment."""
        self.messages.extend(dict(message) for message in messages)

    def prompt_ids(self) -> list[int]:
        """Token ids of the whole conversation so far, with the generation_prompt of the next answer."""
        _, same, make = self._next()
        return [*self._ask(same, make)]

    async def prompt(self) -> PromptIds:
        """``prompt_ids()``; made in a thread where much text has to be tokenized, as at most forks."""
        chars, same, make = self._next()
        return self._ask(same, make) if chars <= LONG_TEXT_CHARS else await run_in_thread(self._ask, same, make)

    def _ask(self, same: int, make: Callable[[], Plan]) -> PromptIds:
        plan = make()
        new = self.messages[same:]
        self._asked = plan, [*self._seen[:same], *(map(dict, new) if self._copies else new)]
        return self._tokens.prompt(plan.kept, plan.added)

    def add_answer(self, prompt_ids: Sequence[int], generation: Generation) -> Message:
        """Append the answer that was sampled after ``prompt_ids``, which are those that ``prompt_ids()`` gave last."""
        plan, asked = self._asked or (None, [])
        if plan is None or plan.length != len(prompt_ids):
            asked_with = f"of {plan.length} tokens" if plan else "and there is none"
            raise ConfigError(
                f"prompt_ids must be what prompt_ids() gave last, {asked_with}; got {len(prompt_ids)} tokens"
            )
        self._asked = None
        self.kept_tokens, self.fork = self._against_held(plan, prompt_ids)
        while self._turns and self._turns[-1].end > plan.kept:
            self._turns.pop()
        self._rendering = plan.rendering
        if plan.rendering is not None:
            self._written = TextDigest(plan.rendering.text)
        elif plan.more_text:
            self._written.add(*plan.more_text)
        self._tokens.cut(plan.kept)
        self._tokens.extend(plan.added)
        self._tokens.extend(generation.output_ids)
        self.open_boundaries += plan.open_boundaries
        if self.fork is not None:
            self.forks[self.fork] += 1
            explain_once(self.fork, self._keeps_thinking if self.fork is ForkReason.DROPPED_THINKING else str)
        continues = _continues(asked)
        continued = _content(asked[-1]) if continues else ""
        begun = self.messages.pop() if continues else {"role": "assistant"}
        message: Message = {**begun, "content": continued + answer_text(generation)}
        self._forms.sampled(message["content"], () if continued else generation.output_ids)
        self.messages.append(message)
        seen = [*(asked[:-1] if continues else asked), message]
        self._turns.append(
            SampledTurn(len(seen), plan.length, len(self._tokens), continued, self._stop_text(generation), plan.place)
        )
        at = shared_length(seen, self._seen)
        self._seen[at:] = map(_copy_of, seen[at:]) if self._copies else seen[at:]
        del self._users[bisect_left(self._users, at) :]
        self._users += [place for place in range(at, len(seen)) if seen[place].get("role") == "user"]
        return message

    def branch(self, messages: Sequence[Mapping[str, Any]]) -> ChatContext:
        """Another conversation with what is held here: the next prompt keeps of it what stands in ``messages``."""
        other = copy.copy(self)
        other.messages = [dict(message) for message in messages]
        other.forks, other.open_boundaries, other._asked = Counter(), 0, None
        other._turns, other._seen, other._written = [*self._turns], [*self._seen], self._written.copy()
        other._users = [*self._users]
        other._tokens = TokenBuffer(self.token_ids)
        return other

    # -- what the next prompt keeps and adds --------------------------------------------------------------------------

    def _next(self) -> tuple[int, int, Callable[[], Plan]]:
        """About how many characters the next prompt has to tokenize, how many messages are as they were, and what makes
        it."""
        messages = self.messages
        if not messages:
            raise ConfigError("the conversation has no messages any more; nothing can be asked")
        if not self._turns:
            known = self._template.prompt_cache
            make = self._rendered if known is None else functools.partial(known.get, messages, self._rendered)
            return _chars(messages), 0, make
        last = self._turns[-1]
        same = shared_length(messages, self._seen)  # held messages that are as they were
        if _continues(messages) and len(messages) == last.n_messages and same >= last.n_messages - 1:
            if _content(messages[-1]).startswith(last.continued):
                return _chars(messages[-1:]), same, functools.partial(self._continued, last)
            same = last.n_messages - 1  # says something else from the start
        if same < last.n_messages:
            reason = self._kind_of_edit(same)
        elif isinstance(addition := self._addition(self._base, last), Addition):
            return _chars(messages[last.n_messages :]), same, functools.partial(self._added, last, addition)
        else:
            same = last.n_messages - 1
            reason = ForkReason.DROPPED_THINKING if addition.drops_thinking else ForkReason.TEMPLATE
        return _chars(messages), same, lambda: replace(self._forked(same), fork=reason)

    @property
    def _base(self) -> list[Message]:
        """The messages without a partial answer at their end."""
        return self.messages[:-1] if _continues(self.messages) else self.messages

    def _added(self, turn: SampledTurn, addition: Addition) -> Plan:
        """What is held up to the end of ``turn``, then what the template adds."""
        text = addition.text.removeprefix(turn.stop_text)
        plan = self._joined(turn.end, text, addition.generation_prompt, addition.rendering)
        if addition.rendering is not None:
            return plan
        return replace(plan, more_text=(addition.answer, addition.text))

    def _whole_addition(
        self, messages: Sequence[Message], turn: SampledTurn, **how: Any
    ) -> Addition | RewrittenHistory:
        """What the template adds after the answer of ``turn``, of these messages."""
        given = self._forms.given(self.messages[turn.n_messages - 1])
        thinking = str(given.message.get(self._template.fields.thinking or "") or "")
        said = SampledAnswer(_content(self.messages[turn.n_messages - 1]), turn.stop_text, given.closed, thinking)
        return self._template.addition(self._forms.messages(messages), len(messages) - how.pop("new"), said, **how)

    def _addition(self, messages: Sequence[Message], turn: SampledTurn) -> Addition | RewrittenHistory:
        """What the template adds after the answer of ``turn``, from as few messages as that takes; see the module
        ``template``."""
        held = turn.n_messages
        before, new = messages[: held - 1], messages[held:]
        window = history_window(before, new, self._users) if self._windows else before
        if len(window) == len(before):
            return self._whole_addition(messages, turn, new=len(new), asked=self._rendering)
        shown = [*window, *messages[held - 1 :]]
        ends = self._whole_addition(shown, turn, new=len(new))
        step = frozenset(pairwise(message.get("role") for message in shown))
        if step in self._steps and len(messages) < 2 * self._whole_at:
            return replace(ends, rendering=None) if isinstance(ends, Addition) else ends
        self._steps |= {step}
        self._whole_at = len(messages)
        whole = self._whole_addition(messages, turn, new=len(new))
        self._windows = _words(whole) == _words(ends)
        if not isinstance(whole, Addition) or whole.rendering is None:
            return whole
        # the ends agree; so must all that was written between the last time and now
        if self._written.matches(whole.rendering.text, whole.answer, whole.text):
            return whole
        self._windows = False
        return RewrittenHistory()

    def _continued(self, last: SampledTurn) -> Plan:
        """The last answer goes on: with its own tokens as far as its message still says what they say."""
        said = _content(self.messages[-1])[len(last.continued) :]
        ids = self.token_ids[last.start : last.end].tolist()
        if last.stop_text:
            ids = ids[:-1]
        n, text = longest_prefix(self._tokenizer, ids, said)
        keep = last.end if self._keep_stop_token and n == len(ids) else last.start + n
        fork = None if keep == last.end else ForkReason.BRANCH if n == len(ids) else ForkReason.EDITED_HISTORY
        added, gap = self._encode_after(said[len(text) :], self.token_ids[:keep])
        return Plan(keep, tuple(added), last.place, gap, self._rendering, fork=fork)

    def _forked(self, same: int) -> Plan:
        """A prompt that keeps the longest part of what is held that the template still renders in the same way, and
        renders the rest. ``same`` messages are as they were."""
        base = self._base
        given = self._forms.messages(base)
        whole = self._template.render(given, generation_prompt=False)
        standing = min(same, len(base))
        turns = [turn for turn in self._turns if turn.place and turn.n_messages - 1 <= standing]

        def rewritten(turn: SampledTurn) -> bool:
            return not whole.startswith(self._template.render(given[: turn.n_messages - 1], generation_prompt=False))

        low = bisect_left(turns, True, key=rewritten)  # places that stand are followed by places that do not
        if not low:
            return self._rendered()
        turn = turns[low - 1]
        if turn.n_messages <= standing:  # its answer stands as well?
            addition = self._whole_addition(base, turn, new=len(base) - turn.n_messages)
            if isinstance(addition, Addition):
                return self._added(turn, addition)
        return self._rendered(turn)

    def _rendered(self, turn: SampledTurn | None = None) -> Plan:
        """The conversation as the template renders it, after what was held before the generation_prompt of ``turn``."""
        given = self._forms.messages(self._base)
        rendered = self._template.render_prompt(given)
        keep = skip = 0
        if turn is not None:
            keep, skip = turn.place, len(self._template.render(given[: turn.n_messages - 1], generation_prompt=False))
        return self._joined(keep, rendered.text[skip:], rendered.generation_prompt or "", rendered)

    def _joined(self, keep: int, text: str, generation_prompt: str, rendering: Rendering | None) -> Plan:
        """The first ``keep`` ids, then ``text``, ``generation_prompt`` and the partial answer that the conversation ends with."""
        # the generation_prompt apart where that changes nothing: the place before it can be kept when the answer is dropped
        apart = self._template.begins_with_added_token(generation_prompt)
        partial = _content(self.messages[-1]) if _continues(self.messages) else ""
        place, gaps, added = 0, 0, []
        for number, piece in enumerate(
            (text, generation_prompt, partial) if apart else (text + generation_prompt, partial)
        ):
            held = added or self.token_ids[:keep]
            known = self._template.generation_prompt_ids if apart and number == 1 and len(held) else {}
            if (found := known.get(key := (piece, int(held[-1]) if len(held) else -1))) is None:
                if len(known) >= _OPENINGS:
                    known.clear()
                found = known[key] = self._encode_after(piece, held)
            ids, gap = found
            added += ids
            gaps += gap
            if apart and number == 0:
                place = keep + len(added)
        return Plan(keep, tuple(added), place, gaps, rendering)

    def _kind_of_edit(self, same: int) -> ForkReason:
        """Whether something held was changed, or the conversation went back to an earlier point and on from there."""
        now, lost = self.messages[same:], self._seen[same:]
        replaced = bool(now) and now[0].get("role") == lost[0].get("role") == "assistant"
        still_there = any(message.get("role") == "assistant" and message in now for message in lost)
        return classify_edit(replaced=replaced, still_there=still_there)

    def _against_held(self, plan: Plan, prompt_ids: Sequence[int]) -> tuple[int, ForkReason | None]:
        """How many tokens of what is held the prompt begins with, and why those are not all."""
        held = len(self._tokens)
        if plan.fork is None:
            return held, None
        kept = common_prefix(self.token_ids, token_array(prompt_ids))
        if kept == held:
            return held, None
        nothing_sampled = kept <= self._turns[0].start and kept < len(prompt_ids)
        new = plan.fork is ForkReason.BRANCH and nothing_sampled
        return kept, ForkReason.NEW_CONTEXT if new else plan.fork

    def _keeps_thinking(self) -> str:
        setting = thinking_argument(self._template)
        return f" The template argument {setting} keeps it." if setting else ""

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _encode_after(self, text: str, held: Sequence[int] | TokenArray) -> tuple[list[int], int]:
        """``text`` as ids that follow ``held``, and 1 when a merge might have reached into the last of those."""
        if not text:
            return [], 0
        if len(held):
            # with its left neighbour in front: what tokenizers do at the beginning of a text (a blank before the first
            # word) is not done in the middle of one
            last = int(held[-1])
            both = self._encode(self._tokenizer.decode([last], skip_special_tokens=False) + text)
            if both[:1] == [last]:
                return both[1:], 0
        special = not len(held) and self._template.begins_with_special_tokens
        ids = self._encode(text, add_special_tokens=special)
        return ids, int(len(held) > 0 and not self._template.begins_with_added_token(text))

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if not text.isascii():  # half a character (of a file's name, of JSON that was cut) is none to a tokenizer
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _stop_text(self, generation: Generation) -> str:
        """The text of the stop token that ends the answer; empty when it ended otherwise."""
        matched = generation.matched_stop  # at the token limit, too
        ended = isinstance(matched, int) or (generation.finish_reason == "stop" and matched is None)
        if not ended or not generation.output_ids:
            return ""
        return self._tokenizer.decode([generation.output_ids[-1]], skip_special_tokens=False)


def _words(addition: Addition | RewrittenHistory) -> tuple[str, str] | None:
    return (addition.text, addition.generation_prompt) if isinstance(addition, Addition) else None


def _content(message: Message) -> str:
    return str(message.get("content") or "")


def _chars(messages: Sequence[Message]) -> int:
    return sum(map(len, map(_content, messages)))


def _continues(messages: Sequence[Message]) -> bool:
    """Whether the last message is an assistant's, and the answer goes on with it."""
    return len(messages) > 1 and messages[-1].get("role") == "assistant"


def _copy_of(message: Message) -> Message:
    """``message`` as it is now, whatever is done to it later; ``deepcopy`` of a few strings takes too long."""
    return {key: value if type(value) is str else copy.deepcopy(value) for key, value in message.items()}


def answer_text(generation: Generation) -> str:
    """What the model said, with the stop string: its tokens are held, but the engine leaves it out of the text."""
    matched = generation.matched_stop
    if isinstance(matched, str) and not generation.text.endswith(matched):
        return generation.text + matched
    return generation.text
