"""An engine that misbehaves, over real HTTP: the loop recovers, or each rollout fails with the reason."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agl_slime.data.results import Outcome
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.errors import WeightSyncError
from tests.harness.engine_faults import GARBAGE_JSON, Abort, Fault, NewVersion, Stall, Status
from tests.harness.loop import HelloAgent, LoopCase, hello_engine
from tests.harness.scripted_engine import QUICK
from tests.harness.tokenizers import small_tokenizer
from tests.loop.failed_run import failed_run

IMPATIENT = replace(QUICK, idle_timeout_s=0.2, total_timeout_s=2.0)


@pytest.mark.parametrize("faults", [[Stall(), GARBAGE_JSON], [Abort(n_tokens=1), Status(500), Abort(n_tokens=2)]])
def test_recovered_engine_faults_leave_samples_unchanged(faults: Sequence[Fault]) -> None:
    with hello_engine() as engine:
        engine.script("/generate", *faults)
        agent = HelloAgent(client_settings=replace(IMPATIENT, max_attempts=4))
        with LoopCase(agent=agent, url=engine.url) as case:
            case.loop.run()
            case.check_ledger()
        assert case.reasons == {}
        assert engine.calls["/generate"] == 4 + len(faults)
        samples = [sample for group in case.trainer.batches[0] for sample in group]
        assert len(samples) == 4
        for sample in samples:
            prompt = sample.tokens[: -sample.response_length]
            assert sample.tokens[len(prompt) :] == engine.continuation(prompt, sample.response_length)
            assert sample.rollout_log_probs == engine.continuation_log_probs(prompt, sample.response_length)
            assert sample.loss_mask == [1] * sample.response_length
            assert sample.tokens[-1] == small_tokenizer().eos_token_id
        [metrics] = case.recorder.metrics
        n_tokens = sum(sample.response_length for sample in samples)
        assert metrics["rollout/tokens_sampled"] == metrics["rollout/tokens_under_mask"] == n_tokens


@pytest.mark.parametrize(
    ("fault", "reason", "detail"),
    [
        (Stall(), "EngineTimeoutError", "idle timeout"),
        (Status(400, "unknown sampling parameter"), "EngineRequestError", "unknown sampling parameter"),
        (Abort(n_tokens=0), "EngineServerError", "abort"),
    ],
    ids=repr,
)
def test_an_engine_that_stays_broken_stops_the_run_with_the_reason(fault: Fault, reason: str, detail: str) -> None:
    with hello_engine() as engine:
        engine.always("/generate", fault)
        began = time.monotonic()
        agent = HelloAgent(client_settings=replace(IMPATIENT, resume_limit=4))
        case, text = failed_run(engine, agent=agent, num_iterations=5)
        assert time.monotonic() - began < 20
    assert text.startswith(f"iteration 1: all 4 rollouts failed: 4 x {reason} (")
    assert detail in text
    assert engine.url in text
    assert case.source.ledger.counts().closed == {Outcome.FAILED: 4}
    assert [rollout.reward for rollout in case.recorder.rollouts] == [None] * 4
    assert case.trainer.batches == []


def test_one_request_that_fails_costs_only_its_group() -> None:
    with hello_engine() as engine:
        engine.script("/generate", Status(400, "refused"))
        with LoopCase(agent=HelloAgent(), url=engine.url) as case:
            case.loop.run()
            case.check_ledger()
    assert case.reasons == {"EngineRequestError": 1}
    assert case.source.ledger.counts().closed == {Outcome.FAILED: 1, Outcome.FILTERED: 1, Outcome.TRAINED: 2}
    [metrics] = case.recorder.metrics
    assert (metrics["rollout/groups_ready"], metrics["rollout/groups_dropped"]) == (1, 1)
    # the tokens of the member whose group was dropped are neither counted as sampled for training nor trained
    assert metrics["rollout/tokens_sampled"] == metrics["rollout/tokens_under_mask"]


def test_weight_update_within_an_answer_is_recorded_per_token() -> None:
    with hello_engine(weight_version="1") as engine:
        engine.script("/generate", NewVersion(n_tokens=1, version="2"))
        with LoopCase(agent=HelloAgent(), url=engine.url, n_samples_per_prompt=1, rollout_batch_size=1) as case:
            case.loop.run()
    [[[sample]]] = case.trainer.batches
    assert sample.weight_versions == ["1", "2"]
    assert sample.metadata["weight_spans"] == [["1", 0, 1], ["2", 1, sample.response_length]]


def push_to(url: str) -> Any:
    weights = DiskWeightSync(base_url=url, client_settings=replace(IMPATIENT, control_timeout_s=1.0))

    async def push(iteration: int) -> str:
        await weights.push(f"/weights/v{iteration}", str(iteration))
        return str(iteration)

    return push


def test_versions_rise_with_each_push_and_are_on_the_samples() -> None:
    with hello_engine(weight_version="0") as engine:
        with LoopCase(agent=HelloAgent(), url=engine.url, num_iterations=3, sync=push_to(engine.url)) as case:
            case.loop.run()
            resources = asyncio.run(case.store.get_latest_resources())
        assert engine.weight_version == "3"
    assert [metrics["weights/version"] for metrics in case.recorder.metrics] == ["1", "2", "3"]
    versions = [{v for group in batch for s in group for v in s.weight_versions} for batch in case.trainer.batches]
    assert versions == [{"0"}, {"1"}, {"2"}]
    assert resources is not None
    assert "main_llm" in resources.resources


def test_a_weight_sync_that_fails_stops_the_run_with_its_sentence() -> None:
    sentence = "weight version 1 did not reach 1 of 1 workers"
    with hello_engine(weight_version="0") as engine:
        engine.always("/update_weights_from_disk", Stall())
        began = time.monotonic()
        case, text = failed_run(engine, sentence, error=WeightSyncError, num_iterations=3, sync=push_to(engine.url))
        case.check_ledger()
        assert time.monotonic() - began < 20
    assert "update_weights_from_disk sent nothing within the idle timeout" in text
    assert case.recorder.metrics == []  # the iteration did not finish
