"""``Tree``: the conversations of one attempt, and the conversation that a request continues.

Clients send the whole history with each request. It is matched message by message with the tree, and matched messages
are taken from there: an answer has the text and tokens that were sampled, whatever its client made of them. The match
ends at the first unknown message, also an answer that could be one of several siblings with different tokens.

A ``Conversation`` has one ``RolloutSession``. A request that continues its last answer extends it; a request that
continues from elsewhere, or while the conversation is busy, gets a branch, which keeps the tokens of the shared prefix.
``UntrainedTurns`` are the answers that are not trained because the agent discarded them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from agl_slime.agent.session import RolloutSession
from agl_slime.gateway.messages import Message, answer_keys, message_key, same_words
from agl_slime.gateway.settings import Branches
from agl_slime.tokens.forks import ForkReason, classify_edit
from agl_slime.tokens.template import ChatTemplate

OpenSession = Callable[[list[Message]], RolloutSession]
_MESSAGE = operator.attrgetter("message")


@dataclass(eq=False, slots=True)
class Conversation:
    """A conversation in tokens; ``tip`` is its last answer. ``busy``: a request is pending."""

    session: RolloutSession
    tip: Node | None = None
    busy: bool = False


@dataclass(eq=False, slots=True)
class Node:
    """An answer: ``sampled`` has the text as sampled, ``served`` as the client got it. ``parent_state`` and ``state``
    are the states of the tree before and after it, ``turn`` its number in the rollout, ``depth`` the number of messages
    up to it. ``cut``: its client left before the end."""

    sampled: Message
    served: Message
    parent_state: int
    state: int
    conversation: Conversation
    turn: int
    depth: int
    cut: bool = False
    continued: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """A request's ``messages``, of which the first ``length`` are the tree's, and the ``keys`` of the others. ``node``
    is the last answer in the matched part; ``conversation`` shares the longest prefix with the request."""

    messages: list[Message]
    length: int
    keys: list[Hashable]
    state: int
    node: Node | None
    conversation: Conversation | None
    fork: ForkReason | None


@dataclass(frozen=True, slots=True)
class Path:
    """A path in the tree: its state, its last answer, its number of messages, the last message, and the rest."""

    state: int
    node: Node | None
    length: int = 0
    message: Message | None = None
    parent: Path | None = None


@dataclass(eq=False)
class Tree:
    """The conversations with one chat template and one set of ``tools``; ``open_session`` makes the first session."""

    template: ChatTemplate
    open_session: OpenSession
    tools: tuple[Message, ...] = ()
    ambiguous: int = 0  # answers that could be several
    _states: int = 0
    # messages that are not answers, with the state after each; messages under one key differ in trailing white space
    _messages: dict[tuple[int, Hashable], tuple[tuple[int, Message], ...]] = field(default_factory=dict)
    _answers: dict[tuple[int, Hashable], tuple[Node, ...]] = field(default_factory=dict)
    _conversations: dict[int, Conversation] = field(default_factory=dict)  # the last through each state
    _seen_keys: set[Hashable] = field(default_factory=set)  # of answers and tool results
    _first_child: dict[int, int] = field(default_factory=dict)  # by state
    _forks: int = 0  # how often a state got one more child
    # of the last request: the matched messages but its last, the paths up to each, and ``_forks`` at that time
    _last_messages: list[Message] = field(default_factory=list)
    _last_paths: list[tuple[Path, ...]] = field(default_factory=list)
    _last_forks: int = 0
    _last_steps: list[Path] = field(default_factory=list)  # the path of the last request, step by step
    # ids of calls as the model wrote them, by served id; by state and id where a client gives an answer's calls others
    _written_ids: dict[str | tuple[int, str], str] = field(default_factory=dict)

    def find(self, messages: list[Message]) -> Match:
        """The longest match of a request. Replaces answers in ``messages`` by the equal ones in the tree."""
        if self._last_forks != self._forks:
            self._last_messages, self._last_paths, self._last_forks = [], [], self._forks
        unchanged = [*map(operator.is_, messages[:-1], self._last_messages)]
        shared = unchanged.index(False) if False in unchanged else len(unchanged)
        del self._last_messages[shared:], self._last_paths[shared:]
        paths, ambiguous = self._last_paths[-1] if self._last_paths else (Path(0, None),), False
        for index in range(len(self._last_messages), len(messages)):
            message, last, count = messages[index], index == len(messages) - 1, self.ambiguous
            extended = tuple(step for path in paths for step in self._extend(path, message, last=last))
            if not extended:
                ambiguous = self.ambiguous > count
                break
            paths, self.ambiguous = extended, count
            if not last:
                if len(paths) == 1 and paths[0].node is not None and paths[0].message is paths[0].node.sampled:
                    messages[index] = message = paths[0].node.served
                self._last_messages.append(message)
                self._last_paths.append(paths)
        path, matched = paths[0], self._messages_of(paths[0])
        conversation = self._conversations.get(path.state)
        rest = list(messages[len(matched) :])
        if ambiguous:  # keeps a branch of the conversation from reusing the sibling's tokens
            rest[0] = {**rest[0], "sampled": "by one of several"}
        fork = self._fork_reason(messages, len(matched), path.node, conversation)
        keys = [*map(message_key, rest)]
        whole = [*matched, *self._with_written_ids(rest, path.node)]
        return Match(whole, len(matched), keys, path.state, path.node, conversation, fork)

    def acquire(self, match: Match) -> Conversation:
        """The conversation to ask for this request; it is busy until ``add_answer``, or the caller's failure."""
        conversation = match.conversation
        if conversation is None:
            conversation = Conversation(self.open_session(match.messages))
        elif conversation.busy or match.node is None or conversation.tip is not match.node:
            conversation = Conversation(conversation.session.branch(match.messages))
        conversation.session.context.messages = [*match.messages]  # messages are immutable: turns share them
        conversation.busy = True
        self._conversations.setdefault(0, conversation)
        return conversation

    def add_answer(
        self,
        match: Match,
        conversation: Conversation,
        *,
        sampled: Message,
        served: Message,
        ids: Mapping[str, str],
        cut: bool = False,
    ) -> Node:
        """Add an answer of ``conversation``. ``ids`` are the ids of its calls as the model wrote them, by served id."""
        state, rest = match.state, list(zip(match.messages[match.length :], match.keys, strict=True))
        if match.messages[-1]["role"] == "assistant":  # the answer continues this message and includes it
            rest = rest[:-1]
            if not match.keys and match.node is not None:
                state = match.node.parent_state
        for message, key in rest:
            children = self._messages.get((state, key), ())
            child = next((each for each in children if each[1]["content"] == message["content"]), None)
            if child is None:
                child = self._new_state(), message
                self._messages[state, key] = (*children, child)
                self._note_child(state, child[0])
            state = child[0]
            self._conversations[state] = conversation
            if message["role"] == "tool":
                self._seen_keys.add(key)
        self._written_ids.update(ids)
        turns, depth = conversation.session.turns, len(conversation.session.messages)
        node = Node(sampled, served, state, self._new_state(), conversation, len(turns) - 1, depth, cut)
        self._note_child(state, node.state)
        alone = (node,)
        for key in answer_keys(served):
            self._answers[state, key] = (*equal, node) if (equal := self._answers.get((state, key))) else alone
            self._seen_keys.add(key)
        if match.node is not None:
            match.node.continued = True
        conversation.tip, conversation.busy = node, False
        self._conversations[node.state] = conversation
        return node

    def forget(self) -> None:
        """Break the reference cycles between answers and conversations; no request follows."""
        for conversation in self._conversations.values():
            conversation.tip = None

    def _note_child(self, state: int, child: int) -> None:
        """Note a transition; a second one from ``state`` invalidates the paths of the last request."""
        self._forks += self._first_child.setdefault(state, child) != child

    def _new_state(self) -> int:
        self._states += 1
        return self._states

    def _extend(self, path: Path, message: Message, *, last: bool) -> list[Path]:
        """The paths with one message more, the likeliest first; several if the tree has it in several forms."""
        if message["role"] == "assistant" and (node := self._find_answer(path.state, message)) is not None:
            for call, served in zip(message.get("tool_calls") or (), node.served.get("tool_calls") or (), strict=False):
                if call["id"] != served["id"]:
                    self._written_ids[node.state, call["id"]] = self._written_ids[served["id"]]
            return [Path(node.state, node, path.length + 1, node.sampled, path)]
        children = self._find_messages(path.state, message, exact=last)
        return [Path(state, path.node, path.length + 1, child, path) for state, child in children]

    def _messages_of(self, path: Path) -> list[Message]:
        """The messages of a path; steps shared with the last request's path are reused."""
        new: list[Path] = []
        steps = self._last_steps
        while path.parent is not None and not (path.length <= len(steps) and steps[path.length - 1] is path):
            new.append(path)
            path = path.parent
        steps[path.length :] = reversed(new)
        return [*map(_MESSAGE, steps)]

    def _find_answer(self, state: int, message: Message) -> Node | None:
        for key in answer_keys(message):
            nodes = self._answers.get((state, key), ())
            if not nodes or not same_words(message, nodes[-1].served):
                continue
            if len(nodes) == 1 or _same_tokens(nodes):
                return nodes[-1]
            self.ambiguous += 1
            return None
        return None

    def _find_messages(self, state: int, message: Message, *, exact: bool) -> list[tuple[int, Message]]:
        """Equal messages that are not answers, with the states after them. Trailing white space may differ, except in
        the last message of a request (``exact``): its answer would be to another prompt."""
        children = self._messages.get((state, message_key(message)), ())
        equal = [child for child in children if child[1]["content"] == message["content"]]
        return equal if exact else [*equal, *(child for child in children if child not in equal)]

    def _fork_reason(
        self, messages: Sequence[Message], length: int, node: Node | None, conversation: Conversation | None
    ) -> ForkReason | None:
        """The reason why a request does not continue a conversation's last answer, as far as messages show it."""
        if conversation is None or conversation.tip is None or conversation.tip is node or length == len(messages):
            return None
        tip, first = conversation.tip, messages[length]
        text = first["content"].strip() if first["role"] == "assistant" and tip.depth == length + 1 else ""
        if tip.cut and text and tip.served["content"].startswith(text):
            return ForkReason.BRANCH  # the client read only part of the cut answer
        later = (key for message in messages[length + 1 :] for key in _keys(message))
        fork = classify_edit(
            replaced=first["role"] == "assistant",
            still_there=any(key in self._seen_keys for key in later),
            dropped=tip.depth - length if len(messages) < tip.depth else 0,
            summary=first["role"] == "user" and length > 0 and messages[length - 1]["role"] == "user",
        )
        return None if fork is ForkReason.BRANCH else fork  # tokens tell branches apart

    def _with_written_ids(self, messages: Sequence[Message], node: Node | None) -> Iterator[Message]:
        """``messages`` with the ids of calls as the model wrote them, which templates expect; the results before the
        next answer are of calls of ``node``."""
        ids = self._written_ids
        for message in messages:
            if message["role"] == "assistant":
                node = None
            if identity := message.get("tool_call_id"):
                key = (node.state if node is not None else -1, identity)
                message = {**message, "tool_call_id": ids.get(key) or ids.get(identity, identity)}
            if message.get("tool_calls"):
                calls = [{**call, "id": ids.get(call["id"], call["id"])} for call in message["tool_calls"]]
                message = {**message, "tool_calls": calls}
            yield message


