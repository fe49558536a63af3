"""Models of slime's launch scripts, at small sizes: weights through slime's converters, log-probs beside transformers,
and a step; experts of the engine in Megatron's routers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from agl_slime.engine.client.generation import SamplingParams
from agl_slime.tools.rehearse.megatron.small import load_model
from tests.harness.engine_servers import engine_in_thread
from tests.harness.megatron import require_megatron
from tests.harness.slime_programs import require_slime, run_program
from tests.programs.slime.models import MODELS, case_of
from tests.train.local.test_routed_experts import ask, prompts_of

pytestmark = [pytest.mark.slime, pytest.mark.megatron]
QUICK = "Qwen3_MoE"
slow = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != QUICK]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def logs(directory: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    require_megatron()
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    trained = [item for item in items if item.function is test_a_model_is_loaded_trained_and_pushed]
    names = [str(item.callspec.params["name"]) for item in trained]
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
        if "visual" not in key or "images" in name:
            assert value.equal(first[key]), key
            moved[key] = float((second[key] - value).abs().max())
    assert max(moved.values()) < 2e-3
    # the bias of a router is set by no gradient, and no token may have reached an expert
    assert min(size for key, size in moved.items() if "correction_bias" not in key and "experts" not in key) > 5e-4
    samples = torch.load(directory / name / "train_data" / "0.pt", weights_only=False)["samples"]
    assert len(samples) == 12
    for sample in samples:
        tokens, computed = torch.as_tensor(sample["tokens"]), np.asarray(sample["log_probs"])
        images = sample.get("multimodal_train_inputs") or {}
        if images:
            images["mm_token_type_ids"] = (tokens == before.config.image_token_id).long()[None]
        with torch.no_grad():
            logits = before(tokens[None], use_cache=False, **images).logits[0, :-1]
        values = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(computed, values[-len(computed) :], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [QUICK, "Qwen3_MoE_on_4_ranks"])
def test_megatrons_routers_take_the_engines_experts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The engine picks experts with a bias that the trainer lacks."""

    def biased(router: Any, states: Any) -> tuple[Any, Any, Any]:
        logits = states.reshape(-1, router.hidden_dim) @ router.weight.T
        probs = logits.softmax(-1)
        experts = (probs + torch.linspace(0, 0.1, router.num_experts)).topk(router.top_k).indices
        weights = probs.gather(-1, experts)
        return logits, weights / weights.sum(-1, keepdim=True), experts

    require_megatron()
    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", biased)
    (engine := tmp_path / "engine").mkdir()
    case_of(engine, name)
    prompts = prompts_of(12)
    config = json.loads((engine / f"{name}_before" / "config.json").read_text())
    shape = config["num_hidden_layers"], config["num_experts_per_tok"]
    sampling = SamplingParams(max_new_tokens=12, routed_experts=shape, extra={"ignore_eos": True})
    with engine_in_thread(engine / f"{name}_before", return_routed_experts=True) as url:
        answers = asyncio.run(ask(url, prompts, sampling))
    rows = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.experts is not None
        row = {"tokens": [*prompt, *answer.output_ids], "response_length": 12, "loss_mask": [1] * 12}
        row |= {"rollout_log_probs": answer.log_probs, "rollout_routed_experts": answer.experts.rows.tolist()}
        rows.append(row | {"reward": number % 2, "group_index": number // 4, "index": number, "rollout_id": number})
    (tmp_path / "samples.json").write_text(json.dumps(rows))
    logs = run_program(require_slime(), "models", tmp_path, name, f"{name}_replayed", timeout_s=1200)
    apart = []
    for case, log in logs.items():
        assert isinstance(log, dict), log
        samples = torch.load(tmp_path / case / "train_data" / "0.pt", weights_only=False)["samples"]
        pairs = (np.subtract(sample["log_probs"], sample["rollout_log_probs"]) for sample in samples)
        apart.append(max(float(np.abs(pair).max()) for pair in pairs))
    free, replayed = apart
    assert free > 0.01
    assert replayed < 1e-5
