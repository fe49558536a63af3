"""The text of an answer while it is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

DECODED_AFTER = 5  # SGLang's INIT_INCREMENTAL_DETOKENIZATION_OFFSET
CUT = "\ufffd"
"""What decoding writes for bytes that are no whole character."""

_LONGEST_CHARACTER = 4  # bytes, and so ids


def growing_text(
    before: str, ids: Sequence[int], decode: Callable[[Sequence[int]], str] | None
) -> Callable[[Mapping[str, Any]], str]:
    """How the text so far is read from an event, where ``ids`` with the text ``before`` were sampled by an earlier
    request: the engine leaves out or damages a character that is cut between the two, so it is decoded from ids.
    Without ``decode`` the engine's text is taken."""
    if decode is None:
        return lambda event: before + str(event.get("text") or "")
    known, first = [*ids], len(ids)

    def settled(end: int) -> int:
        """``end``, or the place before it where no character is cut."""
        for at in range(end, max(0, end - _LONGEST_CHARACTER), -1):
            if not decode(known[max(0, at - DECODED_AFTER) : at]).endswith(CUT):
                return at
        return end  # the model sampled that

    told = settled(first)
    text = before if told == first else before.rstrip(CUT)

    def read(event: Mapping[str, Any]) -> str:
        nonlocal told, text
        known.extend(pair[1] for pair in event["meta_info"]["output_token_logprobs"][len(known) - first :])
        start, end = max(0, told - DECODED_AFTER), settled(len(known))
        if end > told:
            text += decode(known[start:end])[len(decode(known[start:told])) :]
            told = end
        return text

    return read


def telling(on_text: Callable[[str, Any], None], read: Callable[[Mapping[str, Any]], str]) -> Callable[[Any], None]:
    """Takes the events of one request and tells the text so far, and by which event; not that of the last event, which
    has what ended the answer in it: its caller gets the whole."""

    def tell(event: Any) -> None:
        meta = event.get("meta_info") if isinstance(event, Mapping) else None
        if not isinstance(meta, Mapping) or meta.get("finish_reason") is not None:
            return
        try:
            text = read(event)
        except (KeyError, IndexError, TypeError):
            return  # of another form: said when the answer is read
        on_text(text, event)

    return tell
