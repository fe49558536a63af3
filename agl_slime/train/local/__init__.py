"""Trainers turn a batch of samples into new weights. ``LocalTrainer`` needs torch and is imported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agl_slime.train.local.batch import TrainBatch
from agl_slime.train.local.settings import LocalTrainerSettings

if TYPE_CHECKING:
    from agl_slime.train.local.trainer import LocalTrainer


def __getattr__(name: str) -> Any:
    if name == "LocalTrainer":
        from agl_slime.train.local.trainer import LocalTrainer

        return LocalTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["LocalTrainer", "LocalTrainerSettings", "TrainBatch"]
