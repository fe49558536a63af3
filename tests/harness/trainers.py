"""A trainer of the tiny policy, its weights and the gradients of its steps."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from agl_slime.train.local import LocalTrainer, LocalTrainerSettings

# One step on the whole batch without gradient clipping: the formulas alone.
ONE_STEP = LocalTrainerSettings(n_minibatches=1, grad_clip=math.inf)


def trainer(
    policy: Path,
    settings: LocalTrainerSettings | None = None,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    **changes: Any,
) -> LocalTrainer:
    settings = replace(settings or LocalTrainerSettings(), **changes)
    return LocalTrainer(model_path=policy, settings=settings, temperature=temperature, seed=seed)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@contextmanager
def recorded_gradients(ours: LocalTrainer) -> Iterator[list[torch.Tensor]]:
    """Grows by the flattened gradient of each step."""
    steps: list[torch.Tensor] = []
    hook = ours._optimizer.register_step_pre_hook(lambda *_: steps.append(gradient_of(ours.model)))
    try:
        yield steps
    finally:
        hook.remove()


def gradient_of(model: Any) -> torch.Tensor:
    return flat([parameter.grad for parameter in model.parameters()]).clone()


def gradients(
    policy: Path, batch: Any, settings: LocalTrainerSettings = ONE_STEP, **changes: Any
) -> list[torch.Tensor]:
    """The gradient of each step of one ``train``, computed in float64 and flattened."""
    ours = trainer(policy, settings, **changes)
    ours.model.double()
    with recorded_gradients(ours) as steps:
        ours.train(batch, iteration=0)
    return steps


def gradient(policy: Path, batch: Any, settings: LocalTrainerSettings = ONE_STEP, **changes: Any) -> torch.Tensor:
    [step] = gradients(policy, batch, settings, **changes)
    return step


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.norm() > 1e-3  # two zeros are equal, too
    assert (ours - expected).norm() <= 1e-6 * expected.norm()
