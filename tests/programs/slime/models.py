"""A step of slime's own Megatron actors for models of slime's launch scripts, at small sizes: weights are pushed before
it and after it.

    python -m tests.programs.slime.models DIRECTORY NAME...

Each name is a key of ``MODELS``: a model of ``scripts/models`` on parallel ranks. What slime logs is the result.
The batch is DIRECTORY/samples.json, if it is there; with ``_replayed`` after its name a model's routers take its
experts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.tools.rehearse.megatron.flags import as_flags
from agl_slime.tools.rehearse.megatron.small import save_model, shrink
from agl_slime.types import Sample, sample_from_fields
from tests.harness.slime_programs import model_words, report
from tests.harness.trainer_policy import VOCABULARY
from tests.programs.slime.steps import Case, begin, run, samples_of

TP, PP, EP = (f"--{part}-model-parallel-size 2" for part in ("tensor", "pipeline", "expert"))
FIT = "--make-vocab-size-divisible-by 64"
ALL = f"{TP} {PP} --sequence-parallel {EP} --expert-tensor-parallel-size 1 {FIT}"
MODELS: dict[str, tuple[str, str, int]] = {
    "Qwen2.5": ("qwen2.5-3B", f"{TP} {PP} {FIT}", 4),
    "Qwen3": ("qwen3-4B", f"{TP} --sequence-parallel {FIT} --context-parallel-size 2", 4),
    "Qwen3_on_8_ranks": ("qwen3-4B", f"{TP} {PP} {FIT}", 8),
    "Qwen3_in_virtual_stages": ("qwen3-4B", f"{PP} {FIT} --num-layers-per-virtual-pipeline-stage 1", 2),
    "Qwen3_MoE": ("qwen3-30B-A3B", EP, 2),
    "Qwen3_MoE_on_4_ranks": ("qwen3-30B-A3B", ALL, 4),
    "Llama_3.1": ("llama3.1-8B-Instruct", "", 1),
    "Llama_3.1_on_4_ranks": ("llama3.1-8B-Instruct", f"{TP} {PP}", 4),
    "GLM_4": ("glm4-9B", f"{TP} {PP}", 4),
    "GLM_4.5_Air": ("glm4.5-106B-A12B", EP, 2),
    "GLM_4.5": ("glm4.5-355B-A32B", f"{ALL} --decoder-last-pipeline-num-layers 15", 4),
    "GLM_4.7_Flash": ("glm4.7-30B-A3B", EP, 2),
    "DeepSeek_V3": ("deepseek-v3", f"{ALL} --decoder-last-pipeline-num-layers 6", 4),
    "DeepSeek_V3_on_context": ("deepseek-v3", f"{EP} --context-parallel-size 2", 4),
    "Kimi_K2": ("kimi-k2", EP, 2),
    "Moonlight": ("moonlight", EP, 2),
    "MiniMax_M2": ("minimax-m2", EP, 2),
    "Qwen3-Next": ("qwen3-next-80B-A3B", ALL, 4),
    "Qwen3.5": ("qwen3.5-4B", f"{TP} {PP}", 4),
    "Qwen3.5_MoE": ("qwen3.5-35B-A3B", EP, 2),
    "Qwen3.5_MoE_with_images": ("qwen3.5-35B-A3B-vl", f"{EP} --context-parallel-size 2", 2),
}
"""Scripts of slime, layouts and GPUs."""


def main(directory: Path, names: list[str]) -> None:
    begin()
    report({name: outcome(directory, name) for name in names})


def outcome(directory: Path, name: str) -> Any:
    """slime's log of the step, or the output of the ranks."""
    try:
        return run(directory, case_of(directory, name))
    except SystemExit as end:
        return str(end)


def case_of(directory: Path, name: str) -> Case:
    script, layout, gpus = MODELS[name.removesuffix("_replayed")]
    flags = [*model_words(script), *layout.split()]
    small = shrink(flags, gpus=gpus, tokens=VOCABULARY)
    save_model(small.config, model := directory / f"{name}_before", tokenizer=LOOKUP_POLICY)
    architecture = [*flags, *as_flags(small.options)]
    replay = "--use-rollout-routing-replay" if name.endswith("_replayed") else ""
    sizes = {"world": small.ranks, "model": model, "architecture": architecture}
    samples = recorded_samples(directory / "samples.json")
    if "images" in name:
        samples = with_images(samples_of(uneven=False), small.config)
    return Case(name=name, flags=replay, samples=samples, **sizes)


def with_images(samples: list[Sample], config: dict[str, Any]) -> list[Sample]:
    """Samples that begin with an image of 4 x 6 patches, which are 2 x 3 tokens."""
    start, image, end = (config[f"{mark}_token_id"] for mark in ("vision_start", "image", "vision_end"))
    for number, sample in enumerate(samples):
        sample.tokens = [start, *[image] * 6, end, *sample.tokens]
        pixels = torch.randn(24, 3 * 2 * 16**2, generator=torch.Generator().manual_seed(number))
        sample.multimodal_train_inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 6]])}
    return samples


def recorded_samples(file: Path) -> list[Sample] | None:
    rows = json.loads(file.read_text()) if file.is_file() else []
    for row in rows:
        row["rollout_routed_experts"] = torch.tensor(row["rollout_routed_experts"], dtype=torch.int32)
    return [sample_from_fields(**row) for row in rows] or None


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
