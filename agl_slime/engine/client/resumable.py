"""The joining of a generation's parts after aborts; no I/O here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from agl_slime.engine.client.generation import (
    Decode,
    FinishReason,
    Generation,
    PartRequest,
    SamplingParams,
    WeightSpan,
    broken_off,
    parse_generation,
)
from agl_slime.engine.client.prompt import PromptIds
from agl_slime.engine.client.replay import Nucleus

DECODED_AFTER = 5  # SGLang's INIT_INCREMENTAL_DETOKENIZATION_OFFSET
CUT = "\ufffd"
"""The replacement character that decoding writes for an incomplete character."""

_LONGEST_CHARACTER = 4  # bytes, and so ids


def growing_text(
    earlier_text: str, ids: Sequence[int], decode: Callable[[Sequence[int]], str] | None
) -> Callable[[Mapping[str, Any]], str]:
    """A function that gives the text so far from an event, after ``ids`` with the text ``earlier_text`` from an earlier
    request. The engine drops or damages a character that is split between the two requests, so the text is decoded from
    ids. Without ``decode`` it is the engine's text."""
    if decode is None:
        return lambda event: earlier_text + str(event.get("text") or "")
    all_ids, first = [*ids], len(ids)

    def settled(end: int) -> int:
        """``end``, or the place before it where no character is cut."""
        for place in range(end, max(0, end - _LONGEST_CHARACTER), -1):
            if not decode(all_ids[max(0, place - DECODED_AFTER) : place]).endswith(CUT):
                return place
        return end  # the model sampled that

    decoded_to = settled(first)
    text = earlier_text if decoded_to == first else earlier_text.rstrip(CUT)

    def read(event: Mapping[str, Any]) -> str:
        nonlocal decoded_to, text
        all_ids.extend(pair[1] for pair in event["meta_info"]["output_token_logprobs"][len(all_ids) - first :])
        start, end = max(0, decoded_to - DECODED_AFTER), settled(len(all_ids))
        if end > decoded_to:
            text += decode(all_ids[start:end])[len(decode(all_ids[start:decoded_to])) :]
            decoded_to = end
        return text

    return read


def text_receiver(
    on_text: Callable[[str, Any], None], read: Callable[[Mapping[str, Any]], str]
) -> Callable[[Any], None]:
    """A receiver of one request's events that calls ``on_text`` with the text so far and the event. The last event is
    left out: it has the finish reason, and the caller gets the whole answer."""

    def receive(event: Any) -> None:
        meta = event.get("meta_info") if isinstance(event, Mapping) else None
        if not isinstance(meta, Mapping) or meta.get("finish_reason") is not None:
            return
        try:
            text = read(event)
        except (KeyError, IndexError, TypeError, ValueError, OverflowError):
            return  # another form: an error when the answer is read
        on_text(text, event)

    return receive


# parameters that depend on a state which a resumed request does not have
_GRAMMAR_KEYS = ("regex", "json_schema", "ebnf", "structural_tag")


