"""A loop with a ledger and checkpoints on disk, as each process of a resumed run has it; only the model and the trainer
are played."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl_slime.data.ledger import Ledger
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.errors import LoopError, TrainerError
from agl_slime.events import BatchTrained
from agl_slime.loop.checkpoint import Checkpoint, CheckpointWriter, load_newest, read_checkpoints
from agl_slime.report.files import RunDir
from agl_slime.report.rollouts import RolloutWriter
from agl_slime.store.bridge import BridgeStore
from agl_slime.types import flat_samples
from tests.harness.loop import HelloAgent, LoopCase
from tests.harness.tokenizers import small_tokenizer

TASKS = [
    {("a", "key"): "that JSON has not", "prompt": f"say hello to {name}", "name": name}
    for name in ("Ada", "Alan", "Grace", "Edsger", "Barbara", "Donald", "Tony")
]


class MemoryTrainer:
    """Its whole state is the list of the instances that it was trained on."""

    def __init__(self) -> None:
        self.learned: list[str] = []

    def train(self, batch: Any, *, iteration: int) -> dict[str, float]:
        self.learned += [group[0].metadata["instance_id"] for group in batch]
        return {"train/loss": 0.0}

    def save_weights(self, directory: str | os.PathLike[str]) -> None:
        raise AssertionError("nobody asks for weights here")

    def save(self, directory: str | os.PathLike[str]) -> None:
        Path(directory).mkdir()
        (Path(directory) / "learned.json").write_text(json.dumps(self.learned))

    def load(self, directory: str | os.PathLike[str]) -> None:
        try:
            self.learned = json.loads((Path(directory) / "learned.json").read_text())
        except (OSError, ValueError) as error:
            raise TrainerError(f"{directory} cannot be read: {error}") from error


class Cut(Exception):
    """Ends the run as a kill would."""


class Life(LoopCase):
    """One process's worth of a run in ``directory``."""

    def __init__(
        self,
        directory: Path,
        url: str,
        *,
        n_groups: int = 2,
        n_trained: int | None = None,
        judge: Any = None,
        cut_after: int | None = None,
        recorded: bool = False,
        **settings: Any,
    ) -> None:
        """``n_trained`` groups of ``n_groups`` are trained on in each iteration; after the training of iteration
        ``cut_after`` the run ends without a checkpoint. A ``recorded`` one writes its rollouts as ``run_training``
        does."""
        self.memory, self.n_trained, self.cut_after = MemoryTrainer(), n_trained or n_groups, cut_after
        checkpoints = read_checkpoints(directory / "checkpoints")
        self.checkpoint: Checkpoint | None = load_newest(checkpoints, self.memory) if checkpoints else None
        self.ledger = Ledger(path=directory / "ledger.sqlite")
        source = GroupSource(
            store=BridgeStore(),
            tokenizer=small_tokenizer(),
            settings=DataSourceSettings(get_timeout_s=20),
            ledger=self.ledger,
        )
        if self.checkpoint is not None:
            RunDir(directory).rewind(self.checkpoint.loop.iteration)
            self.checkpoint.rewind(self.ledger)
            source.restore(self.checkpoint.data_source)
            settings["start"] = self.checkpoint.loop
        saved = CheckpointWriter(directory=directory / "checkpoints", trainer=self.memory, source=source)
        self.record: Callable[[Any], None] = lambda event: None
        if recorded:
            writer = RolloutWriter(RunDir(directory), keep="all")
            writer.tokenizer = small_tokenizer()
            self.record = writer.handle
        super().__init__(
            agent=HelloAgent(judge=judge),
            url=url,
            tasks=TASKS,
            val_tasks=TASKS,
            source=source,
            train=self._train,
            save=saved.save,
            on_event=self.record,
            rollout_batch_size=n_groups,
            max_replaced_groups=None,
            **settings,
        )

    def _train(self, iteration: int) -> dict[str, float]:
        batch = self.source.get_samples(self.n_trained)
        self.record(BatchTrained(iteration=iteration, samples=list(flat_samples(batch))))
        metrics = self.memory.train(batch, iteration=iteration)
        if iteration == self.cut_after:
            raise Cut
        return metrics

    async def run_until_cut(self) -> None:
        with pytest.raises(LoopError, match="Cut"):
            await self.loop.run_async()

    @property
    def tasks(self) -> list[int]:
        """The numbers of the tasks that were trained on, in order."""
        return sorted(map(int, self.memory.learned))

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.ledger.close()
