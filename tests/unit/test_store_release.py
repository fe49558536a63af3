"""When a data source lets a store forget what it has read."""

from __future__ import annotations

from collections.abc import Sequence

from agl_slime.datasource.release import Releaser
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.retention import Retention
from tests.unit.test_store_retention import execute


class Elsewhere:
    """A store in another process, as far as the releaser is concerned."""

    def __init__(self) -> None:
        self.released: list[str] = []
        self.away = False

    async def release(self, rollout_ids: Sequence[str]) -> int:
        if self.away:
            raise ConnectionError("away")
        self.released.extend(rollout_ids)
        return len(rollout_ids)


async def read(releaser: Releaser, *ids: str) -> None:
    releaser._flushed -= 10.0  # as if the last flush were long ago
    for rollout_id in ids:
        await releaser.read(rollout_id)


async def test_a_store_of_this_process_forgets_at_once() -> None:
    store = BridgeStore(retention=Retention(released_rollouts=0))
    [rollout_id] = await execute(store, 1)
    await Releaser(store, saves=True).read(rollout_id)
    assert await store.get_rollout_by_id(rollout_id) is None


async def test_with_saves_a_rollout_is_kept_until_two_saved_states_have_it() -> None:
    store = Elsewhere()
    releaser = Releaser(store, saves=True)
    await read(releaser, "a", "b")
    releaser.saved(waiting=["b"])
    await read(releaser, "c")
    assert store.released == []
    releaser.saved(waiting=[])
    await read(releaser, "d")
    assert store.released == ["a"]
    releaser.saved(waiting=[])
    await read(releaser, "e")
    assert store.released == ["a", "b", "c"]


async def test_without_saves_rollouts_are_released_some_at_a_time() -> None:
    store = Elsewhere()
    releaser = Releaser(store, saves=False)
    for n in range(300):
        await releaser.read(f"r{n}")
    assert store.released == [f"r{n}" for n in range(256)]
    await read(releaser, "r300")
    assert len(store.released) == 301


async def test_what_could_not_be_released_is_released_later() -> None:
    store = Elsewhere()
    releaser = Releaser(store, saves=False)
    store.away = True
    await read(releaser, "a")
    store.away = False
    await read(releaser, "b")
    assert store.released == ["a", "b"]


async def test_a_store_that_cannot_release_is_left_alone() -> None:
    await Releaser(object(), saves=False).read("a")
