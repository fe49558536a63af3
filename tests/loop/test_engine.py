"""An engine that misbehaves, over real HTTP: the loop recovers, or each rollout fails with the reason."""

import asyncio
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agl_slime.data import read
from agl_slime.data.results import Outcome
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.errors import WeightSyncError
from agl_slime.support.agl import LitAgent
from tests.gateway.protocols import CHATS, body_of
from tests.harness.engine_faults import GARBAGE_JSON, UNCHANGED, Abort, Drip, Edited, Fault, NewVersion, Stall, Status
from tests.harness.loop import TASKS, HelloAgent, LoopCase, hello_engine
from tests.harness.scripted_engine import QUICK
from tests.harness.tokenizers import TEMPLATE, small_tokenizer
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
        (Drip(), "EngineTimeoutError", "within the time limit"),
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


class AskingAgent(LitAgent[Any]):
    """Asks by HTTP, and has a reward for any answer, where it is ``careless`` also for an error."""

    def __init__(self, path: str = "chat/completions", *, careless: bool = False) -> None:
        super().__init__()
        self._path, self._careless = path, careless

    async def training_rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        body = body_of(self._path, [{"role": "user", "content": task["prompt"]}])
        url = f"{resources['main_llm'].endpoint}/{self._path}"
        async with aiohttp.ClientSession() as http, http.post(re.sub(r"/k/[^/]+", "", url), json=body) as refused:
            assert refused.status == 401  # without its key
            async with http.post(url, json=body) as answer:
                await answer.read()
                assert answer.ok or self._careless
        return 1.0


def told_twice(body: dict[str, Any], meta: dict[str, Any]) -> None:
    meta["output_token_logprobs"] *= 2


def by_version_0(body: dict[str, Any], meta: dict[str, Any]) -> None:
    """As of a router's worker that has missed an update."""
    meta |= {"weight_version": "0", "weight_versions": [{**span, "version": "0"} for span in meta["weight_versions"]]}


def not_a_number(body: dict[str, Any], meta: dict[str, Any]) -> None:
    meta["output_token_logprobs"][0][0] = math.nan


def with_versions_of_more_tokens(body: dict[str, Any], meta: dict[str, Any]) -> None:
    """As of tokens after a stop string, which the client takes off."""
    meta["weight_versions"][-1]["end"] += 3


def outside_of_the_vocabulary(body: dict[str, Any], meta: dict[str, Any]) -> None:
    body["output_ids"][0] = meta["output_token_logprobs"][0][1] = 1_000_000


@pytest.mark.parametrize("through_gateway", [False, True], ids=["client", "gateway"])
def test_false_answers_cost_their_rollouts_and_true_ones_are_trained(through_gateway, tmp_path, caplog):
    small_tokenizer(TEMPLATE).save_pretrained(tmp_path)
    agent = AskingAgent(careless=True) if through_gateway else HelloAgent()
    with hello_engine(weight_version="0") as engine:
        for false in (told_twice, by_version_0, outside_of_the_vocabulary, not_a_number):
            engine.script("/generate", UNCHANGED, UNCHANGED, Edited(false), Edited(with_versions_of_more_tokens))
        options: Any = {"url": engine.url, "model": str(tmp_path), "num_iterations": 4, "sync": push_to(engine.url)}
        with LoopCase(agent=agent, **options) as case:
            case.loop.run()
            case.check_ledger()
    for metrics in case.recorder.metrics:
        assert metrics["rollout/failed/EngineProtocolError"] == metrics["rollout/failed"] == 1
        assert metrics["rollout/staleness_max"] == 0
    assert case.source.ledger.counts().closed == {Outcome.FAILED: 4, Outcome.FILTERED: 4, Outcome.TRAINED: 8}
    samples = [sample for batch in case.trainer.batches for group in batch for sample in group]
    assert len(samples) == 8
    for sample in samples:
        prompt, length = sample.tokens[: -sample.response_length], sample.response_length
        assert sample.tokens[len(prompt) :] == engine.continuation(prompt, length)
        assert sample.rollout_log_probs == engine.continuation_log_probs(prompt, length)
    assert len({*engine.seeds}) == 16
    warned = [record.getMessage() for record in caplog.records if engine.url in record.getMessage()]
    assert [text.count("version 0, and version 1 was pushed before") for text in warned] == [1]


@pytest.mark.parametrize("path", ["", "completions", *CHATS])
def test_members_differ_on_a_deterministic_engine_and_a_rerun_repeats_them(path: str, tmp_path: Path) -> None:
    """The seed of a request follows from the run's seed, the task, the member, the attempt and the turn; also of what
    an agent asks the gateway for."""
    small_tokenizer(TEMPLATE).save_pretrained(tmp_path)
    group: Any = {"rollout_batch_size": 1, "n_samples_per_prompt": 4, "max_attempts": 2, "model": str(tmp_path)}
    group["max_concurrent"] = 1  # the refused request is the first member's in each run
    answers, seeds = [], []
    for seed in (0, 0, 1):
        with hello_engine(deterministic=True) as engine:
            engine.script("/generate", Status(400, "refused"))  # the second attempt of a rollout
            agent = AskingAgent(path) if path else HelloAgent()
            with LoopCase(agent=agent, url=engine.url, seed=seed, tasks=TASKS[:1], **group) as case:
                case.loop.run()
        [[samples]] = case.trainer.batches
        answers.append({tuple(sample.tokens[-sample.response_length :]) for sample in samples})
        seeds.append({*engine.seeds})
        assert len(engine.seeds) == len(seeds[-1]) == 5
        assert max(seeds[-1]) < 2**31
    assert [len(each) for each in answers] == [4, 4, 4]
    assert (answers[0], seeds[0]) == (answers[1], seeds[1])
    assert not seeds[0] & seeds[2]
    with hello_engine() as engine:
        agent = HelloAgent(sampling=SamplingParams(max_new_tokens=8, seed=7))
        with LoopCase(agent=agent, url=engine.url, **group) as case:
            case.loop.run()
        assert {*engine.seeds} == {7}


@pytest.mark.parametrize("reason", ["EngineRequestError", "conversion_error"])
def test_one_rollout_that_fails_costs_only_its_group(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, convert = ["once"] * (reason == "conversion_error"), read.convert_rollout

    def convert_rollout(*args: Any, **options: Any) -> Any:
        return breaks.pop().partition(0) if breaks else convert(*args, **options)

    monkeypatch.setattr(read, "convert_rollout", convert_rollout)
    with hello_engine() as engine:
        engine.script("/generate", UNCHANGED if breaks else Status(400, "refused"))
        with LoopCase(agent=HelloAgent(), url=engine.url) as case:
            case.loop.run()
            case.check_ledger()
    assert case.reasons == {reason: 1}
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
