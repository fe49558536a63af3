"""Saved states of a data source, its journal for newer managers, and when it lets a store forget the rollouts that it
has read."""

import asyncio
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agl_slime import AGLDataSource, slime_hooks
from agl_slime.data import completions
from agl_slime.data.completions import CompletionTable
from agl_slime.data.policy import MinimumViableGroup
from agl_slime.data.results import Outcome
from agl_slime.data.source import DataSourceSettings
from agl_slime.errors import DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import InMemoryLightningStore, LightningStore
from agl_slime.train.slime.hooks import generate_rollout
from agl_slime.types import Sample
from tests.harness.datasource import QUICK, get
from tests.harness.slime_source import (
    HELD_AGENT,
    HeldAgent,
    args_for,
    finished_rollouts,
    names,
    sampling_by_mode,
    service_with_runner,
    write_tasks,
)
from tests.harness.stores import a_turn, enqueue, finish
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


def source_over(store: LightningStore, directory: Path, args: Any = None, **settings: Any) -> AGLDataSource:
    return AGLDataSource(
        args or Namespace(save=str(directory), load=str(directory)),
        store=store,
        settings=DataSourceSettings(**{"get_timeout_s": 20.0, "poll_interval_s": 0.01, **settings}),
    )


async def finalized(source: AGLDataSource, n: int) -> None:
    """Until ``n`` rollouts are in the ledger with an end, or are members of a group that waits."""

    def complete() -> bool:
        counts = source.groups.ledger.counts()
        # a failed member of a group that waits is closed in the ledger already
        waiting = sum(member.ok for member in source.groups.assembler.waiting())
        return counts.ready + sum(counts.closed.values()) + waiting >= n

    await until(complete)


def as_saved(group: list[Sample]) -> list[Any]:
    return [(sample.index, sample.group_index, sample.rollout_id, sample.to_dict()) for sample in group]


async def test_ready_and_partial_groups_and_indices_resume_from_the_checkpoint(tmp_path: Path) -> None:
    store = BridgeStore()
    first = source_over(store, tmp_path)
    groups = {name: await enqueue(store, 2, group_id=name, size=2) for name in ("taken", "ready", "half", "open")}
    for name in ("taken", "ready"):
        for rollout_id in groups[name]:
            await finish(store, rollout_id)
        await finalized(first, 2 if name == "taken" else 4)
    [taken] = await get(first, 1)
    await finish(store, groups["half"][0])
    await finalized(first, 5)
    first.save(3)
    [ready] = first.groups.delivery.ready
    for number, sample in enumerate(ready, 2):  # as its delivery will, with the newest version that was seen
        sample.metadata["policy_version"], sample.group_index = 0, 1
        sample.index = sample.rollout_id = number
    expected = as_saved(ready)
    first.stop()

    with source_over(store, tmp_path) as second:
        second.load(3)
        assert second.groups.ledger.counts().ready == 2
        for rollout_id in (groups["half"][1], *groups["open"]):
            await finish(store, rollout_id, turns=[a_turn(0), a_turn(1)] if rollout_id == groups["open"][1] else None)
        later = await get(second, 3)
        assert as_saved(later[0]) == expected
        assert [set(names([group])) for group in later] == [{*groups[name]} for name in ("ready", "half", "open")]
        numbers = [(sample.index, sample.rollout_id) for group in [taken, *later] for sample in group]
        assert numbers == [*zip(range(8), range(8), strict=True), (8, 7)]  # the last rollout has two Samples
        assert [group[0].group_index for group in [taken, *later]] == [0, 1, 2, 3]
        counts = second.groups.ledger.counts()
        assert (counts.opened, counts.open, counts.ready, counts.closed) == (8, 0, 0, {Outcome.TRAINED: 8})


async def test_a_late_end_is_recognised_after_a_restart_too(tmp_path: Path) -> None:
    store = BridgeStore()
    first = source_over(store, tmp_path, policy=MinimumViableGroup(min_ratio=1.0))
    ids = await enqueue(store, 3, group_id="g", size=3)
    await finish(store, ids[0], status="failed", reward=None)
    await finalized(first, 1)
    first.save(1)
    first.stop()
    with source_over(store, tmp_path) as second:
        second.load(1)
        for rollout_id in ids[1:]:
            await finish(store, rollout_id)
        await finalized(second, 3)
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
        await finalized(first, 4)
        trained = await get(first, 2)
        first.save(0)
    with source_over(store, tmp_path, get_timeout_s=0.5) as second:
        await asyncio.sleep(0.05)  # time in which it could look through the store, and must not
        second.load(0)
        for rollout_id in ids[4:]:
            await finish(store, rollout_id)
        later = await get(second, 6)  # this store announces nothing, so the call waits for its deadline
        assert sorted(names(trained + later)) == sorted(ids)


