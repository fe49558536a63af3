"""What makes the local trainer fit models of real sizes: packing, pieces of logits, checkpointing, bfloat16."""

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers  # noqa: E402

from agl_slime.cli.settings import train_config  # noqa: E402
from agl_slime.errors import ConfigError, MissingDependencyError  # noqa: E402
from agl_slime.train.local import LocalTrainer, LocalTrainerSettings  # noqa: E402
from agl_slime.train.local.hardware import bfloat16_wanted, set_threads, torch_device  # noqa: E402
from agl_slime.types import Sample  # noqa: E402
from tests.harness.trainer_policy import VOCABULARY, make_model, make_samples  # noqa: E402

SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "initializer_range": 0.2}
MODELS: dict[str, tuple[dict[str, Any], bool]] = {  # settings, and whether they go through packed
    "llama": (SMALL, True),
    "qwen3": (SMALL, True),
    "cohere": ({**SMALL, "logit_scale": 3.0}, True),
    "mistral": ({**SMALL, "sliding_window": 4}, False),
    "gemma2": ({**SMALL, "final_logit_softcapping": 2.0}, False),
    "gpt2": ({"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}, True),
}


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return make_samples(make_model(), prompt_lengths=(1, 60))


def trainer(policy: Path, **settings: Any) -> LocalTrainer:
    return LocalTrainer(model_path=policy, settings=LocalTrainerSettings(**settings))


def body_calls(ours: LocalTrainer) -> list[tuple[int, bool]]:
    """How many ids will go through the model's layers at once, and whether as a packed row."""
    calls: list[tuple[int, bool]] = []
    body: Any = ours.model.base_model

    def look(_module: Any, _args: Any, kwargs: Any) -> None:
        if (ids := kwargs.get("input_ids")) is not None and ids.shape[1] > 1:
            calls.append((ids.numel(), "packed" in kwargs))

    body.register_forward_pre_hook(look, with_kwargs=True)
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_uneven_samples_have_the_log_probs_of_the_whole_model(name, tmp_path, monkeypatch):
    settings, packed = MODELS[name]
    config = transformers.AutoConfig.for_model(name, **settings)
    torch.manual_seed(0)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("agl_slime.train.local.trainer.LOGITS_CHUNK", 7)
    ours = trainer(tmp_path)
    calls = body_calls(ours)
    metrics = ours.train(make_samples(model, prompt_lengths=(1, 60)), iteration=0)
    assert metrics["train/logprob_diff_max"] < 1e-4
    assert any(in_one_row for _, in_one_row in calls) == packed


def test_each_token_is_computed_once_if_old_log_probs_are_the_engines(policy: Path, samples: list[Sample]) -> None:
    for settings, passes in (({}, 1), ({"epochs": 2}, 2), ({"old_log_probs": "recompute"}, 2), ({"kl_coef": 0.1}, 1)):
        ours = trainer(policy, n_minibatches=1, **settings)
        calls = body_calls(ours)
        ours.train(samples, iteration=0)
        distinct = set()  # the prompt of a group, and what its answers begin with alike, count once
        for sample in samples:
            last = len(sample.tokens) - 1 - [*(sample.loss_mask or [])[::-1], 1].index(1)
            distinct |= {tuple(sample.tokens[: end + 1]) for end in range(last if any(sample.loss_mask or []) else 0)}
        computed = sum(ids for ids, _ in calls)
        assert passes * len(distinct) <= computed < passes * len(distinct) / 0.9


def test_groups_with_equal_rewards_go_forward_only(policy: Path, samples: list[Sample]) -> None:
    equal = copy.deepcopy(samples[:8])
    for sample in equal:
        sample.reward = float(sample.group_index or 0)
    for batch, settings, goes_back in ((equal, {}, False), (samples, {}, True), (equal, {"kl_coef": 0.1}, True)):
        ours = trainer(policy, n_minibatches=1, **settings)
        gradients: list[Any] = []
        first: Any = ours.model.base_model.layers[0]  # type: ignore[union-attr, index]
        first.mlp.register_full_backward_hook(lambda *_, calls=gradients: calls.append(1))
        ours.train(samples, iteration=0)
        n_gradients, momentum = len(gradients), copy.deepcopy(ours.model.state_dict())
        ours.train(batch, iteration=1)
        assert (len(gradients) > n_gradients) == goes_back
        assert any(not torch.equal(tensor, momentum[name]) for name, tensor in ours.model.state_dict().items())


def test_checkpointing_computes_the_layers_again_and_trains_alike(policy: Path, samples: list[Sample]) -> None:
    weights, calls, varied = [], [], copy.deepcopy(samples)
    for i, sample in enumerate(varied):  # or a group would go forward only
        sample.reward = float(i % 2)
    for checkpointing in (False, True):
        ours = trainer(policy, gradient_checkpointing=checkpointing, n_minibatches=1)
        calls.append(0)

        def count(*_: Any) -> None:
            calls[-1] += 1

        ours.model.base_model.layers[0].mlp.register_forward_pre_hook(count)  # type: ignore[union-attr, index]
        ours.train(varied, iteration=0)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in ours.model.parameters()]))
    assert calls[1] == 2 * calls[0]
    assert torch.allclose(*weights, atol=1e-6)


