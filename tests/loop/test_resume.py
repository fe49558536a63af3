"""A loop that is cut off and goes on from its last checkpoint, with a ledger on disk; only the model and the trainer
are played."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl_slime.data.ledger import Ledger
from agl_slime.data.results import Outcome
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.errors import ConfigError, LoopError, TrainerError
from agl_slime.events import BatchTrained
from agl_slime.loop.checkpoint import Checkpoint, CheckpointWriter, load_newest, read_checkpoints
from agl_slime.loop.online import OnlineRLLoop
from agl_slime.loop.settings import LoopSettings, LoopState
from agl_slime.report.files import RunDir, iter_jsonl
from agl_slime.report.rollouts import RolloutWriter
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.concurrent import RunnerSettings
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM
from agl_slime.types import flat_samples
from tests.harness.loop import HelloAgent, Recorder, hello_engine
from tests.harness.tokenizers import small_tokenizer

TASKS = [
    {"prompt": f"say hello to {name}", "name": name}
    for name in ("Ada", "Alan", "Grace", "Edsger", "Barbara", "Donald", "Tony")
]


class MemoryTrainer:
    """What it has learned is the list of the instances that it was given; that is also its whole state."""

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


class Life:
    """One process's worth of a run in ``directory``."""

    def __init__(self, directory: Path, url: str, *, n_groups: int = 2, judge: Any = None, **settings: Any) -> None:
        self.trainer = MemoryTrainer()
        self.ledger = Ledger(path=directory / "ledger.sqlite")
        self.source = GroupSource(
            store=BridgeStore(),
            tokenizer=small_tokenizer(),
            settings=DataSourceSettings(get_timeout_s=20),
            ledger=self.ledger,
        )
        found = read_checkpoints(directory / "checkpoints")
        self.checkpoint: Checkpoint | None = load_newest(found, self.trainer) if found else None
        if self.checkpoint is not None:
            RunDir(directory).rewind(self.checkpoint.loop.iteration)
            self.checkpoint.rewind(self.ledger)
            self.source.restore(self.checkpoint.data_source)
        self.writer = CheckpointWriter(directory=directory / "checkpoints", trainer=self.trainer, source=self.source)
        self.recorder = Recorder()
        self.n_trained: int | None = None
        self.after_training: Callable[[int], None] = lambda iteration: None
        assert self.source._store is not None
        try:
            self.loop = OnlineRLLoop(
                store=self.source._store,
                agent=HelloAgent(judge=judge),
                tasks=TASKS,
                val_tasks=TASKS,
                llm=LLM(endpoint=url, model="scripted", sampling_parameters={"max_new_tokens": 8}),
                data_source=self.source,
                slime_train_fn=self._train,
                save_fn=self.writer.save,
                start=self.checkpoint.loop if self.checkpoint is not None else None,
                settings=LoopSettings(
                    **{"rollout_batch_size": n_groups, "n_samples_per_prompt": 2, "rollout_timeout_s": 20.0, **settings}
                ),
                runners=RunnerPlan(settings=RunnerSettings(poll_interval_s=0.01, heartbeat_interval_s=0)),
                observer=self.recorder,
            )
        except BaseException:
            self.end()
            raise

    def _train(self, iteration: int) -> dict[str, float]:
        n_groups = self.n_trained or self.loop.settings.rollout_batch_size
        metrics = self.trainer.train(self.source.get_samples(n_groups), iteration=iteration)
        self.after_training(iteration)
        return metrics

    def end(self) -> None:
        self.source.stop()
        self.ledger.close()


class Cut(Exception):
    """The process is gone."""


def cut_after(iteration: int) -> Callable[[int], None]:
    def cut(now: int) -> None:
        if now == iteration:
            raise Cut

    return cut