async def test_a_load_goes_back_to_the_step_that_is_named(tmp_path: Path) -> None:
    store = BridgeStore()
    with source_over(store, tmp_path) as source:
        await finished_rollouts(store, 2)
        await finalized(source, 2)
        source.save(1)
        await get(source, 1)
        source.save(2)
    for step, expected in ((1, 2), (2, 1), (7, 0), (None, 0)):  # no file of the last two
        with source_over(store, tmp_path) as loaded:
            loaded.load(*([] if step is None else [step]))
            assert len(loaded) == expected


@pytest.mark.parametrize("batches", [2, 3, 6])
@pytest.mark.parametrize("saves", [True, False])
async def test_a_checkpoint_of_the_model_finds_the_state_after_its_batch(saves, batches, tmp_path):
    """slime saves the model first, and ``train_async.py`` both once the next batch is delivered: with ``saves`` after
    step 1's, or it is killed between the two."""
    store = BridgeStore()
    args = Namespace(save=str(tmp_path), load=str(tmp_path), save_interval=2, rollout_batch_size=1)
    delivered = []
    with source_over(store, tmp_path, args=args) as first:
        ids = await finished_rollouts(store, 6)
        await finalized(first, 6)
        for step in range(batches):
            delivered += names((await asyncio.to_thread(generate_rollout, args, step, first)).samples)
            if saves and step == min(2, batches - 1):
                first.save(1)
    kept = {*range(max(batches - 2, 0), batches), *([1] if saves else [])}
    assert {path.stem for path in (tmp_path / "rollout").iterdir()} == {f"agl_datasource_{step}" for step in kept}
    with source_over(store, tmp_path) as second:
        second.load(1 if saves else batches - 1)
        later = names(await get(second, 6 - (2 if saves else batches))) if saves or batches < 6 else []
        assert sorted(delivered[: 2 if saves else batches] + later) == sorted(ids)
        assert len(second) == 0


def test_without_a_directory_nothing_is_saved_or_loaded() -> None:
    with AGLDataSource(Namespace(), store=BridgeStore()) as source:
        source.save(0)
        source.load(0)
        assert len(source) == 0


