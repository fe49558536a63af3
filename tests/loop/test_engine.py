"""What the loop makes of an engine that misbehaves, over real HTTP: it recovers, or each rollout fails with the
reason."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from agl_slime.data.results import Outcome
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.errors import LoopError, WeightSyncError
from tests.harness.engine_faults import GARBAGE_JSON, HTML_PAGE, Abort, Fault, NewVersion, Reset, Stall, Status
from tests.harness.loop import QUICK_CLIENT, HelloAgent, LoopCase, hello_engine, threads_of_ours
from tests.harness.tokenizers import small_tokenizer

IMPATIENT = replace(QUICK_CLIENT, idle_timeout_s=0.2, total_timeout_s=2.0)


@pytest.mark.parametrize(
    "faults",
    [
        [Status(500), Status(500)],
        [Status(429), Status(503)],
        [Reset()],
        [Reset(in_body=True), Status(502)],
        [Stall()],
        [GARBAGE_JSON],
        [HTML_PAGE],
        [Abort(n_tokens=0)],
        [Abort(n_tokens=1), Status(500), Abort(n_tokens=2)],
    ],
    ids=repr,
)
def test_recovered_engine_faults_leave_samples_unchanged(
    faults: Sequence[Fault],
) -> None:
    with hello_engine() as engine:
        engine.script("/generate", *faults)
        agent = HelloAgent(client_settings=replace(IMPATIENT, max_attempts=4))
        with LoopCase(agent=agent, url=engine.url) as case:
            case.loop.run()
            case.check_ledger()
        tokenizer = small_tokenizer()
        assert case.reasons == {}
        assert engine.calls["/generate"] == 4 + len(faults)
        samples = [sample for group in case.trainer.batches[0] for sample in group]
        assert len(samples) == 4
        for sample in samples:
            prompt = sample.tokens[: -sample.response_length]
            assert sample.tokens[len(prompt) :] == engine.continuation(prompt, sample.response_length)
            assert sample.rollout_log_probs == engine.continuation_log_probs(prompt, sample.response_length)
            assert sample.loss_mask == [1] * sample.response_length
            assert sample.tokens[-1] == tokenizer.eos_token_id
        [metrics] = case.recorder.metrics
        assert (
            metrics["rollout/tokens_sampled"]
            == metrics["rollout/tokens_under_mask"]
            == sum(sample.response_length for sample in samples)
        )


@pytest.mark.parametrize(
    ("fault", "reason", "says"),
    [
        (Status(500, "CUDA error: out of memory"), "EngineServerError", "CUDA error"),
        (Status(429), "EngineServerError", "429"),
        (Reset(), "EngineUnreachableError", "broke the connection"),
        (Reset(in_body=True), "EngineUnreachableError", "broke the connection"),
        (Stall(), "EngineTimeoutError", "idle timeout"),
        (GARBAGE_JSON, "EngineProtocolError", "not JSON"),
        (HTML_PAGE, "EngineProtocolError", "text/html"),
        (Status(400, "unknown sampling parameter"), "EngineRequestError", "unknown sampling parameter"),
        (Abort(n_tokens=0), "EngineServerError", "abort"),
    ],
    ids=repr,
)
def test_an_engine_that_stays_broken_stops_the_run_and_says_why(fault: Fault, reason: str, says: str) -> None:
    with hello_engine() as engine:
        engine.always("/generate", fault)
        began = time.monotonic()
        agent = HelloAgent(client_settings=replace(IMPATIENT, resume_limit=4))
        with LoopCase(agent=agent, url=engine.url, num_iterations=5) as case, pytest.raises(LoopError) as caught:
            case.loop.run()
        assert time.monotonic() - began < 20
    text = str(caught.value)
    assert text.startswith(f"iteration 1: all 4 rollouts failed: 4 x {reason} (")
    assert says in text
    assert engine.url in text
    case.check_ledger()
    assert case.source.ledger.counts().closed == {Outcome.FAILED: 4}
    assert [rollout.reward for rollout in case.recorder.rollouts] == [None] * 4
    assert case.trainer.batches == []
    assert threads_of_ours() == []


def test_engine_death_in_second_iteration_keeps_metrics_of_the_first() -> None:
    with hello_engine() as engine:

        def sync(iteration: int) -> str:
            engine.always("/generate", Reset())
            return str(iteration)

        with LoopCase(agent=HelloAgent(), url=engine.url, num_iterations=3, sync=sync) as case:
            with pytest.raises(LoopError, match=r"iteration 2: all 4 rollouts failed: 4 x EngineUnreachableError"):
                case.loop.run()
            case.check_ledger()
    [metrics] = case.recorder.metrics
    assert (metrics["iteration"], metrics["weights/version"], metrics["rollout/reward_mean"]) == (1, "1", 1.0)


def test_one_request_that_fails_costs_its_group_and_no_other() -> None:
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


# -- weight sync -----------------------------------------------------------------------------------------------------


def push_to(url: str) -> object:
    weights = DiskWeightSync(base_url=url, client_settings=replace(IMPATIENT, control_timeout_s=2.0))

    async def push(iteration: int) -> str:
        await weights.push(f"/weights/v{iteration}", str(iteration))
        return str(iteration)

    return push


def test_versions_rise_and_are_the_engines() -> None:
    with hello_engine(weight_version="0") as engine:
        with LoopCase(agent=HelloAgent(), url=engine.url, num_iterations=3, sync=push_to(engine.url)) as case:  # type: ignore[arg-type]
            case.loop.run()
            resources = asyncio.run(case.store.get_latest_resources())
        assert engine.weight_version == "3"
    assert [metrics["weights/version"] for metrics in case.recorder.metrics] == ["1", "2", "3"]
    assert [
        {version for group in batch for sample in group for version in sample.weight_versions}
        for batch in case.trainer.batches
    ] == [
        {"0"},
        {"1"},
        {"2"},
    ]
    assert resources is not None
    assert "main_llm" in resources.resources


@pytest.mark.parametrize(
    ("path", "fault", "says"),
    [
        ("/update_weights_from_disk", Status(500, "no space left"), "no space left"),
        ("/update_weights_from_disk", Status(400, "shape mismatch"), "shape mismatch"),
        ("/pause_generation", Reset(), "pause"),
        ("/update_weights_from_disk", Stall(), "update"),
    ],
    ids=repr,
)
def test_a_weight_sync_that_fails_stops_the_run_with_its_sentence(path: str, fault: Fault, says: str) -> None:
    with hello_engine(weight_version="0") as engine:
        engine.always(path, fault)
        began = time.monotonic()
        with LoopCase(agent=HelloAgent(), url=engine.url, num_iterations=3, sync=push_to(engine.url)) as case:  # type: ignore[arg-type]
            with pytest.raises(WeightSyncError, match="weight version 1 did not reach 1 of 1 workers") as caught:
                case.loop.run()
            case.check_ledger()
        assert time.monotonic() - began < 20
    assert says in str(caught.value)
    assert case.recorder.metrics == []  # the iteration did not finish
    assert case.recorder.end.reason == str(caught.value)
    assert threads_of_ours() == []
