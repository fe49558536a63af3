"""Completions of a text or of token ids: no template, no roles. What the engine is asked is what the client sent, in
tokens; where that begins with what was asked and sampled before, in those tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """``ids``: the prompt, where it came as those."""

    ids: tuple[int, ...] | None = None


class RawContext(ChatContext):
    """One prompt and its answer."""

    def __init__(self, template: ChatTemplate, match: RawMatch, turns: Sequence[Turn]) -> None:
        super().__init__(template=template, messages=match.messages)
        self._text, self._ids, self._before = match.messages[0]["content"], match.ids, match.node
        self._turn = turns[match.node.turn] if match.node is not None else None

    async def prompt(self) -> PromptIds:
        ids = await run_in_thread(self.prompt_ids) if len(self._text) > LONG_TEXT_CHARS else self.prompt_ids()
        return PromptIds(token_array(ids))

    def prompt_ids(self) -> list[int]:
        ids = self._encoded() if self._ids is None else list(self._ids)
        if self._turn is not None and self._before is not None:
            self.kept_tokens = common_prefix(self._turn.token_ids, token_array(ids))
            whole = self.kept_tokens == len(self._turn.token_ids)
            kept_words = self._text.startswith(_text_of(self._before))  # and not the end mark
            self.fork = None if whole else ForkReason.TEMPLATE if kept_words else ForkReason.BRANCH
        return ids

    def _encoded(self) -> list[int]:
        tokenizer = self._tokenizer
        if self._turn is None or self._before is None:
            known = self._template.first_prompts  # the other members of the group ask the same
            return self._first() if known is None else list(known.get([self._text], self._first))
        rest = self._text[len(self._before.held["content"]) :]
        n, same = longest_prefix(tokenizer, self._turn.response_ids.tolist(), rest)
        more = tokenizer.encode(rest[len(same) :], add_special_tokens=False)
        return [*self._turn.prompt_ids.tolist(), *self._turn.response_ids[:n].tolist(), *more]

    def _first(self) -> list[int]:
        begins = getattr(self._tokenizer, "bos_token", None) or ""
        return self._tokenizer.encode(self._text, add_special_tokens=not (begins and self._text.startswith(begins)))

    def add_answer(self, prompt_ids: Sequence[int], generation: Generation) -> Message:
        self._tokens.extend(prompt_ids)
        self._tokens.extend(generation.output_ids)
        self.messages.append({"role": "assistant", "content": generation.text})
        return self.messages[-1]


class RawTree(Tree):
    """The texts of one attempt. ``held`` of a node is its prompt, ``served`` its answer."""

    def __init__(self, template: ChatTemplate, open_session: OpenSession) -> None:
        super().__init__(template, open_session)
        self._nodes: list[Node] = []
        self._places: dict[str, int] = {}

    def find(self, messages: Sequence[Message]) -> RawMatch:
        """The answer whose prompt and words the text begins with, or the longest such prompt."""
        asked = messages[0]
        if asked["role"] != "text":
            return RawMatch([], 0, [], 0, None, None, None)
        ids = None if isinstance(asked["content"], str) else asked["content"]
        text = asked["content"] if ids is None else self.template.tokenizer.decode(ids, skip_special_tokens=False)

        def known(node: Node) -> int:
            whole = _text_of(node)
            return len(whole) if text.startswith(whole) else len(node.held["content"])

        nodes = (node for node in reversed(self._nodes) if text.startswith(node.held["content"]))
        node = max(nodes, key=known, default=None)
        return RawMatch([{"role": "text", "content": text}], int(node is not None), [], 0, node, None, None, ids)

    def take(self, match: Match) -> Line:
        assert isinstance(match, RawMatch)
        session = self.open_session(match.messages)
        session.context = RawContext(self.template, match, session.turns)
        session.last_turn = match.node.turn if match.node is not None else None
        return Line(session)

    def answered(
        self, match: Match, line: Line, *, held: Message, served: Message, ids: Mapping[str, str], cut: bool = False
    ) -> Node:
        prompt = match.messages[0]
        place = self._places.setdefault(prompt["content"], len(self._places))
        node = Node(prompt, served, place, place, line, len(line.session.turns) - 1, 1, cut)
        if match.node is not None and match.node.held["content"] != prompt["content"]:
            match.node.continued = True
        self._nodes.append(node)
        return node


def _text_of(node: Node) -> str:
    return node.held["content"] + node.served["content"]
