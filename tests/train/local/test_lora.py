"""Low-rank adapters: trained parameters, weights for the engine, and resuming from a checkpoint."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers  # noqa: E402

from agl_slime.errors import ConfigError, TrainerError  # noqa: E402
from agl_slime.train.local import LocalTrainer, LocalTrainerSettings  # noqa: E402
from agl_slime.types import Sample  # noqa: E402
from tests.harness.trainer_policy import VOCABULARY, make_model, response_log_probs, save_policy  # noqa: E402

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason='adapters need peft: pip install "agl-slime[lora]"')


def trainer(policy: Path, *, seed: int = 0, **settings: Any) -> LocalTrainer:
    all_settings = LocalTrainerSettings(**{"lora_rank": 4, "lr": 1e-2, "n_minibatches": 2, **settings})
    return LocalTrainer(model_path=policy, settings=all_settings, seed=seed)


def adapters(ours: LocalTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in ours.model.parameters() if p.requires_grad])


def test_a_rank_above_the_models_hidden_size_is_refused(policy: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora_rank is 65: the model's hidden size is 64.* set at most 64"):
        trainer(policy, lora_rank=65)
    assert adapters(trainer(policy, lora_rank=64)).numel()


def assert_weights_load_as_trained(ours: LocalTrainer, samples: list[Sample], directory: Path, start: Any) -> Any:
    """The model that is loaded from the weights; its log-probs are the trained model's and differ from the start's."""
    for iteration in range(2):
        assert ours.train(samples, iteration=iteration)["train/grad_norm"] > 0
    ours.save_weights(directory)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    for sample in samples[:3]:
        n = sample.response_length
        trained = response_log_probs(ours.model, sample.tokens, n)
        assert response_log_probs(loaded, sample.tokens, n) == pytest.approx(trained, abs=1e-5)
        assert response_log_probs(start, sample.tokens, n) != pytest.approx(trained, abs=1e-2)
    return loaded


def test_new_adapters_change_nothing_and_come_from_the_seed(policy: Path, samples: list[Sample]) -> None:
    state = torch.random.get_rng_state()
    metrics = trainer(policy, old_log_probs="recompute").train(samples, iteration=0)
    assert metrics["train/logprob_diff_max"] < 1e-5
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(adapters(trainer(policy, seed=1)), adapters(trainer(policy, seed=1)))
    assert not torch.equal(adapters(trainer(policy, seed=1)), adapters(trainer(policy, seed=2)))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_training_resumes_exactly(policy: Path, samples: list[Sample], tmp_path: Path, checkpointing: bool):
    straight = trainer(policy, gradient_checkpointing=checkpointing)
    straight.train(samples, iteration=0)
    straight.save(tmp_path / "state")
    resumed = trainer(policy, gradient_checkpointing=checkpointing, seed=7)  # other adapters, until it is loaded
    resumed.load(tmp_path / "state")
    assert resumed.iteration == 0
    assert straight.train(samples, iteration=1)["train/loss"] == resumed.train(samples, iteration=1)["train/loss"]
    assert torch.equal(adapters(straight), adapters(resumed))


def test_the_start_policy_is_the_model_without_its_adapters(policy: Path, samples: list[Sample]) -> None:
    ours = trainer(policy, kl_coef=0.5)
    assert ours._start_model is ours.model
    first = ours.train(samples, iteration=0)["train/reference_kl"]
    assert ours.train(samples, iteration=1)["train/reference_kl"] > first > 0
    assert adapters(ours).numel() > 0


def test_unfitting_lora_checkpoint_is_refused_and_changes_nothing(policy: Path, samples: list[Sample], tmp_path: Path):
    ours = trainer(policy)
    ours.train(samples, iteration=0)
    ours.save(tmp_path / "with")
    trainer(policy, lora_rank=0).save(tmp_path / "without")
    state = adapters(ours)
    with pytest.raises(TrainerError, match="trained without lora_rank"):
        ours.load(tmp_path / "without")
    with pytest.raises(TrainerError, match="trained with lora_rank"):
        trainer(policy, lora_rank=0).load(tmp_path / "with")
    with pytest.raises(TrainerError, match="another model"):
        trainer(policy, lora_rank=2).load(tmp_path / "with")
    with pytest.raises(TrainerError, match="belong to other weights"):
        trainer(save_policy(tmp_path / "other", seed=1)).load(tmp_path / "with")
    assert torch.equal(adapters(ours), state)
    with pytest.raises(ConfigError, match=r"lora_targets .*no_such_layer"):
        trainer(policy, lora_targets=("no_such_layer",))


CASES = [
    (tied, settings)
    for tied in (True, False)
    for settings in (
        {"lora_rank": 0, "kl_coef": 0.5, "weight_decay": 0.1},
        {},
        {"lora_alpha": 3.0, "gradient_checkpointing": True},
        {"lora_targets": ("q_proj", "lm_head")},
        {"lora_targets": ("embed_tokens", "v_proj")},
        {"lora_targets": ("lm_head",)},
        {"lora_targets": ("embed_tokens",)},
    )
]


@pytest.mark.parametrize(("tied", "settings"), CASES, ids=str)
def test_lora_targets_load_as_trained_or_are_refused_at_the_start(tied, settings, samples, tmp_path):
    source, targets = save_policy(tmp_path / "source", tied=tied), settings.get("lora_targets", ())
    if targets == ("lm_head",) or (tied and {"lm_head", "embed_tokens"} & {*targets}):
        with pytest.raises(ConfigError, match=r"lora_targets is .*(same weights|output layer alone)"):
            trainer(source, **settings)
        return
    ours = trainer(source, **settings)
    layers = {name.split(".lora_")[0].split(".")[-1] for name, p in ours.model.named_parameters() if p.requires_grad}
    assert not targets or layers == {*targets}
    start = make_model(tied=tied)
    loaded = assert_weights_load_as_trained(ours, samples, tmp_path / "weights", start)
    assert set(loaded.state_dict()) == set(start.state_dict())
    frozen = {name.replace(".base_layer.", "."): tensor for name, tensor in ours.model.state_dict().items()}
    if ours.settings.lora_rank:  # the adapters alone were trained
        assert all(torch.equal(frozen[name], tensor) for name, tensor in start.state_dict().items())


def test_gpt2s_transposed_layers_are_merged_too(samples: list[Sample], tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2)
    start = transformers.AutoModelForCausalLM.from_config(config).eval()
    start.save_pretrained(tmp_path / "source")
    ours = trainer(tmp_path / "source", lora_targets=("c_attn", "c_fc"), old_log_probs="recompute")
    assert_weights_load_as_trained(ours, samples, tmp_path / "weights", start)
