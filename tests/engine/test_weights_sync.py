"""New weights reach every worker, in the order that SGLang survives, also with requests in flight."""

import asyncio
import json
import re
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agl_slime.engine.client.client import ClientSettings, PauseMode, SGLangClient
from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.errors import EngineUnreachableError, WeightSyncError
from tests.harness.engine_faults import Answer, Body, Fault, Reset, Stall, Status
from tests.harness.engine_servers import MAX_RUNNING, Server
from tests.harness.scripted_engine import ScriptedEngine

UPDATE = "/update_weights_from_disk"
QUICK = ClientSettings(backoff_base_s=0.001, backoff_cap_s=0.01, max_attempts=3)


def make_sync(engine: ScriptedEngine, **limits: Any) -> DiskWeightSync:
    return DiskWeightSync(base_url=engine.url, client_settings=QUICK, **({"flush_timeout_s": 5.0} | limits))


def steps(engine: ScriptedEngine) -> list[str]:
    return [path for path in engine.log if path not in ("/workers", "/abort_request")]


async def test_one_worker() -> None:
    async with ScriptedEngine() as engine:
        assert await make_sync(engine).push("/models/step-1", "1") == (engine.url,)
        expected = "/pause_generation /flush_cache /update_weights_from_disk /model_info /continue_generation"
        assert steps(engine) == expected.split()
        assert (engine.weight_version, engine.model_path, engine.paused) == ("1", "/models/step-1", False)
        sent = {request.path: request.payload for request in engine.received}
        assert sent["/pause_generation"] == {"mode": "abort"}
        update = {"model_path": "/models/step-1", "weight_version": "1", "flush_cache": False}
        assert sent[UPDATE] == update


async def test_all_workers_of_a_router_at_the_same_time() -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(ScriptedEngine()) for _ in range(3)]
        router = await stack.enter_async_context(ScriptedEngine(workers=[worker.url for worker in workers]))

        class WaitForLast(Fault):
            """The first worker's update waits for the last one's: updates in turn would never end."""

            async def apply(self, engine: ScriptedEngine, request: web.Request, answer: Answer) -> web.StreamResponse:
                await workers[2].arrived(UPDATE)
                return await answer()

        workers[0].script(UPDATE, WaitForLast())
        urls = await asyncio.wait_for(make_sync(router).push("/models/step-1", "1"), 10)
        assert list(urls) == [worker.url for worker in workers]
        assert [worker.weight_version for worker in workers] == ["1"] * 3
        assert steps(router) == []  # a router takes none of these


@pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])
async def test_generations_in_flight_end_under_the_new_weights(pause: PauseMode) -> None:
    async with ScriptedEngine(token_s=0.002, weight_version="0") as engine, SGLangClient(base_url=engine.url) as client:
        sync = make_sync(engine, pause=pause)
        assert await sync.check_pause() == ""
        begun = [asyncio.Event() for _ in range(10)]
        sampling = SamplingParams(max_new_tokens=40)
        tasks = [
            asyncio.create_task(client.generate([n], sampling, on_progress=lambda _, event=event: event.set()))
            for n, event in enumerate(begun)
        ]
        for event in begun:
            await event.wait()
        await sync.push("/models/step-1", "1")
        for n, generation in enumerate(await asyncio.gather(*tasks)):
            assert list(generation.output_ids) == engine.continuation([n], 40)
            assert generation.resumed == (pause == "abort")
            first, second = generation.weight_versions
            assert (first.version, second.version, second.end) == ("0", "1", 40)
            assert 0 < first.end == second.start < 40
        # sequences that stay in place keep the cache from being flushed; recomputed ones do not
        if pause != "abort":
            assert engine.calls["/flush_cache"] == 1
            assert engine.received[-1].path == "/continue_generation"


@pytest.mark.parametrize("pause", ["retract", "in_place"])
async def test_a_run_starts_on_an_engine_that_a_killed_one_left_paused(pause: PauseMode) -> None:
    async with ScriptedEngine() as engine, SGLangClient(base_url=engine.url) as client:
        await client.pause_generation(pause)
        sync = make_sync(engine, pause=pause)
        assert await asyncio.wait_for(sync.check_pause(), 10) == ""
        await sync.push("/models/step-1", "1")
        assert (await client.generate([5], SamplingParams(max_new_tokens=1))).output_ids


async def test_an_engine_that_does_not_list_its_versions_aborts_at_a_pause() -> None:
    async with ScriptedEngine() as good, ScriptedEngine(lists_versions=False) as old:
        async with ScriptedEngine(workers=[good.url, old.url]) as router:
            sync = make_sync(router, pause="in_place")
            why = await sync.check_pause()
        assert old.url in why
        assert "aborts running requests" in why
        assert sync.pause == "abort"
        assert good.weight_version == old.weight_version == "default"


