"""``--trainer slime --max-staleness N``: a stand-in takes slime's place, and takes its batches as slime's manager does,
with our data source and rollout function over HTTP."""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.engine.client.generation import Generation, WeightSpan
from agl_slime.errors import AglSlimeError, DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import RemoteStore
from agl_slime.store.server import StoreService
from agl_slime.train.slime.hooks import generate_rollout
from agl_slime.train.slime.source import AGLDataSource
from agl_slime.types import flat_samples
from tests.cli.test_slime_run import BATCH, SIZE, NumbersAgent, StandIn, config_for, numbered, played, run
from tests.harness.waiting import becomes_true
from tests.programs.agents.contract_agent import ByteTokenizer, EchoEngine

PLACES = ("before the step", "after the checkpoint", "in the weight update")


class Uneven(NumbersAgent):
    """Answers under the weights in use, so that groups end in another order than they began."""

    def __init__(self) -> None:
        SGLangLitAgent.__init__(self, tokenizer=ByteTokenizer(), client=self)

    async def generate(self, input_ids: Sequence[int], sampling: Any, **options: Any) -> Generation:
        answer = await EchoEngine().generate(input_ids, sampling, **options)
        span = WeightSpan(Managed.version, 0, len(answer.output_ids))
        await asyncio.sleep(random.Random(sum(input_ids)).choice((0.0, 0.0, 0.05)))
        return replace(answer, weight_versions=(span,))


class Managed(StandIn):
    """Records the tasks of each step; ends the run as a kill would, in the step and place of ``killed``."""

    batches: dict[int, list[int]] = {}
    killed: tuple[int, str] | None = None
    version = "1"

    def start(self) -> None:
        super().start()
        for step in [step for step in self.batches if step >= self.args.start_rollout_id]:
            del self.batches[step]  # steps after the checkpoint are trained a second time
        self.source = AGLDataSource(self.args)
        Managed.version = "1"

    def train(self, rollout_id: int) -> int:
        self.die(rollout_id, PLACES[0])
        output: Any = generate_rollout(self.args, rollout_id, self.source)
        samples = [*flat_samples(output.samples)]
        self.batches[rollout_id] = [int(sample.metadata["instance_id"]) for sample in samples[::SIZE]]
        assert len({sample.group_index for sample in samples}) == BATCH
        super().train(rollout_id)
        self.die(rollout_id, PLACES[1])
        return len(samples)

    def update_weights(self) -> str:
        self.die(StandIn.trained[-1], PLACES[2])
        Managed.version = super().update_weights()
        return Managed.version

    def stop(self) -> None:
        self.source.stop()

    def die(self, step: int, place: str) -> None:
        if self.killed == (step, place):
            type(self).killed = None
            raise AglSlimeError("killed")


@pytest.fixture
def engine() -> Iterator[str]:
    Managed.batches.clear()
    with played(Managed) as url:
        yield url


def tasks_trained() -> list[int]:
    return sorted(number for batch in Managed.batches.values() for number in batch)


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("staleness", [1, 2])
async def test_every_task_is_trained_once_and_no_token_is_staler_than_the_limit(engine, tmp_path, staleness):
    config = config_for(engine, tmp_path, 6, numbered(6 * BATCH), max_staleness=staleness, keep_rollouts="all")
    await run(replace(config, agent=f"{__name__}:Uneven"))
    assert StandIn.trained == list(range(6))
    assert tasks_trained() == list(range(6 * BATCH))
    rows = json_lines(tmp_path / "run-6" / "metrics.jsonl")
    assert 1 <= max(row["rollout/staleness_max"] for row in rows) <= staleness
    assert [row["train/tokens_trained"] for row in rows] == [BATCH * SIZE] * 6
    chosen: dict[int, list[int]] = {}
    for line in json_lines(tmp_path / "run-6" / "groups.jsonl"):
        assert set(line["outcomes"]) == {"trained"}
        chosen.setdefault(line["iteration"] - 1, []).append(int(line["instance_id"]))
    # the manager trains on the groups that the loop has chosen
    assert {step: {*batch} for step, batch in chosen.items()} == {s: {*batch} for s, batch in Managed.batches.items()}


async def test_rollouts_run_while_slime_trains(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step waits for rollouts that synchronous training would not run."""
    size, train = BATCH * SIZE, Managed.train

    def wait_and_train(self: Managed, rollout_id: int) -> int:
        assert rollout_id or becomes_true(lambda: len(NumbersAgent.prompts) == 2 * size, 20)
        return train(self, rollout_id)

    monkeypatch.setattr(Managed, "train", wait_and_train)
    await run(config_for(engine, tmp_path, 3, numbered(3 * BATCH), max_staleness=1))
    assert tasks_trained() == list(range(3 * BATCH))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_a_run_that_is_killed_anywhere_trains_each_task_once(engine: str, tmp_path: Path, seed: int) -> None:
    rng, steps, checkpoint = random.Random(seed), 8, tmp_path / "checkpoint"
    config = config_for(engine, tmp_path, steps, numbered(steps * BATCH), max_staleness=2)
    config = replace(config, agent=f"{__name__}:Uneven")

    async def resume() -> None:
        loaded = ("--load", str(checkpoint)) if (checkpoint / "latest").exists() else ()
        await run(config, "--save", str(checkpoint), *loaded)

    for step in sorted(rng.sample(range(steps - 1), 5)):
        Managed.killed = step, rng.choice(PLACES)
        with pytest.raises(AglSlimeError, match="killed"):
            await resume()
    await resume()
    assert sorted(Managed.batches) == list(range(steps))
    assert tasks_trained() == list(range(steps * BATCH))


async def test_unplanned_step_is_an_error_in_one_sentence(engine: str) -> None:
    with StoreService(store=BridgeStore()) as service:
        service.plan(3, ["ro-1"])
        store = RemoteStore(service.url)
        try:
            assert await store.planned(3) == ["ro-1"]
            with pytest.raises(DataSourceError, match="no plan for step 4"):
                await store.planned(4)
        finally:
            await store.close()