@pytest.mark.parametrize(
    "content", ["", "[]", '{"groups": [[{}]], "index": 0, "group_index": 0, "rollout_number": 0}', "null"]
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
        await finished_rollouts(store)
        await finalized(source, 1)
        source.save(0)
        [file] = (tmp_path / "rollout").iterdir()
        saved = file.read_text()
        source.groups.delivery.ready[0][0].metadata["odd"] = object()
        with pytest.raises(DataSourceError, match="is not JSON"):
            source.save(0)
        assert file.read_text() == saved
        assert list((tmp_path / "rollout").iterdir()) == [file]


SIZE = 2


async def roll_out(store: BridgeStore, n: int, *, first: int = 0) -> None:
    for number in range(first, first + n):
        await finished_rollouts(store, SIZE, group_id=f"g{number}", size=SIZE)


def straw(directory: Path, url: str, **settings: Any) -> Namespace:
    settings |= {"rollout_data_transport": "straw", "rollout_data_dir": str(directory)}
    return args_for(agl_store_url=url, rollout_batch_size=3, **settings)


def batch_of(args: Namespace, step: int, source: AGLDataSource) -> list[list[Sample]]:
    return slime_hooks.generate_rollout(args, step, source).samples  # type: ignore[union-attr]


async def test_the_batch_of_a_step_is_the_same_for_the_manager_that_follows(served, tmp_path):
    store, url = served
    await roll_out(store, 9)
    args = straw(tmp_path, url)
    source = AGLDataSource(args)
    source.load(-1)
    first = [batch_of(args, step, source) for step in range(2)]
    source.stop()  # killed before slime knew that the queue had the second
    source = AGLDataSource(args)
    source.state_dict()
    second = [batch_of(args, step, source) for step in (1, 2)]
    assert [[sample.to_dict() for sample in group] for group in second[0]] == [
        [sample.to_dict() for sample in group] for group in first[1]
    ]
    taken = names([*first[0], *first[1], *second[1]])
    assert len(taken) == len({*taken}) == 9 * SIZE
    assert source.groups.ledger.counts().closed == {Outcome.TRAINED: 9 * SIZE}
    source.stop()


async def test_a_checkpoint_that_is_loaded_counts_and_not_the_last_batch(served, tmp_path):
    store, url = served
    await roll_out(store, 6)
    args = straw(tmp_path / "pool", url, save=str(tmp_path), load=str(tmp_path))
    source = AGLDataSource(args)
    source.load(-1)
    batch_of(args, 0, source)
    source.save(0)
    lost = batch_of(args, 1, source)
    source.stop()
    with AGLDataSource(args) as source:
        source.load(0)
        assert sorted(names(batch_of(args, 1, source))) == sorted(names(lost))
        assert source.kept_batch(0) is None


def test_evaluations_go_by_the_names_of_slimes_data_sets(tmp_path: Path):
    """As slime's ``--eval-prompt-data`` and ``--eval-config`` leave them in its args."""
    data = [
        Namespace(name=name, path=write_tasks(tmp_path / f"{name}.jsonl", n), n_samples_per_eval_prompt=samples, **more)
        for name, n, samples, more in (("easy", 3, 2, {"temperature": 0.0}), ("hard", 2, 1, {"max_response_len": 9}))
    ]
    with service_with_runner() as (store, service):
        with AGLDataSource(args_for(agl_store_url=service.url, eval_datasets=data, rollout_temperature=1.0)) as source:
            for _ in range(2):
                output = slime_hooks.generate_rollout(None, 0, source, evaluation=True)
                assert {name: len(entry["rewards"]) for name, entry in output.data.items()} == {"easy": 6, "hard": 2}
                prompts = [sample.prompt[-1]["content"] for sample in output.data["easy"]["samples"]]
                assert sorted(prompts) == [f"task {i}" for i in range(3) for _ in range(2)]
        sampled = asyncio.run(sampling_by_mode(store))
        assert sorted(sampled["val"], key=len) == [{"temperature": 0.0}, {"temperature": 1.0, "max_new_tokens": 9}]


@pytest.mark.usefixtures("stopped_rollouts")
async def test_cancelled_generate_call_cancels_its_rollout():
    """Newer slimes cancel the task of a function with this mode; they aborted every request on every engine before."""
    assert slime_hooks.generate.abort_mode == "request"  # type: ignore[attr-defined]
    HeldAgent.release.clear()
    with service_with_runner(HeldAgent()) as (store, service):
        args = args_for(agl_store_url=service.url)
        cancelled: list[Any] = []
        store.subscribe_finished(lambda end: cancelled.append(end) if end.status == "cancelled" else None)
        aborted, completed = (
            asyncio.ensure_future(slime_hooks.generate(args, Sample(index=0, prompt=prompt), {}))
            for prompt in ("aborted", "completed")
        )
        await until(lambda: store.usage().running == 2)
        aborted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await aborted
        await until(lambda: len(cancelled) > 0)
        HeldAgent.release.set()
        assert isinstance(await asyncio.wait_for(completed, 20), Sample)
        assert [rollout.input["prompt"] for rollout in cancelled] == ["aborted"]


@pytest.mark.usefixtures("stopped_rollouts")
async def test_rollout_cancelled_before_it_is_enqueued_ends_cancelled():
    HeldAgent.release.clear()
    args = args_for(agl_agent=HELD_AGENT)
    cancelled = asyncio.ensure_future(slime_hooks.generate(args, Sample(index=0, prompt="x"), {}))
    await asyncio.sleep(0)  # requested, and not enqueued yet
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    HeldAgent.release.set()
    sample = await asyncio.wait_for(slime_hooks.generate(args, Sample(index=1, prompt="y"), {}), 20)
    assert isinstance(sample, Sample)


async def test_tasks_that_were_drawn_after_the_last_state_are_found_in_the_store(served, tmp_path):
    """The manager that enqueues them is killed: the next one runs none of them again, and trains on each once."""
    store, url = served
    args = args_for(agl_store_url=url, agl_tasks=write_tasks(tmp_path / "t.jsonl", 20), rollout_batch_size=3)
    source = AGLDataSource(args)
    state = source.state_dict()
    accepted: list[str] = []
    for step in range(3):
        source.demand(3)
        enqueued = 3 * SIZE * (step + 1)
        await until(lambda enqueued=enqueued: store.usage().stored == enqueued)
        queued = [rollout for rollout in await store.query_rollouts() if rollout.status == "queuing"]
        for rollout in queued[: SIZE + step]:
            await finish(store, rollout.rollout_id)
        if step < 2:
            await until(lambda source=source: len(source) > 0)
        source.stop()
        source = AGLDataSource(args)
        source.load_state_dict(state)
        source.demand(3)
        await until(lambda source=source: source.groups.ledger.counts().open > 0)
        for rollout in queued[SIZE + step :]:
            await finish(store, rollout.rollout_id)
        accepted += names(await asyncio.to_thread(batch_of, args, step, source))
        assert store.usage().stored == enqueued
        state = source.state_dict()
    tasks = [rollout.input["prompt"] for rollout in await store.query_rollouts()]
    assert len(accepted) == len({*accepted}) == len(tasks) == 9 * SIZE
    assert len({*tasks}) == 9
    counts = source.groups.ledger.counts()
    assert (counts.open, counts.ready, counts.closed) == (0, 0, {Outcome.TRAINED: 9 * SIZE})
    source.close()


async def test_tasks_of_a_state_that_never_got_to_the_store_are_enqueued(served, tmp_path):
    store, url = served
    args = args_for(agl_store_url=url, agl_tasks=write_tasks(tmp_path / "t.jsonl", 9))
    source = AGLDataSource(args)
    taken = source._producer._cursor.take(2)  # and it is killed before the store has them
    state = source.state_dict()
    source.stop()
    with AGLDataSource(args) as source:
        source.load_state_dict(state)
        source.demand(2)
        await until(lambda: store.usage().stored == 2 * SIZE)
        prompts = {rollout.input["prompt"] for rollout in await store.query_rollouts()}
        assert prompts == {group.task["prompt"] for group in taken}
