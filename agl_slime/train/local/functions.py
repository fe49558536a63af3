"""Functions of a user's own file for the local trainer: a loss, an advantage, a metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from agl_slime.agent.loading import load_function
from agl_slime.errors import TrainerError, format_exception


def user_function(path: str, *, flag: str) -> Callable[..., Any]:
    """The function ``path/to/file.py:name``, whose exceptions become a ``TrainerError`` that names ``flag``. Raises
    ``ConfigError`` without such a function."""
    function = load_function(path, flag=flag)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise TrainerError(f"{flag} {path} failed with {format_exception(error)}") from error

    return call


def user_advantages(path: str) -> Callable[[Sequence[float], Sequence[int]], list[float]]:
    """The function of ``--local.advantage``: from the rewards ``[n]`` and the groups' numbers ``[n]`` of a batch's
    rollouts, the advantages ``[n]``, checked."""
    function = user_function(path, flag="--local.advantage")

    def advantages(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
        try:
            values = np.asarray(function(np.array(rewards), np.array(groups)), dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise TrainerError(f"--local.advantage {path} returned no array of numbers: {error}") from error
        if values.shape != (len(rewards),) or not np.isfinite(values).all():
            shape = list(values.shape)
            raise TrainerError(
                f"--local.advantage {path} returned {shape}; return a finite number per rollout, [{len(rewards)}]"
            )
        return values.tolist()

    return advantages


def user_metrics(path: str, **arrays: np.ndarray) -> dict[str, float]:
    """The metrics ``user/NAME`` of a batch, by the function of ``--local.metric``, which gets ``arrays`` ``[n_tokens]``
    by keyword and returns numbers by name."""
    values = user_function(path, flag="--local.metric")(**arrays)
    try:
        metrics = {f"user/{name}": float(value) for name, value in values.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise TrainerError(f"--local.metric {path} returned no dict of numbers by name: {error}") from error
    if unusable := [name for name, value in metrics.items() if not math.isfinite(value)]:
        raise TrainerError(f"--local.metric {path}: {unusable[0]} is {metrics[unusable[0]]}; return finite numbers")
    return metrics
