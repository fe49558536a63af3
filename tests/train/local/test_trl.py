"""Our loss and gradient against those in TRL's GRPOTrainer on the same batch. Skips without TRL: ``pip install
"trl==1.16.0"``."""

import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl", reason="compares with TRL, which is not installed")

from agl_slime.data.normalize import normalize_rewards  # noqa: E402
from agl_slime.train.local import LocalTrainer, LocalTrainerSettings  # noqa: E402
from agl_slime.types import Sample  # noqa: E402
from tests.harness.trainer_policy import make_model, make_samples, response_log_probs, save_policy  # noqa: E402

CLIP, CLIP_HIGH, TEMPERATURE, LONGEST = 0.1, 0.25, 0.8, 32


def trl_trainer(model: Any, directory: Path, *, loss_type: str, beta: float, loss: str) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>")), pad_token="<pad>", eos_token="<pad>"
    )
    config = GRPOConfig(
        output_dir=str(directory),
        loss_type=loss_type,
        beta=0.0,  # anything else would look for a reference model by name; set below
        use_bias_correction_kl=False,
        importance_sampling_level="sequence" if loss == "gspo" else "token",
        max_completion_length=LONGEST,
        epsilon=CLIP,
        epsilon_high=1 + CLIP_HIGH if loss == "cispo" else CLIP_HIGH,  # there the bound of the weight itself
        temperature=TEMPERATURE,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        num_generations=4,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    theirs = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * 4}),
        processing_class=tokenizer,
    )
    theirs.beta = beta
    theirs.current_gradient_accumulation_steps = 1
    return theirs


def trl_inputs(samples: list[Sample], *, start: Any) -> dict[str, Any]:
    """The batch as TRL holds it: prompts padded on the left, completions on the right, observations out through
    ``tool_mask``."""
    advantages = normalize_rewards(
        [float(s.reward) for s in samples],
        group_indices=[s.group_index for s in samples],
        rollout_ids=[s.index for s in samples],
    )  # type: ignore[arg-type]
    prompts = [sample.tokens[: len(sample.tokens) - sample.response_length] for sample in samples]
    responses = [sample.tokens[len(sample.tokens) - sample.response_length :] for sample in samples]
    start_log_probs = [
        response_log_probs(start, sample.tokens, sample.response_length, temperature=TEMPERATURE) for sample in samples
    ]

    def pad_left(rows: list[list[Any]]) -> torch.Tensor:
        width = max(len(row) for row in rows)
        return torch.tensor([[0] * (width - len(row)) + row for row in rows])

    def right(rows: list[list[Any]]) -> torch.Tensor:
        width = max(len(row) for row in rows)
        return torch.tensor([row + [0] * (width - len(row)) for row in rows])

    return {
        "prompt_ids": pad_left(prompts),
        "prompt_mask": pad_left([[1] * len(row) for row in prompts]),
        "completion_ids": right(responses),
        "completion_mask": right([[1] * len(row) for row in responses]),
        "tool_mask": right([sample.loss_mask or [] for sample in samples]),
        "advantages": torch.tensor(advantages),
        "old_per_token_logps": right([sample.rollout_log_probs or [] for sample in samples]),
        "ref_per_token_logps": right(start_log_probs),
        "num_items_in_batch": torch.tensor(sum(sum(sample.loss_mask or []) for sample in samples)),
    }


@pytest.mark.parametrize(
    ("loss_type", "loss", "aggregation"),
    [
        ("dapo", "ppo", "token"),
        ("grpo", "ppo", "rollout"),
        ("dr_grpo", "ppo", "constant"),
        ("grpo", "gspo", "rollout"),
        ("cispo", "cispo", "token"),
    ],
)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_loss_and_gradient_equal_trls(tmp_path: Path, loss_type: str, loss: Any, aggregation: Any, beta: float):
    samples = make_samples(
        make_model(seed=1), temperature=TEMPERATURE
    )  # of another policy, so that ratios are away from 1
    moved = make_model(seed=0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # away from the start policy, so that the KL term has a gradient
        for parameter in moved.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)

    settings = LocalTrainerSettings(
        n_minibatches=1,
        grad_clip=math.inf,
        clip=1.0 if loss == "cispo" else CLIP,
        clip_high=CLIP_HIGH,
        kl_coef=beta,
        loss=loss,
        aggregation=aggregation,
        max_response=LONGEST if aggregation == "constant" else 0,
    )
    start = save_policy(tmp_path / "start", seed=0)
    ours = LocalTrainer(model_path=start, settings=settings, temperature=TEMPERATURE)
    ours.model.load_state_dict(moved.state_dict())
    gradients: list[dict[str, torch.Tensor]] = []
    ours._optimizer.register_step_pre_hook(
        lambda *_: gradients.append({n: p.grad.clone() for n, p in ours.model.named_parameters()})
    )
    metrics = ours.train(samples, iteration=0)

    theirs = trl_trainer(moved, tmp_path / "trl", loss_type=loss_type, beta=beta, loss=loss)
    theirs.model.train()
    loss = theirs._compute_loss(theirs.model, trl_inputs(samples, start=make_model(seed=0)))
    loss.backward()

    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert 0 < metrics["train/clip_fraction"] < 1
    # TRL left-pads, so its positions, and with them the rounding, differ from ours.
    their_grads = {name: parameter.grad for name, parameter in theirs.model.named_parameters()}
    assert set(gradients[0]) == set(their_grads)
    norm = math.sqrt(sum(float(grad.norm()) ** 2 for grad in their_grads.values()))
    difference = math.sqrt(sum(float((gradients[0][name] - grad).norm()) ** 2 for name, grad in their_grads.items()))
    assert norm > 0.1
    assert difference <= 1e-5 * norm
