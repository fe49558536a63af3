"""What a reward may be, decided where it enters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from agl_slime.errors import RewardError


def check_reward(value: Any, *, source: str) -> dict[str, float]:
    """The named rewards of ``value``, the primary first; a plain number is named ``primary``.

    Numbers of numpy and torch are taken too. ``None``, strings, NaN and infinities raise ``RewardError``: a reward is
    never invented.
    """
    if isinstance(value, Mapping):
        if not value:
            raise RewardError(f"{source} returned an empty dict; name at least one reward.")
        return {str(name): _number(item, f"{source}[{name!r}]") for name, item in value.items()}
    return {"primary": _number(value, source)}


def _number(value: Any, source: str) -> float:
    if value is None:
        raise RewardError(f"{source} returned None; expected a number.", reason="no_reward")
    item = getattr(value, "item", None)
    if item is not None and not isinstance(value, (str, bytes)):
        try:
            value = item()  # one-element arrays and tensors
        except (RuntimeError, ValueError, TypeError) as error:
            raise RewardError(f"{source} returned {value!r}, which is not one number.") from error
    if not isinstance(value, Real):
        raise RewardError(f"{source} returned {value!r} of type {type(value).__name__}; expected a number.")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond what a float holds
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{source} returned {number!r}; a reward must be a finite number.")
    return number
