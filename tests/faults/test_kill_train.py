"""Short runs of ``kill_train`` and ``end_train``, whose 50 and 24 ends take minutes; and what the engine is asked for
again after a kill."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.loop.checkpoint import read_checkpoints
from agl_slime.tokens.codec import unpack_token_ids
from tests.faults.end_train import PHASES, SIGNALS
from tests.faults.end_train import run as end_train
from tests.faults.kill_train import Run, run
from tests.faults.token_counter import TokenCounter

pytest.importorskip("torch", reason="needs agl-slime[local]")


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("flags", ["", "--drop-zero-variance"])
def test_no_task_is_lost_or_trained_on_twice_when_train_is_killed(
    tmp_path: Path, max_staleness: int, flags: str
) -> None:
    result = run(tmp_path, kills=4, seed=3, limit_s=300, max_staleness=max_staleness, flags=flags)
    assert result.findings == []
    assert (result.lost, result.twice, result.leftovers) == ([], [], [])
    assert result.optimizer_steps[0] == result.optimizer_steps[1] > 0
    assert result.adds_up
    assert result.reports_in_order
    assert result.kills_while_training >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "max_staleness"), [("local", 0), ("local", 2), ("slime", 2)])
def test_files_agree_after_every_signal_in_every_phase(tmp_path: Path, trainer: str, max_staleness: int) -> None:
    """Each phase once and each signal at least once; ``python -m tests.faults.end_train`` has all pairs."""
    planned = list(zip(PHASES, SIGNALS + SIGNALS[2:], strict=True))
    result = end_train(
        tmp_path, planned=planned, rng=random.Random(5), max_staleness=max_staleness, trainer=trainer, limit_s=600
    )
    assert result.findings == []
    assert result.by_phase.total() == len(PHASES)
    assert result.tasks > 0


@pytest.mark.slow
async def test_tokens_sampled_before_a_kill_are_not_sampled_again(tmp_path: Path) -> None:
    """Every token that the second life trains on was in the checkpoint or was sampled by the engine since, once."""
    counter = TokenCounter()
    flags = "--rollout-batch-size 4 --n-samples-per-prompt 4 --max-staleness 2 --weight-pause retract --save-interval 1"
    with EmbeddedEngine(LOOKUP_POLICY) as engine:
        async with counter.before(engine.url) as url:
            scene = Run(tmp_path, flags=f"{flags} --eval-interval 0", limit_s=200, engine_url=url)
            calls: list[dict[str, Any]] = []
            # until a checkpoint has a call in it that was cut within an answer
            while not any(call["finish_reason"] == "abort" for call in calls):
                await asyncio.to_thread(train_and_kill, scene)
                newest = read_checkpoints(scene.output / "checkpoints")[0]
                lines = [json.loads(line) for line in newest.partial.read_text().splitlines()]
                calls = [call for line in lines for call in line["calls"]]
            counter.tokens = 0
            last = await asyncio.to_thread(scene.start, iterations=newest.loop.iteration + 4)
            await asyncio.to_thread(last.join, 150)
            assert last.exitcode == 0, scene.last_words()
    kept = sum(len(unpack_token_ids(call["output_ids"])) for call in calls)
    trained = [row["train/tokens_trained"] for row in scene.rows() if row["iteration"] > newest.loop.iteration]
    assert len(trained) == 4
    assert sum(trained) == kept + counter.tokens
    assert kept > 100


def train_and_kill(scene: Run) -> None:
    process = scene.start(iterations=1000)
    try:
        scene.wait_for_training(process)
        scene.wait(process, 0.5)
    finally:
        process.kill()
        process.join()
