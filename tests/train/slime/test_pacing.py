"""``agl_max_staleness``: groups are enqueued ahead of training up to the limit and no further."""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from agl_slime import AGLDataSource, slime_hooks
from agl_slime.data.results import Outcome
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.support.threads import run_blocking
from agl_slime.train.slime.producer import StalenessController
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.slime_source import AGENT, args_for, check, names
from tests.harness.waiting import becomes_true


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with in_thread(ScriptedEngine(weight_version="1")) as engine:
        yield engine


def paced(engine: ScriptedEngine, max_staleness: int, **settings: Any) -> Namespace:
    settings = {"rollout_batch_size": 2, "agl_get_timeout_s": 10, **settings}
    return args_for(agl_agent=AGENT, agl_llm_url=engine.url, agl_max_staleness=max_staleness, **settings)


def opened(source: AGLDataSource) -> int:
    """The number of groups that were enqueued."""
    return source.groups.ledger.counts().opened // 2


def wait_for_opened(source: AGLDataSource, n: int) -> None:
    assert becomes_true(lambda: opened(source) == n, 10)


def wait_for_ready(source: AGLDataSource, n: int) -> None:
    assert becomes_true(lambda: len(source.groups.delivery.ready) == n, 10)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_groups_are_enqueued_so_far_ahead_of_training_and_none_is_dropped(engine: ScriptedEngine, max_staleness: int):
    args = paced(engine, max_staleness)
    trained: list[str] = []
    with AGLDataSource(args) as source:
        for rollout_id in range(4):
            engine.weight_version = str(rollout_id + 1)  # slime's first version is 1
            output = slime_hooks.generate_rollout(args, rollout_id, source)
            check(output.samples)
            trained += names(output.samples)
            wait_for_opened(source, (rollout_id + max_staleness + 1) * 2)
        assert source.groups.ledger.counts().closed == {Outcome.TRAINED: 16}
        wait_for_ready(source, max_staleness * 2)
        assert opened(source) == (3 + max_staleness + 1) * 2
        assert len(set(trained)) == 16
        rollouts = run_blocking(source._producer._connection.store.query_rollouts())  # type: ignore[union-attr]
        assert {rollout.metadata["oldest_version"] for rollout in rollouts} == {1, 2, 3, 4}


def test_staleness_limit_below_the_drivers_is_an_error_with_the_minimum(engine: ScriptedEngine) -> None:
    args = paced(engine, 0)
    with AGLDataSource(args) as source:
        slime_hooks.generate_rollout(args, 0, source)
        # as train_async does: the next rollout is requested before the weights of the last step are there
        with pytest.raises(DataSourceError, match="rollout 1 while weights after 0 steps are in use; set 1 or more"):
            slime_hooks.generate_rollout(args, 1, source)


def test_an_engine_that_names_no_version_is_taken_to_be_one_rollout_behind(engine: ScriptedEngine) -> None:
    engine.weight_version = "default"
    args = paced(engine, 1)
    with AGLDataSource(args) as source:
        for rollout_id in range(3):
            slime_hooks.generate_rollout(args, rollout_id, source)
            assert opened(source) <= (rollout_id + 2) * 2


def test_fully_async_rollouts_are_paced_by_the_engine_s_version(engine: ScriptedEngine) -> None:
    args = paced(engine, 1, rollout_function_path="slime.fully_async_rollout.generate_rollout_fully_async")
    taken: list[str] = []

    def take(source: AGLDataSource) -> int:
        taken.extend(names(source.get_samples(1)))
        return len(taken)

    with AGLDataSource(args) as source:
        assert becomes_true(lambda: take(source) >= 8, 10)
        assert source.get_samples(1) == []
        assert opened(source) == 4  # of two steps' groups, and no more until the weights change
        engine.weight_version = "2"
        assert becomes_true(lambda: take(source) >= 12, 10)
        wait_for_opened(source, 6)
    assert len(set(taken)) == 12


def test_ages_outlive_a_restart(engine: ScriptedEngine, tmp_path: Path) -> None:
    args = paced(engine, 2, save=str(tmp_path), load=str(tmp_path))
    with AGLDataSource(args) as source:
        slime_hooks.generate_rollout(args, 0, source)
        wait_for_ready(source, 4)
        source.save(0)
        saved = {*names([*source.groups.delivery.ready])}
    state = json.loads((tmp_path / "rollout" / "agl_datasource_0.json").read_text())
    assert [version for _, version in state["pacing"]] == [0, 0, 0, 0]
    engine.weight_version = "2"
    with AGLDataSource(args) as resumed:
        resumed.load(0)
        first = slime_hooks.generate_rollout(args, 1, resumed)
        assert set(names(first.samples)) < saved
        wait_for_opened(resumed, 2 + 4 + 2)  # trained, saved, new
        assert [version for _, version in resumed._producer._staleness.state()] == [0, 0, 1, 1]  # type: ignore[union-attr]


def test_restored_groups_are_as_old_as_they_were() -> None:
    pacing = StalenessController(cast(Any, Namespace(in_flight=["b", "a"])), batch_size=2, max_staleness=2)
    pacing.restore([("a", 1), ("b", 2)])
    pacing.begin_rollout(3, cast(Any, Namespace(ready=[], reserve=print)))
    assert pacing.state() == [("a", 1), ("b", 2)]


def test_a_lower_limit_is_refused_while_groups_of_a_higher_one_wait(engine: ScriptedEngine, tmp_path: Path) -> None:
    """They would be trained on four versions behind, under a limit of one."""
    args = paced(engine, 4, save=str(tmp_path), load=str(tmp_path))
    with AGLDataSource(args) as source:
        slime_hooks.generate_rollout(args, 0, source)
        wait_for_ready(source, 8)
        source.save(0)
    engine.weight_version = "2"
    with AGLDataSource(paced(engine, 1, load=str(tmp_path))) as resumed:
        resumed.load(0)
        with pytest.raises(DataSourceError, match="agl_max_staleness 1: the saved state holds 8 groups"):
            slime_hooks.generate_rollout(args, 1, resumed)
    with AGLDataSource(args) as resumed:
        resumed.load(0)
        assert len(slime_hooks.generate_rollout(args, 1, resumed).samples) == 2


def test_it_needs_to_know_the_size_of_a_batch(engine: ScriptedEngine) -> None:
    with pytest.raises(ConfigError, match="agl_max_staleness 1 needs slime's --rollout-batch-size"):
        AGLDataSource(paced(engine, 1, rollout_batch_size=None))
