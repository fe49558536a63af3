"""Turns as span attributes, and back.

A rollout's prompts repeat its history, so a turn is stored as the difference to its base turn: the number of that turn,
how many of its tokens are kept, and the tokens after those. Twenty turns take the space of their new tokens. A checksum
over the whole prompt, the response and the log-probs guards against damage.
"""

from __future__ import annotations

import itertools
import json
import secrets
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from agl_slime.engine.client.generation import WeightSpan
from agl_slime.errors import TraceError
from agl_slime.tokens import attributes as names
from agl_slime.tokens.codec import (
    LogProbArray,
    TokenArray,
    pack_array,
    shared_length,
    stored_bytes,
    unpack_log_probs,
    unpack_token_ids,
)
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.images import Image, Images, decode_images, image_attributes
from agl_slime.tokens.replay import decode_replay, replay_attributes
from agl_slime.tokens.turn import Messages, Turn

T = TypeVar("T")

# Numbers of encoders. An attempt has one process; the random start keeps the attempts of a rollout apart.
_streams = itertools.count(secrets.randbits(32))
_to_json = json.JSONEncoder(ensure_ascii=False, default=str).encode  # json.dumps would make an encoder per call


class TurnEncoder:
    """An encoder of one rollout's turns as span attributes, each as the difference to its base turn.

    One encoder per rollout attempt. Thread-safe: concurrent branches of an agent may share it. With ``copies`` off,
    callers never edit a message.
    """

    def __init__(self, *, model: str | None = None, copies: bool = True) -> None:
        self._model, self._copies = model, copies
        self.stream = f"{next(_streams) & 0xFFFFFFFF:08x}"
        self._lock = threading.Lock()
        # per turn a list of messages and its length in it: turns that extend each other share a list
        self._messages: list[tuple[list[Any], int]] = []
        self._images: list[Images] = []
        self._written: set[str] = set()  # images whose files are in a span

    def encode(self, turn: Turn) -> dict[str, Any]:
        """The attributes of the span of ``turn``: strings and numbers. Every encoded turn must reach the store, or
        later ones cannot be read. ``turn.base_turn`` counts the turns that were encoded before."""
        with self._lock:
            index, base = len(self._messages), turn.base_turn
            if base is not None and not 0 <= base < index:
                raise TraceError(f"turn {index} extends turn {base}, which was not encoded before")
            messages, (line, length) = turn.messages or (), ([], 0) if base is None else self._messages[base]
            shared = min(shared_length(messages, line), length)
            new = [*map(_json, messages[shared:])]
            if shared < len(line):
                line = line[:shared]
            line += map(_copy_message, messages[shared:], new) if self._copies else messages[shared:]
            self._messages.append((line, len(messages)))
            images = image_attributes(turn.images, () if base is None else self._images[base], self._written)
            self._images.append(turn.images)
        attributes: dict[str, Any] = {
            names.FORMAT: names.FORMAT_VERSION,
            names.OPERATION_NAME: "chat",
            names.PROVIDER_NAME: "sglang",
            names.STREAM: self.stream,
            names.TURN_INDEX: index,
            names.PROMPT_IDS: pack_array(turn.prompt_ids[turn.kept_tokens :]),
            names.RESPONSE_IDS: pack_array(turn.response_ids),
            names.CHECKSUM: _checksum(turn.prompt_ids, turn.response_ids, turn.log_probs),
            names.USAGE_INPUT_TOKENS: len(turn.prompt_ids),
            names.USAGE_OUTPUT_TOKENS: len(turn.response_ids),
            names.USAGE_CACHED_TOKENS: turn.cached_tokens,
            names.RESPONSE_FINISH_REASONS: [turn.finish_reason],
            names.OUTPUT_MESSAGES: _output_messages(turn),
            names.LATENCY_S: float(turn.latency_s),
            names.TOKEN_SOURCE: turn.token_source,
        }
        if base is not None:
            attributes[names.PROMPT_BASE] = base
            attributes[names.PROMPT_KEPT] = turn.kept_tokens
        if turn.fork is not None:
            attributes[names.PROMPT_FORK] = turn.fork.value
        if turn.log_probs is not None:
            attributes[names.LOG_PROBS] = pack_array(turn.log_probs)
        attributes |= replay_attributes(turn) | images
        if any(turn.speculated):
            attributes[names.SPECULATED] = json.dumps(turn.speculated)
        if turn.weight_versions:
            versions = [[span.version, span.start, span.end] for span in turn.weight_versions]
            attributes[names.WEIGHT_VERSIONS] = json.dumps(versions)
        if turn.messages is not None:
            attributes[names.MESSAGES_KEPT] = shared
            attributes[names.MESSAGES_NEW] = f"[{','.join(new)}]"
        for name, value in (
            (names.RESPONSE_ID, turn.request_id),
            (names.RESUMED, turn.resumed),
            (names.REQUEST_MODEL, self._model),
            (names.UNTRAINED, turn.untrained),
        ):
            if value:
                attributes[name] = value
        return attributes


