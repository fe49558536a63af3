"""A data source whose store is away, restarts or repeats itself, and whose groups are judged by others: the run goes on
and each rollout counts once."""

from __future__ import annotations

import asyncio
import sys
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from agl_slime import AGLDataSource, slime_hooks
from agl_slime.data import completions
from agl_slime.data.results import Outcome
from agl_slime.data.source import DataSourceSettings
from agl_slime.errors import DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.types import Sample
from tests.harness.slime_source import (
    AGENT,
    HeldAgent,
    args_for,
    service_with_runner,
    wait_until,
    write_tasks,
)
from tests.harness.slime_source import enqueue as enqueue_over_http
from tests.harness.stores import enqueue, finish

QUICK = DataSourceSettings(get_timeout_s=20.0, poll_interval_s=0.01)


async def get(source: AGLDataSource, n: int) -> list[list[Sample]]:
    return await asyncio.to_thread(source.get_samples, n)


# -- a store that is away for a moment ---------------------------------------------------------------------------------


class Flaky(BridgeStore):
    """Reads fail as told."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__()
        self.failures = list(failures)
        self.forever: Exception | None = None

    async def get_latest_attempt(self, rollout_id: str) -> Any:
        if self.failures:
            raise self.failures.pop(0)
        if self.forever is not None:
            raise self.forever
        return await super().get_latest_attempt(rollout_id)


async def test_a_read_that_fails_while_the_store_restarts_is_made_again() -> None:
    store = Flaky(ConnectionError("refused"), TimeoutError(), ConnectionResetError("reset"))
    with AGLDataSource(store=store, settings=QUICK) as source:
        ids = await enqueue(store, 2)
        for rollout_id in ids:
            await finish(store, rollout_id)
        groups = await get(source, 2)
        assert sorted(group[0].metadata["agl_rollout_id"] for group in groups) == sorted(ids)
        assert source.groups.ledger.counts().closed == {Outcome.TRAINED: 2}


async def test_a_store_that_stays_away_ends_it_with_the_first_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_PATIENCE_S", 0.5)
    store = Flaky(ConnectionError("the first cause"))
    store.forever = ConnectionError("what came later")
    with AGLDataSource(store=store, settings=QUICK) as source:
        for rollout_id in await enqueue(store, 3):
            await finish(store, rollout_id)
        with pytest.raises(DataSourceError, match="the first cause"):
            await get(source, 1)
        with pytest.raises(DataSourceError, match="the first cause"):
            await get(source, 1)


def test_a_store_server_that_restarts_between_an_end_and_its_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent Lightning's client answers "there is no such rollout" for a server that cannot be reached."""
    with service_with_runner() as (_, service):
        source = AGLDataSource(args_for(agl_store_url=service.url))
        request = source.groups._store._request_json
        calls = 0

        async def interrupted(method: Any, path: str, **arguments: Any) -> Any:
            nonlocal calls
            if method == "get" and "/rollouts/" in path:
                calls += 1
                if calls <= 2:
                    raise ConnectionError("the server is restarting")
            return await request(method, path, **arguments)

        monkeypatch.setattr(source.groups._store, "_request_json", interrupted)
        ids = enqueue_over_http(service.url, "g", 2)
        with source:
            [group] = source.get_samples(1)
        assert sorted(sample.metadata["agl_rollout_id"] for sample in group) == sorted(ids)
        assert calls > 2


# -- what slime's dynamic filter drops ---------------------------------------------------------------------------------


def keep_odd(args: Any, samples: list[Sample], **_: Any) -> Any:
    return Namespace(keep=bool((samples[0].group_index or 0) % 2), reason="even")


def test_groups_that_slimes_dynamic_filter_drops_are_counted_as_filtered() -> None:
    with AGLDataSource(args_for(agl_agent=AGENT)) as source:
        args = Namespace(rollout_batch_size=2, dynamic_sampling_filter_path=f"{__name__}.keep_odd")
        output = slime_hooks.generate_rollout(args, 0, source)
        assert len(output.samples) == 2
        counts = source.groups.ledger.counts()
        assert counts.closed[Outcome.TRAINED] == 4
        assert counts.reasons[Outcome.FILTERED, "even"] == 4
        assert counts.opened == counts.open + counts.ready + sum(counts.closed.values())


# -- a feed that names a rollout twice ---------------------------------------------------------------------------------


def test_completion_reported_twice_is_delivered_once_and_position_advances(tmp_path: Path) -> None:
    with service_with_runner() as (_, service):
        service.feed.append, append = lambda rollout: (append(rollout), append(rollout)), service.feed.append
        source = AGLDataSource(args_for(agl_store_url=service.url, save=str(tmp_path)))
        with source:
            for n in range(5):
                enqueue_over_http(service.url, f"g{n}", 2)
                assert len(source.get_samples(1)) == 1
            wait_until(source, 10)
            follow: dict[str, Any] = {}
            with source.groups.changed:
                source.groups.changed.wait_for(
                    lambda: follow.update(source.groups.state()["follow"]) or follow["after"] >= 10, 20
                )
                state = source.groups.state()
            assert follow["after"] == 10
            assert len(state["ended"]) + len(state["follow"].get("settled", ())) == 0
            assert source.groups.ledger.counts().closed == {Outcome.TRAINED: 10}


# -- a store that restarts during an evaluation ------------------------------------------------------------------------


def test_a_store_that_restarts_during_an_evaluation(tmp_path: Path) -> None:
    HeldAgent.release.clear()
    evaluation: dict[str, Any] = {}
    with service_with_runner(HeldAgent()) as (_, service):
        port = int(service.url.rpartition(":")[2])
        args = args_for(
            agl_store_url=service.url, agl_eval_tasks=write_tasks(tmp_path / "e.jsonl", 3), agl_eval_rollouts=3
        )
        source = AGLDataSource(args)
        evaluating = threading.Thread(target=lambda: evaluation.update(source.evaluate(0)), daemon=True)
        evaluating.start()
        wait_until(source, 3)
    HeldAgent.release.set()
    with service_with_runner(port=port), source:
        evaluating.join(30)
        assert not evaluating.is_alive(), "it waits for rollouts that the store has lost"
        assert evaluation["agl"]["rewards"] == [0.25] * 3
        counts = source.groups.ledger.counts()
        assert counts.reasons[Outcome.CANCELLED, "store_restarted"] == 3
        assert counts.closed[Outcome.VALIDATED] == 3


# -- a state that is taken while groups are finalized ------------------------------------------------------------------


def test_states_taken_at_any_moment_have_each_group_in_one_place() -> None:
    """A task is under way or its group is ready, not both, also at the very moment at which the group is finalized."""
    args = args_for(agl_agent=AGENT, n_samples_per_prompt=1)
    both: list[set[str]] = []
    errors: list[BaseException] = []
    taken = 0
    interval = sys.getswitchinterval()

    def take_states() -> None:
        try:
            while source.groups.ledger.counts().closed.get(Outcome.TRAINED, 0) < 400:
                with source.groups.changed:
                    source.groups.changed.wait(0.1)  # woken by each group that is finalized
                    state = source.groups.state()
                under_way = set(state["demand"]["under_way"])
                both.append(under_way & {group[0]["metadata"]["group_id"] for group in state["groups"]})
        except BaseException as error:
            errors.append(error)

    sys.setswitchinterval(1e-6)
    try:
        with AGLDataSource(args) as source:
            watcher = threading.Thread(target=take_states)
            watcher.start()
            while taken < 400:
                taken += len(source.get_samples(20))
            watcher.join(30)
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert len(both) > 20
    assert not set().union(*both)
