"""When a data source lets a store forget the rollouts that it has read."""

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
from agl_slime.support.agl import InMemoryLightningStore
from tests.harness.datasource import QUICK, get
from tests.harness.slime_source import finished_rollouts
from tests.harness.waiting import until


class Elsewhere(InMemoryLightningStore):
    """A store that releases, as a store in another process does; the first ``failures`` calls fail."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__(thread_safe=True)
        self.released: list[str] = []
        self.failures = failures

    async def release(self, rollout_ids: Sequence[str]) -> int:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("away")
        self.released.extend(rollout_ids)
        return len(rollout_ids)


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

    restarted = CompletionTable(hold=True, has_feed=True)
    restarted.restore(state)
    for _ in range(2):
        restarted.saved(waiting=[])
    assert sorted(restarted.due) == ["a", "b", "c", "d"]


async def test_slime_without_save_interval_releases_read_rollouts(tmp_path: Path) -> None:
    """slime's ``--save-interval`` is None by default: nothing is ever saved. A release that fails is repeated."""
    store = Elsewhere(failures=1)
    with AGLDataSource(Namespace(save=str(tmp_path), save_interval=None), store=store, settings=QUICK) as source:
        ids = await finished_rollouts(store, 3)
        await get(source, 3)
        await until(lambda: sorted(store.released) == sorted(ids))


async def test_slime_with_save_interval_holds_rollouts_until_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rounds, release_due = 0, completions.CompletionFollower.release_due

    async def counted(self: Any, **options: Any) -> None:
        nonlocal rounds
        await release_due(self, **options)
        rounds += 1

    monkeypatch.setattr(completions.CompletionFollower, "release_due", counted)
    monkeypatch.setattr(completions, "_TICK_S", 0.02)
    store = Elsewhere()
    with AGLDataSource(Namespace(save=str(tmp_path), save_interval=5), store=store, settings=QUICK) as source:
        ids = await finished_rollouts(store, 3)
        await get(source, 3)
        source.save(4)
        saved = rounds
        await until(lambda: rounds >= saved + 2)
        assert store.released == []
        source.save(9)
        await until(lambda: sorted(store.released) == sorted(ids))


async def test_second_reader_and_plain_store_release_nothing() -> None:
    table = CompletionTable(hold=False, has_feed=False)
    table.read("a")
    assert table.due == ["a"]
    for store, settings in (
        (Elsewhere(), DataSourceSettings(release=False, poll_interval_s=0.01)),
        (InMemoryLightningStore(thread_safe=True), QUICK),
    ):
        with AGLDataSource(store=store, settings=settings) as source:
            await finished_rollouts(store)
            assert len(await get(source, 1)) == 1
            assert getattr(store, "released", []) == []
