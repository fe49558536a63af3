"""``agl-slime autopsy`` of slime's dumps with images: faults of M-RoPE's positions in tiny vision models."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason='forward passes need torch: pip install "agl-slime[local]"')

import torch
import transformers

from agl_slime.errors import TrainerError
from agl_slime.tools.forensics.autopsy import AutopsyConfig, autopsy
from agl_slime.tools.forensics.gaps import Diagnosis
from agl_slime.types import Sample, sample_from_fields
from tests.harness.slime_dumps import write_dump
from tests.harness.vision import save_qwen2_vl
from tests.tools.forensics.autopsies import is_clean

GRIDS = ([[1, 4, 6]], [[1, 6, 4], [1, 2, 8]])  # patches in time, height and width of each Sample's images
PATCH = 3 * 2 * 14 * 14
Change = Callable[[Any, Any], Any]
"""Of M-RoPE's rows ``[3, 1, length]``, with the mask of the images."""


@dataclass
class VisionModel:
    """A checkpoint, and Samples with images whose responses its model scores."""

    path: Path
    samples: list[Sample]

    def log_probs(self, change: Change | None = None) -> list[list[float]]:
        """The responses' log-probs by transformers' forward pass; ``change`` is a fault of its positions."""
        model = transformers.AutoModelForImageTextToText.from_pretrained(self.path, dtype=torch.float32).eval()
        index = model.model.get_rope_index

        def faulty(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            rows, deltas = index(input_ids, *args, **kwargs)
            return (rows if change is None else change(rows.clone(), is_image(input_ids))), deltas

        def is_image(ids: Any) -> Any:
            return ids[0] == model.config.image_token_id

        model.model.get_rope_index = faulty
        scores = []
        for sample in self.samples:
            ids = torch.tensor([sample.tokens])
            with torch.no_grad():
                kinds = is_image(ids).int()[None]
                logits = model(input_ids=ids, mm_token_type_ids=kinds, **(sample.multimodal_train_inputs or {})).logits
            log_probs = logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            scores.append(log_probs[-sample.response_length :].tolist())
        return scores

    def diagnosis(self, directory: Path, recorded: Sequence[Sequence[float]]) -> Diagnosis:
        for sample, values in zip(self.samples, recorded, strict=True):
            sample.rollout_log_probs = list(values)
        write_dump(directory, 0, self.samples)
        config = AutopsyConfig(run_dir=directory, step=0, model=self.path)
        diagnosis, case = asyncio.run(autopsy(config))
        assert all(sample.images for sample in case.samples)
        return diagnosis


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    path = save_qwen2_vl(tmp_path_factory.mktemp("model"))
    config, generator = transformers.AutoConfig.from_pretrained(path), torch.Generator().manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    samples = []
    for number, grids in enumerate(GRIDS):
        text = torch.randint(5, 200, (40,), generator=generator).tolist()
        tokens = [first, *text[1:3]]
        for grid in grids:
            count = grid[0] * grid[1] * grid[2] // 4
            tokens += [config.vision_start_token_id, *[config.image_token_id] * count, config.vision_end_token_id]
            tokens += text[3:6]
        patches = sum(a * b * c for a, b, c in grids)
        inputs = {"pixel_values": torch.randn(patches, PATCH, generator=generator)}
        samples.append(
            sample_from_fields(
                index=number,
                group_index=0,
                tokens=[*tokens, *text[6:]],
                response_length=30,
                loss_mask=[1] * 30,
                multimodal_train_inputs={**inputs, "image_grid_thw": torch.tensor(grids)},
                status=Sample.Status.COMPLETED,
                reward=1.0,
            )
        )
    return VisionModel(path, samples)


def test_a_clean_vision_model_has_no_cause(images: VisionModel, tmp_path: Path) -> None:
    assert is_clean(images.diagnosis(tmp_path, images.log_probs()))
    negative = []
    for sample in images.samples:
        inputs = sample.multimodal_train_inputs or {}
        negative.append(replace(sample, multimodal_train_inputs=inputs | {"pixel_values": -inputs["pixel_values"]}))
    recorded = VisionModel(images.path, negative).log_probs()
    assert images.diagnosis(tmp_path, recorded).gap > 0.01  # pixels count


def off(row: int, step: int) -> Change:
    def change(rows: Any, image: Any) -> Any:
        rows[row, 0, image] += step
        return rows

    return change


def of_text(rows: Any, *, last: int) -> Any:
    rows[: last + 1] = torch.arange(rows.shape[-1])
    return rows


def of_next_token(rows: Any, _: Any) -> Any:
    rows[1, 0, :-1] = rows[1, 0, 1:].clone()
    return rows


def shifted(rows: Any, image: Any, *, edge: int) -> Any:
    """All rows, from the first (1) or after the last (-1) token of each image on."""
    steps = torch.diff(image.int(), prepend=torch.zeros(1, dtype=torch.int))
    return rows - edge * torch.cumsum(steps * edge > 0, 0)


POSITIONS: dict[str, Change] = {
    "had M-RoPE's height row off by -1 in images": off(1, -1),
    "had all of M-RoPE's rows off by +1 after each image": lambda rows, image: shifted(rows, image, edge=-1),
    "placed each token of an image as one of text": lambda rows, _: of_text(rows, last=2),
    "had M-RoPE's height and width rows swapped": lambda rows, _: rows[[0, 2, 1]],
}
MORE_POSITIONS: dict[str, Change] = {
    "had M-RoPE's temporal row off by +1 in images": off(0, 1),
    "had all of M-RoPE's rows off by -1 from each image on": lambda rows, image: shifted(rows, image, edge=1),
    "had M-RoPE's height row of the next token": of_next_token,
    "had the positions of text in M-RoPE's temporal row": lambda rows, _: of_text(rows, last=0),
}


@pytest.mark.parametrize("faults", [POSITIONS, pytest.param(MORE_POSITIONS, marks=pytest.mark.slow)], ids=["a", "b"])
def test_a_fault_of_the_positions_in_images_is_named_first(images: VisionModel, tmp_path: Path, faults: Any) -> None:
    for fault, change in faults.items():
        diagnosis = images.diagnosis(tmp_path, images.log_probs(change))
        assert diagnosis.sentence.startswith(f"image_positions: the engine {fault} ("), diagnosis
        assert diagnosis.first is not None
        assert diagnosis.first.unexplained < 0.1 * diagnosis.gap


def test_images_that_do_not_fit_the_tokens_are_one_sentence(images: VisionModel, tmp_path: Path) -> None:
    inputs = [sample.multimodal_train_inputs for sample in images.samples]
    swapped = [replace(sample) for sample in images.samples]
    for sample, foreign in zip(swapped, reversed(inputs), strict=True):
        sample.multimodal_train_inputs = foreign
    with pytest.raises(TrainerError, match="does not fit the images"):
        VisionModel(images.path, swapped).diagnosis(tmp_path, images.log_probs())
