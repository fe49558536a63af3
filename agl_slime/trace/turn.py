"""One model call with the exact tokens, and its form as span attributes.

A rollout's prompts repeat its history, so a turn is stored as the difference to an earlier turn of the rollout: which
turn, how many tokens of its prompt and response are kept, and the tokens after those. Twenty turns cost what their new
tokens cost. A checksum over the whole prompt, the response and the log-probs makes sure that what is read is what was
sampled.
"""

from __future__ import annotations

import itertools
import json
import secrets
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from agl_slime.errors import TraceError
from agl_slime.sglang.generation import WeightSpan
from agl_slime.tokens.codec import (
    LogProbArray,
    TokenArray,
    log_prob_array,
    pack_array,
    stored_bytes,
    token_array,
    unpack_log_probs,
    unpack_token_ids,
)
from agl_slime.tokens.forks import ForkReason
from agl_slime.trace import attributes as names

if TYPE_CHECKING:
    from agl_slime.sglang.generation import Generation

TokenSource = Literal["engine", "retokenized"]
Messages = tuple[Mapping[str, Any], ...]

_TOKEN_SOURCES = ("engine", "retokenized")


@dataclass(frozen=True, init=False, eq=False)
class Turn:
    """One model call: the prompt that was sent and what was sampled after it.

    ``prompt_ids`` and ``response_ids`` are read-only int32 arrays and ``log_probs`` a read-only float32 array (natural
    log, one per response id) or ``None`` when the source has none; any sequence of numbers may be given.
    ``response_ids`` holds the stop token. ``weight_versions`` says which version sampled which response tokens.
    ``messages`` are the chat messages of the request and ``text`` the engine's answer: for reading, never for training.
    ``latency_s`` is the time the call took in seconds.

    Who made the prompt knows what it goes on from: the first ``kept_tokens`` tokens of turn number ``base_turn`` of the
    rollout, prompt and response, and why those are not all of them (``fork``). A turn of which nobody said so has
    ``None``, 0 and ``None``.

    Raises ``TraceError`` when ids are not non-negative int32, log-probs are not finite, or the lengths do not fit.
    """

    prompt_ids: TokenArray
    response_ids: TokenArray
    log_probs: LogProbArray | None
    finish_reason: str
    weight_versions: tuple[WeightSpan, ...]
    cached_tokens: int
    request_id: str
    text: str
    messages: Messages | None
    latency_s: float
    resumed: int
    token_source: TokenSource
    base_turn: int | None
    kept_tokens: int
    fork: ForkReason | None

    def __init__(
        self,
        *,
        prompt_ids: Sequence[int] | TokenArray,
        response_ids: Sequence[int] | TokenArray,
        log_probs: Sequence[float] | LogProbArray | None = None,
        finish_reason: str = "stop",
        weight_versions: Iterable[WeightSpan] = (),
        cached_tokens: int = 0,
        request_id: str = "",
        text: str = "",
        messages: Iterable[Mapping[str, Any]] | None = None,
        latency_s: float = 0.0,
        resumed: int = 0,
        token_source: TokenSource = "engine",
        base_turn: int | None = None,
        kept_tokens: int = 0,
        fork: ForkReason | None = None,
    ) -> None:
        prompt = token_array(prompt_ids, name="prompt_ids")
        response = token_array(response_ids, name="response_ids")
        for name, ids in (("prompt_ids", prompt), ("response_ids", response)):
            if ids.size and ids.min() < 0:
                raise TraceError(f"{name} must not be negative, got {int(ids.min())}")
        probs = None if log_probs is None else log_prob_array(log_probs, name="log_probs")
        if probs is not None and len(probs) != len(response):
            raise TraceError(
                f"a turn needs one log-prob per response id, got {len(probs)} log-probs for {len(response)} ids"
            )
        versions = tuple(weight_versions)
        for span in versions:
            if not 0 <= span.start <= span.end <= len(response):
                raise TraceError(
                    f"weight version {span.version!r} covers tokens {span.start} to {span.end} of a response of {len(response)}"
                )
        if token_source not in _TOKEN_SOURCES:
            raise TraceError(f"token_source must be one of {', '.join(_TOKEN_SOURCES)}, got {token_source!r}")
        if not 0 <= kept_tokens <= len(prompt) or (base_turn is None and kept_tokens):
            raise TraceError(
                f"kept_tokens must lie between 0 and {len(prompt)} and be 0 without base_turn, got {kept_tokens}"
            )
        self.__dict__.update(  # frozen: not by assignment
            prompt_ids=prompt,
            response_ids=response,
            log_probs=probs,
            finish_reason=finish_reason,
            weight_versions=versions,
            cached_tokens=cached_tokens,
            request_id=request_id,
            text=text,
            messages=None if messages is None else tuple(messages),
            latency_s=latency_s,
            resumed=resumed,
            token_source=token_source,
            base_turn=base_turn,
            kept_tokens=kept_tokens,
            fork=fork,
        )

    @classmethod
    def from_generation(
        cls,
        prompt_ids: Sequence[int] | TokenArray,
        generation: Generation,
        *,
        messages: Iterable[Mapping[str, Any]] | None = None,
        base_turn: int | None = None,
        kept_tokens: int = 0,
        fork: ForkReason | None = None,
    ) -> Turn:
        """The turn of a ``/generate`` call that was sent ``prompt_ids``."""
        return cls(
            prompt_ids=prompt_ids,
            response_ids=generation.output_ids,
            log_probs=generation.log_probs,
            finish_reason=generation.finish_reason,
            weight_versions=generation.weight_versions,
            cached_tokens=generation.cached_tokens,
            request_id=generation.request_id,
            text=generation.text,
            messages=messages,
            latency_s=generation.latency_s,
            resumed=generation.resumed,
            base_turn=base_turn,
            kept_tokens=kept_tokens,
            fork=fork,
        )

    @property
    def token_ids(self) -> TokenArray:
        """Prompt and response in one array."""
        return np.concatenate((self.prompt_ids, self.response_ids))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Turn):
            return NotImplemented
        return all(_same(getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)

    __hash__ = None  # type: ignore[assignment]  # arrays are compared by value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)
    return bool(a == b)


# -- writing ---------------------------------------------------------------------------------------------------------

# What tells the encoders of one attempt apart: they live in one process. Begins anywhere, so that those of its attempts
# look different as well.
_streams = itertools.count(secrets.randbits(32))
# json.dumps would make an encoder per call
_to_json = json.JSONEncoder(ensure_ascii=False, default=str).encode


class TurnEncoder:
    """Turns of one rollout to span attributes, each stored as the difference to the turn that it goes on from.

    One encoder per rollout attempt. Thread-safe: concurrent branches of an agent may share it.
    """

    def __init__(self, *, model: str | None = None) -> None:
        self._model = model
        self._stream = f"{next(_streams) & 0xFFFFFFFF:08x}"
        self._lock = threading.Lock()
        self._messages: list[tuple[str, ...]] = []  # per turn, as JSON: the agent may change its dicts later
        self._shared_json: dict[str, str] = {}

    def encode(self, turn: Turn) -> dict[str, Any]:
        """The attributes of the span of ``turn``: strings and numbers. Every encoded turn must reach the store,
        or later ones cannot be read. ``turn.base_turn`` counts the turns that were encoded before."""
        with self._lock:
            index = len(self._messages)
            if turn.base_turn is not None and not 0 <= turn.base_turn < index:
                raise TraceError(f"turn {index} goes on from turn {turn.base_turn}, which was not encoded before")
            messages = tuple(
                self._shared_json.setdefault(text, text) for text in map(_message_json, turn.messages or ())
            )
            base_messages = () if turn.base_turn is None else self._messages[turn.base_turn]
            self._messages.append(messages)

        attributes: dict[str, Any] = {
            names.FORMAT: names.FORMAT_VERSION,
            names.OPERATION_NAME: "chat",
            names.PROVIDER_NAME: "sglang",
            names.STREAM: self._stream,
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
        if turn.base_turn is not None:
            attributes[names.PROMPT_BASE] = turn.base_turn
            attributes[names.PROMPT_KEPT] = turn.kept_tokens
        if turn.fork is not None:
            attributes[names.PROMPT_FORK] = turn.fork.value
        if turn.log_probs is not None:
            attributes[names.LOG_PROBS] = pack_array(turn.log_probs)
        if turn.weight_versions:
            attributes[names.WEIGHT_VERSIONS] = json.dumps(
                [[span.version, span.start, span.end] for span in turn.weight_versions]
            )
        if turn.messages is not None:
            kept = next(
                (i for i, (a, b) in enumerate(zip(messages, base_messages, strict=False)) if a != b),
                min(len(messages), len(base_messages)),
            )
            attributes[names.MESSAGES_KEPT] = kept
            attributes[names.MESSAGES_NEW] = f"[{','.join(messages[kept:])}]"
        if turn.request_id:
            attributes[names.RESPONSE_ID] = turn.request_id
        if turn.resumed:
            attributes[names.RESUMED] = turn.resumed
        if self._model is not None:
            attributes[names.REQUEST_MODEL] = self._model
        return attributes


def _message_json(message: Mapping[str, Any]) -> str:
    try:
        return _json(message)
    except (TypeError, ValueError) as error:
        raise TraceError(f"a chat message cannot be written as JSON: {error}") from error


def _json(value: Any) -> str:
    text = _to_json(value)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which no store could write as UTF-8
        return json.dumps(value, default=str)
    return text


def _output_messages(turn: Turn) -> str:
    parts = [{"type": "text", "content": turn.text}]
    return _json([{"role": "assistant", "parts": parts, "finish_reason": turn.finish_reason}])


def _checksum(prompt: TokenArray, response: TokenArray, log_probs: LogProbArray | None) -> int:
    crc = 0
    for values in (prompt, response) if log_probs is None else (prompt, response, log_probs):
        crc = zlib.crc32(stored_bytes(values), crc)
    return crc


# -- reading ---------------------------------------------------------------------------------------------------------


class HasAttributes(Protocol):
    """The part of a span that is read here."""

    @property
    def attributes(self) -> Mapping[str, Any]: ...


def is_packed(attributes: Mapping[str, Any]) -> bool:
    """Whether the attributes are those of a ``TurnEncoder``."""
    return names.FORMAT in attributes


def decode_turns(spans: Iterable[HasAttributes]) -> list[Turn]:
    """The turns of spans whose attributes a ``TurnEncoder`` made, in their order; other spans are passed over.

    Turns of one encoder come in the order of encoding, whatever the order of the spans; those of several encoders keep
    the places that their spans have. Raises ``TraceError`` when a turn is missing, doubled, damaged or not in a known
    format.
    """
    packed = [span.attributes for span in spans if is_packed(span.attributes)]
    streams: dict[str, dict[int, Mapping[str, Any]]] = {}
    places: dict[str, list[int]] = {}  # of each stream, where its turns stand among all
    for place, attributes in enumerate(packed):
        if attributes[names.FORMAT] != names.FORMAT_VERSION:
            raise TraceError(
                f"span format {attributes[names.FORMAT]!r} is unknown; this version of agl-slime reads format {names.FORMAT_VERSION}"
            )
        stream, index = str(attributes.get(names.STREAM)), _integer(attributes, names.TURN_INDEX)
        turns = streams.setdefault(stream, {})
        if index in turns:
            raise TraceError(f"turn {index} of encoder {stream} is there twice")
        turns[index] = attributes
        places.setdefault(stream, []).append(place)
    decoded = {
        place: turn
        for stream, turns in streams.items()
        for place, turn in zip(places[stream], _decode_stream(stream, turns, places[stream]), strict=True)
    }
    return [decoded[place] for place in range(len(packed))]


def _decode_stream(stream: str, by_index: Mapping[int, Mapping[str, Any]], places: Sequence[int]) -> list[Turn]:
    turns: list[Turn] = []
    for index in range(len(by_index)):
        attributes = by_index.get(index)
        if attributes is None:
            raise TraceError(f"turn {index} of encoder {stream} is missing, although turn {max(by_index)} is there")
        try:
            turns.append(_decode_turn(attributes, turns, places))
        except TraceError as error:
            raise TraceError(f"turn {index} of encoder {stream} cannot be read: {error}") from error
    return turns


def _decode_turn(attributes: Mapping[str, Any], earlier: Sequence[Turn], places: Sequence[int]) -> Turn:
    prompt = unpack_token_ids(_string(attributes, names.PROMPT_IDS), name="prompt ids")
    base: Turn | None = None
    base_turn, kept = None, 0
    if names.PROMPT_BASE in attributes:
        at, kept = _integer(attributes, names.PROMPT_BASE), _integer(attributes, names.PROMPT_KEPT)
        if not 0 <= at < len(earlier):
            raise TraceError(f"it builds on turn {at}, which does not come before it")
        base = earlier[at]
        held = base.token_ids
        if not 0 <= kept <= len(held):
            raise TraceError(f"it keeps {kept} tokens of turn {at}, which has {len(held)}")
        base_turn = places[at]
        prompt = np.concatenate((held[:kept], prompt))
        prompt.flags.writeable = False
    response = unpack_token_ids(_string(attributes, names.RESPONSE_IDS), name="response ids")
    log_probs = unpack_log_probs(_string(attributes, names.LOG_PROBS)) if names.LOG_PROBS in attributes else None
    for what, ids, name in (
        ("prompt", prompt, names.USAGE_INPUT_TOKENS),
        ("response", response, names.USAGE_OUTPUT_TOKENS),
    ):
        if len(ids) != _integer(attributes, name):
            raise TraceError(f"its {what} has {len(ids)} tokens where {name} says {attributes[name]}")
    if _checksum(prompt, response, log_probs) != _integer(attributes, names.CHECKSUM):
        raise TraceError("its tokens or log-probs do not have the checksum that was written with them")
    source = _string(attributes, names.TOKEN_SOURCE)
    return Turn(
        prompt_ids=prompt,
        response_ids=response,
        log_probs=log_probs,
        finish_reason=finish_reason(attributes),
        weight_versions=_weight_versions(attributes),
        cached_tokens=_integer(attributes, names.USAGE_CACHED_TOKENS),
        request_id=str(attributes.get(names.RESPONSE_ID, "")),
        text=_output_text(attributes),
        messages=_decode_messages(attributes, base),
        latency_s=float(attributes.get(names.LATENCY_S, 0.0)),
        resumed=int(attributes.get(names.RESUMED, 0)),
        token_source=source,  # type: ignore[arg-type]  # Turn refuses other values
        base_turn=base_turn,
        kept_tokens=kept,
        fork=_fork(attributes),
    )


def _fork(attributes: Mapping[str, Any]) -> ForkReason | None:
    try:
        return ForkReason(attributes[names.PROMPT_FORK]) if names.PROMPT_FORK in attributes else None
    except ValueError as error:
        raise TraceError(f"{names.PROMPT_FORK}: {error}") from error


def _decode_messages(attributes: Mapping[str, Any], base: Turn | None) -> Messages | None:
    if names.MESSAGES_NEW not in attributes:
        return None
    kept, held = (
        _integer(attributes, names.MESSAGES_KEPT),
        (base.messages if base is not None and base.messages is not None else ()),
    )
    if not 0 <= kept <= len(held):
        raise TraceError(f"it keeps {kept} chat messages of its base turn, which has {len(held)}")
    new = parse_json(_string(attributes, names.MESSAGES_NEW), names.MESSAGES_NEW)
    if not isinstance(new, list):
        raise TraceError(f"{names.MESSAGES_NEW} must be a JSON list")
    return (*held[:kept], *new)


def _weight_versions(attributes: Mapping[str, Any]) -> tuple[WeightSpan, ...]:
    if names.WEIGHT_VERSIONS not in attributes:
        return ()
    listed = parse_json(_string(attributes, names.WEIGHT_VERSIONS), names.WEIGHT_VERSIONS)
    try:
        return tuple(WeightSpan(str(version), int(start), int(end)) for version, start, end in listed)
    except (TypeError, ValueError) as error:
        raise TraceError(
            f"{names.WEIGHT_VERSIONS} must be a JSON list of [version, start, end], got {listed!r}"
        ) from error


def _output_text(attributes: Mapping[str, Any]) -> str:
    messages = parse_json(_string(attributes, names.OUTPUT_MESSAGES), names.OUTPUT_MESSAGES)
    try:
        return "".join(part["content"] for message in messages for part in message["parts"] if part["type"] == "text")
    except (TypeError, KeyError) as error:
        raise TraceError(f"{names.OUTPUT_MESSAGES} is not a list of messages with parts") from error


def finish_reason(attributes: Mapping[str, Any]) -> str:
    """The (first) finish reason of a call, ``"stop"`` when none was written."""
    reasons = attributes.get(names.RESPONSE_FINISH_REASONS)
    if isinstance(reasons, str):
        return reasons
    return str(reasons[0]) if isinstance(reasons, Sequence) and reasons else "stop"


def parse_json(text: str, name: str) -> Any:
    """``text`` as JSON; ``TraceError`` naming the attribute when it is none."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise TraceError(f"{name} is not valid JSON: {error}") from error


def _string(attributes: Mapping[str, Any], name: str) -> str:
    value = attributes.get(name)
    if not isinstance(value, str):
        raise TraceError(f"attribute {name} must be a string, got {value!r:.80}")
    return value


def _integer(attributes: Mapping[str, Any], name: str) -> int:
    value = attributes.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TraceError(f"attribute {name} must be an integer, got {value!r:.80}")
    return value