class _Json(str):
    """A message's JSON, equal to any message with the same JSON: ``1`` is not ``True``."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, _json(other) if isinstance(other, Mapping) else other)


def _copy_message(message: Mapping[str, Any], text: str) -> dict[str, Any] | _Json:
    """A copy that later edits do not reach: a dict for a message of strings, else its JSON."""
    return dict(message) if all(type(value) is str for value in message.values()) else _Json(text)


def _json(value: Any) -> str:
    try:
        text = _to_json(value)
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which no store could write as UTF-8
        return json.dumps(value, default=str)
    except (TypeError, ValueError) as error:
        raise TraceError(f"a chat message cannot be written as JSON: {error}") from error
    return text


def _output_messages(turn: Turn) -> str:
    content_parts = [{"type": "text", "content": turn.text}]
    return _json([{"role": "assistant", "parts": content_parts, "finish_reason": turn.finish_reason}])


def _checksum(prompt: TokenArray, response: TokenArray, log_probs: LogProbArray | None) -> int:
    crc = 0
    for values in (prompt, response) if log_probs is None else (prompt, response, log_probs):
        crc = zlib.crc32(stored_bytes(values), crc)
    return crc


# -- reading ---------------------------------------------------------------------------------------------------------


def is_packed(attributes: Mapping[str, Any]) -> bool:
    """Whether these attributes are a ``TurnEncoder``'s."""
    return names.FORMAT in attributes


def decode_turns(spans: Iterable[Any]) -> list[Turn]:
    """The turns of a ``TurnEncoder``'s spans, in order; other spans are skipped.

    Turns of one encoder come in the order of encoding, whatever the order of the spans; turns of several encoders keep
    the places of their spans. Raises ``TraceError`` when a turn is missing, doubled, damaged or in an unknown
    format.
    """
    packed = [span.attributes for span in spans if is_packed(span.attributes)]
    for attributes in packed:
        if attributes[names.FORMAT] != names.FORMAT_VERSION:
            supported = f"this version of agl-slime reads format {names.FORMAT_VERSION}"
            raise TraceError(f"span format {attributes[names.FORMAT]!r} is unknown; {supported}")
    streams = _places(packed)
    decoded: dict[int, Turn] = {}
    for stream, places in streams.items():
        ordered = sorted((_get(packed[place], names.TURN_INDEX, int), place) for place in places)
        turns: list[Turn] = []
        images: dict[str, Image] = {}
        for number, (index, place) in enumerate(ordered):
            if index < number:
                raise TraceError(f"turn {index} of encoder {stream} occurs twice")
            if index > number:
                raise TraceError(f"turn {number} of encoder {stream} is missing, although turn {index} exists")
            try:
                turns.append(_decode_turn(packed[place], turns, places, images))
            except TraceError as error:
                raise TraceError(f"turn {index} of encoder {stream} cannot be read: {error}") from error
        decoded.update(zip(places, turns, strict=True))
    return [decoded[place] for place in range(len(packed))]


