"""Tokens and positions that an engine may have had in place of the right ones: edits of a recorded sequence, each with
the new places of its recorded tokens, and M-RoPE's rows of time, height and width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_slime.tools.forensics.gaps import KeptSample

Edited = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]
"""The ids, the new places of recorded tokens, and which of the recorded tokens remain."""


def _unchanged(sample: KeptSample) -> Edited:
    return sample.ids, sample.places, np.ones(len(sample.places), dtype=bool)


def insert(sample: KeptSample, place: int, token: int) -> Edited:
    ids, places, remaining = _unchanged(sample)
    return np.insert(ids, place, token), places + (places >= place), remaining


def remove(sample: KeptSample, gone: Sequence[int]) -> Edited:
    """Without the tokens at ``gone``, unless no recorded token remains."""
    gone = [place for place in gone if 0 <= place < len(sample.ids)]
    remaining = ~np.isin(sample.places, gone)
    places = sample.places[remaining]
    places = places - np.searchsorted(np.sort(gone), places)
    if len(places) == 0 or places[0] < 1:
        return _unchanged(sample)
    return np.delete(sample.ids, gone), places, remaining


def with_prompt(sample: KeptSample, prompt: Sequence[int] | None) -> Edited:
    """With another prompt; unchanged without one."""
    ids, places, remaining = _unchanged(sample)
    if not prompt:
        return ids, places, remaining
    ids = np.concatenate([np.asarray(prompt, dtype=np.int64), ids[sample.prompt_length :]])
    return ids, places + len(prompt) - sample.prompt_length, remaining


def end_marks(sample: KeptSample, ends: set[int]) -> list[int]:
    """The end marks before the last recorded token."""
    return [place for place in range(int(sample.places[-1])) if int(sample.ids[place]) in ends]


def line_ends(sample: KeptSample, ends: set[int]) -> list[int]:
    """The tokens after the end marks, without sampled ones."""
    following = (place + 1 for place in end_marks(sample, ends))
    recorded = {*sample.places.tolist()}
    return [place for place in following if place < int(sample.places[-1]) and place not in recorded]


def thinking_blocks(sample: KeptSample, begin: int, end: int) -> list[int]:
    """The places of whole thinking blocks before the last run of recorded tokens."""
    runs = np.flatnonzero(np.diff(sample.places) > 1)
    last_run = int(sample.places[runs[-1] + 1 if len(runs) else 0])
    places, opened = [], None
    for place in range(last_run):
        if sample.ids[place] == begin:
            opened = place
        elif sample.ids[place] == end and opened is not None:
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
    for first, second in combinations(range(3), 2):
        order = [{first: second, second: first}.get(row, row) for row in range(3)]
        yield f"had M-RoPE's {names[first]} and {names[second]} rows swapped", lambda rows, *_, order=order: rows[order]
    regions: dict[str, Callable[[NDArray[np.bool_], int], NDArray[Any]]] = {
        "in images": lambda image, _: image,
        "after each image": lambda image, _: np.cumsum(np.diff(image.astype(int), prepend=0) < 0),
        "from each image on": lambda image, _: np.cumsum(np.diff(image.astype(int), prepend=0) > 0),
        "in the response": lambda image, prompt_length: np.arange(len(image)) >= prompt_length,
    }
    row_sets = {f"M-RoPE's {name} row": [row] for row, name in enumerate(names)} | {"all of M-RoPE's rows": [0, 1, 2]}
    for (which, part), step in product(row_sets.items(), (1, -1)):
        offset = step * np.isin(np.arange(3), part)[:, None]
        for place, mask in regions.items():
            text = f"had {which} off by {step:+d} {place}"
            yield text, lambda rows, image, start, offset=offset, mask=mask: rows + offset * mask(image, start)
        text = f"had {which} of the {'token before' if step > 0 else 'next token'}"
        yield text, lambda rows, *_, offset=offset, step=step: np.where(offset != 0, _beside(rows, step), rows)


def _beside(rows: Rows, step: int) -> Rows:
    """The positions of the token before, or of the next one for a negative ``step``."""
    if step > 0:
        return np.concatenate([rows[:, :1] - 1, rows[:, :-1]], axis=1)
    return np.concatenate([rows[:, 1:], rows[:, -1:] + 1], axis=1)
