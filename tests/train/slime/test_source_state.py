"""``save`` and ``load``: what waits when a checkpoint is written comes out afterwards, each group once."""

from __future__ import annotations

import asyncio
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from agl_slime import AGLDataSource
from agl_slime.data.policy import CompleteGroup, MinimumViableGroup
from agl_slime.data.results import Outcome
from agl_slime.data.source import DataSourceSettings
from agl_slime.errors import DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import InMemoryLightningStore, LightningStore
from agl_slime.types import Sample
from tests.harness.stores import enqueue, finish

QUICK = DataSourceSettings(get_timeout_s=20.0, poll_interval_s=0.01)


def args_of(directory: Path) -> Namespace:
    return Namespace(save=str(directory), load=str(directory))


def source_over(store: LightningStore, directory: Path, **settings: Any) -> AGLDataSource:
    return AGLDataSource(
        args_of(directory),
        store=store,
        settings=DataSourceSettings(**{"get_timeout_s": 20.0, "poll_interval_s": 0.01, **settings}),
    )


async def get(source: AGLDataSource, n: int) -> list[list[Sample]]:
    return await asyncio.to_thread(source.get_samples, n)


async def settled(source: AGLDataSource, n: int) -> None:
    """Until ``n`` rollouts have been taken in."""

    def taken_in() -> int:
        counts = source.groups.ledger.counts()
        # a failed member of a group that waits is closed in the ledger already
        return (
            counts.ready + sum(counts.closed.values()) + sum(member.ok for member in source.groups.assembler.waiting())
        )

    for _ in range(2_000):
        if taken_in() >= n:
            return
        await asyncio.sleep(0.005)
    pytest.fail(f"{taken_in()} of {n} rollouts were taken in")


def rollouts_of(groups: list[list[Sample]]) -> list[str]:
    return [sample.metadata["agl_rollout_id"] for group in groups for sample in group]


async def test_ready_and_partial_groups_and_indices_resume_from_the_checkpoint(tmp_path: Path) -> None:
    store = BridgeStore()
    first = source_over(store, tmp_path)
    groups = {name: await enqueue(store, 2, group_id=name, size=2) for name in ("taken", "ready", "half", "open")}
    for name in ("taken", "ready"):
        for rollout_id in groups[name]:
            await finish(store, rollout_id)
        await settled(first, 2 if name == "taken" else 4)
    [taken] = await get(first, 1)
    await finish(store, groups["half"][0])
    await settled(first, 5)
    first.save(3)
    for sample in first.groups.delivery.ready[0]:
        sample.metadata["policy_version"] = 0  # as its delivery will: the newest version that was seen
    before = [
        (sample.index, sample.group_index, sample.rollout_id, sample.to_dict())
        for sample in first.groups.delivery.ready[0]
    ]
    first.stop()

    with source_over(store, tmp_path) as second:
        second.load(3)
        assert second.groups.ledger.counts().ready == 2
        for rollout_id in (groups["half"][1], *groups["open"]):
            await finish(store, rollout_id)
        later = await get(second, 3)
        assert [
            (sample.index, sample.group_index, sample.rollout_id, sample.to_dict()) for sample in later[0]
        ] == before
        assert [set(rollouts_of([group])) for group in later] == [
            set(groups["ready"]),
            set(groups["half"]),
            set(groups["open"]),
        ]
        assert [sample.index for group in [taken, *later] for sample in group] == list(range(8))
        assert [group[0].group_index for group in [taken, *later]] == [0, 1, 2, 3]
        counts = second.groups.ledger.counts()
        assert (counts.opened, counts.open, counts.ready, counts.closed) == (8, 0, 0, {Outcome.TRAINED: 8})


async def test_counts_and_policy_version_resume_without_double_counting(tmp_path: Path) -> None:
    store = BridgeStore()
    first = source_over(store, tmp_path, policy=CompleteGroup())
    half = await enqueue(store, 2, group_id="half", size=2)
    whole = await enqueue(store, 2, group_id="whole", size=2)
    await finish(store, half[0], status="failed", reward=None)
    for rollout_id in whole:
        await finish(store, rollout_id, status="failed", reward=None)
    await settled(first, 3)
    first.groups.set_version(7)
    first.save(1)
    first.stop()
    assert first.groups.ledger.counts().closed == {Outcome.FAILED: 3}

    with source_over(store, tmp_path, policy=CompleteGroup()) as second:
        second.load(1)
        await finish(store, half[1], status="failed", reward=None)
        await settled(second, 4)
        counts = second.groups.ledger.counts()
        assert (counts.opened, counts.closed, counts.reasons) == (
            4,
            {Outcome.FAILED: 4},
            {(Outcome.FAILED, "failed"): 4},
        )
        assert second.groups.delivery.versions.newest == 7