def _places(packed: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """The places of each encoder's turns among all turns."""
    streams: dict[str, list[int]] = {}
    for place, attributes in enumerate(packed):
        streams.setdefault(str(attributes.get(names.STREAM)), []).append(place)
    return streams


def turn_numbers(spans: Iterable[Any]) -> dict[tuple[str, Any], int]:
    """The index of each turn in ``decode_turns``, by its encoder and its index there."""
    streams = _places(span.attributes for span in spans if is_packed(span.attributes))
    return {(stream, index): place for stream, places in streams.items() for index, place in enumerate(places)}


def _decode_turn(
    attributes: Mapping[str, Any], earlier: Sequence[Turn], places: Sequence[int], images: dict[str, Image]
) -> Turn:
    prompt = unpack_token_ids(_get(attributes, names.PROMPT_IDS, str), name="prompt ids")
    base, base_turn, kept_tokens = None, None, 0
    if names.PROMPT_BASE in attributes:
        index, kept_tokens = _get(attributes, names.PROMPT_BASE, int), _get(attributes, names.PROMPT_KEPT, int)
        if not 0 <= index < len(earlier):
            raise TraceError(f"{names.PROMPT_BASE} is turn {index}, which is not an earlier turn")
        base, base_turn = earlier[index], places[index]
        if not 0 <= kept_tokens <= base.length:
            raise TraceError(f"{names.PROMPT_KEPT} is {kept_tokens}, turn {index} has {base.length} tokens")
        prompt = np.concatenate((base.token_ids[:kept_tokens], prompt))
        prompt.flags.writeable = False
    response = unpack_token_ids(_get(attributes, names.RESPONSE_IDS, str), name="response ids")
    log_probs = unpack_log_probs(_get(attributes, names.LOG_PROBS, str)) if names.LOG_PROBS in attributes else None
    for ids, name in ((prompt, names.USAGE_INPUT_TOKENS), (response, names.USAGE_OUTPUT_TOKENS)):
        if len(ids) != _get(attributes, name, int):
            raise TraceError(f"there are {len(ids)} ids where {name} says {attributes[name]}")
    if _checksum(prompt, response, log_probs) != _get(attributes, names.CHECKSUM, int):
        raise TraceError("its tokens or log-probs do not match their checksum")
    fork = attributes.get(names.PROMPT_FORK)
    if fork is not None and fork not in {reason.value for reason in ForkReason}:
        raise TraceError(f"{names.PROMPT_FORK} must be a fork reason, got {fork!r:.80}")
    return Turn(
        prompt_ids=prompt,
        response_ids=response,
        log_probs=log_probs,
        finish_reason=finish_reason(attributes),
        weight_versions=_weight_versions(attributes),
        cached_tokens=_get(attributes, names.USAGE_CACHED_TOKENS, int),
        request_id=str(attributes.get(names.RESPONSE_ID, "")),
        text=_output_text(attributes),
        messages=_decode_messages(attributes, base),
        latency_s=float(attributes.get(names.LATENCY_S, 0.0)),
        resumed=int(attributes.get(names.RESUMED, 0)),
        untrained=str(attributes.get(names.UNTRAINED, "")),
        token_source=_get(attributes, names.TOKEN_SOURCE, str),  # type: ignore[arg-type]  # Turn refuses others
        base_turn=base_turn,
        kept_tokens=kept_tokens,
        fork=None if fork is None else ForkReason(fork),
        speculated=_speculated(attributes),
        images=decode_images(attributes, base.images if base is not None else (), images),
        **decode_replay(attributes),
    )


def _decode_messages(attributes: Mapping[str, Any], base: Turn | None) -> Messages | None:
    if names.MESSAGES_NEW not in attributes:
        return None
    shared = _get(attributes, names.MESSAGES_KEPT, int)
    earlier = (base.messages if base is not None else None) or ()
    if not 0 <= shared <= len(earlier):
        raise TraceError(f"{names.MESSAGES_KEPT} is {shared}, the base turn has {len(earlier)} messages")
    new = parse_json(_get(attributes, names.MESSAGES_NEW, str), names.MESSAGES_NEW)
    if not isinstance(new, list):
        raise TraceError(f"{names.MESSAGES_NEW} must be a JSON list")
    return (*earlier[:shared], *new)


def _weight_versions(attributes: Mapping[str, Any]) -> tuple[WeightSpan, ...]:
    if names.WEIGHT_VERSIONS not in attributes:
        return ()
    listed = parse_json(_get(attributes, names.WEIGHT_VERSIONS, str), names.WEIGHT_VERSIONS)
    try:
        return tuple(WeightSpan(str(version), int(start), int(end)) for version, start, end in listed)
    except (TypeError, ValueError) as error:
        raise TraceError(f"{names.WEIGHT_VERSIONS} must be a list of [version, start, end], got {listed!r}") from error


def _speculated(attributes: Mapping[str, Any]) -> tuple[int, int, int]:
    if names.SPECULATED not in attributes:
        return 0, 0, 0
    listed = parse_json(_get(attributes, names.SPECULATED, str), names.SPECULATED)
    try:
        accepted, drafted, verified = map(int, listed)
    except (TypeError, ValueError) as error:
        raise TraceError(f"{names.SPECULATED} must be three whole numbers, got {listed!r:.80}") from error
    return accepted, drafted, verified


def _output_text(attributes: Mapping[str, Any]) -> str:
    messages = parse_json(_get(attributes, names.OUTPUT_MESSAGES, str), names.OUTPUT_MESSAGES)
    try:
        return "".join(part["content"] for message in messages for part in message["parts"] if part["type"] == "text")
    except (TypeError, KeyError) as error:
        raise TraceError(f"{names.OUTPUT_MESSAGES} is not a list of messages with parts") from error


def finish_reason(attributes: Mapping[str, Any]) -> str:
    """The (first) finish reason of a call, ``"stop"`` when none was written."""
    reasons = attributes.get(names.RESPONSE_FINISH_REASONS) or "stop"
    return reasons if isinstance(reasons, str) else str(reasons[0])


def parse_json(text: str, name: str) -> Any:
    """``text`` as JSON; ``TraceError`` with the attribute's ``name`` for anything else."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise TraceError(f"{name} is not valid JSON: {error}") from error


def _get(attributes: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = attributes.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TraceError(f"attribute {name} must be of type {kind.__name__}, got {value!r:.80}")
    return value
