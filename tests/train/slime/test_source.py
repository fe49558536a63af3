"""``AGLDataSource(args)`` as slime builds it: an agent in the same process, or a store over HTTP with runners
elsewhere."""

from __future__ import annotations

import asyncio
import random
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_slime import AGLDataSource, slime_hooks
from agl_slime.data.results import Outcome
from agl_slime.errors import DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.train.slime.generate import stop_rollouts
from agl_slime.types import RolloutFnEvalOutput, Sample
from tests.harness.slime_source import (
    AGENT,
    HELD_AGENT,
    HeldAgent,
    args_for,
    check,
    enqueue,
    names,
    sampling_by_mode,
    service_with_runner,
    wait_until,
    write_tasks,
)
from tests.programs.agents.contract_agent import ContractAgent

HERE = "tests.train.slime.test_source"


class FlakyAgent(ContractAgent):
    """Fails on tasks that say so."""

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        return {**super().make_task(rng), "fail": rng.random() < 0.3}

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        if task.get("fail"):
            raise ValueError("this task has no answer")
        return super().compute_reward(task, response)


class HopelessAgent(FlakyAgent):
    def make_task(self, rng: random.Random) -> dict[str, Any]:
        return {**super().make_task(rng), "fail": True}


def test_connected_to_nothing_it_gives_placeholders_like_slimes_own_source(caplog: pytest.LogCaptureFixture):
    source = AGLDataSource(args_for())
    groups = source.get_samples(2)
    assert [[sample.index for sample in group] for group in groups] == [[0, 1], [2, 3]]
    assert all(sample.status == Sample.Status.PENDING for group in groups for sample in group)
    assert "agl_store_url" in caplog.text
    source.stop()


def test_an_agent_in_the_manager_s_own_process_needs_nothing_else():
    with AGLDataSource(args_for(agl_agent=AGENT)) as source:
        groups = source.get_samples(3)
        check(groups)
        assert [group[0].group_index for group in groups] == [0, 1, 2]
        output = slime_hooks.generate_rollout(Namespace(rollout_batch_size=2), 0, source)
        check(output.samples)
        assert (output.metrics or {})["agl/trained_total"] == 10


def test_tasks_are_enqueued_as_they_are_asked_for_and_no_further(tmp_path: Path):
    with service_with_runner() as (store, service):
        with AGLDataSource(
            args_for(agl_store_url=service.url, agl_tasks=write_tasks(tmp_path / "t.jsonl", 50))
        ) as source:
            assert len(source) == 50  # what slime computes an epoch from
            check(source.get_samples(3))
            check(source.get_samples(2))
        assert len(asyncio.run(store.query_rollouts())) == 10


def test_a_group_with_a_failed_rollout_is_replaced():
    with AGLDataSource(args_for(agl_agent=f"{HERE}:FlakyAgent")) as source:
        groups = source.get_samples(12)
        check(groups)
        assert len(groups) == 12
        counts = source.groups.ledger.counts()
        assert counts.closed[Outcome.FAILED] > 0
        assert counts.opened == counts.open + counts.ready + sum(counts.closed.values())


def test_a_run_in_which_nothing_succeeds_says_so():
    with (
        AGLDataSource(args_for(agl_agent=f"{HERE}:HopelessAgent")) as source,
        pytest.raises(DataSourceError, match="this task has no answer"),
    ):
        source.get_samples(1)


def test_fully_async_source_returns_at_once_and_keeps_a_batch_in_flight():
    HeldAgent.release.clear()
    args = args_for(agl_agent=HELD_AGENT, rollout_function_path="x.fully_async_rollout.generate", rollout_batch_size=3)
    with AGLDataSource(args) as source:
        assert source.get_samples(1) == []
        HeldAgent.release.set()
        taken: list[list[Sample]] = []
        for _ in range(1000):
            taken += source.get_samples(1)
            if len(taken) >= 3:
                break
            threading.Event().wait(0.02)  # slime's worker pauses for a second here
        check(taken)
        assert len(taken) == 3


