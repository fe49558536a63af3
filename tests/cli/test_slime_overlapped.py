"""``--trainer slime --max-staleness N``: slime's place is taken by a stand-in that takes its batches as slime's manager
does, with our data source and rollout function over HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.cli import slime
from agl_slime.engine.client.generation import Generation, WeightSpan
from agl_slime.errors import AglSlimeError, ConfigError, DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import RemoteStore
from agl_slime.store.server import StoreService
from agl_slime.train.slime.hooks import generate_rollout
from agl_slime.train.slime.source import AGLDataSource
from agl_slime.types import flat_samples
from tests.cli.test_slime_run import BATCH, SIZE, NumbersAgent, StandIn, config_for, numbered, parse, run
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.programs.agents.contract_agent import ByteTokenizer, EchoEngine

PLACES = ("before the step", "after the checkpoint", "in the weight update")


class Uneven(NumbersAgent):
    """Answers under the weights in use, so that groups end in another order than they began."""

    def __init__(self) -> None:
        SGLangLitAgent.__init__(self, tokenizer=ByteTokenizer(), client=self)

    async def generate(self, input_ids: Sequence[int], sampling: Any, **more: Any) -> Generation:
        answer = await EchoEngine().generate(input_ids, sampling, **more)
        span = WeightSpan(Managed.version, 0, len(answer.output_ids))
        answer = replace(answer, weight_versions=(span,))
        await asyncio.sleep(random.Random(sum(input_ids)).choice((0.0, 0.0, 0.05)))
        return answer


class Managed(StandIn):
    """Keeps the tasks of each step; ends the run as a kill would, in the step and place of ``killed``."""

    batches: dict[int, list[int]] = {}
    killed: tuple[int, str] | None = None
    before_train: Any = staticmethod(lambda: None)
    version = "1"

    def start(self) -> None:
        super().start()
        for step in [step for step in self.batches if step >= self.args.start_rollout_id]:
            del self.batches[step]  # what came after the checkpoint is trained again
        self.source = AGLDataSource(self.args)
        Managed.version = "1"

    def train(self, rollout_id: int) -> int:
        self.die(rollout_id, PLACES[0])
        type(self).before_train()
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
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(slime, "require_slime", lambda: None)
    monkeypatch.setattr(slime, "parse_slime_args", parse)
    monkeypatch.setattr(slime, "SlimeTrainer", Managed)
    monkeypatch.setattr(slime, "load_tokenizer", lambda path: ByteTokenizer())
    monkeypatch.setattr(Managed, "before_train", staticmethod(lambda: None))
    for kept in (StandIn.trained, NumbersAgent.seen, NumbersAgent.sampling, Managed.batches):
        kept.clear()
    with in_thread(ScriptedEngine()) as engine:
        yield engine.url


def order(batches: dict[int, list[int]]) -> list[int]:
    return [number for step in sorted(batches) for number in batches[step]]


@pytest.mark.parametrize("staleness", [1, 2])
async def test_every_task_is_trained_once_and_no_token_is_staler_than_the_limit(
    engine: str, tmp_path: Path, staleness: int
) -> None:
    config = config_for(engine, tmp_path, 6, numbered(6 * BATCH), max_staleness=staleness)
    await run(replace(config, agent=f"{__name__}:Uneven"))
    assert StandIn.trained == list(range(6))
    assert sorted(order(Managed.batches)) == list(range(6 * BATCH))
    rows = [json.loads(line) for line in (tmp_path / "run-6" / "metrics.jsonl").read_text().splitlines()]
    assert 1 <= max(row["rollout/staleness_max"] for row in rows) <= staleness
    assert [row["train/tokens_trained"] for row in rows] == [BATCH * SIZE] * 6


async def test_rollouts_run_while_slime_trains(engine: str, tmp_path: Path) -> None:
    """In turn nobody would run the rollouts that the first step waits for here."""
    ran = threading.Event()

    def wait() -> None:
        while len(NumbersAgent.seen) < 2 * BATCH * SIZE:
            assert not ran.wait(0.01)
            assert len(NumbersAgent.seen) <= 2 * BATCH * SIZE

    Managed.before_train = staticmethod(lambda: None if StandIn.trained else wait())
    await run(config_for(engine, tmp_path, 3, numbered(3 * BATCH), max_staleness=1))
    assert sorted(order(Managed.batches)) == list(range(3 * BATCH))


async def test_the_manager_trains_on_the_groups_that_the_loop_has_chosen(engine: str, tmp_path: Path) -> None:
    await run(config_for(engine, tmp_path, 4, numbered(4 * BATCH), max_staleness=2, keep_rollouts="all"))
    lines = (tmp_path / "run-4" / "groups.jsonl").read_text().splitlines()
    chosen: dict[int, list[int]] = {}
    for line in map(json.loads, lines):
        assert set(line["outcomes"]) == {"trained"}
        chosen.setdefault(line["iteration"] - 1, []).append(int(line["instance_id"]))
    assert {step: sorted(batch) for step, batch in chosen.items()} == {
        step: sorted(batch) for step, batch in Managed.batches.items()
    }


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_a_run_that_is_killed_anywhere_trains_each_task_once(engine: str, tmp_path: Path, seed: int) -> None:
    rng, steps = random.Random(seed), 8
    checkpoint = tmp_path / "checkpoint"
    config = config_for(engine, tmp_path, steps, numbered(steps * BATCH), max_staleness=2)
    config, kills = replace(config, agent=f"{__name__}:Uneven"), 0
    for step in sorted(rng.sample(range(steps - 1), 5)):
        Managed.killed = step, rng.choice(PLACES)
        loaded = ("--load", str(checkpoint)) if (checkpoint / "latest").exists() else ()
        with pytest.raises(AglSlimeError, match="killed"):
            await run(config, "--save", str(checkpoint), *loaded)
        kills += 1
    await run(config, "--save", str(checkpoint), *(("--load", str(checkpoint)) if checkpoint.exists() else ()))
    assert kills == 5
    assert sorted(Managed.batches) == list(range(steps))
    assert sorted(order(Managed.batches)) == list(range(steps * BATCH))


async def test_gpus_that_engines_and_actors_share_are_refused(engine: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-staleness 1 with --colocate"):
        await run(config_for(engine, tmp_path, 1, numbered(3), max_staleness=1), "--colocate")


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
