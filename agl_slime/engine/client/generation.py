"""SGLang's requests and answers; no I/O here.

Log-probs, also the trainer's, are natural logs of softmax(logits / temperature), not renormalised for top_p or top_k.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from operator import itemgetter
from reprlib import repr as shortened
from types import SimpleNamespace
from typing import Any, Literal

from agl_slime.engine.client.prompt import outermost
from agl_slime.engine.client.replay import Nucleus, RoutedExperts, Shape, parse_experts, parse_nucleus
from agl_slime.engine.client.retry import impossible_answer
from agl_slime.errors import ConfigError, EngineError, EngineProtocolError
from agl_slime.support.ranges import check_ranges

FinishReason = Literal["stop", "length", "abort"]
Decode = Callable[..., str]
"""A tokenizer's ``decode(ids, skip_special_tokens=...)``."""

# SGLang's Req._check_vocab_boundary_finish makes an id outside the vocabulary an end token with this "stop string"
_NAN_MARK = "NaN happened"

_SPECULATED = "spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct"
_first, _second = itemgetter(0), itemgetter(1)

LOG_PROBS = -80.0, 1e-4
"""Bounds of a sampled token's log-prob: below, a ratio of probabilities overflows float32; above 0 by rounding only."""
_MAX_INT32 = 2**31 - 1  # ids are kept as int32