def test_evaluation_runs_validation_rollouts_through_the_same_hook(tmp_path: Path):
    with AGLDataSource(
        args_for(agl_agent=AGENT, agl_eval_tasks=write_tasks(tmp_path / "e.jsonl", 4), agl_eval_rollouts=4)
    ) as source:
        output = slime_hooks.generate_rollout(None, 0, source, evaluation=True)
        assert isinstance(output, RolloutFnEvalOutput)
        entry = output.data["agl"]
        assert entry["rewards"] == [0.25] * 4
        assert entry["truncated"] == [False] * 4
        assert len(entry["samples"]) == 4
        assert source.groups.ledger.counts().closed == {Outcome.VALIDATED: 4}
        assert len(source) == 0


def test_evaluations_are_sampled_as_slimes_eval_flags_say(tmp_path: Path):
    tasks = write_tasks(tmp_path / "t.jsonl", 4)
    args = args_for(agl_tasks=tasks, agl_eval_tasks=tasks, agl_eval_rollouts=2)
    args.rollout_temperature, args.rollout_top_p, args.rollout_max_response_len = 0.9, 1.0, 64
    args.eval_temperature, args.eval_top_p, args.eval_max_response_len = 0.0, None, 512
    with service_with_runner() as (store, service):
        args.agl_store_url = service.url
        with AGLDataSource(args) as source:
            for _ in range(2):
                source.get_samples(1)
                source.evaluate(0)
        assert asyncio.run(sampling_by_mode(store)) == {
            "train": [{"temperature": 0.9, "top_p": 1.0, "max_new_tokens": 64}],
            "val": [{"temperature": 0.0, "top_p": 1.0, "max_new_tokens": 512}],
        }


# -- an outside producer, checkpoints, restarts
# --------------------------------------------------------------------------------------------------------


def test_checkpoint_records_exactly_the_groups_handed_out(tmp_path: Path):
    """Groups handed out, ready, half finished and not begun at the checkpoint; the manager dies and another one
    loads."""
    with service_with_runner() as (_, service):
        args = args_for(agl_store_url=service.url, save=str(tmp_path), load=str(tmp_path))
        handed_out = enqueue(service.url, "handed-out", 2)
        first = AGLDataSource(args)
        assert sorted(names(first.get_samples(1))) == sorted(handed_out)
        ready = enqueue(service.url, "ready", 2)
        half = enqueue(service.url, "half", 1)
        wait_until(first, 5)
        first.save(7)
        assert len(first) == 1
        after = enqueue(service.url, "after", 2)
        assert sorted(names(first.get_samples(2))) == sorted(ready + after)  # in a life that will be forgotten
        first.stop()

        other_half = enqueue(service.url, "half", 1)
        second = AGLDataSource(args)
        second.load(7)
        groups = second.get_samples(3)
        check(groups)
        assert sorted(names(groups)) == sorted(ready + half + other_half + after)
        assert len({group[0].group_index for group in groups} | {0}) == 4  # numbered on, not anew
        counts = second.groups.ledger.counts()
        assert (
            counts.opened == counts.open + counts.ready + sum(counts.closed.values()) == 8
        )  # those of the first life, too
        second.stop()


def test_a_store_that_restarts_gets_the_tasks_in_flight_again(tmp_path: Path):
    HeldAgent.release.clear()
    tasks = write_tasks(tmp_path / "t.jsonl", 20)
    source: AGLDataSource
    with service_with_runner(HeldAgent()) as (store, service):
        port = int(service.url.rpartition(":")[2])
        source = AGLDataSource(args_for(agl_store_url=service.url, agl_tasks=tasks))
        # one end makes the source know this life of the store
        known = enqueue(service.url, "known", 1, size=1)
        source.demand(2)
        wait_until(source, 4)
        asyncio.run(_cancel(store, known[0]))
        wait_until(source, 5)
        lost = [rollout.input for rollout in asyncio.run(store.query_rollouts()) if rollout.rollout_id not in known]
    HeldAgent.release.set()
    with service_with_runner(port=port) as (store, _):
        groups = source.get_samples(2)
        check(groups)
        again = [rollout.input for rollout in asyncio.run(store.query_rollouts())]
        assert sorted(task["prompt"] for task in again) == sorted(task["prompt"] for task in lost)
        counts = source.groups.ledger.counts()
        assert counts.reasons[Outcome.CANCELLED, "store_restarted"] == 4
        assert counts.opened == counts.open + counts.ready + sum(counts.closed.values())
        source.stop()


