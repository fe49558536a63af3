"""The conversations of one attempt as a tree: which of them a request goes on with.

Clients send the whole history with each request. It is walked through what was held before, message by message, and
what is found is taken from there: of an answer the text and the tokens that were sampled, whatever its client made of
it. The walk ends at the first message that is not known; what follows is the request's own. An answer that could be
one of several siblings with different tokens is not known: nothing is guessed.

A *line* is one ``RolloutSession``: a conversation that is asked again and again. A request that goes on from the end of
a line takes it further; one that goes on from anywhere else, or while the line is being asked, gets a branch of it,
which keeps the tokens that still stand.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from agl_slime.gateway.messages import Message, answer_keys, message_key, same_words
from agl_slime.rollout.session import RolloutSession
from agl_slime.tokens.forks import ForkReason, classify_edit
from agl_slime.tokens.template import ChatTemplate

OpenSession = Callable[[list[Message]], RolloutSession]
_MESSAGE = operator.attrgetter("message")


@dataclass(eq=False, slots=True)
class Line:
    """A conversation in tokens; ``tip`` is its last answer. ``asking``: a request is under way."""

    session: RolloutSession
    tip: Node | None = None
    asking: bool = False


@dataclass(eq=False, slots=True)
class Node:
    """An answer: ``held`` with the words that were sampled, ``served`` as the client got it. ``state`` is the place in
    the tree after it and ``before`` that before it, ``turn`` its number in the rollout, ``depth`` the number of
    messages up to it; ``cut``: its reader left before its end."""

    held: Message
    served: Message
    before: int
    state: int
    line: Line
    turn: int
    depth: int
    cut: bool = False
    continued: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """A request's ``messages``, the first ``known`` of them as they are held, and the ``keys`` of the others. ``node``
    is the last answer among those; ``line`` the conversation that shares most with the request."""

    messages: list[Message]
    known: int
    keys: list[list[Hashable]]
    state: int
    node: Node | None
    line: Line | None
    fork: ForkReason | None


@dataclass(frozen=True, slots=True)
class Walk:
    """A way through what is held: where it is, the last answer on it, the number of its messages, the last of them, and
    the walk up to there."""

    state: int
    node: Node | None
    length: int = 0
    message: Message | None = None
    before: Walk | None = None


@dataclass(eq=False)
class Tree:
    """The conversations that share one chat template and one set of ``tools``; ``open_session`` makes the first."""

    template: ChatTemplate
    open_session: OpenSession
    tools: tuple[Message, ...] = ()
    ambiguous: int = 0  # answers that could have been several
    _states: int = 0
    # messages that nobody sampled here; with one key are those that differ in white space at their ends
    _plain: dict[tuple[int, Hashable], tuple[tuple[int, Message], ...]] = field(default_factory=dict)
    _answers: dict[tuple[int, Hashable], tuple[Node, ...]] = field(default_factory=dict)
    _lines: dict[int, Line] = field(default_factory=dict)  # the last line through each state
    _seen: set[Hashable] = field(default_factory=set)  # answers, and results of tools
    _after: dict[int, int] = field(default_factory=dict)  # the first state after each
    _branched: int = 0  # how often a state got another way on
    # of the last request, all messages that were known but its last one, and the walks up to each; and ``_branched``
    _walked: list[Message] = field(default_factory=list)
    _walks: list[tuple[Walk, ...]] = field(default_factory=list)
    _walked_at: int = 0
    _way: list[Walk] = field(default_factory=list)  # that of the last request, step by step
    _ids: dict[str, str] = field(default_factory=dict)  # of a call as it was served: its id as the model wrote it

    def find(self, messages: list[Message]) -> Match:
        """What of a request is known. In ``messages`` an answer's form as its client sent it gives way to the one that
        is held anyway."""
        if self._walked_at != self._branched:
            self._walked, self._walks, self._walked_at = [], [], self._branched
        same = [*map(operator.is_, messages[:-1], self._walked)]
        known = same.index(False) if False in same else len(same)
        del self._walked[known:], self._walks[known:]
        walks, several = self._walks[-1] if self._walks else (Walk(0, None),), False
        for at in range(len(self._walked), len(messages)):
            message, last, before = messages[at], at == len(messages) - 1, self.ambiguous
            further = tuple(step for walk in walks for step in self._further(walk, message, last=last))
            if not further:
                several = self.ambiguous > before
                break
            walks, self.ambiguous = further, before
            if not last:
                if len(walks) == 1 and walks[0].node is not None and walks[0].message is walks[0].node.held:
                    messages[at] = message = walks[0].node.served
                self._walked.append(message)
                self._walks.append(walks)
        state, node, line, held = walks[0].state, walks[0].node, self._lines.get(walks[0].state), self._held(walks[0])
        rest = list(messages[len(held) :])
        if several:  # or the line that it branches from would take it for its own
            rest[0] = {**rest[0], "sampled": "by one of several"}
        fork = self._kind(messages, len(held), node, line)
        keys = [_keys(message) for message in rest]
        return Match([*held, *map(self._as_written, rest)], len(held), keys, state, node, line, fork)

    def take(self, match: Match) -> Line:
        """The line to ask for this request; give it back with ``answered`` or ``failed``."""
        line = match.line
        if line is None:
            line = Line(self.open_session(match.messages))
        elif line.asking or match.node is None or line.tip is not match.node:
            line = Line(line.session.branch(match.messages))
        line.session.context.messages = [*match.messages]  # nobody edits these, so all turns share them
        line.asking = True
        self._lines.setdefault(0, line)
        return line

    def failed(self, line: Line) -> None:
        """Nothing was sampled."""
        line.asking = False

    def answered(
        self, match: Match, line: Line, *, held: Message, served: Message, ids: Mapping[str, str], cut: bool = False
    ) -> Node:
        """Keep an answer that was sampled on ``line``. ``ids`` are those of its calls, as served and as written."""
        state, rest = match.state, list(zip(match.messages[match.known :], match.keys, strict=True))
        if match.messages[-1]["role"] == "assistant":  # which the answer goes on with, and is a message with
            rest = rest[:-1]
            if not match.keys and match.node is not None:
                state = match.node.before
        for message, keys in rest:
            known = self._plain.get((state, keys[0]), ())
            at = next((one for one in known if one[1]["content"] == message["content"]), None)
            at = at or (self._new_state(), message)
            for key in keys:
                same = self._plain.get((state, key), ())
                if at not in same:
                    self._plain[state, key] = (*same, at)
                    self._grows(state, at[0])
            state = at[0]
            self._lines[state] = line
            if message["role"] == "tool":
                self._seen.update(keys)
        self._ids.update(ids)
        turns, depth = line.session.turns, len(line.session.messages)
        node = Node(held, served, state, self._new_state(), line, len(turns) - 1, depth, cut)
        self._grows(state, node.state)
        alone = (node,)
        for key in answer_keys(served):
            self._answers[state, key] = (*before, node) if (before := self._answers.get((state, key))) else alone
            self._seen.add(key)
        if match.node is not None:
            match.node.continued = True
        line.tip, line.asking = node, False
        self._lines[node.state] = line
        return node

    def forget(self) -> None:
        """Nothing more is asked: answers refer to their lines, and from now on not the other way round."""
        for line in self._lines.values():
            line.tip = None

    def _grows(self, state: int, to: int) -> None:
        """There is a way from ``state`` to another; with a second one, walks through it may go elsewhere."""
        self._branched += self._after.setdefault(state, to) != to

    def _new_state(self) -> int:
        self._states += 1
        return self._states

    def _further(self, walk: Walk, message: Message, *, last: bool) -> list[Walk]:
        """The walks after one message more, the likeliest first: several where it was held in several forms."""
        if message["role"] == "assistant" and (node := self._answer(walk.state, message)) is not None:
            return [Walk(node.state, node, walk.length + 1, node.held, walk)]
        others = self._other(walk.state, message, exact=last)
        return [Walk(state, walk.node, walk.length + 1, held, walk) for state, held in others]

    def _held(self, walk: Walk) -> list[Message]:
        """The messages of a way, as they are held; what it shares with the last one is there already."""
        new: list[Walk] = []
        while walk.before is not None and not (walk.length <= len(self._way) and self._way[walk.length - 1] is walk):
            new.append(walk)
            walk = walk.before
        self._way[walk.length :] = reversed(new)
        return [*map(_MESSAGE, self._way)]

    def _answer(self, state: int, message: Message) -> Node | None:
        for key in answer_keys(message):
            nodes = self._answers.get((state, key), ())
            if not nodes or not same_words(message, nodes[-1].served):
                continue
            if len(nodes) == 1 or _same_tokens(nodes):
                return nodes[-1]
            self.ambiguous += 1
            return None
        return None

    def _other(self, state: int, message: Message, *, exact: bool) -> list[tuple[int, Message]]:
        """The states after a message that nobody sampled here, and the message as it came there. White space at its end
        may differ, but for one that is to be answered (``exact``): the answer would be to another prompt."""
        found: list[tuple[int, Message]] = []
        for key in _keys(message):
            found += [at for at in self._plain.get((state, key), ()) if at not in found]
        same = [at for at in found if at[1]["content"] == message["content"]]
        found = same if exact else [*same, *(at for at in found if at not in same)]
        if message["role"] != "assistant":
            return found
        return [at for at in found if same_words(message, at[1]) or same_words(at[1], message)]

    def _kind(self, messages: Sequence[Message], known: int, node: Node | None, line: Line | None) -> ForkReason | None:
        """Why a request does not go on from the end of a line, as far as messages tell more than tokens do."""
        if line is None or line.tip is None or line.tip is node or known == len(messages):
            return None
        tip, at = line.tip, messages[known]
        said = at["content"].strip() if at["role"] == "assistant" and tip.depth == known + 1 else ""
        if tip.cut and said and tip.served["content"].startswith(said):
            return ForkReason.BRANCH  # from the middle of it: some of what was delivered was not read
        later = (key for message in messages[known + 1 :] for key in _keys(message))
        fork = classify_edit(
            replaced=at["role"] == "assistant",
            still_there=any(key in self._seen for key in later),
            dropped=tip.depth - known if len(messages) < tip.depth else 0,
            summary=at["role"] == "user" and known > 0 and messages[known - 1]["role"] == "user",
        )
        return None if fork is ForkReason.BRANCH else fork  # tokens tell branches apart

    def _as_written(self, message: Message) -> Message:
        """With the ids of calls as the model wrote them, which is what templates expect."""
        if message.get("tool_call_id") in self._ids:
            message = {**message, "tool_call_id": self._ids[message["tool_call_id"]]}
        if message.get("tool_calls"):
            calls = [{**call, "id": self._ids.get(call["id"], call["id"])} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        return message


def _keys(message: Message) -> list[Hashable]:
    return answer_keys(message) if message["role"] == "assistant" else [message_key(message)]


def _same_tokens(nodes: Sequence[Node]) -> bool:
    first, *others = (node.line.session.turns[node.turn] for node in nodes)
    return all(np.array_equal(first.response_ids, other.response_ids) for other in others)
