"""What a checkpoint keeps of rollouts in flight, and that a run which goes on from there has none of it sampled
again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.agent.partial import PartialRollouts
from agl_slime.agent.session import RolloutSession
from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.generation import SamplingParams, WeightSpan
from agl_slime.engine.client.resumable import Progress
from agl_slime.errors import ConfigError
from agl_slime.events import GroupsCollected, PhaseStarted
from agl_slime.runner.concurrent import RunnerSettings
from agl_slime.runner.thread import RunnerThread
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, EnqueueRolloutRequest
from agl_slime.tokens.converter import convert_rollout
from tests.harness.engine_faults import digest
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer

SAMPLING = SamplingParams(max_new_tokens=40)


@dataclass
class Counting:
    """A scripted engine that says when it has sampled so many tokens in all."""

    sampled: int = 0
    wanted: int = 10**9
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def engine(self, **more: Any) -> ScriptedEngine:
        engine = ScriptedEngine(token_s=0.001, **more)
        plain = engine.next_id

        def count(ids: Any) -> int:
            self.sampled += 1
            if self.sampled >= self.wanted:
                self.reached.set()
            return plain(ids)

        engine.next_id = count
        return engine

    async def until(self, n: int) -> None:
        self.wanted = n
        self.reached.clear()
        if self.sampled < n:
            await self.reached.wait()


def rollout(name: str = "r", instance_id: str | None = "7") -> Any:
    return SimpleNamespace(rollout_id=name, metadata={} if instance_id is None else {"instance_id": instance_id})


async def test_call_cut_by_a_checkpoint_resumes_from_its_kept_tokens(tmp_path: Path) -> None:
    counting = Counting()
    async with counting.engine(weight_version="3") as engine, SGLangClient(base_url=engine.url) as client:
        partial = PartialRollouts()
        first = asyncio.create_task(partial.client(client, rollout()).generate([5, 6], SAMPLING))
        await counting.until(10)
        await asyncio.to_thread(partial.save, tmp_path / "partial", base_url=engine.url)
        got = await first
        whole, log_probs = engine.continuation([5, 6], 40), engine.continuation_log_probs([5, 6], 40)
        assert list(got.output_ids) == whole  # it went on after the checkpoint

        later = PartialRollouts()
        later.load(tmp_path / "partial")
        engine.weight_version, counting.sampled = "4", 0
        again = later.client(client, rollout("another"))
        got = await again.generate([5, 6], SAMPLING)
        kept = later.reused_tokens
        assert 10 <= kept < 40
        assert counting.sampled == 40 - kept  # what had been sampled was not paid for twice
        assert engine.received[-1].payload["input_ids"] == [5, 6, *whole[:kept]]
        assert list(got.output_ids) == whole
        assert list(got.log_probs) == pytest.approx(log_probs)
        assert got.weight_versions == (WeightSpan("3", 0, kept), WeightSpan("4", kept, 40))


async def test_finished_calls_are_replayed_once_without_the_engine(tmp_path: Path) -> None:
    async with Counting().engine() as engine, SGLangClient(base_url=engine.url) as client:
        partial = PartialRollouts()
        recorded = partial.client(client, rollout())
        said = [await recorded.generate([5, n], SAMPLING) for n in (6, 7, 6)]
        await asyncio.to_thread(partial.save, tmp_path / "partial", base_url=engine.url)
        assert engine.calls["/abort_request"] == 0  # nothing was running

        later = PartialRollouts()
        later.load(tmp_path / "partial")
        engine.calls.clear()
        again = later.client(client, rollout("b"))
        told: list[Progress] = []
        assert [await again.generate([5, n], SAMPLING, on_progress=told.append) for n in (6, 6, 7)] == [
            said[0],
            said[2],
            said[1],
        ]
        assert [(t.text, t.so_far()) for t in told] == [(said[n].text, said[n]) for n in (0, 2, 1)]
        assert engine.calls["/generate"] == 0
        # once more than was kept, with another prompt, and with other parameters
        await again.generate([5, 6], SAMPLING)
        await again.generate([5, 8], SAMPLING)
        await later.client(client, rollout("c")).generate([5, 6], SAMPLING)
        assert engine.calls["/generate"] == 3


async def test_tokens_of_a_group_whose_age_is_lost_are_sampled_again(tmp_path: Path) -> None:
    """Such a group was dropped before the checkpoint, and is admitted anew, by newer weights."""
    async with Counting().engine(weight_version="0") as engine, SGLangClient(base_url=engine.url) as client:
        partial = PartialRollouts()
        for name in ("7", "8"):
            await partial.client(client, rollout(name, name)).generate([5, int(name)], SAMPLING)
        await asyncio.to_thread(partial.save, tmp_path / "partial", base_url=engine.url)
        later = PartialRollouts()
        later.load(tmp_path / "partial", admitted={"8": 0})
        engine.weight_version = "2"
        versions = {}
        for name in ("7", "8"):
            got = await later.client(client, rollout(name, name)).generate([5, int(name)], SAMPLING)
            versions[name] = {span.version for span in got.weight_versions}
        assert versions == {"7": {"2"}, "8": {"0"}}


async def test_tokens_of_a_group_begun_while_a_checkpoint_was_written_are_kept(tmp_path: Path) -> None:
    """Its instance is not in the checkpoint; the weights that sampled it are, and admit it again."""
    async with Counting().engine(weight_version="3") as engine, SGLangClient(base_url=engine.url) as client:
        partial = PartialRollouts()
        await partial.client(client, rollout("a", "9")).generate([5, 9], SAMPLING)
        await asyncio.to_thread(partial.save, tmp_path / "partial", base_url=engine.url)
        calls = engine.calls["/generate"]
        for version, again in (("3", 0), ("4", 1)):
            later = PartialRollouts()
            later.load(tmp_path / "partial", admitted={"8": 0}, version=version)
            await later.client(client, rollout("b", "9")).generate([5, 9], SAMPLING)
            assert engine.calls["/generate"] == calls + again


async def test_tokens_that_no_rollout_repeats_end_with_their_weights(tmp_path: Path) -> None:
    async with Counting().engine(weight_version="3") as engine, SGLangClient(base_url=engine.url) as client:
        partial = PartialRollouts()
        await partial.client(client, rollout("a", "9")).generate([5, 9], SAMPLING)
        await asyncio.to_thread(partial.save, tmp_path / "one", base_url=engine.url)
        later = PartialRollouts()
        later.load(tmp_path / "one", admitted={"9": 3}, version="3")
        await asyncio.to_thread(later.save, tmp_path / "two", base_url=engine.url)
        later.handle(PhaseStarted(iteration=4, phase="sync"))
        await asyncio.to_thread(later.save, tmp_path / "three", base_url=engine.url)
    assert [len((tmp_path / name).read_text().splitlines()) for name in ("two", "three")] == [1, 0]


async def test_unresumed_rollouts_are_kept_by_the_next_checkpoint_too(tmp_path: Path) -> None:
    async with Counting().engine() as engine, SGLangClient(base_url=engine.url) as client:
        first, said = PartialRollouts(), {}
        for name, instance in (("a", "1"), ("b", "2"), ("c", "3")):
            recorded = first.client(client, rollout(name, instance))
            said[instance] = [await recorded.generate([5, n], SAMPLING) for n in (6, 7)]
        await asyncio.to_thread(first.save, tmp_path / "one", base_url=engine.url)

        second = PartialRollouts()
        second.load(tmp_path / "one")
        begun = second.client(client, rollout("d", "1"))
        assert await begun.generate([5, 6], SAMPLING) == said["1"][0]
        second.handle(GroupsCollected(iteration=1, groups=[SimpleNamespace(instance_id="3")]))
        await asyncio.to_thread(second.save, tmp_path / "two", base_url=engine.url)

        third = PartialRollouts()
        third.load(tmp_path / "two")
        engine.calls.clear()
        for name, instance in (("e", "1"), ("f", "2")):
            recorded = third.client(client, rollout(name, instance))
            assert [await recorded.generate([5, n], SAMPLING) for n in (6, 7)] == said[instance]
        assert engine.calls["/generate"] == 0
        await third.client(client, rollout("g", "3")).generate([5, 6], SAMPLING)
        assert engine.calls["/generate"] == 1


async def test_other_sampling_parameters_are_another_call(tmp_path: Path) -> None:
    async with Counting().engine() as engine, SGLangClient(base_url=engine.url) as client:
        partial = PartialRollouts()
        await partial.client(client, rollout()).generate([5, 6], SAMPLING)
        await asyncio.to_thread(partial.save, tmp_path / "partial", base_url=engine.url)
        later = PartialRollouts()
        later.load(tmp_path / "partial")
        got = await later.client(client, rollout()).generate([5, 6], SamplingParams(max_new_tokens=8))
        assert len(got.output_ids) == 8
        assert later.reused_tokens == 0


async def test_finished_failed_or_anonymous_rollouts_are_not_kept(tmp_path: Path) -> None:
    async with Counting().engine() as engine, SGLangClient(base_url=engine.url) as client:
        partial = PartialRollouts()
        for name, instance in (("trained", "1"), ("failed", "2"), ("open", "3")):
            await partial.client(client, rollout(name, instance)).generate([5, 6], SAMPLING)
        assert partial.client(client, rollout("val", None)) is client
        partial.drop("failed")
        partial.handle(GroupsCollected(iteration=1, groups=[SimpleNamespace(instance_id="1")]))
        await asyncio.to_thread(partial.save, tmp_path / "partial", base_url=engine.url)
        (line,) = (tmp_path / "partial").read_text().splitlines()
        assert '"instance_id": "3"' in line


async def test_without_the_engine_the_checkpoint_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_slime.agent.partial._CUT_TIMEOUT_S", 0.2)
    async with Counting().engine() as engine, SGLangClient(base_url=engine.url) as client:
        partial = PartialRollouts()
        await partial.client(client, rollout()).generate([5, 6], SAMPLING)
        await client.pause_generation()
        running = asyncio.create_task(partial.client(client, rollout("b")).generate([5, 7], SAMPLING))
        await engine.arrived("/generate", 2)
        await asyncio.to_thread(partial.save, tmp_path / "partial", base_url="http://127.0.0.1:1")
        assert len((tmp_path / "partial").read_text().splitlines()) == 1
        await client.continue_generation()
        await running


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    PartialRollouts().load(tmp_path / "none")
    (tmp_path / "partial").write_text('{"instance_id": "1", "calls": [{}]}\n')
    with pytest.raises(ConfigError, match="partial cannot be read"):
        PartialRollouts().load(tmp_path / "partial")


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
            enqueued = await store.enqueue_many_rollouts(
                [
                    EnqueueRolloutRequest(input=task, mode="train", metadata={"instance_id": str(n)})
                    for n, task in enumerate(tasks)
                ]
            )
            if until is not None:
                await counting.until(until)
                await asyncio.to_thread(partial.save, tmp_path / "partial", base_url=url)
                return []
            samples = []
            for one in enqueued:
                done = await asyncio.wait_for(store.wait_for_rollout(one.rollout_id, timeout=20), 30)  # type: ignore[attr-defined]
                samples += convert_rollout(done, await store.query_spans(one.rollout_id), tokenizer).samples
            return samples
        finally:
            # in a thread: the engine is on this loop, and is told what nobody waits for any more
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
    for before, after in zip(plain, resumed, strict=True):
        for name in ("tokens", "loss_mask", "rollout_log_probs", "response_length", "reward"):
            assert getattr(before, name) == getattr(after, name)
        assert before.weight_versions == after.weight_versions[:1] == ["1"]
    assert any(sample.weight_versions == ["1", "2"] for sample in resumed)
