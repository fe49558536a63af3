"""The bodies of an attempt's requests: what one shares with an earlier one is neither parsed nor read again.

Clients send a conversation whole each time, and their serializers write what they have written before in the same
bytes. So a body is held in two parts: all up to the end of its list of messages, and the rest. One that begins with the
first, ends with the second and has a comma between them is that conversation with more messages: JSON says so, if what
follows the comma is a list without its brackets.

Where the list ends is seen when the second request comes, which differs from the first from there on, and proved by
parsing the first with one item more at that place. From then on a digest stands for the bytes: hashing 130 kB takes 0.1
ms, and a thousand conversations that wait would hold as many bytes again as their messages have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import orjson

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.calls import Call
from agl_slime.gateway.images import marked_body
from agl_slime.gateway.messages import check_results
from agl_slime.gateway.protocol import Kept, Protocol, parsed_body
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.support.http import INLINE_PARSE_BYTES
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.images import ImageSettings

T = TypeVar("T")

_HELD = 4  # conversations of one attempt at a time
_IMAGES = ImageSettings()
_SETTINGS = GatewaySettings()
_SHARED = 64
_PROBE = "an item that nobody sends: 5f1c2f3d"


@dataclass(slots=True)
class _Held:
    """A request that was read. Its head ends where its list does; once it is known where that is, the bytes are let go
    of, for its ``length`` and ``digest`` (of the path and the head) tell another that begins with it."""

    path: str
    body: Mapping[str, Any]  # its list has what writing an answer needs
    call: Call
    raw: bytes = b""
    length: int = 0
    digest: bytes = b""
    tail: bytes = b""


_asked: dict[tuple[str, bytes], _Held] = {}  # what attempts have asked for, by the ends of their requests


@dataclass(slots=True)
class Request:
    """What was asked, as bytes. ``key`` is equal for requests that are; ``new`` is what it adds to ``held``, and
    ``digest`` that of both."""

    path: str
    raw: bytes
    key: bytes
    held: _Held | None = None
    new: bytes = b""
    digest: bytes = b""


class Bodies:
    def __init__(self) -> None:
        self._held: list[_Held] = []

    def look(self, path: str, raw: bytes) -> Request:
        """The request with its key."""
        grown = sorted((held for held in self._held if _may_have_grown(held, path, raw)), key=lambda held: held.length)
        digest, seen, found = _digest(path), memoryview(raw), None
        at = 0
        for held in grown:
            digest.update(seen[at : held.length])
            at = held.length
            if digest.digest() == held.digest:
                found = held, digest.copy()
        if found is None:
            digest.update(seen[at:])
            return Request(path, raw, digest.digest())
        (held, digest), end = found, len(raw) - len(found[0].tail)
        digest.update(seen[held.length : end])
        until = digest.digest()
        digest.update(seen[end:])
        return Request(path, raw, digest.digest(), held, raw[held.length : end], until)

    async def read(
        self,
        request: Request,
        protocol: Protocol,
        kept: Kept,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        settings: GatewaySettings = _SETTINGS,
    ) -> tuple[Mapping[str, Any], Call]:
        """The body, in which the list of messages has what writing an answer needs, and the call, which has all of
        them. Raises ``GatewayRequestError``."""
        if request.held is not None and (
            found := await self._grown(request, request.held, protocol, kept, settings.max_messages)
        ):
            return found
        body = await _off_loop(request.raw, partial(parsed_body, request.raw))
        body, shown = await marked_body(request.raw, body, settings.images)
        body = {**defaults, **body}
        call = await _off_loop(request.raw, partial(_read, protocol, body, kept, settings.max_messages))
        if shown:
            call = replace(call, images=shown)
        if not protocol.grows or not isinstance(body.get(protocol.grows), list):
            return body, call
        short = {**body, protocol.grows: protocol.kept_items(body[protocol.grows])}
        if not shown:
            self._hold(request, protocol.grows, short, call)
        return short, call

    async def _grown(
        self, request: Request, held: _Held, protocol: Protocol, kept: Kept, most: int
    ) -> tuple[Mapping[str, Any], Call] | None:
        """``None`` where it has to be read whole: what is new may be no part of a list, or refused, or show images."""
        if held.call.messages[-1]["role"] == "assistant":  # what follows may belong to it
            return None
        try:
            items = orjson.loads(b"[" + request.new[1:] + b"]")
            marked, shown = await marked_body(request.new, {protocol.grows: items}, _IMAGES)
            items = marked[protocol.grows]
            more = await _off_loop(request.new, partial(protocol.more, items, kept)) if items and not shown else []
        except (ValueError, GatewayRequestError):
            return None
        if not more:
            return None
        call = replace(held.call, messages=[*held.call.messages, *more])
        _check(call, protocol, most, known=len(held.call.messages))
        length = held.length + len(request.new)
        grown = _Held(held.path, held.body, call, length=length, digest=request.digest, tail=held.tail)
        self._held = [each for each in self._held if each is not held] + [grown]
        return held.body, call

    def _hold(self, request: Request, name: str, body: Mapping[str, Any], call: Call) -> None:
        path, raw = request.path, request.raw
        before = next((held for held in reversed(self._held) if held.path == path and held.raw), None)
        end = None if before is None else _end_of_list(before, raw, name)
        if end is None:
            held = _Held(path, body, call, raw)
        else:
            self._held = [each for each in self._held if each is not before]
            digest = _digest(path, raw[:end]).digest()
            held = _shared(_Held(path, body, call, length=end, digest=digest, tail=raw[end:]))
        self._held = [*self._held, held][-_HELD:]


async def _off_loop(raw: bytes, work: Callable[[], T]) -> T:
    """What ``work`` makes of ``raw``; of a large one in a thread."""
    return work() if len(raw) <= INLINE_PARSE_BYTES else await run_in_thread(work)


def _read(protocol: Protocol, body: Mapping[str, Any], kept: Kept, most: int) -> Call:
    call = protocol.read(body, kept)
    _check(call, protocol, most)
    return call


def _check(call: Call, protocol: Protocol, most: int, *, known: int = 0) -> None:
    if (n := len(call.messages)) > most:
        told = f"the request has {n} messages, more than max_messages, {most}: send fewer"
        raise GatewayRequestError(told, status=413, code="request_too_large", param=protocol.grows)
    check_results(call.messages, protocol.orphan, in_text=protocol.calls_in_text and not call.offered, known=known)


def _shared(held: _Held) -> _Held:
    """``held`` with what an attempt before it asked for as well, in the same object: the tools of an agent, parsed, are
    as large as many turns."""
    key = held.path, held.tail
    if (known := _asked.get(key)) is None:
        if len(_asked) >= _SHARED:
            del _asked[next(iter(_asked))]
        _asked[key] = replace(held, call=replace(held.call, messages=[]))
    elif known.body == held.body and known.call.tools == held.call.tools:
        call = replace(held.call, tools=known.call.tools)
        return replace(held, body=known.body, call=call, tail=known.tail)
    return held


def _may_have_grown(held: _Held, path: str, raw: bytes) -> bool:
    """Whether a request may be ``held`` with more messages, by what costs nothing to see."""
    fits = not held.raw and held.path == path and len(raw) - len(held.tail) > held.length
    return fits and raw[held.length] == ord(",") and raw.endswith(held.tail)


def _digest(path: str, raw: bytes = b"") -> Any:
    return hashlib.blake2b(path.encode("utf-8", "surrogatepass") + b"\n" + raw, digest_size=16)


def _end_of_list(before: _Held, raw: bytes, name: str) -> int | None:
    """Where the list ``name`` ends in ``raw``, if that is what ``before`` says with more items."""
    first = before.raw
    length = min(len(first), len(raw))
    differs = np.frombuffer(first, np.uint8, length) != np.frombuffer(raw, np.uint8, length)
    at = int(differs.argmax()) if length else 0
    tail = first[at:]
    if not (length and differs[at]) or raw[at] != ord(",") or len(raw) <= len(first) or not raw.endswith(tail):
        return None
    try:
        probed = orjson.loads(first[:at] + b"," + orjson.dumps(_PROBE) + tail)
        plain = orjson.loads(first)
    except ValueError:
        return None
    proved = probed == {**plain, name: [*plain[name], _PROBE]}
    return len(raw) - len(tail) if proved else None