def test_progress_rises_to_the_end(policy: Path, samples: list[Sample]) -> None:
    for settings in ({}, {"old_log_probs": "recompute", "kl_coef": 0.1, "epochs": 2}):
        ours = trainer(policy, max_tokens_per_microbatch=64, **settings)
        shares: list[float] = []
        ours.on_progress = shares.append
        ours.train(samples, iteration=0)
        assert len(shares) > 8
        assert shares == sorted(shares)
        assert 0 < shares[0] < 0.2
        assert shares[-1] == pytest.approx(1.0)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 instructions")
def test_in_bfloat16_training_is_nearly_the_same_and_logits_are_exact(policy: Path, samples: list[Sample]) -> None:
    exact = trainer(policy, old_log_probs="recompute").train(samples, iteration=0)
    ours, calls = trainer(policy, compute_dtype="bfloat16", old_log_probs="recompute"), []
    ours.model.lm_head.register_forward_hook(lambda _module, _args, logits: calls.append(logits.detach()))
    coarse = ours.train(samples, iteration=0)
    assert 1e-5 < coarse["train/logprob_diff_max"] < 0.2
    assert coarse["train/loss"] == pytest.approx(exact["train/loss"], abs=0.05)
    assert {parameter.dtype for parameter in ours.model.parameters()} == {torch.float32}
    assert calls
    for logits in calls:
        assert logits.dtype == torch.float32
        assert not torch.equal(logits, logits.bfloat16().float())


def test_the_device_and_no_emulated_bfloat16(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cuda:99", "gpu"):
        with pytest.raises(ConfigError, match=f"device is '{device}'"):
            trainer(policy, device=device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_device("auto").type == "cpu"
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(ConfigError, match="compute_dtype is 'bfloat16'"):
        bfloat16_wanted("bfloat16", torch.device("cpu"))
    assert not bfloat16_wanted("auto", torch.device("cpu"))


def test_threads_by_the_size_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with torch.device("meta"):
        small, large = torch.nn.Linear(300, 300), torch.nn.Linear(10_000, 10_000)
    set_threads("auto", small)
    set_threads("auto", large)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    set_threads("auto", large)
    set_threads(3, small)
    set_threads(None, large)
    assert chosen == [1, 6, 4, 3]


def run_trainer(settings: dict[str, Any], policy: Path) -> Any:
    from agl_slime.cli.local import _make_trainer

    return _make_trainer(train_config(**settings), policy)


def test_the_runs_temperature_and_seed_are_the_trainers(policy: Path) -> None:
    made = run_trainer({"seed": 5, "temperature": 0.5}, policy)
    assert (made._seed, made._temperature) == (5, 0.5)


@pytest.mark.parametrize("by", ["trainer", "run"])
def test_lora_without_peft_names_the_extra_to_install(by: str, policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match=r"agl-slime\[lora\]"):
        trainer(policy, lora_rank=4) if by == "trainer" else run_trainer({"local.lora_rank": 4}, policy)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_packed_bfloat16_trains(policy: Path, samples: list[Sample]) -> None:
    ours = trainer(policy, device="auto", gradient_checkpointing=True)
    metrics = ours.train(samples, iteration=0)
    assert ours.model.device.type == "cuda"
    assert metrics["train/logprob_diff_max"] < 0.2
    assert math.isfinite(metrics["train/loss"])
