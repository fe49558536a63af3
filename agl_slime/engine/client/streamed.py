"""The text of an answer while it is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

DECODED_AFTER = 5  # SGLang's INIT_INCREMENTAL_DETOKENIZATION_OFFSET
CUT = "\ufffd"
"""The replacement character that decoding writes for an incomplete character."""

_LONGEST_CHARACTER = 4  # bytes, and so ids


def growing_text(
    before: str, ids: Sequence[int], decode: Callable[[Sequence[int]], str] | None
) -> Callable[[Mapping[str, Any]], str]:
    """A function that gives the text so far from an event, after ``ids`` with the text ``before`` from an earlier
    request. The engine drops or damages a character that is split between the two requests, so the text is decoded from
    ids. Without ``decode`` it is the engine's text."""
    if decode is None:
        return lambda event: before + str(event.get("text") or "")
    all_ids, first = [*ids], len(ids)

    def settled(end: int) -> int:
        """``end``, or the place before it where no character is cut."""
        for at in range(end, max(0, end - _LONGEST_CHARACTER), -1):
            if not decode(all_ids[max(0, at - DECODED_AFTER) : at]).endswith(CUT):
                return at
        return end  # the model sampled that

    decoded_to = settled(first)
    text = before if decoded_to == first else before.rstrip(CUT)

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
        except (KeyError, IndexError, TypeError):
            return  # another form: an error when the answer is read
        on_text(text, event)

    return receive