class DefaultLimit(int):
    """The default limit of tokens; an API with a default of its own is not sent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one generation; the names are SGLang's.

    ``max_new_tokens`` counts resumed parts too; ``max_tokens`` is another name for it. ``stop`` may be one string, or
    token ids. ``extra`` is sent unchanged (``regex``, for example); ``repetition_penalty`` and ``seed`` (SGLang's
    ``sampling_seed``) are added to it, ``num_samples`` must be 1. With ``routed_experts``, (layers, experts per token),
    the engine reports the experts of each token, with ``nucleus`` the ids that top_p and top_k kept for each sampled
    token, and log-probs are within them; ``replay_files`` is the directory of large ones (``agl_slime.tokens.replay``).
    ``context_length`` limits prompt and answer together, if it is less than the model's.
    """

    temperature: float = 1.0
    """Sampling temperature, in the engine and in the trainer; 0 is greedy, for evaluations."""
    top_p: float = 1.0
    """Nucleus sampling: the likeliest tokens with this much of the probability. Below 1 the trainer's log-probs are
    computed over the same tokens, which the engine must report: the embedded one does, and SGLang with slime's
    patch."""
    top_k: int = -1
    """Sample from this many of the likeliest tokens; -1 is all. Log-probs as with top_p."""
    max_new_tokens: int = DefaultLimit(256)
    """Most tokens of one answer."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = False
    routed_experts: Shape | None = None
    nucleus: bool = False
    replay_files: str | None = None
    context_length: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: InitVar[int | None] = None
    repetition_penalty: InitVar[float | None] = None
    seed: InitVar[int | None] = None
    num_samples: InitVar[int] = 1

    def __post_init__(
        self, max_tokens: int | None, repetition_penalty: float | None, seed: int | None, num_samples: int
    ) -> None:
        if num_samples != 1:
            fix = "a rollout has one answer per turn; give its trajectory several times"
            raise ConfigError(f"num_samples must be 1, got {num_samples}: {fix}")
        if max_tokens is not None:
            object.__setattr__(self, "max_new_tokens", max_tokens)
        named = {"repetition_penalty": repetition_penalty, "sampling_seed": seed}
        if settings := {name: value for name, value in named.items() if value is not None}:
            check_ranges(
                SimpleNamespace(seed=seed, repetition_penalty=repetition_penalty),
                ("seed", lambda value: isinstance(value, int), "an integer"),
                (
                    "repetition_penalty",
                    lambda value: isinstance(value, (int, float)) and 0 < value < math.inf,
                    "above 0",
                ),
            )
            object.__setattr__(self, "extra", {**self.extra, **settings})
        stops: tuple[Any, ...] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        ids = tuple(stop for stop in stops if isinstance(stop, int))
        object.__setattr__(self, "stop", tuple(stop for stop in stops if not isinstance(stop, int)))
        object.__setattr__(self, "stop_token_ids", (*self.stop_token_ids, *ids))
        if self.routed_experts is not None:
            shape = tuple(self.routed_experts)
            object.__setattr__(self, "routed_experts", shape)
            if len(shape) != 2 or not all(isinstance(size, int) and size >= 1 for size in shape):
                raise ConfigError(f"routed_experts must be (layers, experts per token), got {shape!r:.80}")
        check_ranges(
            self,
            ("temperature", lambda value: 0 <= value < math.inf, "a finite number of at least 0"),
            ("top_p", lambda value: 0 < value <= 1, "in (0, 1]"),
            ("top_k", lambda value: value == -1 or 1 <= value < 2**31, "-1 (all tokens) or from 1 to 2147483647"),
            ("max_new_tokens", lambda value: value >= 1, "at least 1"),
            ("context_length", lambda value: value is None or value >= 2, "at least 2"),
            ("stop", lambda value: all(isinstance(stop, str) for stop in value), "texts or token ids"),
            ("stop_token_ids", lambda value: all(isinstance(stop, int) for stop in value), "token ids"),
            ("skip_special_tokens nucleus extra", lambda _: True, ""),
        )

    def to_payload(self) -> dict[str, Any]:
        payload: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_new_tokens": self.max_new_tokens,
            "skip_special_tokens": self.skip_special_tokens,
            # a trained token must be kept in the text as well as in the ids, or the two do not line up
            "spaces_between_special_tokens": False,
        }
        if self.stop:
            payload["stop"] = list(self.stop)
        if self.stop_token_ids:
            payload["stop_token_ids"] = list(self.stop_token_ids)
        if self.nucleus:
            custom = self.extra.get("custom_params") or {}
            return payload | {**self.extra, "custom_params": {**custom, "return_top_p_token_ids": True}}
        return payload | dict(self.extra)

    def seeded(self, *key: Any) -> SamplingParams:
        """These parameters with a ``sampling_seed`` of 31 bits that ``key`` decides, unless they have one: an SGLang
        with --enable-deterministic-inference gives requests with one prompt and one seed the same answer."""
        if self.extra.get("sampling_seed") is not None:
            return self
        digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()
        return replace(self, extra={**self.extra, "sampling_seed": int.from_bytes(digest) >> 1})


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Output tokens ``start`` (inclusive) to ``end`` (exclusive) were sampled by weight version ``version``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation: ``output_ids``, with the stop token, and ``log_probs`` are the engine's, one log-prob per id.

    ``text`` is for reading, not for training. ``resumed`` counts how often an aborted generation was taken up again.
    """

    output_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    matched_stop: int | str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    weight_versions: tuple[WeightSpan, ...] = ()
    request_id: str = ""
    latency_s: float = 0.0
    resumed: int = 0
    top_log_probs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each id the likeliest ones at its place with their log-probs, where they were asked for."""
    experts: RoutedExperts | None = None
    """Of prompt and answer, from where they were asked for; ``None`` where not asked for, or lost with a stream."""
    nucleus: Nucleus | None = None
    speculated: tuple[int, int, int] = (0, 0, 0)
    """Under speculative decoding the tokens accepted and drafted, and how often drafts were verified."""

    @property
    def weight_version(self) -> str | None:
        """The version that sampled the last token."""
        return self.weight_versions[-1].version if self.weight_versions else None


def parse_generation(
    body: Any, *, request: PartRequest | None = None, latency_s: float = 0.0, endpoint: str = "/generate"
) -> Generation:
    """A ``/generate`` answer (asked with ``return_logprob``) as a ``Generation``; ``endpoint`` is its URL in errors,
    ``request`` says what else it must have.

    Raises ``EngineProtocolError`` when the answer does not have SGLang's shape, when its parts contradict each other or
    the request, or when it cannot have been sampled (``LOG_PROBS``, an id outside the vocabulary, weights older than
    the request allows); ``EngineError`` when the engine says that its logits were NaN.
    """
    if not isinstance(body, Mapping) or not isinstance(body.get("meta_info"), Mapping):
        raise EngineProtocolError(f"{endpoint} answered {shortened(body)}, which is not SGLang's form (no meta_info)")
    meta: Mapping[str, Any] = body["meta_info"]
    finish = meta.get("finish_reason")
    kind = finish.get("type") if isinstance(finish, Mapping) else None
    if not isinstance(finish, Mapping) or kind not in ("stop", "length", "abort"):
        raise impossible_answer(f"{endpoint} answered finish_reason {shortened(finish)}, not stop, length or abort")
    matched = stop if type(stop := finish.get("matched")) in (int, str) else None
    if kind == "stop" and matched == _NAN_MARK:
        raise EngineError(f"{endpoint} computed NaN logits and replaced the sampled token: its weights are broken")
    pairs, listed, prompted = meta.get("output_token_logprobs"), body.get("output_ids"), meta.get("prompt_tokens")
    request = request or PartRequest((), SamplingParams(max_new_tokens=_MAX_INT32))
    ids, log_probs = read_pairs(pairs or [], "output_token_logprobs", endpoint, vocab_size=request.vocab_size)
    count = count_of(meta, "completion_tokens", endpoint, default=len(ids))
    # a stream that is aborted in the queue ends with its last id alone
    agree = listed is None or listed == [*ids] or (kind == "abort" and listed == [*ids[-1:]])
    lowest, highest, limit = min(log_probs, default=0.0), max(log_probs, default=0.0), request.sampling.max_new_tokens
    for is_false, problem in (
        (pairs is None and kind != "abort", "no output_token_logprobs although return_logprob was set"),
        (pairs is not None and not agree, f"{len(ids)} output_token_logprobs with other output_ids"),
        (pairs is not None and count != len(ids), f"{len(ids)} output_token_logprobs, and {count} completion_tokens"),
        (not ids and kind != "abort", f"no token with finish_reason {kind}"),
        (len(ids) > limit, f"{len(ids)} tokens, and max_new_tokens was {limit}"),
        (isinstance(matched, int) and ids[-1:] != (matched,), f"a stop at token {matched}, which is not the last one"),
        (not all(map(math.isfinite, log_probs)), "a log-prob that is NaN or infinite"),
        (lowest < LOG_PROBS[0] or highest > LOG_PROBS[1], f"log-probs from {lowest:g} to {highest:g}, beyond -80 to 0"),
    ):
        if is_false:
            raise impossible_answer(f"{endpoint} answered {problem}")
    if request.input_ids and prompted is not None:
        request.check(count_of(meta, "prompt_tokens", endpoint), endpoint)
    accepted, drafted, verified = (count_of(meta, name, endpoint) for name in _SPECULATED)
    return Generation(
        output_ids=ids,
        log_probs=log_probs,
        text=_text(body, "text", endpoint),
        finish_reason=kind,
        matched_stop=matched,
        prompt_tokens=count_of(meta, "prompt_tokens", endpoint),
        cached_tokens=count_of(meta, "cached_tokens", endpoint),
        weight_versions=_weight_spans(meta, len(ids), request.oldest_version, endpoint),
        request_id=_text(meta, "id", endpoint),
        latency_s=latency_s,
        top_log_probs=_top_log_probs(meta.get("output_top_logprobs"), len(ids), endpoint),
        speculated=(accepted, drafted, verified),
        **_replay_data(meta, request, len(ids), kind, endpoint),
    )


def read_pairs(
    pairs: Any, name: str, endpoint: str, *, vocab_size: int | None = None
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The ids and the log-probs of SGLang's list ``name`` of (log-prob, id, text). Raises ``EngineProtocolError`` for
    another form, and for an id outside the vocabulary."""
    try:
        ids, log_probs = tuple(map(_second, pairs)), tuple(map(_first, pairs))
        if not isinstance(pairs, list) or not {*map(type, ids)} <= {int} or not {*map(type, log_probs)} <= {int, float}:
            raise TypeError
        log_probs = tuple(map(float, log_probs))
    except (TypeError, KeyError, IndexError, OverflowError) as error:
        raise impossible_answer(f"{endpoint} answered {name} of another form: {shortened(pairs)}") from error
    size = vocab_size or _MAX_INT32 + 1
    if ids and not 0 <= (wrong := outermost(ids)) < size:
        raise impossible_answer(f"{endpoint} answered token id {wrong}, outside the model's vocabulary of {size} ids")
    return ids, log_probs


