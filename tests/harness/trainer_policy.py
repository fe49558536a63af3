"""A tiny random policy and rollouts sampled from it, for the tests of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agl_slime.types import Sample, sample_from_fields

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 460


def make_model(*, seed: int = 0, attention_dropout: float = 0.0, tied: bool = True) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 512, "vocab_size": VOCABULARY}
    values = {"tie_word_embeddings": tied, "initializer_range": 0.08, "attention_dropout": attention_dropout}
    return AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **values)).eval()


def save_policy(directory: Path, *, seed: int = 0, tied: bool = True) -> Path:
    """The checkpoint of a random policy, with a placeholder for its tokenizer files."""
    make_model(seed=seed, tied=tied).save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return directory


def response_log_probs(
    model: PreTrainedModel, tokens: list[int], response_length: int, *, temperature: float = 1.0
) -> list[float]:
    """The log-probs of the last ``response_length`` tokens, from one plain forward pass."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1] / temperature
    log_probs = logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:]).unsqueeze(-1)).squeeze(-1)
    return log_probs[len(log_probs) - response_length :].tolist()


def make_samples(
    model: PreTrainedModel,
    *,
    groups: int = 3,
    per_group: int = 4,
    seed: int = 0,
    prompt_lengths: tuple[int, int] = (3, 12),
    response_lengths: tuple[int, int] = (2, 20),
    observations: bool = True,
    temperature: float = 1.0,
) -> list[Sample]:
    """``groups * per_group`` rollouts of random tokens, with the policy's log-probs, random rewards and, with
    ``observations``, masks with holes."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        prompt = rng.integers(0, VOCABULARY, rng.integers(*prompt_lengths, endpoint=True)).tolist()
        for _ in range(per_group):
            response = rng.integers(0, VOCABULARY, rng.integers(*response_lengths, endpoint=True)).tolist()
            mask = [1, *rng.integers(0, 2, len(response) - 1).tolist()] if observations else [1] * len(response)
            tokens = prompt + response
            log_probs = response_log_probs(model, tokens, len(response), temperature=temperature)
            numbers = {"group_index": group, "index": len(samples), "rollout_id": len(samples)}
            fields = {"tokens": tokens, "response_length": len(response), "loss_mask": mask}
            fields["rollout_log_probs"] = [value * bit for value, bit in zip(log_probs, mask, strict=True)]
            end = {"reward": float(rng.random() < 0.5), "status": Sample.Status.COMPLETED}
            samples.append(sample_from_fields(**numbers, **fields, **end))
    return samples
