"""What newer managers ask of a data source: its state for their journal, samples for their event loop, one batch for
one step, an end."""

import asyncio
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from agl_slime import AGLDataSource, slime_hooks
from agl_slime.data.results import Outcome
from agl_slime.store.bridge import BridgeStore
from agl_slime.types import Sample
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
from tests.harness.stores import finish
from tests.harness.waiting import until

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
