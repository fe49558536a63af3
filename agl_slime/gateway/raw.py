"""Completions of a text or of token ids, without template and roles. A prompt that begins with an earlier prompt and
answer reuses their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agl_slime.engine.client.generation import Generation
from agl_slime.engine.client.prompt import PromptIds
from agl_slime.gateway.messages import Message
from agl_slime.gateway.tree import Conversation, Match, Node, OpenSession, Tree
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.codec import common_prefix, token_array
from agl_slime.tokens.conversation import LONG_TEXT_CHARS, ChatContext
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.template import ChatTemplate
from agl_slime.tokens.tokenizer import encode_text, longest_prefix
from agl_slime.tokens.turn import Turn


@dataclass(frozen=True, slots=True)
class RawMatch(Match):
    """A raw prompt's match. ``ids``: prompt token ids, if the client sent ids. ``prompt_chars``, ``total_chars``:
    characters of the previous prompt, and of prompt plus answer if the text begins with both; else 0."""

    ids: tuple[int, ...] | None = None
    prompt_chars: int = 0
    total_chars: int = 0


@dataclass(slots=True)
class _NodeDigests:
    """Characters and digest of a node's prompt, and of prompt plus answer; texts would take quadratic memory."""

    prompt_chars: int
    prompt_digest: bytes
    total_chars: int
    total_digest: bytes


class RawContext(ChatContext):
    """One prompt and its answer. ``messages`` shows it in pieces: earlier prompts and answers, and the added text."""

    def __init__(self, template: ChatTemplate, match: RawMatch, turns: Sequence[Turn]) -> None:
        previous = match.node.conversation.session.context if match.node is not None else None
        self._previous = previous if isinstance(previous, RawContext) else None
        text = match.messages[0]["content"]
        pieces: list[Message] = []
        if self._previous is not None and match.total_chars:
            pieces = [*self._previous.messages]
        if not pieces or len(text) > match.total_chars:
            pieces.append({"role": "text", "content": text[match.total_chars :]})
        super().__init__(template=template, messages=pieces, copies=False)
        self._text, self._ids, self._prompt_chars = text, match.ids, match.prompt_chars
        self._extends_answer = bool(match.total_chars)
        self._turn = turns[match.node.turn] if match.node is not None else None

    async def prompt(self) -> PromptIds:
        ids = await run_in_thread(self.prompt_ids) if len(self._text) > LONG_TEXT_CHARS else self.prompt_ids()
        return PromptIds(token_array(ids))

    def prompt_ids(self) -> list[int]:
        ids = self._encoded() if self._ids is None else list(self._ids)
        if self._turn is not None:
            self.kept_tokens = common_prefix(self._turn.token_ids, token_array(ids))
            whole = self.kept_tokens == len(self._turn.token_ids)
            # the client sent the answer's text back without the end token
            self.fork = None if whole else ForkReason.TEMPLATE if self._extends_answer else ForkReason.BRANCH
        return ids

    def _encoded(self) -> list[int]:
        if self._turn is None:
            prompts = self.template.prompt_cache  # shared by the members of a group
            return self._first() if prompts is None else list(prompts.get([self._text], self._first))
        rest = self._text[self._prompt_chars :]
        n, same = longest_prefix(self._tokenizer, self._turn.response_ids.tolist(), rest)
        new_ids = encode_text(self._tokenizer, rest[len(same) :])
        return [*self._turn.prompt_ids.tolist(), *self._turn.response_ids[:n].tolist(), *new_ids]

    def _first(self) -> list[int]:
        bos = getattr(self._tokenizer, "bos_token", None) or ""
        return encode_text(self._tokenizer, self._text, add_special_tokens=not (bos and self._text.startswith(bos)))

    def add_answer(self, prompt_ids: Sequence[int], generation: Generation) -> Message:
        shared, previous = self.kept_tokens, self._previous
        if previous is not None and shared == len(previous._tokens):  # no other turn extended that buffer
            self._tokens, prompt_ids = previous._tokens, prompt_ids[shared:]
        self._tokens.extend(prompt_ids)
        self._tokens.extend(generation.output_ids)
        self._text, self._ids, self._previous, self._turn = "", None, None, None
        self.messages.append({"role": "assistant", "content": generation.text})
        return self.messages[-1]


class RawTree(Tree):
    """The texts of one attempt; each node is an answer."""

    def __init__(self, template: ChatTemplate, open_session: OpenSession) -> None:
        super().__init__(template, open_session)
        self._digests: dict[Node, _NodeDigests] = {}
        self._places: dict[bytes, int] = {}

    def find(self, messages: Sequence[Message]) -> RawMatch:
        """The answer with the longest prompt, or prompt plus answer, that the text begins with."""
        prompt = messages[0]
        if prompt["role"] != "text":
            return RawMatch([], 0, [], 0, None, None, None)
        ids = None if isinstance(prompt["content"], str) else prompt["content"]
        text = prompt["content"] if ids is None else self.template.tokenizer.decode(ids, skip_special_tokens=False)
        prefixes = self._prefix_digests(text)

        def shared_chars(node: Node) -> int:
            digest = self._digests[node]
            return digest.total_chars if digest.total_digest in prefixes else digest.prompt_chars

        nodes = (node for node in reversed(self._digests) if self._digests[node].prompt_digest in prefixes)
        node = max(nodes, key=shared_chars, default=None)
        match = RawMatch([{"role": "text", "content": text}], int(node is not None), [], 0, node, None, None, ids)
        if node is None:
            return match
        digest = self._digests[node]
        total = digest.total_chars if digest.total_digest in prefixes else 0
        return replace(match, prompt_chars=digest.prompt_chars, total_chars=total)

    def _prefix_digests(self, text: str) -> set[bytes]:
        """The digests of prefixes of ``text`` that are as long as an earlier text, in one pass."""
        lengths = {length for digest in self._digests.values() for length in (digest.prompt_chars, digest.total_chars)}
        digest, position, prefixes = _digest(), 0, set[bytes]()
        for length in sorted(length for length in lengths if length <= len(text)):
            digest.update(_bytes(text[position:length]))
            position = length
            prefixes.add(_with_length(digest, length))
        return prefixes

    def acquire(self, match: Match) -> Conversation:
        assert isinstance(match, RawMatch)
        session = self.open_session(match.messages)
        session.context = RawContext(self.template, match, session.turns)
        session.last_turn = match.node.turn if match.node is not None else None
        return Conversation(session)

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
        assert isinstance(match, RawMatch)
        prompt, answer = match.messages[0]["content"], served["content"]
        digest = _digest(prompt)
        prompt_digest = _with_length(digest, len(prompt))
        digest.update(_bytes(answer))
        total = len(prompt) + len(answer)
        place = self._places.setdefault(prompt_digest, len(self._places))
        node = Node({}, served, place, place, conversation, len(conversation.session.turns) - 1, 1, cut)
        if match.node is not None and self._digests[match.node].prompt_digest != prompt_digest:
            match.node.continued = True
        self._digests[node] = _NodeDigests(len(prompt), prompt_digest, total, _with_length(digest, total))
        return node


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(text: str = "") -> Any:
    return hashlib.blake2b(_bytes(text), digest_size=16)


def _with_length(digest: Any, length: int) -> bytes:
    return digest.digest() + length.to_bytes(8, "big")