def count_of(meta: Mapping[str, Any], name: str, endpoint: str, *, default: int = 0) -> int:
    """A count in ``meta_info``. Raises ``EngineProtocolError`` unless it is a whole number from 0 to 2**31 - 1."""
    value = meta.get(name)
    if value is not None and (type(value) is not int or not 0 <= value <= _MAX_INT32):
        raise impossible_answer(f"{endpoint} answered {name} {shortened(value)}; expected a whole number of at least 0")
    return default if value is None else value


def version_of(meta: Mapping[str, Any], endpoint: str, *, name: str = "weight_version") -> str | None:
    """The weight version in an answer; ``None`` without one. Raises ``EngineProtocolError`` unless it is a number or a
    short printable text: files and metrics name it."""
    value = meta.get(name)
    if type(value) is int and abs(value) <= _MAX_INT32:
        value = str(value)
    if value is not None and not (isinstance(value, str) and value.isprintable() and len(value) <= 256):
        raise impossible_answer(f"{endpoint} answered the {name} {shortened(value)}; expected a short printable text")
    return value


def _text(answer: Mapping[str, Any], name: str, endpoint: str) -> str:
    if not isinstance(text := answer.get(name) or "", str):
        raise impossible_answer(f"{endpoint} answered {name} {shortened(text)}; expected a text")
    return text


