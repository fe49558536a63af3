"""A checkpoint keeps rollouts in flight: a run that resumes from it samples none of their tokens a second time."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.agent.partial import PartialRollouts
from agl_slime.agent.session import RolloutSession
from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.generation import Generation, SamplingParams, WeightSpan
from agl_slime.engine.client.resumable import Progress
from agl_slime.events import GroupsCollected, PhaseStarted
from agl_slime.runner.concurrent import RunnerSettings, RunnerThread
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, EnqueueRolloutRequest
from agl_slime.tokens.converter import convert_rollout
from tests.harness.engine_faults import digest
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer

SAMPLING = SamplingParams(max_new_tokens=40)


@dataclass
class Counting:
    """A scripted engine that counts its sampled tokens, and a way to wait for a count."""

    sampled: int = 0
    limit: int = 10**9
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def engine(self, **options: Any) -> ScriptedEngine:
        engine = ScriptedEngine(token_s=0.001, **options)
        plain = engine.next_id

        def count(ids: Any) -> int:
            self.sampled += 1
            if self.sampled >= self.limit:
                self.reached.set()
            return plain(ids)

        engine.next_id = count
        return engine

    async def until(self, n: int) -> None:
        self.limit = n
        self.reached.clear()
        if self.sampled < n:
            await self.reached.wait()


class Runs:
    """An engine and its client, with the checkpoints of successive runs."""

    def __init__(self, engine: ScriptedEngine, client: SGLangClient, directory: Path) -> None:
        self.engine, self.client, self.directory = engine, client, directory
        self.clients: dict[tuple[PartialRollouts, str], Any] = {}

    async def save(self, partial: PartialRollouts, name: str = "partial", *, url: str = "") -> None:
        await asyncio.to_thread(partial.save, self.directory / name, base_url=url or self.engine.url)

    def loaded(self, name: str = "partial", **options: Any) -> PartialRollouts:
        partial = PartialRollouts()
        partial.load(self.directory / name, **options)
        return partial

    async def ask(
        self, partial: PartialRollouts, *ids: int, name: str = "r", instance: str = "7", sampling: Any = SAMPLING
    ) -> Generation:
        """The next answer of the rollout ``name``."""
        if (partial, name) not in self.clients:
            self.clients[partial, name] = partial.client(self.client, rollout(name, instance))
        return await self.clients[partial, name].generate([5, *ids], sampling)

    def lines(self, name: str = "partial") -> list[str]:
        return (self.directory / name).read_text().splitlines()


@pytest.fixture
async def runs(tmp_path: Path) -> AsyncIterator[Runs]:
    async with Counting().engine(weight_version="3") as engine, SGLangClient(base_url=engine.url) as client:
        yield Runs(engine, client, tmp_path)


def rollout(name: str = "r", instance_id: str | None = "7") -> Any:
    return SimpleNamespace(rollout_id=name, metadata={} if instance_id is None else {"instance_id": instance_id})


async def test_call_cut_by_a_checkpoint_resumes_from_its_kept_tokens(tmp_path: Path) -> None:
    counting = Counting()
    async with counting.engine(weight_version="3") as engine, SGLangClient(base_url=engine.url) as client:
        runs, partial = Runs(engine, client, tmp_path), PartialRollouts()
        first = asyncio.create_task(runs.ask(partial, 6))
        await counting.until(10)
        await runs.save(partial)
        whole, log_probs = engine.continuation([5, 6], 40), engine.continuation_log_probs([5, 6], 40)
        assert list((await first).output_ids) == whole  # sampled to its end after the checkpoint

        resumed = runs.loaded()
        engine.weight_version, counting.sampled = "4", 0
        generation = await runs.ask(resumed, 6, name="another")
        n = resumed.reused_tokens
        assert 10 <= n < 40
        assert counting.sampled == 40 - n  # no kept token was sampled twice
        assert engine.received[-1].payload["input_ids"] == [5, 6, *whole[:n]]
        assert list(generation.output_ids) == whole
        assert list(generation.log_probs) == pytest.approx(log_probs)
        assert generation.weight_versions == (WeightSpan("3", 0, n), WeightSpan("4", n, 40))


async def test_finished_calls_are_replayed_once_without_the_engine(runs: Runs) -> None:
    partial = PartialRollouts()
    answers = [await runs.ask(partial, n) for n in (6, 7, 6)]
    await runs.save(partial)
    assert runs.engine.calls["/abort_request"] == 0  # nothing was running

    resumed, progress = runs.loaded(), list[Progress]()
    runs.engine.calls.clear()
    client = runs.clients[resumed, "b"] = resumed.client(runs.client, rollout("b"))
    replayed = [await client.generate([5, n], SAMPLING, on_progress=progress.append) for n in (6, 6, 7)]
    assert replayed == [answers[0], answers[2], answers[1]]
    assert [(step.text, step.so_far()) for step in progress] == [(answer.text, answer) for answer in replayed]
    assert runs.engine.calls["/generate"] == 0
    reused = resumed.reused_tokens
    # once more than the checkpoint has it, with another prompt, and in a second rollout of the instance
    for prompt, name in ((6, "b"), (8, "b"), (6, "c")):
        await runs.ask(resumed, prompt, name=name)
    assert runs.engine.calls["/generate"] == 3
    # with other parameters
    resumed = runs.loaded()
    generation = await runs.ask(resumed, 6, sampling=SamplingParams(max_new_tokens=8))
    assert (len(generation.output_ids), resumed.reused_tokens, reused > 0) == (8, 0, True)


async def test_tokens_of_a_group_whose_age_is_lost_are_sampled_anew(runs: Runs) -> None:
    """A group that was dropped before the checkpoint is admitted by newer weights. The instance of a group that began
    while the checkpoint was written is not in it; the weights that sampled it are, and admit it."""
    partial = PartialRollouts()
    for name in ("7", "8"):
        await runs.ask(partial, int(name), name=name, instance=name)
    await runs.save(partial)
    for admitted, version, sampled in (({"8": 3}, None, {"7": "4", "8": "3"}), ({}, "3", {"7": "3", "8": "3"})):
        resumed = runs.loaded(admitted=admitted, **({} if version is None else {"version": version}))
        runs.engine.weight_version = "4"
        answers = {name: await runs.ask(resumed, int(name), name=name, instance=name) for name in ("7", "8")}
        assert {name: answer.weight_versions[0].version for name, answer in answers.items()} == sampled
    resumed = runs.loaded(admitted={}, version="4")
    await runs.ask(resumed, 7)
    assert resumed.reused_tokens == 0


async def test_tokens_that_no_rollout_repeats_end_with_their_weights(runs: Runs) -> None:
    partial = PartialRollouts()
    await runs.ask(partial, 9, name="a", instance="9")
    await runs.save(partial, "one")
    resumed = runs.loaded("one", admitted={"9": 3}, version="3")
    await runs.save(resumed, "two")
    resumed.handle(PhaseStarted(iteration=4, phase="sync"))
    await runs.save(resumed, "three")
    assert [len(runs.lines(name)) for name in ("two", "three")] == [1, 0]


async def test_unresumed_rollouts_are_kept_by_the_next_checkpoint_too(runs: Runs) -> None:
    first, answers = PartialRollouts(), {}
    for name, instance in (("a", "1"), ("b", "2"), ("c", "3")):
        answers[instance] = [await runs.ask(first, n, name=name, instance=instance) for n in (6, 7)]
    await runs.save(first, "one")

    second = runs.loaded("one")
    assert await runs.ask(second, 6, name="d", instance="1") == answers["1"][0]
    second.handle(GroupsCollected(iteration=1, groups=[SimpleNamespace(instance_id="3")]))
    await runs.save(second, "two")

    third = runs.loaded("two")
    runs.engine.calls.clear()
    for name, instance in (("e", "1"), ("f", "2")):
        assert [await runs.ask(third, n, name=name, instance=instance) for n in (6, 7)] == answers[instance]
    assert runs.engine.calls["/generate"] == 0
    await runs.ask(third, 6, name="g", instance="3")
    assert runs.engine.calls["/generate"] == 1


async def test_finished_failed_or_anonymous_rollouts_are_not_kept(runs: Runs) -> None:
    partial = PartialRollouts()
    for name, instance in (("trained", "1"), ("failed", "2"), ("open", "3")):
        await runs.ask(partial, 6, name=name, instance=instance)
    assert partial.client(runs.client, rollout("val", None)) is runs.client
    partial.drop("failed")
    partial.handle(GroupsCollected(iteration=1, groups=[SimpleNamespace(instance_id="1")]))
    await runs.save(partial)
    (line,) = runs.lines()
    assert '"instance_id": "3"' in line


async def test_without_the_engine_the_checkpoint_is_written_all_the_same(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agl_slime.agent.partial._CUT_TIMEOUT_S", 0.2)
    partial = PartialRollouts()
    await runs.ask(partial, 6)
    await runs.client.pause_generation()
    running = asyncio.create_task(runs.ask(partial, 7, name="b"))
    await runs.engine.arrived("/generate", 2)
    await runs.save(partial, url="http://127.0.0.1:1")
    assert len(runs.lines()) == 1
    await runs.client.continue_generation()
    await running


class Twice(SGLangLitAgent):
    """Two answers, and an environment between them."""

    async def run(self, task: dict[str, Any], session: RolloutSession) -> None:
        await session.ask()
        await session.ask({"role": "user", "content": f"and {task['name']}?"})

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return float(len(response))


async def test_rollouts_cut_by_the_end_of_a_run_resume_in_the_next(tmp_path: Path) -> None:
    counting, tokenizer = Counting(), small_tokenizer()
    tasks = [{"prompt": f"say hello to {name}", "name": name} for name in ("Ada", "Alan", "Grace")]

    async def run(url: str, partial: PartialRollouts, *, until: int | None) -> list[Any]:
        store = BridgeStore()
        llm = LLM(endpoint=url, model="none", sampling_parameters={"max_new_tokens": 60})
        await store.add_resources({"main_llm": llm})
        agent = Twice(tokenizer=tokenizer)
        agent.partial = partial
        runner = RunnerThread(agent=agent, store=store, settings=RunnerSettings(poll_interval_s=0.01)).start()
        try:
            requests = [
                EnqueueRolloutRequest(input=task, mode="train", metadata={"instance_id": task["name"]})
                for task in tasks
            ]
            enqueued = await store.enqueue_many_rollouts(requests)
            if until is not None:
                await counting.until(until)
                await asyncio.to_thread(partial.save, tmp_path / "partial", base_url=url)
                return []
            samples = []
            for rollout_id in [rollout.rollout_id for rollout in enqueued]:
                done = await asyncio.wait_for(store.wait_for_rollout(rollout_id, timeout=20), 30)  # type: ignore[attr-defined]
                samples += convert_rollout(done, await store.query_spans(rollout_id), tokenizer).samples
            return samples
        finally:
            # in a thread: the engine is on this loop, and hears which requests are abandoned
            await asyncio.to_thread(runner.stop)

    words = tokenizer.encode("hello there and say some more", add_special_tokens=False)
    speaking: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "next_id": lambda ids: words[digest(ids) % len(words)],
        "decode": lambda ids: tokenizer.decode(list(ids)),
    }
    async with counting.engine(weight_version="1", **speaking) as engine:
        plain = await run(engine.url, PartialRollouts(), until=None)
        total, counting.sampled = counting.sampled, 0
        # within the second answers: first ones are whole, second ones are cut
        await run(engine.url, PartialRollouts(), until=total * 3 // 4)
        await engine.idle()
        later, engine.weight_version, counting.sampled = PartialRollouts(), "2", 0
        later.load(tmp_path / "partial")
        resumed = await run(engine.url, later, until=None)
    assert later.reused_tokens >= total * 3 // 4
    assert counting.sampled == total - later.reused_tokens
    for whole, joined in zip(plain, resumed, strict=True):
        for name in ("tokens", "loss_mask", "rollout_log_probs", "response_length", "reward"):
            assert getattr(whole, name) == getattr(joined, name)
        assert whole.weight_versions == joined.weight_versions[:1] == ["1"]
    assert any(sample.weight_versions == ["1", "2"] for sample in resumed)
