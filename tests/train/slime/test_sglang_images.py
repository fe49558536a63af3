"""Images on a real SGLang with a tiny vision model: the engine's log-probs beside the trainer's."""

from pathlib import Path
from typing import Any

import pytest

from agl_slime.agent.agent import SGLangLitAgent
from agl_slime.tokens.loading import load_tokenizer
from agl_slime.tools.forensics.autopsy import AutopsyConfig, autopsy
from agl_slime.train.slime.replay import in_slimes_form
from tests.harness.engine_servers import real_sglang
from tests.harness.rollouts import run_rollouts
from tests.harness.vision import picture, save_qwen2_vl, uri

TURNS = ([picture(1, (112, 84))], [], [picture(2, (56, 140)), picture(3, (84, 28))])


def message(number: int) -> dict[str, Any]:
    pictures = [{"type": "image_url", "image_url": {"url": uri(data)}} for data in TURNS[number]]
    return {"role": "user", "content": [*pictures, {"type": "text", "text": f"What now, {number}?"}]}


class Describer(SGLangLitAgent):
    """Shows pictures turn by turn."""

    async def run(self, task: dict[str, Any], session: Any) -> None:
        await session.ask()
        for number in range(1, len(TURNS)):
            await session.ask(message(number))

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return [message(0)]

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return 1.0


def trainers_log_probs(path: Path, sample: Any) -> list[float]:
    """Of the response's tokens, by transformers' own model from ids and ``multimodal_train_inputs``."""
    import torch
    from transformers import Qwen2VLForConditionalGeneration

    model = Qwen2VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.tensor([sample.tokens])
    kinds = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **sample.multimodal_train_inputs).logits[0]
    log_probs = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return log_probs[-sample.response_length :].tolist()


@pytest.mark.sglang
async def test_sglang_counts_image_tokens_alike_and_agrees_on_log_probs(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_qwen2_vl(model)
    with real_sglang(model, tmp_path / "server.log") as server:
        (finished,) = await run_rollouts(
            Describer(), [{}], endpoint=server.url, model=str(model), max_new_tokens=8, temperature=1.0
        )
    assert finished.failure is None
    tokenizer = load_tokenizer(str(model))
    conversion = finished.convert(tokenizer)
    (sample,) = in_slimes_form(conversion.samples, tokenizer)
    assert [len(turn.images) for turn in conversion.trajectory.turns] == [1, 1, 3]
    counts = [grid.prod().item() // 4 for grid in sample.multimodal_train_inputs["image_grid_thw"]]
    assert counts == [12, 10, 3]
    assert sample.tokens.count(tokenizer.convert_tokens_to_ids("<|image_pad|>")) == sum(counts)
    computed = trainers_log_probs(model, sample)
    sampled = [(a, b) for a, b, mask in zip(computed, sample.rollout_log_probs, sample.loss_mask, strict=True) if mask]
    assert len(sampled) > 8
    assert max(abs(a - b) for a, b in sampled) < 1e-3
    # a dump of it has no cause of a difference either
    from tests.harness.slime_dumps import write_dump

    write_dump(tmp_path / "dump", 0, [sample])
    cause, case = await autopsy(AutopsyConfig(run_dir=tmp_path / "dump", step=0, model=model))
    assert case.samples[0].images
    assert (cause.first, cause.gap < 1e-3, cause.tokens) == (None, True, len(sampled)), cause
    # both computed with these images: other images give other log-probs
    sample.multimodal_train_inputs["pixel_values"] = sample.multimodal_train_inputs["pixel_values"].flip(0)
    blind = trainers_log_probs(model, sample)
    assert max(abs(a - b) for a, b in zip(blind, computed, strict=True)) > 0.01