class ResumableGeneration:
    """One unfinished generation: ``while not done: add(send(next_request()))``.

    A weight sync pauses the engine with mode ``abort``: running requests answer at once with their tokens so far. To
    the agent one model call stays one model call, so the next part's prompt is the prompt plus all ids sampled so far,
    and its budget is the rest of ``max_new_tokens``.

    The invariant: ``output_ids`` are exactly what the engine sampled, in order, each with the log-prob and weight
    version of its own sampling, and it ends where a generation without aborts would have ended:

    - **Budget**: at ``max_new_tokens`` ids the reason is ``length``, which the engine checks before anything else (an
      end token there is a ``stop`` to 0.5.23; resumed after an abort it is ``length`` here).
    - **Stop tokens**: SGLang looks at the abort mark first, so the last id of an aborted part may be an unhandled stop
      token; ``eos_token_ids`` are the model's.
    - **Stop strings**: the engine searches only what one request sampled. When the text so far ends in the beginning of
      a stop string, the next part is asked for one token at a time, until the match is decided.
    - **Text**: the engine decodes each part alone, so a character whose bytes are split is U+FFFD in both. With
      ``decode``, the text of joined parts is decoded from their ids.
    - **Constrained output**: a grammar would restart in the middle, so such a generation is sampled again from its
    start.

    Not preserved: penalties (``repetition_penalty`` and its kin) and ``stop_regex`` see one part only.
    """

    def __init__(
        self,
        *,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        eos_token_ids: Collection[int] = (),
        context_length: int | None = None,
        decode: Decode | None = None,
        experts_start: int = 0,
        **fields: Any,
    ) -> None:
        self._experts_start, self._fields = experts_start, fields  # of each ``PartRequest``
        self._prompt = prompt_ids if isinstance(prompt_ids, PromptIds) else tuple(prompt_ids)
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
        """The tokens sampled so far."""
        return replace(self._got, resumed=self.resumed)

    def reader(self) -> Callable[[Mapping[str, Any]], str]:
        """A function that gives the text so far from an event of the next part."""
        decode = self._decode and partial(self._decode, skip_special_tokens=self._sampling.skip_special_tokens)
        ids = [*self._prompt[-DECODED_AFTER:], *self._got.output_ids]
        return growing_text(self._got.text, ids, decode if self.sampled else None)

    def progress(self, request: PartRequest, text: str, event: Mapping[str, Any]) -> Progress:
        """The progress at ``event``, an event of the part that was requested last."""
        return Progress(text, partial(_so_far, copy.copy(self), request, event))

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
                    self._got, output_ids=(), log_probs=(), text="", weight_versions=(), top_log_probs=(), nucleus=None
                )
        extra = self._sampling.extra
        if self.sampled and extra.get("min_new_tokens"):
            least = max(0, int(extra["min_new_tokens"]) - self.sampled)
            extra = {**extra, "min_new_tokens": min(least, 1) if self._open_stop else least}
        budget = 1 if self._open_stop else self._budget - self.sampled
        experts = self._got.experts
        return PartRequest(
            (*self._prompt, *self._got.output_ids) if self.sampled else self._prompt,
            self._sampling
            if budget == self._sampling.max_new_tokens and extra is self._sampling.extra
            else replace(self._sampling, max_new_tokens=budget, extra=extra),
            min(experts.end, len(self._prompt) + self.sampled) if experts is not None else self._experts_start,
            prompt_tokens=len(self._prompt),
            **self._fields,
        )

    def add(self, part: Generation) -> None:
        answer, one_token, offset = self._got, self._open_stop, self.sampled
        searched = max(0, len(answer.text) - max(map(len, self._stops), default=1) + 1)
        counted = answer if answer.prompt_tokens else part  # a part that was aborted in the queue has no counts
        self._got = replace(
            part,
            output_ids=answer.output_ids + part.output_ids,
            log_probs=answer.log_probs + part.log_probs,
            text=answer.text + part.text,
            matched_stop=part.matched_stop if part.finish_reason == "stop" else None,
            prompt_tokens=counted.prompt_tokens,
            cached_tokens=counted.cached_tokens,
            weight_versions=_joined(answer.weight_versions, part.weight_versions, offset),
            top_log_probs=answer.top_log_probs + part.top_log_probs,
            experts=answer.experts.joined(part.experts)
            if answer.experts and part.experts
            else answer.experts or part.experts,
            nucleus=_joined_nucleus(answer, part),
            speculated=_added(answer.speculated, part.speculated),
        )
        self.done = part.finish_reason == "stop" or (part.finish_reason == "length" and not one_token)
        self._aborted = part.finish_reason == "abort"
        if offset and part.output_ids and self._decode is not None:
            self._got = replace(self._got, text=self._decoded(self._got.output_ids, self._decode))
            self._trim_stop(searched)
        if not self.done:
            self._end_if_over(searched)

    def give_up(self, reason: FinishReason) -> None:
        """End with the tokens so far (no room in the context for another one, or the caller does not want a resume)."""
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
        """Check whether the generation is complete, in the engine's order (length, stop strings, stop tokens): the
        engine aborted this part before its own check."""
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
        """Cut the matched stop string or token off the text, as the engine does."""
        answer, text = self._got, self._got.text
        if not self._trim:
            return
        if isinstance(answer.matched_stop, int) and self._decode is not None:
            text = self._decoded(answer.output_ids[:-1], self._decode)
        elif isinstance(answer.matched_stop, str) and (end := text.find(answer.matched_stop, searched)) >= 0:
            text = text[:end]
        self._got = replace(answer, text=text)

    def _decoded(self, ids: Sequence[int], decode: Decode) -> str:
        # after the prompt's last tokens, as SGLang does: some tokenizers drop a blank at the very beginning
        head, skip = list(self._prompt[-DECODED_AFTER:]), self._sampling.skip_special_tokens
        return decode([*head, *ids], skip_special_tokens=skip)[len(decode(head, skip_special_tokens=skip)) :]


class Progress(NamedTuple):
    """The progress of a streamed generation: its text, and a function that gives the rest as if it had been aborted
    here."""

    text: str
    so_far: Callable[[], Generation]


def _so_far(resumable: ResumableGeneration, request: PartRequest, event: Mapping[str, Any]) -> Generation:
    resumable = copy.copy(resumable)
    resumable.add(parse_generation(broken_off(event), request=request))
    return resumable.so_far


def _added(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def _joined_nucleus(answer: Generation, part: Generation) -> Nucleus | None:
    """The nuclei of an answer and its next part; ``None`` when one of them has sampled tokens without it."""
    if not (answer.output_ids and part.output_ids):
        return part.nucleus if part.output_ids else answer.nucleus
    return None if answer.nucleus is None or part.nucleus is None else answer.nucleus.joined(part.nucleus)


def _joined(spans: tuple[WeightSpan, ...], later: tuple[WeightSpan, ...], offset: int) -> tuple[WeightSpan, ...]:
    """All spans; ``later`` begin at output token ``offset``, and neighbours of one version become one span."""
    for span in later:
        start, end = span.start + offset, span.end + offset
        if spans and spans[-1].version == span.version and spans[-1].end == start:
            start, spans = spans[-1].start, spans[:-1]
        if end > start:
            spans = (*spans, WeightSpan(span.version, start, end))
    return spans