def _replay_data(meta: Mapping[str, Any], request: PartRequest, count: int, kind: str, endpoint: str) -> dict[str, Any]:
    """The requested replay data; an aborted part may lack it."""
    replayed, checks = {}, {"endpoint": endpoint, "required": kind != "abort"}
    if (shape := request.sampling.routed_experts) is not None:
        length, start = len(request.input_ids) + count, request.experts_start
        replayed["experts"] = parse_experts(meta, shape, length=length, start=start, **checks)
    if request.sampling.nucleus and count:
        replayed["nucleus"] = parse_nucleus(meta, count=count, vocab_size=request.vocab_size, **checks)
    return replayed


def broken_off(event: Any) -> Any:
    """The last event of a stream, completed as an aborted answer's if it has no finish reason."""
    meta = event.get("meta_info") if isinstance(event, Mapping) else None
    if not isinstance(meta, Mapping) or meta.get("finish_reason") is not None:
        return event
    return {**event, "meta_info": {**meta, "finish_reason": {"type": "abort", "message": "the stream broke off"}}}


def _top_log_probs(listed: Any, count: int, endpoint: str) -> tuple[tuple[tuple[int, float], ...], ...]:
    places = [] if listed is None else listed
    if not isinstance(places, list) or len(places) not in (0, count):
        raise impossible_answer(f"{endpoint} answered output_top_logprobs of another form: {shortened(listed)}")
    pairs = (read_pairs(place or [], "output_top_logprobs", endpoint) for place in places)
    return tuple(tuple(zip(*place, strict=True)) for place in pairs)


@dataclass(frozen=True, slots=True)
class ImageInput:
    """The images of a prompt as the engine gets them: ``data`` are URIs, ``prompt`` the ids with the chat template's
    placeholder of each image, which the engine expands to the image's tokens."""

    data: tuple[str, ...]
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartRequest:
    """One request to send: ``input_ids`` = prompt + the ids sampled so far. Routed experts are requested for the
    tokens from ``experts_start`` on. With ``images`` the prompt's ids are the engine's expanded ones, ``prompt_tokens``
    in number. The answer has ids below ``vocab_size`` and weights of ``oldest_version`` or newer ones."""

    input_ids: Sequence[int]
    sampling: SamplingParams
    experts_start: int = 0
    images: ImageInput | None = None
    prompt_tokens: int = 0
    vocab_size: int | None = None
    oldest_version: int | None = None

    def to_payload(self) -> dict[str, Any]:
        payload: dict[str, Any] = {"input_ids": self.input_ids, "sampling_params": self.sampling.to_payload()}
        payload["return_logprob"] = True
        if self.images is not None:
            payload["input_ids"] = (*self.images.prompt, *self.input_ids[self.prompt_tokens :])
            payload["image_data"] = self.images.data
        if self.sampling.routed_experts is not None:
            payload["return_routed_experts"] = True
            if self.experts_start:
                payload["routed_experts_start_len"] = self.experts_start
        return payload

    def check(self, counted: int, endpoint: str) -> None:
        """Raises ``EngineProtocolError`` when the engine ``counted`` another number of tokens in the prompt."""
        reason, prompt = "it cuts prompts (--allow-auto-truncate), or answers another request", "a prompt"
        if self.images is not None:
            reason = "it has another processor than the model's directory, or SGLANG_MM_AVOID_RETOKENIZE is off"
            prompt = "a prompt with images"
        if counted != (sent := len(self.input_ids)):
            raise impossible_answer(f"{endpoint} counts {counted} tokens in {prompt} that has {sent}: {reason}")


def _weight_spans(meta: Mapping[str, Any], n_tokens: int, oldest: int | None, endpoint: str) -> tuple[WeightSpan, ...]:
    # newer servers list which tokens each version sampled; older ones name only the version at the end
    listed, version, end = meta.get("weight_versions"), version_of(meta, endpoint), 0
    if not listed:
        listed = [] if version is None else [{"version": version, "start": 0, "end": n_tokens}]
    spans: list[WeightSpan] = []
    for item in listed if isinstance(listed, list) else [None]:
        if not isinstance(item, Mapping) or (name := version_of(item, endpoint, name="version")) is None:
            raise impossible_answer(f"{endpoint} answered weight_versions of another form: {shortened(listed)}")
        start, last = (count_of(item, place, endpoint, default=-1) for place in ("start", "end"))
        if start != end or last < start:
            raise impossible_answer(f"{endpoint} answered weight_versions with gaps or overlaps: {shortened(listed)}")
        if oldest is not None and name.isdecimal() and int(name) < oldest and start < min(last, n_tokens):
            reason = f"and version {oldest} was pushed before: a worker has missed an update"
            raise impossible_answer(f"{endpoint} sampled with weights of version {name}, {reason}")
        spans.append(WeightSpan(name, start, min(last, n_tokens)))
        end = last
    if spans and end < n_tokens:
        raise impossible_answer(f"{endpoint} answered weight_versions of {end} tokens in an answer of {n_tokens}")
    return tuple(span for span in spans if span.start < span.end)
