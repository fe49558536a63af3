"""Weights that are rounded to bfloat16 on their way are to an SGLang that computes in it what float32 ones are."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason='the weights are written with torch: pip install "agl-slime[local]"')

from agl_slime.engine.client.client import SGLangClient  # noqa: E402
from agl_slime.engine.client.generation import SamplingParams  # noqa: E402
from agl_slime.engine.client.weights import DiskWeightSync  # noqa: E402
from agl_slime.train.local import LocalTrainer, LocalTrainerSettings  # noqa: E402
from tests.harness.engine_servers import real_sglang  # noqa: E402

GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0)


@pytest.mark.sglang
def test_a_real_sglang_gives_the_same_log_probs_for_both(policy_dir: Path, tmp_path: Path) -> None:
    trainer = LocalTrainer(model_path=policy_dir, settings=LocalTrainerSettings())
    with torch.no_grad():  # other weights than the server begins with
        for parameter in trainer.model.parameters():
            parameter.mul_(1 + 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    for dtype in ("float32", "bfloat16"):
        trainer.save_weights(tmp_path / dtype, dtype=dtype)

    async def answers(url: str) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        sync, answers_by_version = DiskWeightSync(base_url=url), []
        assert await sync.computes_in() == "bfloat16"
        async with SGLangClient(base_url=url) as client:
            for version, path in enumerate((policy_dir, tmp_path / "float32", tmp_path / "bfloat16")):
                await sync.push(str(path), str(version))
                generation = await client.generate([1, 2, 3, 4], GREEDY)
                answers_by_version.append((tuple(generation.output_ids), tuple(generation.log_probs)))
        return answers_by_version

    with real_sglang(policy_dir, tmp_path / "sglang.log", ("--dtype", "bfloat16")) as server:
        first, whole, rounded = asyncio.run(answers(server.url))
    assert whole[0]
    assert whole == rounded
    assert whole[1] != first[1]
