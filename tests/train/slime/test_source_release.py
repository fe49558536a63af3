"""When a data source lets a store forget what it has read."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agl_slime import AGLDataSource
from agl_slime.data import completions
from agl_slime.data.completions import CompletionTable
from agl_slime.data.source import DataSourceSettings
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.retention import Retention
from agl_slime.support.agl import InMemoryLightningStore
from tests.harness.stores import enqueue, finish
from tests.harness.waiting import until

QUICK = DataSourceSettings(get_timeout_s=20.0, poll_interval_s=0.01)


class Elsewhere(InMemoryLightningStore):
    """A store that releases, as one in another process does."""

    def __init__(self) -> None:
        super().__init__(thread_safe=True)
        self.released: list[str] = []
        self.away = 0

    async def release(self, rollout_ids: Sequence[str]) -> int:
        if self.away:
            self.away -= 1
            raise ConnectionError("away")
        self.released.extend(rollout_ids)
        return len(rollout_ids)


async def test_a_store_of_this_process_forgets_at_once(tmp_path: Path) -> None:
    store = BridgeStore(retention=Retention(released_rollouts=0))
    args = Namespace(save=str(tmp_path), save_interval=1)
    with AGLDataSource(args, store=store, settings=QUICK) as source:
        [rollout_id] = await enqueue(store)
        await finish(store, rollout_id)
        await asyncio.to_thread(source.get_samples, 1)
        await until(lambda: store.usage().stored == 0)


def test_with_saves_a_rollout_is_kept_until_two_saved_states_have_it() -> None:
    table = CompletionTable(hold=True, has_feed=True)
    for name in ("a", "b"):
        table.read(name)
    table.saved(waiting=["b"])
    table.read("c")
    assert table.due == []
    table.saved(waiting=[])
    table.read("d")
    assert table.due == ["a"]
    state = json.loads(json.dumps(table.state()))
    assert sorted(state["unreleased"]) == ["a", "b", "c", "d"]  # "a" is due, and may not have been released
    table.saved(waiting=[])
    assert table.due == ["a", "b", "c"]

    after_a_restart = CompletionTable(hold=True, has_feed=True)
    after_a_restart.restore(state)
    after_a_restart.saved(waiting=[])
    after_a_restart.saved(waiting=[])
    assert sorted(after_a_restart.due) == ["a", "b", "c", "d"]


async def test_slime_without_save_interval_releases_read_rollouts(tmp_path: Path) -> None:
    """slime's ``--save-interval`` is None by default, and then nothing is ever saved."""
    store = Elsewhere()
    with AGLDataSource(Namespace(save=str(tmp_path), save_interval=None), store=store, settings=QUICK) as source:
        ids = await enqueue(store, 3)
        for rollout_id in ids:
            await finish(store, rollout_id)
        await asyncio.to_thread(source.get_samples, 3)
        await until(lambda: sorted(store.released) == sorted(ids))


async def test_slime_with_save_interval_holds_rollouts_until_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, release_due = 0, completions.CompletionFollower.release_due

    async def counted(self: Any, **how: Any) -> None:
        nonlocal rounds
        await release_due(self, **how)
        rounds += 1

    monkeypatch.setattr(completions.CompletionFollower, "release_due", counted)
    monkeypatch.setattr(completions, "_TICK_S", 0.02)
    store = Elsewhere()
    with AGLDataSource(Namespace(save=str(tmp_path), save_interval=5), store=store, settings=QUICK) as source:
        ids = await enqueue(store, 3)
        for rollout_id in ids:
            await finish(store, rollout_id)
        await asyncio.to_thread(source.get_samples, 3)
        source.save(4)
        before = rounds
        await until(lambda: rounds >= before + 2)
        assert store.released == []
        source.save(9)
        await until(lambda: sorted(store.released) == sorted(ids))


async def test_failed_release_is_retried() -> None:
    store = Elsewhere()
    store.away = 1
    with AGLDataSource(store=store, settings=QUICK) as source:
        [rollout_id] = await enqueue(store)
        await finish(store, rollout_id)
        await asyncio.to_thread(source.get_samples, 1)
        await until(lambda: store.released == [rollout_id])


async def test_second_reader_and_plain_store_release_nothing() -> None:
    table = CompletionTable(hold=False, has_feed=False)
    table.read("a")
    assert table.due == ["a"]
    for store, settings in (
        (Elsewhere(), DataSourceSettings(release=False, poll_interval_s=0.01)),
        (InMemoryLightningStore(thread_safe=True), QUICK),
    ):
        with AGLDataSource(store=store, settings=settings) as source:
            [rollout_id] = await enqueue(store)
            await finish(store, rollout_id)
            assert len(await asyncio.to_thread(source.get_samples, 1)) == 1
            assert getattr(store, "released", []) == []
