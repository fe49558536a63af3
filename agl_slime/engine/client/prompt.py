"""A prompt's token ids as they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt


class PromptIds(Sequence[int]):
    """Token ids as a flat int32 ``array``, not to be changed: a list of 30,000 ids takes longer to make, to check and
    to write than all else of a call."""

    __slots__ = ("array",)

    def __init__(self, array: npt.NDArray[np.int32]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self.array[index].tolist()

    def __iter__(self) -> Any:
        return iter(self.array.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]  # as of a list


def outermost(ids: Sequence[int]) -> int:
    """The least of ``ids`` where it is below 0, else the greatest: in a vocabulary when all are."""
    lowest, highest = (ids.array.min(), ids.array.max()) if isinstance(ids, PromptIds) else (min(ids), max(ids))
    return int(lowest if lowest < 0 else highest)