@pytest.mark.parametrize(
    ("served", "config", "expected"),
    [
        (["bfloat16"], {}, "bfloat16"),
        (["auto", "bfloat16"], {"dtype": "bfloat16"}, "bfloat16"),
        (["auto"], {"torch_dtype": "bfloat16"}, "bfloat16"),  # the field's older name
        (["auto"], None, ""),  # a model that is not on this machine
        (["float32"], {"dtype": "bfloat16"}, "float32"),
        (["bfloat16", "float32"], {}, ""),
        (["none"], {"dtype": "bfloat16"}, ""),  # a server without this route
    ],
)
async def test_workers_compute_dtype(served: list[str], config: dict[str, str] | None, expected: str, tmp_path: Path):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(ScriptedEngine(model_path=str(tmp_path))) for _ in served]
        for worker, dtype in zip(workers, served, strict=True):
            worker.dtype = dtype
            if dtype == "none":
                worker.always("/server_info", Status(404, "Not Found"))
                worker.always("/get_server_info", Status(404, "Not Found"))
        router = await stack.enter_async_context(ScriptedEngine(workers=[worker.url for worker in workers]))
        assert await make_sync(router).dtype() == expected


async def test_it_flushes_until_the_worker_is_idle() -> None:
    async with ScriptedEngine() as engine:
        engine.script("/flush_cache", Status(400, "running requests"), Status(400, "running requests"))
        await make_sync(engine).push("/models/step-1", "1")
        assert engine.calls["/flush_cache"] == 3


@pytest.mark.parametrize(
    ("path", "fault", "message"),
    [
        ("/pause_generation", Status(500, "no"), "pause: .*no"),
        ("/flush_cache", Status(400, "running requests"), "flush: .*still busy"),
        (UPDATE, Status(400, "No such directory"), "update: .*No such directory"),
        (UPDATE, Body('{"success": false, "message": "shape mismatch"}'), "update: .*shape mismatch"),
        (UPDATE, Reset(), "update: .*broke the connection"),
        (UPDATE, Body('{"success": true, "message": ""}'), "verify: .*reports weight version default instead of 1"),
        (UPDATE, Status(400, "Weights were updated, but the cache was not flushed"), "verify: .*not flushed"),
        ("/model_info", Status(500, "no"), "verify: .*no"),
        (UPDATE, Stall(), "update: .*time limit"),
    ],
    ids=repr,
)
async def test_one_worker_that_fails_is_named_and_all_are_continued(path: str, fault: Fault, message: str) -> None:
    limits = {"flush_timeout_s": 0.05, "update_timeout_s": 0.3}
    async with ScriptedEngine() as good, ScriptedEngine() as bad, ScriptedEngine(workers=[good.url, bad.url]) as router:
        bad.always(path, fault)
        with pytest.raises(WeightSyncError, match="weight version 1 did not reach 1 of 2 workers") as caught:
            await make_sync(router, **limits).push("/models/step-1", "1")
        text = str(caught.value)
        assert re.search(f"{bad.url}: {message}", text)
        assert good.url not in text
        assert "\n" not in text
        assert good.weight_version == "1"
        assert not good.paused
        assert not bad.paused
        assert bad.calls["/continue_generation"] == 1
        # and the next push works
        bad.always(path, None)
        await make_sync(router, **limits).push("/models/step-2", "2")
        assert (good.weight_version, bad.weight_version) == ("2", "2")


async def test_server_that_loads_weights_but_answers_an_error_has_the_weights() -> None:
    async with ScriptedEngine() as engine:

        class LoadAndComplain(Fault):
            async def apply(self, engine: ScriptedEngine, request: web.Request, answer: Answer) -> web.StreamResponse:
                await answer()
                return await Status(400, "Weights were updated, but the cache was not flushed").apply(
                    engine, request, answer
                )

        engine.script(UPDATE, LoadAndComplain())
        await make_sync(engine).push("/models/step-1", "1")
        assert engine.weight_version == "1"


async def test_continue_is_retried_and_its_failure_raised() -> None:
    async with ScriptedEngine() as engine:
        engine.script("/continue_generation", Status(500), Reset())
        await make_sync(engine).push("/models/step-1", "1")
        assert not engine.paused
        engine.always("/continue_generation", Status(500, "stuck"))
        with pytest.raises(WeightSyncError, match=r"continue: .*stuck"):
            await make_sync(engine).push("/models/step-2", "2")


async def test_a_cancelled_push_continues_the_worker() -> None:
    async with ScriptedEngine() as engine:
        engine.script(UPDATE, Stall())
        task = asyncio.create_task(make_sync(engine).push("/models/step-1", "1"))
        await engine.arrived(UPDATE)
        assert engine.paused
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)  # of an answer that never comes
        assert not engine.paused


async def test_weight_sync_to_an_unreachable_engine_is_an_error() -> None:
    async with ScriptedEngine() as gone:
        url = gone.url
    with pytest.raises(EngineUnreachableError):
        await DiskWeightSync(base_url=url, client_settings=QUICK).push("/models/step-1", "1")
    async with ScriptedEngine() as good, ScriptedEngine(workers=[url, good.url]) as router:
        with pytest.raises(WeightSyncError, match=rf"1 of 2 workers: {url}: pause: .*could not be reached"):
            await make_sync(router).push("/models/step-1", "1")
        assert good.weight_version == "1"


