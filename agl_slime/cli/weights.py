"""Weights on their way from the local trainer to engines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agl_slime.cli.settings import TrainConfig
from agl_slime.engine.client.client import PauseMode
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.report.files import RunDir, version_name
from agl_slime.support.files import scratch_directory
from agl_slime.support.threads import run_in_thread
from agl_slime.train.local.settings import WeightsDtype

if TYPE_CHECKING:
    from agl_slime.train.local.trainer import LocalTrainer

_MEMORY = Path("/dev/shm")
_LARGE = 64 << 20  # bytes; below, memory is no faster than a disk
# Free memory needed, in sizes of the checkpoint (which may have half the precision): two versions kept, one being
# written, and the engine.
_FREE_FACTOR = 8


class WeightPublisher:
    """Writes the trainer's weights as a checkpoint that every worker loads; keeps the last two checkpoints."""

    def __init__(self, *, trainer: LocalTrainer, base_url: str, directory: Path, pause: PauseMode = "abort") -> None:
        self._trainer = trainer
        self.sync = DiskWeightSync(base_url=base_url, pause=pause)
        self.directory = directory.resolve()  # the engine has another working directory
        self._in_use: Path | None = None
        self._version = 0
        self.dtype: WeightsDtype = "float32"

    async def push_next(self) -> str:
        """Push the weights to the engine as the next version; returns it. An iteration without training takes none."""
        return await self.push(str(self._version + 1))

    async def push(self, version: str) -> str:
        """Push the weights to the engine as ``version``; returns it."""
        target = self.directory / version_name(version)
        await run_in_thread(partial(self._trainer.save_weights, target, dtype=self.dtype))
        await self.sync.push(str(target), version)
        self._version = int(version)
        # includes checkpoints from before a restart
        earlier = sorted(path for path in self.directory.glob("v*") if path.is_dir() and path != target)
        for path in earlier[:-1]:
            if path != self._in_use:
                await run_in_thread(shutil.rmtree, path, ignore_errors=True)
        return version

    async def push_again(self, version: str, *, base_url: str) -> None:
        """Push the weights of ``version`` to another engine, too; they are kept until then."""
        self._in_use = self.directory / version_name(version)
        try:
            await DiskWeightSync(base_url=base_url).push(str(self._in_use), version)
        finally:
            self._in_use = None


@contextmanager
def weights_directory(config: TrainConfig, model_path: Path, run: RunDir) -> Iterator[Path]:
    """The directory from which the engine loads weights: memory for a large model and an engine started here (an engine
    at a URL may have another /dev/shm, in a container), else the run's directory."""
    size = sum(file.stat().st_size for file in model_path.glob("*.safetensors"))
    fits = size >= _LARGE and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _FREE_FACTOR * size
    if config.sglang_url is None and config.eval_sglang_url is None and fits:
        with scratch_directory(_MEMORY, "agl-slime-weights") as directory:
            yield directory
    else:
        yield run.weights
