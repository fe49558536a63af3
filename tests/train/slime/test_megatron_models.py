"""Models of slime's launch scripts, at small sizes: weights through slime's converters, log-probs beside transformers,
and a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agl_slime.tools.rehearse.megatron.small import load_model
from tests.harness.megatron import require_megatron
from tests.harness.slime_programs import require_slime, run_program
from tests.programs.slime.models import MODELS

pytestmark = [pytest.mark.slime, pytest.mark.megatron]
QUICK = "Qwen3_MoE"
slow = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != QUICK]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def logs(directory: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    require_megatron()
    names = [item.callspec.params["name"] for item in request.session.items if item.parent is request.node]
    return run_program(require_slime(), "models", directory, *names, timeout_s=2400)


@pytest.mark.parametrize("name", [QUICK, *slow])
def test_a_model_is_loaded_trained_and_pushed(name: str, logs: dict[str, Any], directory: Path):
    assert isinstance(logs[name], dict), logs[name]
    pushes = (f"{name}/weights/weight_v00000{version}" for version in (1, 2))
    (before, _), *pushed = (load_model(directory / part) for part in (f"{name}_before", *pushes))
    assert [wrong for _, wrong in pushed] == [[], []]
    expected, first, second = (model.state_dict() for model in (before, *(model for model, _ in pushed)))
    moved = dict[str, float]()
    for key, value in expected.items():
        if "visual" not in key:
            assert value.equal(first[key]), key
            moved[key] = float((second[key] - value).abs().max())
    assert max(moved.values()) < 2e-3
    # the bias of a router is set by no gradient, and no token may have reached an expert
    assert min(size for key, size in moved.items() if "correction_bias" not in key and "experts" not in key) > 5e-4
    samples = torch.load(directory / name / "train_data" / "0.pt", weights_only=False)["samples"]
    assert len(samples) == 12
    for sample in samples:
        tokens, computed = torch.as_tensor(sample["tokens"]), np.asarray(sample["log_probs"])
        with torch.no_grad():
            logits = before(tokens[None], use_cache=False).logits[0, :-1]
        values = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(computed, values[-len(computed) :], atol=2e-5)