async def test_a_late_end_is_recognised_after_a_restart_too(tmp_path: Path) -> None:
    store = BridgeStore()
    first = source_over(store, tmp_path, policy=MinimumViableGroup(min_ratio=1.0))
    ids = await enqueue(store, 3, group_id="g", size=3)
    await finish(store, ids[0], status="failed", reward=None)
    await settled(first, 1)
    first.save(1)
    first.stop()
    with source_over(store, tmp_path) as second:
        second.load(1)
        for rollout_id in ids[1:]:
            await finish(store, rollout_id)
        await settled(second, 3)
        assert second.groups.ledger.counts().reasons == {
            (Outcome.FAILED, "failed"): 1,
            (Outcome.CANCELLED, "group_finalized"): 2,
        }
        assert len(second.groups.assembler) == 0


async def test_plain_store_does_not_repeat_rollouts_trained_before_checkpoint(tmp_path: Path) -> None:
    store = InMemoryLightningStore(thread_safe=True)
    ids = await enqueue(store, 6)
    with source_over(store, tmp_path) as first:
        for rollout_id in ids[:4]:
            await finish(store, rollout_id)
        first.demand(1)
        await settled(first, 4)
        trained = await get(first, 2)
        first.save(0)
    with source_over(store, tmp_path, get_timeout_s=0.5) as second:
        await asyncio.sleep(0.05)  # time in which it could look through the store, and must not
        second.load(0)
        for rollout_id in ids[4:]:
            await finish(store, rollout_id)
        later = await get(second, 6)  # nobody announces here, so it waits for the deadline
        assert sorted(rollouts_of(trained + later)) == sorted(ids)


@pytest.mark.parametrize("seed", range(4))
async def test_random_restarts_hand_out_each_rollout_once(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    store = BridgeStore()
    ids = [rollout_id for group in range(12) for rollout_id in await enqueue(store, 3, group_id=f"g{group}", size=3)]
    rng.shuffle(ids)
    source = source_over(store, tmp_path)
    ended, handed = 0, []
    for step in range(6):
        for rollout_id in ids[step * 6 : step * 6 + 6]:
            await finish(store, rollout_id)
        ended += 6
        await settled(source, ended)
        if len(source):
            handed += rollouts_of(await get(source, rng.randint(1, len(source))))
        source.save(step)
        source.stop()
        source = source_over(store, tmp_path)
        source.load(step)
        await settled(source, ended)
    handed += rollouts_of(await get(source, len(source)))
    source.stop()
    assert sorted(handed) == sorted(ids)


async def test_a_load_goes_back_to_the_step_that_is_named(tmp_path: Path) -> None:
    store = BridgeStore()
    with source_over(store, tmp_path) as source:
        for rollout_id in await enqueue(store, 2):
            await finish(store, rollout_id)
        await settled(source, 2)
        source.save(1)
        [one] = await get(source, 1)
        source.save(2)
    for step, expected in ((1, 2), (2, 1)):
        with source_over(store, tmp_path) as again:
            again.load(step)
            assert len(again) == expected
    assert one[0].index == 0


def test_without_a_directory_or_a_file_there_is_nothing_to_do(tmp_path: Path) -> None:
    with AGLDataSource(Namespace(), store=BridgeStore()) as source:
        source.save(0)
        source.load(0)
    with source_over(BridgeStore(), tmp_path) as source:
        source.load(7)
        source.load()
        assert len(source) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"groups": 1}', '{"groups": [[{}]], "index": 0, "group_index": 0, "rollout_number": 0}', "null"],
)
def test_a_file_that_is_no_saved_state_is_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "agl_datasource_5.json").write_text(content)
    with (
        source_over(BridgeStore(), tmp_path) as source,
        pytest.raises(DataSourceError, match=r"agl_datasource_5\.json is not a saved state"),
    ):
        source.load(5)


async def test_unserializable_state_is_an_error_and_keeps_the_old_file(tmp_path: Path) -> None:
    store = BridgeStore()
    with source_over(store, tmp_path) as source:
        for rollout_id in await enqueue(store, 1):
            await finish(store, rollout_id)
        await settled(source, 1)
        source.save(0)
        [file] = (tmp_path / "rollout").iterdir()
        before = file.read_text()
        source.groups.delivery.ready[0][0].metadata["odd"] = object()
        with pytest.raises(DataSourceError, match="is not JSON"):
            source.save(0)
        assert file.read_text() == before
        assert list((tmp_path / "rollout").iterdir()) == [file]
