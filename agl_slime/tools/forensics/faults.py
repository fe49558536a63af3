"""Tokens and positions that an engine may have had in place of the right ones: edits of a recorded sequence, each with
the new places of its recorded tokens, and M-RoPE's rows of time, height and width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
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


Rows = NDArray[np.int64]


def position_faults() -> Iterator[tuple[str, Callable[[Rows, NDArray[np.bool_], int], Rows]]]:
    """Other positions by M-RoPE's rows, by the tokens of images and by the length of the prompt."""
    yield "placed each token of an image as one of text", lambda rows, *_: np.arange(rows.shape[1]) + 0 * rows
    names = ("temporal", "height", "width")
    for row, name in enumerate(names):
        only = np.arange(3)[:, None] == row
        text = f"had the positions of text in M-RoPE's {name} row"
        yield text, lambda rows, *_, only=only: np.where(only, np.arange(rows.shape[1]), rows)
    for some, other in combinations(range(3), 2):
        order = [{some: other, other: some}.get(row, row) for row in range(3)]
        yield f"had M-RoPE's {names[some]} and {names[other]} rows swapped", lambda rows, *_, order=order: rows[order]
    where: dict[str, Callable[[NDArray[np.bool_], int], NDArray[Any]]] = {
        "in images": lambda image, _: image,
        "after each image": lambda image, _: np.cumsum(np.diff(image.astype(int), prepend=0) < 0),
        "from each image on": lambda image, _: np.cumsum(np.diff(image.astype(int), prepend=0) > 0),
        "in the response": lambda image, prompt_length: np.arange(len(image)) >= prompt_length,
    }
    parts = {f"M-RoPE's {name} row": [row] for row, name in enumerate(names)} | {"all of M-RoPE's rows": [0, 1, 2]}
    for (which, part), step in product(parts.items(), (1, -1)):
        by = step * np.isin(np.arange(3), part)[:, None]
        for place, weigh in where.items():
            text = f"had {which} off by {step:+d} {place}"
            yield text, lambda rows, image, start, by=by, weigh=weigh: rows + by * weigh(image, start)
        text = f"had {which} of the {'token before' if step > 0 else 'next token'}"
        yield text, lambda rows, *_, by=by, step=step: np.where(by != 0, _beside(rows, step), rows)


def _beside(rows: Rows, step: int) -> Rows:
    """The positions of the token before, or of the next one for a negative ``step``."""
    if step > 0:
        return np.concatenate([rows[:, :1] - 1, rows[:, :-1]], axis=1)
    return np.concatenate([rows[:, 1:], rows[:, -1:] + 1], axis=1)