async def _cancel(store: BridgeStore, rollout_id: str) -> None:
    await store.update_rollout(rollout_id, status="cancelled")


# -- one rollout for one prompt --------------------------------------------------------------------------------------


@pytest.fixture
def stopped_afterwards() -> Iterator[None]:
    """What ``generate`` starts lives as long as its process, which here has other tests to run."""
    yield
    stop_rollouts()
    assert [
        thread.name for thread in threading.enumerate() if thread.name in ("agl-slime-datasource", "agl-slime-runner")
    ] == []


@pytest.mark.usefixtures("stopped_afterwards")
async def test_generate_runs_one_rollout_for_one_prompt_of_slime():
    args = args_for(agl_agent=AGENT)
    given = [
        Sample(group_index=3, index=i, prompt=f"say {i}", label="x", metadata={"source_name": "chat"}) for i in range(5)
    ]
    results = await asyncio.gather(*(slime_hooks.generate(args, sample, {"temperature": 0.5}) for sample in given))
    for before, after in zip(given, results, strict=True):
        assert isinstance(after, Sample)
        assert (after.index, after.group_index, after.prompt, after.label) == (before.index, 3, before.prompt, "x")
        assert after.metadata["source_name"] == "chat"
        check([[after]], size=1)


@pytest.mark.usefixtures("stopped_afterwards")
async def test_a_failed_rollout_of_generate_is_a_failed_sample_with_its_reason():
    args = args_for(agl_agent=f"{HERE}:FlakyAgent")
    given = [Sample(index=i, group_index=0, prompt="x", metadata={"fail": i == 0}) for i in range(3)]
    failed, *others = await asyncio.gather(*(slime_hooks.generate(args, sample, {}) for sample in given))
    assert isinstance(failed, Sample)
    assert (failed.status, failed.index, failed.remove_sample) == (Sample.Status.FAILED, 0, True)
    assert "this task has no answer" in failed.metadata["agl_failure"]
    assert failed.response_length == len(failed.loss_mask or ()) == len(failed.rollout_log_probs or ()) == 1
    assert failed.response_length < len(failed.tokens)
    assert sum(failed.loss_mask or ()) == 0
    check([[sample] for sample in others if isinstance(sample, Sample)], size=1)
    _, rewards = slime_hooks.normalize_rewards(Namespace(), [failed, *others])
    assert rewards == [0.0, 0.0, 0.0]  # it is not part of the others' baseline


@pytest.mark.usefixtures("stopped_afterwards")
async def test_stopping_fails_pending_calls_and_the_next_prompt_restarts():
    HeldAgent.release.clear()
    with service_with_runner(HeldAgent()) as (store, service):
        args = args_for(agl_store_url=service.url)
        waiting = asyncio.ensure_future(slime_hooks.generate(args, Sample(index=0, prompt="x"), {}))
        for _ in range(1_000):
            if store.usage().running:
                break
            await asyncio.sleep(0.01)
        await asyncio.to_thread(stop_rollouts)
        with pytest.raises(DataSourceError, match="stopped"):
            await asyncio.wait_for(waiting, 10)
        HeldAgent.release.set()
        sample = await asyncio.wait_for(slime_hooks.generate(args, Sample(index=1, prompt="y"), {}), 20)
        assert isinstance(sample, Sample)
        check([[sample]], size=1)
