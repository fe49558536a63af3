"""Weights change while 64 requests are in flight, on the embedded engine and, under the marker ``sglang``, on a real
SGLang: every request ends, and each token's log-prob is computed with the weights that sampled it.

After ``abort`` and ``retract`` the engine recomputes the KV cache, so a token of the new weights has their log-prob for
the whole prefix. After ``in_place`` the KV cache of the prefix is the old weights', and the log-prob is that of the new
weights *on this cache*; the new weights alone give another.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.engine.client.weights import DiskWeightSync
from tests.harness.engine_servers import MAX_RUNNING, Server

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
            if why := await sync.settle_pause():
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