@pytest.mark.parametrize(
    ("max_staleness", "save_interval", "cut_at"),
    [(0, 1, 1), (0, 1, 3), (0, 2, 4), (0, 3, 5), (1, 1, 1), (1, 2, 4), (2, 3, 5), (4, 1, 5)],
)
async def test_run_cut_between_training_and_checkpoint_trains_each_instance_once(
    tmp_path: Path, max_staleness: int, save_interval: int, cut_at: int
) -> None:
    settings = {"num_iterations": 6, "save_interval": save_interval, "max_staleness": max_staleness}
    with hello_engine() as engine:
        first = Life(tmp_path, engine.url, **settings)
        first.after_training = cut_after(cut_at)
        with pytest.raises(LoopError, match="Cut"):
            await first.loop.run_async()
        first.end()
        second = Life(tmp_path, engine.url, **settings)
        try:
            assert second.checkpoint is not None
            saved = (cut_at - 1) // save_interval * save_interval
            assert second.checkpoint.loop.iteration == saved
            assert len(second.trainer.learned) == 2 * saved
            if not max_staleness:
                assert sorted(map(int, second.trainer.learned)) == [*range(2 * saved)]
            held = set(second.checkpoint.data_source["instances"])
            await second.loop.run_async()
            assert sorted(map(int, second.trainer.learned)) == [*range(12)]
            assert sorted(map(int, second.ledger.finished_instances())) == [*range(12)]
            counts = second.ledger.counts()
            assert (counts.open, counts.ready) == (0, 0)
            assert counts.closed[Outcome.TRAINED] == 24
            assert counts.opened == sum(counts.closed.values())
            assert [row["iteration"] for row in second.recorder.metrics] == [*range(saved + 1, 7)]
            batch_of = {name: place // 2 for place, name in enumerate(second.trainer.learned)}
            late = [batch_of[n] - admitted for n, admitted in second.checkpoint.loop.admitted.items()]
            assert max(late, default=0) <= max_staleness  # their age before the restart counts
            # what had ended before the checkpoint was not run again
            again = counts.reasons.get((Outcome.CANCELLED, "restarted"), 0)
            assert again <= 2 * (12 - 2 * saved - len(held))
            assert max_staleness or again == 4 * (cut_at - saved)
        finally:
            second.end()


async def test_groups_that_are_dropped_are_not_drawn_again_by_a_later_life(tmp_path: Path) -> None:
    def judge(task: dict[str, Any], response: str) -> float:
        if task["name"] in ("Ada", "Tony"):
            raise ValueError("no reward for this one")
        return 1.0

    with hello_engine() as engine:
        first = Life(tmp_path, engine.url, num_iterations=4, judge=judge)
        first.after_training = cut_after(3)
        with pytest.raises(LoopError, match="Cut"):
            await first.loop.run_async()
        first.end()
        second = Life(tmp_path, engine.url, num_iterations=4, judge=judge)
        try:
            await second.loop.run_async()
            dealt_with = Counter(second.ledger.finished_instances())
            assert set(dealt_with.values()) == {1}
            assert sorted(map(int, dealt_with)) == [*range(len(dealt_with))]
            assert len(second.trainer.learned) == len(set(second.trainer.learned)) == 8
            assert set(second.trainer.learned) < set(dealt_with)
        finally:
            second.end()


async def test_pending_groups_are_checkpointed_and_handed_out_after_resume(tmp_path: Path) -> None:
    with hello_engine() as engine:
        first = Life(tmp_path, engine.url, num_iterations=1, n_groups=3)
        first.n_trained = 1  # two of three stay
        await first.loop.run_async()
        [learned] = first.trainer.learned
        first.end()
        second = Life(tmp_path, engine.url, num_iterations=1, n_groups=3)
        try:
            assert second.ledger.counts().ready == 4
            groups = await asyncio.to_thread(second.source.get_samples, 2)
            assert sorted([learned, *(group[0].metadata["instance_id"] for group in groups)]) == ["0", "1", "2"]
            assert second.ledger.counts().closed == {Outcome.TRAINED: 6}
            assert groups[0][0].index not in {sample.index for sample in groups[1]}
        finally:
            second.end()


class RecordedLife(Life):
    """Its rollouts are recorded as those of ``run_training`` are."""

    def __init__(self, directory: Path, url: str, **settings: Any) -> None:
        super().__init__(directory, url, **settings)
        self.record = RolloutWriter(RunDir(directory), keep="all")
        self.record.tokenizer = small_tokenizer()
        self.recorder._on_event = self.record.handle

    def _train(self, iteration: int) -> dict[str, float]:
        batch = self.source.get_samples(self.n_trained)
        self.record.handle(BatchTrained(iteration=iteration, samples=list(flat_samples(batch))))
        return self.trainer.train(batch, iteration=iteration)


async def test_groups_pending_over_a_restart_are_recorded_once(tmp_path: Path) -> None:
    with hello_engine() as engine:
        for iterations, n_trained in ((1, 1), (3, 4)):  # of three groups an iteration
            life = RecordedLife(tmp_path, engine.url, num_iterations=iterations, n_groups=3)
            life.n_trained = n_trained
            await life.loop.run_async()
            life.end()
    groups = list(iter_jsonl(tmp_path / "groups.jsonl"))
    assert sorted(int(group["instance_id"]) for group in groups) == [*range(9)]
    assert {outcome for group in groups for outcome in group["outcomes"]} == {"trained"}
    kept = [rollout["rollout_id"] for rollout in iter_jsonl(tmp_path / "rollouts.jsonl")]
    assert sorted(kept) == sorted(one for group in groups for one in group["rollouts"])


async def test_a_run_that_was_resumed_reports_as_one(tmp_path: Path) -> None:
    with hello_engine() as engine:
        first = Life(tmp_path, engine.url, num_iterations=2, eval_interval=1, eval_rollouts=1)
        one = await first.loop.run_async()
        first.end()
        second = Life(tmp_path, engine.url, num_iterations=3, eval_interval=1, eval_rollouts=1)
        try:
            assert second.checkpoint is not None
            assert second.checkpoint.loop.validations == 3  # before the first iteration, and after each
            both = await second.loop.run_async()
            assert (len(one.reward_means), len(both.reward_means)) == (2, 3)
        finally:
            second.end()


def test_only_the_newest_checkpoints_are_kept_and_half_a_one_is_none(tmp_path: Path) -> None:
    ledger = Ledger(path=tmp_path / "ledger.sqlite")
    with GroupSource(store=BridgeStore(), ledger=ledger) as source:
        writer = CheckpointWriter(directory=tmp_path / "c", trainer=MemoryTrainer(), source=source)
        assert read_checkpoints(tmp_path / "c") == []
        for iteration in (0, 9, 10, 100):
            writer.save(LoopState(iteration=iteration))
        assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step_000010", "step_000100"]
        assert [found.loop.iteration for found in read_checkpoints(tmp_path / "c")] == [100, 10]

        class Broken(MemoryTrainer):
            def save(self, directory: str | os.PathLike[str]) -> None:
                super().save(directory)
                raise OSError("no space left")

        broken = CheckpointWriter(directory=tmp_path / "c", trainer=Broken(), source=source)
        with pytest.raises(OSError, match="no space left"):
            broken.save(LoopState(iteration=101))
        assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step_000010", "step_000100"]
        writer.save(LoopState(iteration=11))  # the run went on from 10: what is later is of no use
        assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step_000010", "step_000011"]
    ledger.close()


@pytest.mark.parametrize("damaged", ["loop.json", "data_source.json", "trainer/learned.json"])
async def test_a_damaged_checkpoint_is_passed_over_for_the_older_one(
    tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    with hello_engine() as engine:
        first = Life(tmp_path, engine.url, num_iterations=4, save_interval=1)
        await first.loop.run_async()
        first.end()
        newest = tmp_path / "checkpoints" / "step_000004"
        content = (newest / damaged).read_bytes()
        (newest / damaged).write_bytes(content[: len(content) // 2])
        second = Life(tmp_path, engine.url, num_iterations=5, save_interval=1)
        try:
            assert second.checkpoint is not None
            assert second.checkpoint.loop.iteration == 3
            assert "step_000004" in caplog.text
            await second.loop.run_async()
            assert sorted(map(int, second.trainer.learned)) == [*range(10)]
            assert second.ledger.counts().closed[Outcome.TRAINED] == 20
            assert [found.loop.iteration for found in read_checkpoints(tmp_path / "checkpoints")] == [5, 4]
        finally:
            second.end()


async def test_when_every_checkpoint_is_damaged_the_newest_is_named(tmp_path: Path) -> None:
    with hello_engine() as engine:
        first = Life(tmp_path, engine.url, num_iterations=1, save_interval=1)
        await first.loop.run_async()
        first.end()
    for name in ("step_000000", "step_000001"):
        (tmp_path / "checkpoints" / name / "trainer" / "learned.json").unlink()
    with pytest.raises(TrainerError, match="step_000001"):
        load_newest(read_checkpoints(tmp_path / "checkpoints"), MemoryTrainer())
    for name in ("step_000000", "step_000001"):
        (tmp_path / "checkpoints" / name / "loop.json").write_text("{")
    with pytest.raises(ConfigError, match="step_000000 is damaged"):
        read_checkpoints(tmp_path / "checkpoints")


def test_a_checkpoint_is_written_through_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: set[str] = set()
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: flushed.add(Path(f"/proc/self/fd/{descriptor}").readlink().name)
    )
    ledger = Ledger(path=tmp_path / "ledger.sqlite")
    with GroupSource(store=BridgeStore(), ledger=ledger) as source:
        writer = CheckpointWriter(directory=tmp_path / "c", trainer=MemoryTrainer(), source=source)
        writer.save(LoopState(iteration=1))
    assert {"loop.json", "data_source.json", "learned.json", "trainer", "c"} <= flushed
    ledger.close()
