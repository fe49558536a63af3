"""A radix tree over token sequences: what of a new sequence is already held, and by whom.

Every distinct token is stored once, so the memory is linear in what was added however often histories overlap; looking
a sequence up costs one numpy comparison per node on its path.
"""

from __future__ import annotations

from dataclasses import dataclass

from agl_slime.tokens.codec import TokenArray


@dataclass(frozen=True)
class Match:
    """How far a looked-up sequence is held.

    ``length`` tokens of it are held. ``first`` is the earliest and ``latest`` the most recent owner of a sequence
    through the last place reached (an owner whose sequence goes on differently or ends there), ``None`` when nothing is
    held. ``ends`` lists ``(length, owners)`` for each place on the way where sequences end, shortest first: the
    sequences that the looked-up one extends or equals.
    """

    length: int
    first: int | None
    latest: int | None
    ends: tuple[tuple[int, tuple[int, ...]], ...]


class _Node:
    """An edge with the node at its end: ``ids`` on the edge, who came first and last, whose sequence ends at the node."""

    __slots__ = ("children", "ends", "first", "ids", "latest")

    def __init__(self, ids: TokenArray, first: int, latest: int) -> None:
        self.ids = ids
        self.first = first
        self.latest = latest
        self.ends: list[int] = []
        self.children: dict[int, _Node] = {}


class TokenTree:
    """Token sequences, each with an owner (a number given by the caller, rising from call to call)."""

    def __init__(self) -> None:
        self._roots: dict[int, _Node] = {}

    def match(self, ids: TokenArray) -> Match:
        """The longest prefix of ``ids`` that is held."""
        children, depth, last = self._roots, 0, None
        ends: list[tuple[int, tuple[int, ...]]] = []
        while depth < len(ids):
            node = children.get(int(ids[depth]))
            if node is None:
                break
            last = node
            shared = common_prefix(node.ids, ids[depth:])
            depth += shared
            if shared < len(node.ids):
                break
            if node.ends:
                ends.append((depth, tuple(node.ends)))
            children = node.children
        return Match(depth, None if last is None else last.first, None if last is None else last.latest, tuple(ends))

    def insert(self, ids: TokenArray, owner: int) -> None:
        """Add ``ids``; an empty sequence is not kept."""
        children, depth, node = self._roots, 0, None
        while depth < len(ids):
            head = int(ids[depth])
            node = children.get(head)
            if node is None:
                # a copy: a view would keep the whole sequence in memory for its tail
                node = children[head] = _Node(ids[depth:].copy(), owner, owner)
                depth = len(ids)
                break
            shared = common_prefix(node.ids, ids[depth:])
            depth += shared
            if shared < len(node.ids):
                node = children[head] = _split(node, shared)
            node.latest = owner
            children = node.children
        if node is not None:
            node.ends.append(owner)


def _split(node: _Node, at: int) -> _Node:
    """The node that ends ``at`` tokens down the edge of ``node``, which becomes its child."""
    upper = _Node(node.ids[:at], node.first, node.latest)
    node.ids = node.ids[at:]
    upper.children[int(node.ids[0])] = node
    return upper


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """Number of leading tokens that ``a`` and ``b`` share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    place = int(differs.argmax()) if n else 0
    return place if n and differs[place] else n
