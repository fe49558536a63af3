"""An overlapped run that is cut off and goes on from its last checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agl_slime.errors import ConfigError, LoopError
from agl_slime.events import Event, GroupsCollected
from agl_slime.loop.checkpoint import read_checkpoints
from tests.harness.loop import hello_engine
from tests.loop.test_resume import Cut, Life, cut_after


async def test_a_lower_limit_than_the_checkpoint_s_is_refused(tmp_path: Path) -> None:
    with hello_engine() as engine:
        first = Life(tmp_path, engine.url, num_iterations=6, save_interval=1, max_staleness=2)
        first.after_training = cut_after(3)
        with pytest.raises(LoopError, match="Cut"):
            await first.loop.run_async()
        first.end()
        [newest, *_] = read_checkpoints(tmp_path / "checkpoints")
        assert newest.loop.admitted
        assert json.loads((newest.path / "loop.json").read_text())["admitted"] == newest.loop.admitted
        with pytest.raises(ConfigError, match=r"max_staleness 0: the checkpoint holds \d groups"):
            Life(tmp_path, engine.url, num_iterations=6, max_staleness=0)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
async def test_a_batch_that_was_collected_and_not_trained_on_keeps_its_age(tmp_path: Path, max_staleness: int) -> None:
    """The run ends between the two: the next one trains on that batch first, and not beside another."""
    settings = {"num_iterations": 6, "save_interval": 5, "max_staleness": max_staleness}

    def cut(event: Event) -> None:
        if isinstance(event, GroupsCollected) and event.iteration == 2:
            raise Cut

    with hello_engine() as engine:
        first = Life(tmp_path, engine.url, **settings)
        first.recorder._on_event = cut
        with pytest.raises(LoopError, match="Cut"):
            await first.loop.run_async()
        collected = first.recorder.events_of(GroupsCollected)[-1].groups
        first.end()
        second = Life(tmp_path, engine.url, **settings)
        try:
            assert second.checkpoint is not None
            admitted = second.checkpoint.loop.admitted
            ages = {admitted[group.instance_id] for group in collected}
            assert ages <= {*range(2)}
            assert max_staleness < 1 or 0 in ages  # by the weights of the start
            await second.loop.run_async()
            trained_first = second.trainer.learned[2:4]
            if (
                max_staleness
            ):  # a group that was slow before the restart may be ready now, and goes first if it is older
                assert {admitted[task] for task in trained_first} <= {*range(max(ages) + 1)}
            else:
                assert {*trained_first} == {group.instance_id for group in collected}
            assert sorted(map(int, second.trainer.learned)) == [*range(12)]
            counts = second.ledger.counts()
            assert (counts.open, counts.ready) == (0, 0)
        finally:
            second.end()
