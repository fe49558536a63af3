"""A data source whose store is away, restarts or repeats itself: the run goes on and each rollout counts once."""

import sys
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from agl_slime import AGLDataSource, slime_hooks
from agl_slime.data import completions
from agl_slime.data.results import Outcome
from agl_slime.errors import DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.types import Sample
from tests.harness.datasource import QUICK, get
from tests.harness.slime_source import (
    AGENT,
    HeldAgent,
    args_for,
    counts_of,
    enqueue,
    finished_rollouts,
    names,
    service_with_runner,
    wait_until,
    write_tasks,
)


class Away(BridgeStore):
    def __init__(self) -> None:
        super().__init__()
        self.causes = ["the first cause", "a later cause"]

    async def get_latest_attempt(self, rollout_id: str) -> Any:
        raise ConnectionError(self.causes.pop(0) if len(self.causes) > 1 else self.causes[0])


async def test_a_store_that_stays_away_ends_it_with_the_first_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_PATIENCE_S", 0.5)
    store = Away()
    with AGLDataSource(store=store, settings=QUICK) as source:
        await finished_rollouts(store, 3)
        for _ in range(2):
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
        ids = enqueue(service.url, "g", 2)
        with source:
            assert sorted(names(source.get_samples(1))) == sorted(ids)
        assert calls > 2


def keep_odd(args: Any, samples: list[Sample], **_: Any) -> Any:
    return Namespace(keep=bool((samples[0].group_index or 0) % 2), reason="even")


def test_groups_that_slimes_dynamic_filter_drops_are_counted_as_filtered() -> None:
    with AGLDataSource(args_for(agl_agent=AGENT)) as source:
        args = Namespace(rollout_batch_size=2, dynamic_sampling_filter_path=f"{__name__}.keep_odd")
        output = slime_hooks.generate_rollout(args, 0, source)
        assert len(output.samples) == 2
        assert sum(value for name, value in (output.metrics or {}).items() if "dynamic_filter" in name) == 2
        counts = counts_of(source)
        assert counts.closed[Outcome.TRAINED] == counts.reasons[Outcome.FILTERED, "even"] == 4


def test_a_store_that_restarts_during_an_evaluation(tmp_path: Path) -> None:
    HeldAgent.release.clear()
    evaluation: dict[str, Any] = {}
    with service_with_runner(HeldAgent()) as (_, service):
        port = int(service.url.rpartition(":")[2])
        tasks = write_tasks(tmp_path / "e.jsonl", 3)
        source = AGLDataSource(args_for(agl_store_url=service.url, agl_eval_tasks=tasks, agl_eval_rollouts=3))
        evaluating = threading.Thread(target=lambda: evaluation.update(source.evaluate(0)), daemon=True)
        evaluating.start()
        wait_until(source, 3)
    HeldAgent.release.set()
    with service_with_runner(port=port), source:
        evaluating.join(30)
        assert not evaluating.is_alive(), "it waits for rollouts that the store has lost"
        assert evaluation["agl"]["rewards"] == [0.25] * 3
        counts = source.groups.ledger.counts()
        assert counts.reasons[Outcome.CANCELLED, "store_restarted"] == counts.closed[Outcome.VALIDATED] == 3


def test_states_taken_at_any_moment_have_each_group_in_one_place() -> None:
    """A task is pending or its group is ready, not both, also at the very moment at which the group is finalized."""
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
                pending = set(state["demand"]["under_way"])
                both.append(pending & {group[0]["metadata"]["group_id"] for group in state["groups"]})
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
