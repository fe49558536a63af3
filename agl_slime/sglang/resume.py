"""Joins the parts of a generation that the engine aborted and we took up again. No I/O: the client sends what
``next_request`` says and hands every answer to ``add``.

A weight sync pauses the engine with mode ``abort``: running requests answer at once with what they have (HTTP 200,
finish_reason ``abort``). To the agent one model call must stay one model call, so the next part's prompt is the prompt
plus all ids sampled so far, and its budget is what is left of ``max_new_tokens``.

The invariant: ``output_ids`` are exactly what the engine sampled, in order, each with the log-prob and weight version
of its own sampling; the joined generation ends where one that was never aborted would have ended:

- **Budget**: at ``max_new_tokens`` ids the reason is ``length`` (the engine checks length before anything else, and so
  do we).
- **Stop tokens**: SGLang looks at the abort mark before it looks at the sampled token, so the last id of an aborted
  part may be a stop token that nobody acted on.
- **Stop strings**: the engine searches only what one request sampled. A string that begins in one part and ends in the
  next would be missed. When the text so far ends in the beginning of a stop string, the next part is asked for one
  token at a time, until the string is complete (we stop there: no id past the end is ever sampled) or can no longer
  become one. It needs no tokenizer and, since it is rare and hits the prefix cache, costs a few one-token requests.
- **Constrained output** (``regex``, ``json_schema``, ``ebnf``, ``structural_tag``): a grammar would start anew in the
  middle, so such a generation starts again from nothing.
- ``min_new_tokens`` shrinks with each part.

What it cannot give back: penalties (``repetition_penalty`` and its kin) count the resumed part's own tokens only; a
character whose bytes are split by the boundary is the replacement character in ``text`` (ids are exact; decode them
when the text matters to the byte); ``stop_regex`` is searched within each part only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from agl_slime.sglang.payloads import FinishReason, Generation, SamplingParams, WeightSpan

# what makes an answer depend on a state that a resumed request does not have
_GRAMMAR_KEYS = ("regex", "json_schema", "ebnf", "structural_tag")


@dataclass(frozen=True, slots=True)
class PartRequest:
    """One request to send: ``input_ids`` = prompt + the ids sampled so far."""

    input_ids: tuple[int, ...]
    sampling: SamplingParams


class ResumableGeneration:
    """One generation in the making: ``while not done: add(send(next_request()))``."""

    def __init__(
        self,
        *,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        eos_token_ids: Collection[int] = (),
        context_length: int | None = None,
    ) -> None:
        self._prompt = tuple(prompt_ids)
        self._sampling = sampling
        self._stop_ids = frozenset(sampling.stop_token_ids) | frozenset(eos_token_ids)
        if sampling.extra.get("ignore_eos"):
            self._stop_ids = frozenset()
        self._stops = tuple(stop for stop in sampling.stop if stop)
        self._constrained = any(sampling.extra.get(key) for key in _GRAMMAR_KEYS)
        self._budget = sampling.max_new_tokens
        if context_length is not None:
            self.limit_context(context_length)
        self._ids: list[int] = []
        self._log_probs: list[float] = []
        self._text = ""
        self._spans: list[WeightSpan] = []
        self._first: Generation | None = None
        self._request_id = ""
        self._finish: FinishReason | None = None
        self._matched: int | str | None = None
        self._aborted = False
        self.resumed = 0
        """How often an aborted generation was taken up again."""
        self.empty_parts = 0
        """Parts in a row, up to now, that brought no token."""

    @property
    def done(self) -> bool:
        return self._finish is not None

    @property
    def sampled(self) -> int:
        """Ids kept so far."""
        return len(self._ids)

    @property
    def _open_stop(self) -> bool:
        """The text ends in the beginning of a stop string."""
        return bool(self._ids) and any(
            self._text.endswith(stop[:n]) for stop in self._stops for n in range(1, len(stop))
        )

    def limit_context(self, context_length: int) -> None:
        """Shorten the budget so that prompt + new tokens fit into ``context_length``: SGLang refuses a request for
        more."""
        self._budget = min(self._budget, context_length - len(self._prompt))

    def next_request(self) -> PartRequest:
        if self._aborted:
            self._aborted = False
            self.resumed += 1
            if self._constrained:
                self._ids, self._log_probs, self._text, self._spans = [], [], "", []
        left = self._budget - len(self._ids)
        changes: dict[str, object] = {}
        if self._ids and self._sampling.extra.get("min_new_tokens"):
            least = max(0, int(self._sampling.extra["min_new_tokens"]) - len(self._ids))
            changes["extra"] = {**self._sampling.extra, "min_new_tokens": min(least, 1) if self._open_stop else least}
        sampling = replace(self._sampling, max_new_tokens=1 if self._open_stop else left, **changes)  # pyright: ignore[reportArgumentType]
        return PartRequest(self._prompt + tuple(self._ids), sampling)

    def add(self, part: Generation) -> None:
        """Take in the answer to ``next_request``."""
        one_token = self._open_stop
        searched = max(0, len(self._text) - max((len(stop) for stop in self._stops), default=1) + 1)
        offset = len(self._ids)
        if self._first is None or self._first.prompt_tokens == 0:
            self._first = part  # a part that was aborted in the queue has no counts
        self._request_id = part.request_id
        self.empty_parts = 0 if part.output_ids else self.empty_parts + 1
        self._ids += part.output_ids
        self._log_probs += part.log_probs
        self._text += part.text
        for span in part.weight_versions:
            self._add_span(WeightSpan(span.version, span.start + offset, span.end + offset))
        if part.finish_reason == "stop":
            self._finish, self._matched = "stop", part.matched_stop
        elif part.finish_reason == "abort" or one_token:
            self._end_if_over(searched)
            self._aborted = part.finish_reason == "abort"
        else:
            self._finish = "length"

    def give_up(self, reason: FinishReason) -> None:
        """End with what is there (no room in the context for another token, or the caller does not want a resume)."""
        self._finish = reason

    def result(self, *, latency_s: float) -> Generation:
        assert self._finish is not None
        assert self._first is not None
        return Generation(
            output_ids=tuple(self._ids),
            log_probs=tuple(self._log_probs),
            text=self._text,
            finish_reason=self._finish,
            matched_stop=self._matched,
            prompt_tokens=self._first.prompt_tokens,
            cached_tokens=self._first.cached_tokens,
            weight_versions=tuple(self._spans),
            request_id=self._request_id,
            latency_s=latency_s,
            resumed=self.resumed,
        )

    def _end_if_over(self, searched: int) -> None:
        """The engine ended this part before it looked whether the generation is over: look now, in the engine's own
        order (length, stop strings, stop tokens)."""
        if len(self._ids) >= self._budget:
            self._finish = "length"
            return
        for stop in self._stops:
            at = self._text.find(stop, searched)
            if at >= 0:
                self._finish, self._matched = "stop", stop
                if not self._sampling.extra.get("no_stop_trim"):
                    self._text = self._text[:at]
                return
        if self._ids and self._ids[-1] in self._stop_ids:
            self._finish, self._matched = "stop", self._ids[-1]

    def _add_span(self, span: WeightSpan) -> None:
        if self._spans and self._spans[-1].version == span.version and self._spans[-1].end == span.start:
            self._spans[-1] = WeightSpan(span.version, self._spans[-1].start, span.end)
        elif span.end > span.start:
            self._spans.append(span)
