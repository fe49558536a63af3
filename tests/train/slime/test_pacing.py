"""``agl_max_staleness``: a data source that slime builds enqueues so far ahead of training and no further."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_slime import AGLDataSource, slime_hooks
from agl_slime.data.results import Outcome
from agl_slime.errors import ConfigError, DataSourceError
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.slime_source import AGENT, args_for, check, names


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with in_thread(ScriptedEngine(weight_version="1")) as engine:
        yield engine


def paced(engine: ScriptedEngine, max_staleness: int, **settings: Any) -> Namespace:
    return args_for(
        agl_agent=AGENT,
        agl_llm_url=engine.url,
        agl_max_staleness=max_staleness,
        **{"rollout_batch_size": 2, "agl_get_timeout_s": 10, **settings},
    )


def until(condition: Callable[[], bool], source: AGLDataSource) -> None:
    deadline = time.monotonic() + 10
    with source.groups.changed:
        while not condition():
            assert time.monotonic() < deadline
            source.groups.changed.wait(0.02)


def opened(source: AGLDataSource) -> int:
    """Groups that were enqueued so far."""
    return source.groups.ledger.counts().opened // 2


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_groups_are_enqueued_so_far_ahead_of_training_and_none_is_dropped(
    engine: ScriptedEngine, max_staleness: int
) -> None:
    args = paced(engine, max_staleness)
    trained: list[str] = []
    with AGLDataSource(args) as source:
        for rollout_id in range(4):
            engine.weight_version = str(rollout_id + 1)  # slime's first version is 1
            output = slime_hooks.generate_rollout(args, rollout_id, source)
            check(output.samples)
            trained += names(output.samples)
            ahead = (rollout_id + max_staleness + 1) * 2
            until(lambda ahead=ahead: opened(source) == ahead, source)
        counts = source.groups.ledger.counts()
        assert counts.closed == {Outcome.TRAINED: 16}
        until(lambda: len(source.groups.delivery.ready) == max_staleness * 2, source)
        assert opened(source) == (3 + max_staleness + 1) * 2
        assert len(set(trained)) == 16


def test_staleness_limit_below_the_drivers_is_an_error_with_the_minimum(engine: ScriptedEngine) -> None:
    args = paced(engine, 0)
    with AGLDataSource(args) as source:
        slime_hooks.generate_rollout(args, 0, source)
        # as train_async does: the next rollout is asked for before the weights of this one are there
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
    got: list[str] = []

    def take(source: AGLDataSource) -> bool:
        got.extend(names(source.get_samples(1)))
        return len(got) >= wanted

    with AGLDataSource(args) as source:
        wanted = 8
        until(lambda: take(source), source)
        assert source.get_samples(1) == []
        assert opened(source) == 4  # of two steps' groups, and no more before the weights change
        engine.weight_version = "2"
        wanted = 12
        until(lambda: take(source), source)
        assert opened(source) == 6
    assert len(set(got)) == 12


def test_ages_outlive_a_restart(engine: ScriptedEngine, tmp_path: Path) -> None:
    args = paced(engine, 2, save=str(tmp_path), load=str(tmp_path))
    with AGLDataSource(args) as source:
        slime_hooks.generate_rollout(args, 0, source)
        until(lambda: len(source.groups.delivery.ready) == 4, source)
        source.save(0)
        kept = {name for group in source.groups.delivery.ready for name in names([group])}
    state = json.loads((tmp_path / "rollout" / "agl_datasource_0.json").read_text())
    assert [at for _, at in state["pacing"]] == [0, 0, 0, 0]
    engine.weight_version = "2"
    with AGLDataSource(args) as again:
        again.load(0)
        first = slime_hooks.generate_rollout(args, 1, again)
        assert set(names(first.samples)) < kept
        until(lambda: opened(again) == 2 + 4 + 2, again)  # trained, kept, new
        assert [at for _, at in again._producer._staleness.state()] == [0, 0, 1, 1]  # type: ignore[union-attr]


def test_a_lower_limit_is_refused_while_groups_of_a_higher_one_wait(engine: ScriptedEngine, tmp_path: Path) -> None:
    """They would be trained on four versions behind, under a limit of one."""
    args = paced(engine, 4, save=str(tmp_path), load=str(tmp_path))
    with AGLDataSource(args) as source:
        slime_hooks.generate_rollout(args, 0, source)
        until(lambda: len(source.groups.delivery.ready) == 8, source)
        source.save(0)
    engine.weight_version = "2"
    with AGLDataSource(paced(engine, 1, load=str(tmp_path))) as again:
        again.load(0)
        with pytest.raises(DataSourceError, match="agl_max_staleness 1: the saved state holds 8 groups"):
            slime_hooks.generate_rollout(args, 1, again)
    with AGLDataSource(args) as again:
        again.load(0)
        assert len(slime_hooks.generate_rollout(args, 1, again).samples) == 2


def test_it_needs_to_know_the_size_of_a_batch(engine: ScriptedEngine) -> None:
    with pytest.raises(ConfigError, match="agl_max_staleness 1 needs slime's --rollout-batch-size"):
        AGLDataSource(paced(engine, 1, rollout_batch_size=None))
