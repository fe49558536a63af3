"""What goes to SGLang and what comes back, and the joining of a generation that was aborted in between; no I/O here.

Log-probs are natural logs of softmax(logits / temperature), not renormalised for top_p or top_k: the same convention in
the engine and the trainer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from agl_slime.errors import EngineError, EngineProtocolError
from agl_slime.sglang.streamed import CUT, DECODED_AFTER, growing_text
from agl_slime.support.ranges import check_ranges

FinishReason = Literal["stop", "length", "abort"]
Decode = Callable[..., str]
"""A tokenizer's ``decode(ids, skip_special_tokens=...)``."""

# SGLang's Req._check_vocab_boundary_finish: a sampled id outside the vocabulary becomes an end token, with this as the
# "stop string" that matched
_NAN_MARK = "NaN happened"

# what makes an answer depend on a state that a resumed request does not have
_GRAMMAR_KEYS = ("regex", "json_schema", "ebnf", "structural_tag")

_first, _second = itemgetter(0), itemgetter(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one generation; the names are SGLang's.

    ``max_new_tokens`` counts the tokens of one call, resumed parts included; ``max_tokens`` is another name for it.
    ``stop`` may be one string, or token ids. ``extra`` is sent as it stands (``regex`` and the like).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: InitVar[int | None] = None

    def __post_init__(self, max_tokens: int | None) -> None:
        if max_tokens is not None:
            object.__setattr__(self, "max_new_tokens", max_tokens)
        stops: tuple[Any, ...] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        ids = tuple(stop for stop in stops if isinstance(stop, int))
        object.__setattr__(self, "stop", tuple(stop for stop in stops if not isinstance(stop, int)))
        object.__setattr__(self, "stop_token_ids", (*self.stop_token_ids, *ids))
        check_ranges(
            self,
            ("temperature", lambda value: 0 <= value < math.inf, "a finite number of at least 0"),
            ("top_p", lambda value: 0 < value <= 1, "in (0, 1]"),
            ("top_k", lambda value: value == -1 or 1 <= value < 2**31, "-1 (all tokens) or from 1 to 2147483647"),
            ("max_new_tokens", lambda value: value >= 1, "at least 1"),
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
        return payload | dict(self.extra)


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
    if not isinstance(finish, Mapping) or kind not in ("stop", "length", "abort"):
        raise EngineProtocolError(f"{where} answered finish_reason {_short(finish)}; expected stop, length or abort")
    if kind == "stop" and finish.get("matched") == _NAN_MARK:
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
        matched_stop=finish.get("matched"),
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        weight_versions=_weight_spans(meta, len(ids), where),
        request_id=str(meta.get("id") or ""),
        latency_s=latency_s,
        top_log_probs=_top_log_probs(meta.get("output_top_logprobs"), where),
    )


def broken_off(event: Any) -> Any:
    """The last event of a stream: as it is when it says how the answer ended, else as that of an aborted one."""
    meta = event.get("meta_info") if isinstance(event, Mapping) else None
    if not isinstance(meta, Mapping) or meta.get("finish_reason") is not None:
        return event
    return {**event, "meta_info": {**meta, "finish_reason": {"type": "abort", "message": "the stream broke off"}}}


def _top_log_probs(listed: Any, where: str) -> tuple[tuple[tuple[int, float], ...], ...]:
    try:
        return tuple(tuple((int(pair[1]), float(pair[0])) for pair in place or ()) for place in listed or ())
    except (TypeError, ValueError, IndexError) as error:
        raise EngineProtocolError(f"{where} answered output_top_logprobs of another form: {_short(listed)}") from error


@dataclass(frozen=True, slots=True)
class PartRequest:
    """One request to send: ``input_ids`` = prompt + the ids sampled so far."""

    input_ids: tuple[int, ...]
    sampling: SamplingParams


class ResumableGeneration:
    """One generation in the making: ``while not done: add(send(next_request()))``.

    A weight sync pauses the engine with mode ``abort``: running requests answer at once with what they have. To the
    agent one model call stays one model call, so the next part's prompt is the prompt plus all ids sampled so far, and
    its budget is what is left of ``max_new_tokens``.

    The invariant: ``output_ids`` are exactly what the engine sampled, in order, each with the log-prob and weight
    version of its own sampling, and it ends where one that was never aborted would have ended:

    - **Budget**: at ``max_new_tokens`` ids the reason is ``length``, which the engine checks before anything else.
    - **Stop tokens**: SGLang looks at the abort mark first, so the last id of an aborted part may be a stop token that
      nobody acted on; ``eos_token_ids`` are the model's own.
    - **Stop strings**: the engine searches only what one request sampled. When the text so far ends in the beginning of
      a stop string, the next part is asked for one token at a time, until that is decided.
    - **Text**: the engine decodes each part alone, so a character whose bytes are split is U+FFFD in both. With
      ``decode``, the text of joined parts is decoded from their ids.
    - **Constrained output**: a grammar would start anew in the middle, so such a generation starts again from nothing.

    What it cannot give back: penalties (``repetition_penalty`` and its kin) and ``stop_regex`` see one part only.
    """

    def __init__(
        self,
        *,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        eos_token_ids: Collection[int] = (),
        context_length: int | None = None,
        decode: Decode | None = None,
    ) -> None:
        self._prompt = tuple(prompt_ids)
        self._sampling = sampling
        self._stop_ids = frozenset(sampling.stop_token_ids) | frozenset(eos_token_ids)
        if sampling.extra.get("ignore_eos"):
            self._stop_ids = frozenset()
        self._stops = tuple(stop for stop in sampling.stop if stop)
        self._trim = not sampling.extra.get("no_stop_trim")
        self._decode = decode
        self._constrained = any(sampling.extra.get(key) for key in _GRAMMAR_KEYS)
        self._budget = sampling.max_new_tokens
        if context_length is not None:
            self.limit_context(context_length)
        self._got = Generation(output_ids=(), log_probs=(), text="", finish_reason="abort")
        self.done = self._aborted = False
        self.resumed = 0

    @property
    def sampled(self) -> int:
        """Ids kept so far."""
        return len(self._got.output_ids)

    @property
    def so_far(self) -> Generation:
        """What has been sampled."""
        return replace(self._got, resumed=self.resumed)

    def reader(self) -> Callable[[Mapping[str, Any]], str]:
        """How the text so far is read from an event of the next part."""
        decode = self._decode and partial(self._decode, skip_special_tokens=self._sampling.skip_special_tokens)
        ids = [*self._prompt[-DECODED_AFTER:], *self._got.output_ids]
        return growing_text(self._got.text, ids, decode if self.sampled else None)

    def progress(self, text: str, event: Mapping[str, Any]) -> Progress:
        """How far it has come with ``event``, which tells of the part that was asked for last."""
        return Progress(text, partial(_so_far, copy.copy(self), event))

    @property
    def _open_stop(self) -> bool:
        """The text ends in the beginning of a stop string; a character cut at its end may be the string's next one."""
        whole = self._got.text.rstrip(CUT)
        cut = whole != self._got.text
        return self.sampled > 0 and any(
            whole.endswith(stop[:n]) and (not stop[n].isascii() if cut else n > 0)
            for stop in self._stops
            for n in range(len(stop))
        )

    def limit_context(self, context_length: int) -> None:
        """Shorten the budget so that prompt + new tokens fit: SGLang refuses a request for more."""
        self._budget = min(self._budget, context_length - len(self._prompt))

    def next_request(self) -> PartRequest:
        if self._aborted:
            self._aborted = False
            self.resumed += 1
            if self._constrained:
                self._got = replace(
                    self._got, output_ids=(), log_probs=(), text="", weight_versions=(), top_log_probs=()
                )
        extra = self._sampling.extra
        if self.sampled and extra.get("min_new_tokens"):
            least = max(0, int(extra["min_new_tokens"]) - self.sampled)
            extra = {**extra, "min_new_tokens": min(least, 1) if self._open_stop else least}
        left = 1 if self._open_stop else self._budget - self.sampled
        return PartRequest(
            (*self._prompt, *self._got.output_ids), replace(self._sampling, max_new_tokens=left, extra=extra)
        )

    def add(self, part: Generation) -> None:
        got, one_token, offset = self._got, self._open_stop, self.sampled
        searched = max(0, len(got.text) - max(map(len, self._stops), default=1) + 1)
        counted = got if got.prompt_tokens else part  # a part that was aborted in the queue has no counts
        self._got = replace(
            part,
            output_ids=got.output_ids + part.output_ids,
            log_probs=got.log_probs + part.log_probs,
            text=got.text + part.text,
            matched_stop=part.matched_stop if part.finish_reason == "stop" else None,
            prompt_tokens=counted.prompt_tokens,
            cached_tokens=counted.cached_tokens,
            weight_versions=_joined(got.weight_versions, part.weight_versions, offset),
            top_log_probs=got.top_log_probs + part.top_log_probs,
        )
        self.done = part.finish_reason == "stop" or (part.finish_reason == "length" and not one_token)
        self._aborted = part.finish_reason == "abort"
        if offset and part.output_ids and self._decode is not None:
            self._got = replace(self._got, text=self._decoded(self._got.output_ids, self._decode))
            self._trim_stop(searched)
        if not self.done:
            self._end_if_over(searched)

    def give_up(self, reason: FinishReason) -> None:
        """End with what is there (no room in the context for another token, or the caller does not want a resume)."""
        self._got, self.done = replace(self._got, finish_reason=reason), True

    def result(self, *, latency_s: float) -> Generation:
        assert self.done
        ids = self._got.output_ids
        if self._got.finish_reason == "length" and ids and ids[-1] in self._stop_ids:
            # the engine looks at the limit first, and leaves the end token in the text
            self._got = replace(self._got, matched_stop=ids[-1])
            self._trim_stop(0)
        return replace(self._got, latency_s=latency_s, resumed=self.resumed)

    def _end_if_over(self, searched: int) -> None:
        """The engine ended this part before it looked whether the generation is over: look now, in the engine's own
        order (length, stop strings, stop tokens)."""
        ids, text = self._got.output_ids, self._got.text
        if len(ids) >= self._budget:
            return self.give_up("length")
        matched: int | str | None = next((stop for stop in self._stops if text.find(stop, searched) >= 0), None)
        if matched is None and ids and ids[-1] in self._stop_ids:
            matched = ids[-1]
        if matched is not None:
            self._got = replace(self._got, matched_stop=matched)
            self.give_up("stop")
            self._trim_stop(searched)
        return None

    def _trim_stop(self, searched: int) -> None:
        """Cut what ended the generation off the text, as the engine does."""
        got, text = self._got, self._got.text
        if not self._trim:
            return
        if isinstance(got.matched_stop, int) and self._decode is not None:
            text = self._decoded(got.output_ids[:-1], self._decode)
        elif isinstance(got.matched_stop, str) and (at := text.find(got.matched_stop, searched)) >= 0:
            text = text[:at]
        self._got = replace(got, text=text)

    def _decoded(self, ids: Sequence[int], decode: Decode) -> str:
        # after the prompt's last tokens, as SGLang does: some tokenizers drop a blank at the very beginning
        head, skip = list(self._prompt[-DECODED_AFTER:]), self._sampling.skip_special_tokens
        return decode([*head, *ids], skip_special_tokens=skip)[len(decode(head, skip_special_tokens=skip)) :]


class Progress(NamedTuple):
    """How far a generation has come that is streamed: its text, and what makes the rest, as if it had been aborted
    there."""

    text: str
    so_far: Callable[[], Generation]


def _so_far(wanted: ResumableGeneration, event: Mapping[str, Any]) -> Generation:
    wanted = copy.copy(wanted)
    wanted.add(parse_generation(broken_off(event)))
    return wanted.so_far


def _joined(spans: tuple[WeightSpan, ...], more: tuple[WeightSpan, ...], offset: int) -> tuple[WeightSpan, ...]:
    """``more`` begins at output token ``offset``; neighbours of one version become one span."""
    for span in more:
        start, end = span.start + offset, span.end + offset
        if spans and spans[-1].version == span.version and spans[-1].end == start:
            start, spans = spans[-1].start, spans[:-1]
        if end > start:
            spans = (*spans, WeightSpan(span.version, start, end))
    return spans


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


def _short(value: Any) -> str:
    return f"{value!r:.200}"
