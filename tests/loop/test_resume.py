"""A loop that ends anywhere and resumes from its last checkpoint, with a ledger on disk."""

import asyncio
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl_slime.data.ledger import Ledger
from agl_slime.data.results import Outcome
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.errors import ConfigError, LoopError, TrainerError
from agl_slime.events import BatchTrained, Event, GroupsCollected
from agl_slime.loop.checkpoint import Checkpoint, CheckpointWriter, load_newest, read_checkpoints
from agl_slime.loop.settings import LoopState
from agl_slime.report.files import RunDir, iter_jsonl
from agl_slime.report.rollouts import RolloutWriter
from agl_slime.store.bridge import BridgeStore
from agl_slime.types import flat_samples
from tests.harness.loop import HelloAgent, LoopCase
from tests.harness.scripted_engine import ScriptedEngine
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


@pytest.mark.parametrize(
    ("max_staleness", "save_interval", "cut_after"), [(0, 1, 1), (0, 3, 5), (1, 2, 4), (2, 3, 5), (4, 1, 5)]
)
async def test_run_cut_between_training_and_checkpoint_trains_each_instance_once(
    tmp_path: Path, max_staleness: int, save_interval: int, cut_after: int, engine: ScriptedEngine
) -> None:
    settings = {"num_iterations": 6, "save_interval": save_interval, "max_staleness": max_staleness}
    with Life(tmp_path, engine.url, cut_after=cut_after, **settings) as first:
        await first.run_until_cut()
    with Life(tmp_path, engine.url, **settings) as second:
        assert second.checkpoint is not None
        saved = (cut_after - 1) // save_interval * save_interval
        assert second.checkpoint.loop.iteration == saved
        assert len(second.memory.learned) == 2 * saved
        if not max_staleness:
            assert second.tasks == [*range(2 * saved)]
        ended = set(second.checkpoint.data_source["instances"])
        await second.loop.run_async()
        assert second.tasks == [*range(12)]
        assert sorted(map(int, second.ledger.finished_instances())) == [*range(12)]
        counts = second.ledger.counts()
        assert (counts.open, counts.ready) == (0, 0)
        assert counts.closed[Outcome.TRAINED] == 24
        assert counts.opened == sum(counts.closed.values())
        assert [row["iteration"] for row in second.recorder.metrics] == [*range(saved + 1, 7)]
        batch_of = {name: place // 2 for place, name in enumerate(second.memory.learned)}
        late = [batch_of[n] - admitted for n, admitted in second.checkpoint.loop.admitted.items()]
        assert max(late, default=0) <= max_staleness  # their age before the restart counts
        # rollouts that had ended before the checkpoint are not run a second time
        repeated = counts.reasons.get((Outcome.CANCELLED, "restarted"), 0)
        assert repeated <= 2 * (12 - 2 * saved - len(ended))
        assert max_staleness or repeated == 4 * (cut_after - saved)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
async def test_a_batch_that_was_collected_and_not_trained_on_keeps_its_age(tmp_path, max_staleness, engine):
    """The run ends between the two: the next one trains on that batch first, and not beside another."""
    settings = {"num_iterations": 6, "save_interval": 5, "max_staleness": max_staleness}

    def cut(event: Event) -> None:
        if isinstance(event, GroupsCollected) and event.iteration == 2:
            raise Cut

    with Life(tmp_path, engine.url, **settings) as first:
        first.recorder._on_event = cut
        await first.run_until_cut()
        collected = first.recorder.events_of(GroupsCollected)[-1].groups
    with Life(tmp_path, engine.url, **settings) as second:
        assert second.checkpoint is not None
        admitted = second.checkpoint.loop.admitted
        ages = {admitted[group.instance_id] for group in collected}
        assert ages <= {*range(2)}
        assert max_staleness < 1 or 0 in ages  # by the weights of the start
        await second.loop.run_async()
        trained_first = second.memory.learned[2:4]
        if max_staleness:  # a slow group from before the restart may be ready now, and goes first if it is older
            assert {admitted[task] for task in trained_first} <= {*range(max(ages) + 1)}
        else:
            assert {*trained_first} == {group.instance_id for group in collected}
        assert second.tasks == [*range(12)]
        counts = second.ledger.counts()
        assert (counts.open, counts.ready) == (0, 0)


async def test_groups_that_are_dropped_are_not_drawn_after_a_resume(tmp_path: Path, engine: ScriptedEngine) -> None:
    def judge(task: dict[str, str], response: str) -> float:
        if task["name"] in ("Ada", "Tony"):
            raise ValueError("no reward for this one")
        return 1.0

    with Life(tmp_path, engine.url, num_iterations=4, judge=judge, cut_after=3) as first:
        await first.run_until_cut()
    with Life(tmp_path, engine.url, num_iterations=4, judge=judge) as second:
        await second.loop.run_async()
        finished = Counter(second.ledger.finished_instances())
        assert set(finished.values()) == {1}
        assert sorted(map(int, finished)) == [*range(len(finished))]
        assert len(second.memory.learned) == len(set(second.memory.learned)) == 8
        assert set(second.memory.learned) < set(finished)


async def test_pending_groups_are_checkpointed_and_delivered_after_resume(tmp_path: Path, engine: ScriptedEngine):
    with Life(tmp_path, engine.url, num_iterations=1, n_groups=3, n_trained=1) as first:
        await first.loop.run_async()
        [learned] = first.memory.learned
    with Life(tmp_path, engine.url, num_iterations=1, n_groups=3) as second:
        assert second.ledger.counts().ready == 4
        groups = await asyncio.to_thread(second.source.get_samples, 2)
        assert sorted([learned, *(group[0].metadata["instance_id"] for group in groups)]) == ["0", "1", "2"]
        assert second.ledger.counts().closed == {Outcome.TRAINED: 6}
        assert groups[0][0].index not in {sample.index for sample in groups[1]}


async def test_groups_pending_over_a_restart_are_recorded_once(tmp_path: Path, engine: ScriptedEngine) -> None:
    for iterations, n_trained in ((1, 1), (3, 4)):
        settings = {"num_iterations": iterations, "n_groups": 3, "n_trained": n_trained, "recorded": True}
        with Life(tmp_path, engine.url, **settings) as life:
            await life.loop.run_async()
    groups = list(iter_jsonl(tmp_path / "groups.jsonl"))
    assert sorted(int(group["instance_id"]) for group in groups) == [*range(9)]
    assert {outcome for group in groups for outcome in group["outcomes"]} == {"trained"}
    rollouts = list(iter_jsonl(tmp_path / "rollouts.jsonl"))
    recorded = [rollout["rollout_id"] for rollout in rollouts]
    assert any(group.get("restored") for group in groups)
    roles = [[message["role"] for message in rollout["messages"]] for rollout in rollouts if rollout["task"]]
    assert roles == [["user", "assistant"]] * len(rollouts)
    assert all(len(rollout["turns"]) == 1 for rollout in rollouts)
    assert sorted(recorded) == sorted(rollout_id for group in groups for rollout_id in group["rollouts"])


async def test_a_run_that_was_resumed_reports_as_one(tmp_path: Path, engine: ScriptedEngine) -> None:
    settings = {"eval_interval": 1, "eval_rollouts": 3}
    with Life(tmp_path, engine.url, num_iterations=2, **settings) as first:
        assert len((await first.loop.run_async()).reward_means) == 2
        first_rewards = (await first.loop._current_state()).val_first
    checkpoints = tmp_path / "checkpoints"  # one of a course that the run has left, because it is damaged
    (Path(shutil.copytree(checkpoints / "step_000002", checkpoints / "step_000009")) / "loop.json").unlink()
    with Life(tmp_path, engine.url, num_iterations=3, **settings) as second:
        assert second.checkpoint is not None
        assert second.checkpoint.loop.validations == 3  # before the first iteration, and after each
        assert second.checkpoint.loop.val_first == first_rewards != {}
        assert len((await second.loop.run_async()).reward_means) == 3
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_000002", "step_000003"]


def test_only_the_newest_whole_checkpoints_stay_and_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flushed: set[str] = set()
    directory, ledger = tmp_path / "c", Ledger(path=tmp_path / "ledger.sqlite")

    def fsync(descriptor: int) -> None:
        flushed.add(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    def names() -> list[str]:
        return sorted(path.name for path in directory.iterdir())

    monkeypatch.setattr(os, "fsync", fsync)
    with GroupSource(store=BridgeStore(), ledger=ledger) as source:
        writer = CheckpointWriter(directory=directory, trainer=MemoryTrainer(), source=source)
        assert read_checkpoints(directory) == []
        for iteration in (0, 9, 10, 100):
            writer.save(LoopState(iteration=iteration))
        assert {"loop.json", "data_source.json", "learned.json", "trainer", "c"} <= flushed
        assert names() == ["step_000010", "step_000100"]
        assert [checkpoint.loop.iteration for checkpoint in read_checkpoints(directory)] == [100, 10]

        class Broken(MemoryTrainer):
            def save(self, directory: str | os.PathLike[str]) -> None:
                super().save(directory)
                raise OSError("no space left")

        broken = CheckpointWriter(directory=directory, trainer=Broken(), source=source)
        with pytest.raises(OSError, match="no space left"):
            broken.save(LoopState(iteration=101))
        assert names() == ["step_000010", "step_000100"]
        writer.save(LoopState(iteration=11))  # the run was resumed from 10: a later checkpoint is of no use
        assert names() == ["step_000010", "step_000011"]
    ledger.close()


async def test_when_every_checkpoint_is_damaged_the_newest_is_named(tmp_path: Path, engine: ScriptedEngine) -> None:
    with Life(tmp_path, engine.url, num_iterations=1, save_interval=1) as first:
        await first.loop.run_async()
    checkpoints = [tmp_path / "checkpoints" / name for name in ("step_000000", "step_000001")]
    for checkpoint in checkpoints:
        (checkpoint / "trainer" / "learned.json").unlink()
    with pytest.raises(TrainerError, match="step_000001"):
        load_newest(read_checkpoints(tmp_path / "checkpoints"), MemoryTrainer())
    for checkpoint in checkpoints:
        (checkpoint / "loop.json").write_text("{")
    with pytest.raises(ConfigError, match="step_000000 is damaged"):
        read_checkpoints(tmp_path / "checkpoints")
