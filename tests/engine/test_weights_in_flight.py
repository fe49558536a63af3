"""Weights change while 64 requests are in flight, on the embedded engine and, under the marker ``sglang``, on a real
SGLang: every one ends, and each token's log-prob is that of the weights that sampled it.

What can be compared: after ``abort`` and ``retract`` the engine computes keys and values anew, so a token of the new
weights has the log-prob that these give its whole prefix. After ``in_place`` the keys and values of what came before
are the old weights', and the log-prob is that of the new weights *on those*; the new weights alone give another.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason='the log-probs are checked with torch: pip install "agl-slime[local]"')
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from agl_slime.engine.client.client import PauseMode, SGLangClient  # noqa: E402
from agl_slime.engine.client.generation import Generation, SamplingParams  # noqa: E402
from agl_slime.engine.client.weights import DiskWeightSync  # noqa: E402
from tests.harness.engine_servers import MAX_RUNNING, Server  # noqa: E402

REQUESTS, NEW_TOKENS = 64, 96
TOLERANCE = 1e-4  # float32 in another order
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def other_weights(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy after some steps, as it were: every weight moved a little."""
    directory = tmp_path_factory.mktemp("other") / "policy"
    shutil.copytree(policy_dir, directory)
    drawn = torch.Generator().manual_seed(0)
    for file in directory.glob("model*.safetensors"):
        tensors = {
            name: (t * (1 + 0.1 * torch.randn(t.shape, generator=drawn))).to(t.dtype)
            for name, t in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    return directory


def load(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory).float().eval()


@contextmanager
def left_as_it_was(server: Server) -> Iterator[None]:
    """The engine is shared: its weights and their version come back."""

    async def version() -> str:
        async with SGLangClient(base_url=server.url) as client:
            return await client.weight_version()

    before = asyncio.run(version())
    try:
        yield
    finally:
        asyncio.run(DiskWeightSync(base_url=server.url).push(str(server.policy), before))


async def sampled_over_a_change(
    server: Server, sync: DiskWeightSync, other: Path
) -> list[tuple[list[int], Generation]]:
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, extra={"ignore_eos": True})
    prompts = [[20 + n, *range(30 + n, 40 + n + n % 20)] for n in range(REQUESTS)]
    started = [asyncio.Event() for _ in range(MAX_RUNNING)]
    async with SGLangClient(base_url=server.url) as client:
        tasks = [
            # those that run first say when they have sampled something
            asyncio.create_task(client.generate(prompt, sampling, on_progress=lambda _, event=event: event.set()))
            for prompt, event in zip(prompts, started, strict=False)
        ]
        for event in started:
            await event.wait()
        tasks += [asyncio.create_task(client.generate(prompt, sampling)) for prompt in prompts[MAX_RUNNING:]]
        await asyncio.sleep(0)
        await sync.push(str(other), "11")
        return list(zip(prompts, await asyncio.gather(*tasks), strict=True))


@torch.no_grad()
def log_probs(old: Any, new: Any, prompt: list[int], got: Generation, *, anew: bool) -> list[float]:
    """Of the sampled tokens, by the weights that sampled each. ``anew``: the new weights see the whole sequence; else
    they go on from the keys and values of the old ones, which have all but the last token that the old ones sampled."""
    ids = torch.tensor([[*prompt, *got.output_ids]])
    change = next((span.start for span in got.weight_versions if span.version == "11"), NEW_TOKENS)
    held = len(prompt) + change - 1 if change else 0
    with_old = old(ids, use_cache=True)
    if anew or not held:
        with_new = new(ids).logits
    else:
        cache = old(ids[:, :held], use_cache=True).past_key_values
        with_new = torch.cat([with_old.logits[:, :held], new(ids[:, held:], past_key_values=cache).logits], dim=1)
    first, split = len(prompt) - 1, len(prompt) - 1 + change
    logits = torch.cat([with_old.logits[0, first:split], with_new[0, split:-1]])
    return logits.log_softmax(-1).gather(-1, ids[0, first + 1 :, None]).squeeze(-1).tolist()


def largest(pairs: Any) -> float:
    return max(abs(a - b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("pause", [pytest.param("abort", marks=SLOW), pytest.param("retract", marks=SLOW), "in_place"])
def test_weights_change_while_64_requests_are_in_flight(
    server: Server, other_weights: Path, pause: PauseMode, record_property: Any
) -> None:
    sync = DiskWeightSync(base_url=server.url, pause=pause)
    with left_as_it_was(server):
        asyncio.run(DiskWeightSync(base_url=server.url).push(str(server.policy), "10"))
        if why := asyncio.run(sync.settle_pause()):
            assert server.real  # one that does not list its versions
            assert "is not paused with" in why
        results = asyncio.run(sampled_over_a_change(server, sync, other_weights))
    mixed = 0
    for _, got in results:
        assert (got.finish_reason, len(got.output_ids)) == ("length", NEW_TOKENS)
        versions = [span.version for span in got.weight_versions]
        assert versions in (["10"], ["11"], ["10", "11"])
        assert [span.start for span in got.weight_versions] == [0, *(span.end for span in got.weight_versions)][:-1]
        assert got.weight_versions[-1].end == NEW_TOKENS
        mixed += len(versions) == 2
        assert (got.resumed > 0) <= (sync.pause == "abort")
    assert MAX_RUNNING // 2 <= mixed < REQUESTS
    old, new = load(server.policy), load(other_weights)
    engine = [got.log_probs for _, got in results]
    in_place = sync.pause == "in_place"
    computed = [log_probs(old, new, prompt, got, anew=not in_place) for prompt, got in results]
    difference = largest(zip(computed, engine, strict=True))
    record_property("largest difference", difference)
    assert difference < TOLERANCE
    if in_place:
        whole = [log_probs(old, new, prompt, got, anew=True) for prompt, got in results]
        far = largest(zip(whole, engine, strict=True))
        record_property("from the new weights alone", far)
        assert far > 10 * TOLERANCE
    print(
        f"{server.url} {sync.pause}: {mixed} of {REQUESTS} answers of two versions, largest difference {difference:.1e}"
        + (f"; from the new weights alone {far:.2f}" if in_place else "")
    )
