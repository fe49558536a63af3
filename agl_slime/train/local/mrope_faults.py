"""Positions that an engine may have had in place of the right ones: M-RoPE's rows of time, height and width."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
