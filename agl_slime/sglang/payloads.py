"""What goes to SGLang and what comes back, as typed objects; nothing here does I/O.

Conventions, the same in the engine and the trainer: log-probs are natural logs of softmax(logits / temperature), not
renormalised for top_p or top_k.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

from agl_slime.errors import ConfigError, EngineError, EngineProtocolError

FinishReason = Literal["stop", "length", "abort"]

# SGLang's Req._check_vocab_boundary_finish: a sampled id outside the vocabulary becomes an end token, with this as the
# "stop string" that matched
_NAN_MARK = "NaN happened"

_first, _second = itemgetter(0), itemgetter(1)

_DP_RANK = re.compile(r"@\d+/?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one generation; the names are SGLang's.

    ``max_new_tokens`` counts the tokens of one call, resumed parts included. ``extra`` is sent as it stands (``regex``
    and the like).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature must be a finite number of at least 0, got {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must lie in (0, 1], got {self.top_p!r}")
        if self.top_k == 0 or self.top_k < -1:
            raise ConfigError(f"top_k must be -1 (all tokens) or at least 1, got {self.top_k!r}")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, got {self.max_new_tokens!r}")

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
        payload.update(self.extra)
        return payload


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Output tokens ``start`` (inclusive) to ``end`` (exclusive) were sampled by weight version ``version``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation: ``output_ids`` and ``log_probs`` are the engine's, one log-prob per id; the stop token is among
    the ids.

    ``text`` is the engine's text and is for reading, not for training. ``resumed`` counts how often an aborted
    generation was taken up again.
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

    @property
    def weight_version(self) -> str | None:
        """The version that sampled the last token."""
        return self.weight_versions[-1].version if self.weight_versions else None


def parse_generation(body: Any, *, latency_s: float = 0.0, where: str = "/generate") -> Generation:
    """A ``/generate`` answer (asked with ``return_logprob``) as a ``Generation``; ``where`` names the URL in errors.

    Raises ``EngineProtocolError`` when the answer does not have SGLang's shape, or a log-prob is not finite;
    ``EngineError`` when the engine says that its logits were NaN.
    """
    if not isinstance(body, Mapping) or not isinstance(body.get("meta_info"), Mapping):
        raise EngineProtocolError(f"{where} answered {_short(body)}, which is not SGLang's form (no meta_info)")
    meta: Mapping[str, Any] = body["meta_info"]
    finish = meta.get("finish_reason")
    kind = finish.get("type") if isinstance(finish, Mapping) else None
    if kind not in ("stop", "length", "abort"):
        raise EngineProtocolError(
            f"{where} answered finish_reason {_short(finish)}; expected a type of stop, length or abort"
        )
    if kind == "stop" and finish is not None and finish.get("matched") == _NAN_MARK:
        raise EngineError(f"{where} computed NaN logits and replaced the sampled token: its weights are broken")
    pairs = meta.get("output_token_logprobs")
    if pairs is None:
        if kind != "abort" and body.get("output_ids"):
            raise EngineProtocolError(f"{where} answered without output_token_logprobs although return_logprob was set")
        pairs = []
    try:
        ids = tuple(map(int, map(_second, pairs)))
        log_probs = tuple(map(float, map(_first, pairs)))
    except (TypeError, ValueError, IndexError) as error:
        raise EngineProtocolError(f"{where} answered output_token_logprobs of another form: {_short(pairs)}") from error
    if not all(map(math.isfinite, log_probs)):
        raise EngineProtocolError(f"{where} answered a log-prob that is NaN or infinite")
    return Generation(
        output_ids=ids,
        log_probs=log_probs,
        text=str(body.get("text") or ""),
        finish_reason=kind,
        matched_stop=finish.get("matched") if isinstance(finish, Mapping) else None,
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        weight_versions=_weight_spans(meta, len(ids), where),
        request_id=str(meta.get("id") or ""),
        latency_s=latency_s,
    )


def parse_workers(body: Any, *, where: str = "/workers") -> tuple[str, ...]:
    """A ``/workers`` answer as the workers' URLs, each once, in the answer's order.

    sglang-router 0.3 answers ``{"workers": [{"url": ..., "is_healthy": ...}, ...]}``; unhealthy ones are listed as
    well, since they come back with whatever weights they hold. With data-parallel awareness the URL of each rank ends
    in ``@rank`` and means the same server. Raises ``EngineProtocolError`` for any other form.
    """
    listed = body.get("workers") if isinstance(body, Mapping) else None
    if not isinstance(listed, list):
        raise EngineProtocolError(f"{where} answered {_short(body)}; expected an object with a list of workers")
    urls: dict[str, None] = {}
    for item in listed:
        url = item.get("url") if isinstance(item, Mapping) else None
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise EngineProtocolError(f"{where} answered a worker {_short(item)}; expected an object with an http url")
        urls[_DP_RANK.sub("", url).rstrip("/")] = None
    return tuple(urls)


def _weight_spans(meta: Mapping[str, Any], n_tokens: int, where: str) -> tuple[WeightSpan, ...]:
    # newer servers list which tokens each version sampled; older ones name only the version at the end
    listed = meta.get("weight_versions")
    if listed:
        try:
            spans = [
                WeightSpan(str(item["version"]), int(item["start"]), min(int(item["end"]), n_tokens)) for item in listed
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineProtocolError(f"{where} answered weight_versions of another form: {_short(listed)}") from error
        return tuple(span for span in spans if span.start < span.end)
    version = meta.get("weight_version")
    return () if version is None or n_tokens == 0 else (WeightSpan(str(version), 0, n_tokens),)


def _short(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
