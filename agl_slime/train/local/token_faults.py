"""Token ids that an engine may have been asked with in place of the recorded ones: edits of a recorded sequence, each
with the new places of its recorded tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Recorded(Protocol):
    """Token ids, of which the first ``prompt_length`` are the prompt, the ``places`` of recorded tokens, the engine's
    ``experts`` of each token but the last, which a trainer replays, and the processor's tensors of ``images``."""

    @property
    def ids(self) -> NDArray[np.int64]: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def places(self) -> NDArray[np.int64]: ...
    @property
    def experts(self) -> NDArray[Any] | None: ...
    @property
    def images(self) -> Mapping[str, NDArray[Any]] | None: ...


def insert(one: Recorded, place: int, token: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.insert(one.ids, place, token), one.places + (one.places >= place)


def remove(one: Recorded, gone: Sequence[int]) -> tuple[Any, Any, Any]:
    """Without the tokens at ``gone``; recorded tokens among them are not scored."""
    gone = [place for place in gone if 0 <= place < len(one.ids)]
    left = ~np.isin(one.places, gone)
    places = one.places[left]
    places = places - np.searchsorted(np.sort(gone), places)
    if len(places) == 0 or places[0] < 1:
        return one.ids, one.places, None
    return np.delete(one.ids, gone), places, left


def with_prompt(one: Recorded, prompt: Sequence[int] | None) -> tuple[Any, Any, None]:
    """With another prompt; unchanged without one."""
    if not prompt:
        return one.ids, one.places, None
    ids = np.concatenate([np.asarray(prompt, dtype=np.int64), one.ids[one.prompt_length :]])
    return ids, one.places + len(prompt) - one.prompt_length, None


def end_marks(one: Recorded, ends: set[int], *, after: bool) -> list[int]:
    """The end marks before the last recorded token, or the tokens after them."""
    last = int(one.places[-1])
    marks = [place for place in range(last) if int(one.ids[place]) in ends]
    recorded = {*one.places.tolist()}
    return [place + 1 for place in marks if place + 1 < last and place + 1 not in recorded] if after else marks


def thinking_blocks(one: Recorded, begin: int, end: int) -> list[int]:
    """The places of whole thinking blocks before the last run of recorded tokens."""
    runs = np.flatnonzero(np.diff(one.places) > 1)
    before = int(one.places[runs[-1] + 1 if len(runs) else 0])
    places, opened = [], None
    for place in range(before):
        if one.ids[place] == begin:
            opened = place
        elif one.ids[place] == end and opened is not None:
            places += range(opened, place + 1)
            opened = None
    return places