def _keys(message: Message) -> list[Hashable]:
    return answer_keys(message) if message["role"] == "assistant" else [message_key(message)]


def _same_tokens(nodes: Sequence[Node]) -> bool:
    first, *rest = (node.conversation.session.turns[node.turn] for node in nodes)
    return all(np.array_equal(first.response_ids, turn.response_ids) for turn in rest)


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """An answer, the one that its request continued, its ``place`` in a tree, and the attempt's clock at both ends."""

    node: Node
    parent: Node | None
    place: tuple[int, int]
    requested_at: int
    answered_at: int


@dataclass
class UntrainedTurns:
    """The ``turns`` that the setting ``branches`` excludes from training, after each answer. The cost of an answer does
    not grow with the number of earlier answers."""

    branches: Branches
    turns: tuple[int, ...] = ()
    _untrained: set[int] = field(default_factory=set)
    _latest: dict[tuple[int, int], list[TimedAnswer]] = field(default_factory=dict)  # not requested again, by place
    _parents: dict[Node, Node | None] = field(default_factory=dict)
    _branch: dict[Node, None] = field(default_factory=dict)  # from the first answer to the last

    def add(self, answer: TimedAnswer) -> None:
        """Add the next answer, in order of ``answered_at``."""
        if self.branches == "all":
            return
        dropped, restored = self._drop_retried(answer) if self.branches == "used" else self._move_branch(answer)
        if dropped or restored:
            self._untrained.difference_update(node.turn for node in restored)
            self._untrained.update(node.turn for node in dropped)
            self.turns = tuple(sorted(self._untrained))

    def _drop_retried(self, answer: TimedAnswer) -> tuple[list[Node], list[Node]]:
        """Drop answers that were requested again after they ended and were never continued."""
        dropped, parent = [], answer.parent
        earlier = self._latest.setdefault(answer.place, [])
        while earlier and earlier[0].answered_at < answer.requested_at:
            node = earlier.pop(0).node
            dropped += [] if node.continued else [node]
        earlier.append(answer)
        restored = [parent] if parent is not None and parent.continued and parent.turn in self._untrained else []
        return dropped, restored

    def _move_branch(self, answer: TimedAnswer) -> tuple[list[Node], list[Node]]:
        """Drop answers that are not on the branch of the last answer."""
        dropped, added, node = [], [], answer.node
        self._parents[node] = answer.parent
        while node is not None and node not in self._branch:
            added.append(node)
            node = self._parents[node]
        while self._branch and next(reversed(self._branch)) is not node:
            dropped.append(self._branch.popitem()[0])
        self._branch.update(dict.fromkeys(reversed(added)))
        return dropped, [node for node in added if node.turn in self._untrained]
