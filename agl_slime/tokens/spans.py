"""The turns of one attempt from Agent Lightning spans of any writer.

Three conventions are read. Only the best one of an attempt counts, so that a call recorded by two instrumentations is
one turn:

1. this package's: packed ids and log-probs (``agl_slime.tokens.turn``);
2. token lists: ``prompt_token_ids`` and ``response_token_ids`` of Agent Lightning's instrumentation, with log-probs
  if present. The ids are the engine's. (vLLM's log-probs are taken before temperature by default.)
3. text: ``gen_ai.prompt.N.*`` and ``gen_ai.completion.N.*``, or ``gen_ai.input.messages`` and
  ``gen_ai.output.messages``. Re-tokenized through the chat template, marked ``retokenized``, without log-probs.

Calls beneath a reward span (a judge's) are not turns of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from agl_slime.errors import TraceError
from agl_slime.tokens.foreign import model_calls
from agl_slime.tokens.retokenize import Retokenizer
from agl_slime.tokens.span_codec import decode_turns, is_packed
from agl_slime.tokens.turn import Turn

if TYPE_CHECKING:
    from agl_slime.support.agl import Span
    from agl_slime.tokens.tokenizer import ChatTokenizer


def spans_of_attempt(spans: Iterable[Span], attempt_id: str | None = None) -> list[Span]:
    """The spans of one attempt by sequence id, each once. By default the attempt that began last.

    A lost worker may still write spans to its dead attempt, so an attempt begins at its earliest span. Raises
    ``TraceError`` when there are several attempts and their spans have no start times.
    """
    spans = list(spans)
    if attempt_id is None:
        attempt_id = _latest_attempt(spans)
    of_attempt = [span for span in reversed(spans) if span.attempt_id == attempt_id]
    by_id = {span.span_id: span for span in of_attempt}  # an exporter may deliver a span twice
    return sorted(by_id.values(), key=lambda span: (span.sequence_id, span.start_time or 0.0))


def _latest_attempt(spans: Sequence[Span]) -> str | None:
    began: dict[str, float] = {}
    for span in spans:
        if span.start_time is not None:
            began[span.attempt_id] = min(span.start_time, began.get(span.attempt_id, span.start_time))
    attempts = {span.attempt_id for span in spans}
    if len(attempts) > 1 and attempts != set(began):
        raise TraceError(f"spans of {len(attempts)} attempts lack start times; name the attempt with attempt_id")
    return max(attempts, key=lambda attempt: began.get(attempt, 0.0), default=None)


def read_turns(
    spans: Sequence[Span],
    tokenizer: ChatTokenizer | None = None,
    *,
    is_policy_call: Callable[[Span], bool] | None = None,
) -> tuple[Turn, ...]:
    """The turns in ``spans``, the ordered spans of one attempt (``spans_of_attempt``).

    ``tokenizer`` is needed for text-only traces only. ``is_policy_call`` leaves out calls to other models in the
    second and third convention, whose spans do not say whether the policy answered; without it every call counts.
    Raises ``TraceError`` when a span is damaged or a text-only trace comes without tokenizer.
    """
    if any(is_packed(span.attributes) for span in spans):
        return tuple(decode_turns(spans))
    calls = model_calls(spans, is_policy_call)
    if any(call.has_ids for call in calls):
        return tuple(call.turn() for call in calls if call.has_ids)
    if not calls:
        return ()
    if tokenizer is None:
        raise TraceError("the trace has text but no token ids; a tokenizer is needed to re-tokenize it")
    retokenizer = Retokenizer(tokenizer)
    return tuple(turn for call in calls if (turn := call.retokenized_turn(retokenizer)) is not None)