async def test_two_pushes_at_once_are_refused() -> None:
    async with ScriptedEngine() as engine:
        sync = make_sync(engine)
        first = asyncio.create_task(sync.push("/models/step-1", "1"))
        await engine.arrived("/pause_generation")
        with pytest.raises(WeightSyncError, match="still running"):
            await sync.push("/models/step-2", "2")
        await first
        await sync.push("/models/step-2", "2")


REQUESTS, NEW_TOKENS = 64, 96
TOLERANCE = 1e-4  # float32 in another order
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def other_weights(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy as after some steps: every weight moved a little."""
    import torch
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("other") / "policy"
    shutil.copytree(policy_dir, directory)
    rng = torch.Generator().manual_seed(0)
    for file in directory.glob("model*.safetensors"):
        tensors = {
            name: (t * (1 + 0.1 * torch.randn(t.shape, generator=rng))).to(t.dtype)
            for name, t in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    return directory


def load(directory: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(directory).float().eval().requires_grad_(False)


async def sampled_over_a_change(
    server: Server, sync: DiskWeightSync, other: Path
) -> list[tuple[list[int], Generation]]:
    """Version 10 until the first requests have sampled tokens, then version 11. The engine is shared: its weights and
    their version are restored."""
    restore = DiskWeightSync(base_url=server.url)
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, extra={"ignore_eos": True})
    prompts = [[20 + n, *range(30 + n, 40 + n + n % 20)] for n in range(REQUESTS)]
    started = [asyncio.Event() for _ in range(MAX_RUNNING)]
    async with SGLangClient(base_url=server.url) as client:
        version = await client.weight_version()
        try:
            await restore.push(str(server.policy), "10")
            if why := await sync.check_pause():
                assert server.real  # one that does not list its versions
                assert "is not paused with" in why
            tasks = [
                asyncio.create_task(client.generate(prompt, sampling, on_progress=lambda _, event=event: event.set()))
                for prompt, event in zip(prompts, started, strict=False)
            ]
            for event in started:
                await event.wait()
            tasks += [asyncio.create_task(client.generate(prompt, sampling)) for prompt in prompts[MAX_RUNNING:]]
            await asyncio.sleep(0)
            await sync.push(str(other), "11")
            return list(zip(prompts, await asyncio.gather(*tasks), strict=True))
        finally:
            await restore.push(str(server.policy), version)


def log_probs(old: Any, new: Any, prompt: list[int], generation: Generation, *, recompute: bool) -> list[float]:
    """Of the sampled tokens, by the weights that sampled each. ``recompute``: the new weights compute the whole
    sequence; else they extend the KV cache of the old ones, which has all but the last token that these sampled."""
    import torch

    ids = torch.tensor([[*prompt, *generation.output_ids]])
    change = next((span.start for span in generation.weight_versions if span.version == "11"), NEW_TOKENS)
    cached = len(prompt) + change - 1 if change else 0
    with_old = old(ids, use_cache=True)
    if recompute or not cached:
        with_new = new(ids).logits
    else:
        cache = old(ids[:, :cached], use_cache=True).past_key_values
        with_new = torch.cat([with_old.logits[:, :cached], new(ids[:, cached:], past_key_values=cache).logits], dim=1)
    first, split = len(prompt) - 1, len(prompt) - 1 + change
    logits = torch.cat([with_old.logits[0, first:split], with_new[0, split:-1]])
    return logits.log_softmax(-1).gather(-1, ids[0, first + 1 :, None]).squeeze(-1).tolist()


@pytest.mark.parametrize("pause", [pytest.param("abort", marks=SLOW), pytest.param("retract", marks=SLOW), "in_place"])
def test_weights_change_while_64_requests_are_in_flight(server, other_weights, pause, record_property):
    sync = DiskWeightSync(base_url=server.url, pause=pause)
    results = asyncio.run(sampled_over_a_change(server, sync, other_weights))
    mixed = []
    for prompt, generation in results:
        assert (generation.finish_reason, len(generation.output_ids)) == ("length", NEW_TOKENS)
        spans = generation.weight_versions
        versions = [span.version for span in spans]
        assert versions in (["10"], ["11"], ["10", "11"])
        assert [span.start for span in spans] == [0, *(span.end for span in spans)][:-1]
        assert spans[-1].end == NEW_TOKENS
        assert (generation.resumed > 0) <= (sync.pause == "abort")
        if len(versions) == 2:
            mixed.append((prompt, generation))
    assert MAX_RUNNING // 2 <= len(mixed) < REQUESTS
    old, new = load(server.policy), load(other_weights)

    def largest_difference(*, recompute: bool) -> float:
        largest = 0.0
        for prompt, generation in [*mixed, *results[::8]]:
            expected = log_probs(old, new, prompt, generation, recompute=recompute)
            largest = max(largest, *(abs(a - b) for a, b in zip(expected, generation.log_probs, strict=True)))
        return largest

    in_place = sync.pause == "in_place"
    difference = largest_difference(recompute=not in_place)
    record_property("largest difference", difference)
    assert difference < TOLERANCE
    if in_place:
        recomputed = largest_difference(recompute=True)
        record_property("from the new weights alone", recomputed)
        assert recomputed > 10 * TOLERANCE
