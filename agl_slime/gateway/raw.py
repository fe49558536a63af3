"""Completions of a text or of token ids: no template, no roles. What the engine is asked is what the client sent, in
tokens; where that begins with what was asked and sampled before, in those tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agl_slime.gateway.messages import Message
from agl_slime.gateway.tree import Line, Match, Node, OpenSession, Tree
from agl_slime.sglang.generation import Generation
from agl_slime.sglang.prompt import PromptIds
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.codec import common_prefix, token_array
from agl_slime.tokens.conversation import LONG_TEXT_CHARS, ChatContext
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.template import ChatTemplate
from agl_slime.tokens.tokenizer import longest_prefix
from agl_slime.trace.turn import Turn


@dataclass(frozen=True, slots=True)
class RawMatch(Match):
    """``ids``: the prompt, where it came as those. Of the answer that it goes on from ``asked`` is the length of its
    prompt in characters, and ``whole`` that of prompt and answer, where its words stand here as well; else 0."""

    ids: tuple[int, ...] | None = None
    asked: int = 0
    whole: int = 0


@dataclass(slots=True)
class _Said:
    """Of a node, the length of its prompt and of prompt and answer in characters, and their digests: texts that begin
    with each other are not held again and again."""

    asked: int
    asked_digest: bytes
    whole: int
    whole_digest: bytes


class RawContext(ChatContext):
    """One prompt and its answer. ``messages``, which are for reading, have it in pieces: what was asked and answered
    before, and what came then."""

    def __init__(self, template: ChatTemplate, match: RawMatch, turns: Sequence[Turn]) -> None:
        before = match.node.line.session.context if match.node is not None else None
        self._before = before if isinstance(before, RawContext) else None
        text = match.messages[0]["content"]
        pieces: list[Message] = []
        if self._before is not None and match.whole:
            pieces = [*self._before.messages]
        if not pieces or len(text) > match.whole:
            pieces.append({"role": "text", "content": text[match.whole :]})
        super().__init__(template=template, messages=pieces, copies=False)
        self._text, self._ids, self._asked_before = text, match.ids, match.asked
        self._answered = bool(match.whole)
        self._turn = turns[match.node.turn] if match.node is not None else None

    async def prompt(self) -> PromptIds:
        ids = await run_in_thread(self.prompt_ids) if len(self._text) > LONG_TEXT_CHARS else self.prompt_ids()
        return PromptIds(token_array(ids))

    def prompt_ids(self) -> list[int]:
        ids = self._encoded() if self._ids is None else list(self._ids)
        if self._turn is not None:
            self.kept_tokens = common_prefix(self._turn.token_ids, token_array(ids))
            whole = self.kept_tokens == len(self._turn.token_ids)
            # its words, and not the end mark
            self.fork = None if whole else ForkReason.TEMPLATE if self._answered else ForkReason.BRANCH
        return ids

    def _encoded(self) -> list[int]:
        tokenizer = self._tokenizer
        if self._turn is None:
            known = self._template.prompt_cache  # the other members of the group ask the same
            return self._first() if known is None else list(known.get([self._text], self._first))
        rest = self._text[self._asked_before :]
        n, same = longest_prefix(tokenizer, self._turn.response_ids.tolist(), rest)
        more = tokenizer.encode(rest[len(same) :], add_special_tokens=False)
        return [*self._turn.prompt_ids.tolist(), *self._turn.response_ids[:n].tolist(), *more]

    def _first(self) -> list[int]:
        begins = getattr(self._tokenizer, "bos_token", None) or ""
        return self._tokenizer.encode(self._text, add_special_tokens=not (begins and self._text.startswith(begins)))

    def add_answer(self, prompt_ids: Sequence[int], generation: Generation) -> Message:
        kept, before = self.kept_tokens, self._before
        if before is not None and kept == len(before._tokens):  # nothing else went on from there
            self._tokens, prompt_ids = before._tokens, prompt_ids[kept:]
        self._tokens.extend(prompt_ids)
        self._tokens.extend(generation.output_ids)
        self._text, self._ids, self._before, self._turn = "", None, None, None
        self.messages.append({"role": "assistant", "content": generation.text})
        return self.messages[-1]


class RawTree(Tree):
    """The texts of one attempt. ``served`` of a node is its answer."""

    def __init__(self, template: ChatTemplate, open_session: OpenSession) -> None:
        super().__init__(template, open_session)
        self._said: dict[Node, _Said] = {}
        self._places: dict[bytes, int] = {}

    def find(self, messages: Sequence[Message]) -> RawMatch:
        """The answer whose prompt and words the text begins with, or the longest such prompt."""
        asked = messages[0]
        if asked["role"] != "text":
            return RawMatch([], 0, [], 0, None, None, None)
        ids = None if isinstance(asked["content"], str) else asked["content"]
        text = asked["content"] if ids is None else self.template.tokenizer.decode(ids, skip_special_tokens=False)

        begins = self._begins(text)

        def known(node: Node) -> int:
            return self._said[node].whole if self._said[node].whole_digest in begins else self._said[node].asked

        nodes = (node for node in reversed(self._said) if self._said[node].asked_digest in begins)
        node = max(nodes, key=known, default=None)
        match = RawMatch([{"role": "text", "content": text}], int(node is not None), [], 0, node, None, None, ids)
        if node is None:
            return match
        said = self._said[node]
        return replace(match, asked=said.asked, whole=said.whole if said.whole_digest in begins else 0)

    def _begins(self, text: str) -> set[bytes]:
        """The digests of what is held that are those of a beginning of ``text``; in one pass over it."""
        lengths = {length for said in self._said.values() for length in (said.asked, said.whole)}
        digest, at, found = _digest(), 0, set[bytes]()
        for length in sorted(length for length in lengths if length <= len(text)):
            digest.update(_bytes(text[at:length]))
            at = length
            found.add(_marked(digest, length))
        return found

    def take(self, match: Match) -> Line:
        assert isinstance(match, RawMatch)
        session = self.open_session(match.messages)
        session.context = RawContext(self.template, match, session.turns)
        session.last_turn = match.node.turn if match.node is not None else None
        return Line(session)

    def answered(
        self, match: Match, line: Line, *, held: Message, served: Message, ids: Mapping[str, str], cut: bool = False
    ) -> Node:
        assert isinstance(match, RawMatch)
        text, words = match.messages[0]["content"], served["content"]
        digest = _digest(text)
        asked = _marked(digest, len(text))
        digest.update(_bytes(words))
        whole = len(text) + len(words)
        place = self._places.setdefault(asked, len(self._places))
        node = Node({}, served, place, place, line, len(line.session.turns) - 1, 1, cut)
        if match.node is not None and self._said[match.node].asked_digest != asked:
            match.node.continued = True
        self._said[node] = _Said(len(text), asked, whole, _marked(digest, whole))
        return node


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(text: str = "") -> Any:
    return hashlib.blake2b(_bytes(text), digest_size=16)


def _marked(digest: Any, length: int) -> bytes:
    """The digest of the text so far, with its length."""
    return digest.digest() + length.to_bytes(8, "big")
