"""Checkpoints of the local trainer:  weights for the engine, its own state, and checkpoints that are refused."""

import asyncio
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import transformers  # noqa: E402

from agl_slime.errors import ConfigError, TrainerError  # noqa: E402
from agl_slime.support.files import write_checksums  # noqa: E402
from agl_slime.train.local import LocalTrainer, LocalTrainerSettings  # noqa: E402
from agl_slime.types import Sample  # noqa: E402
from tests.harness.trainer_policy import make_model, save_policy  # noqa: E402
from tests.harness.trainers import flat, trainer, weights  # noqa: E402


def test_weights_replace_former_ones_beside_the_files_of_their_source(policy, samples, tmp_path, capfd):
    """Files about the source's making are not copied, and nothing is printed."""
    source = Path(shutil.copytree(policy, tmp_path / "source"))
    for name in ("agl_slime_policy.json", "model.safetensors.index.json"):
        (source / name).write_text("{}")
    (source / "logs").mkdir()
    ours, target = trainer(source), tmp_path / "weight_v000001"
    ours.save_weights(target)
    ours.train(samples, iteration=0)
    ours.save_weights(target)
    assert capfd.readouterr() == ("", "")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "weight_v000001"}
    assert {path.name for path in target.iterdir()} == {path.name for path in policy.iterdir()}
    for name in ("config.json", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (policy / name).read_bytes()
    read = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in weights(ours.model).items())
    assert not torch.equal(flat(list(read.parameters())), flat(list(make_model().parameters())))


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_weights_are_half_as_large_and_rounded_like_the_engines(tied: bool, tmp_path: Path):
    from safetensors.torch import load_file

    source = save_policy(tmp_path / "source", tied=tied)
    ours = trainer(source)
    for dtype in ("float32", "bfloat16"):
        ours.save_weights(tmp_path / dtype, dtype=dtype)
    whole, rounded = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    sizes = [(tmp_path / dtype / "model.safetensors").stat().st_size for dtype in ("float32", "bfloat16")]
    assert sizes[1] < 0.6 * sizes[0]
    assert rounded.keys() == whole.keys()
    assert ("lm_head.weight" in whole) is not tied
    assert all(torch.equal(tensor, whole[name].to(torch.bfloat16)) for name, tensor in rounded.items())
    assert any(not torch.equal(tensor.float(), whole[name]) for name, tensor in rounded.items())
    assert (tmp_path / "bfloat16" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_a_place_that_cannot_be_written_is_named(policy: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    ours = trainer(policy)
    with pytest.raises(TrainerError, match="file/weights"):
        ours.save_weights(tmp_path / "file" / "weights")
    with pytest.raises(TrainerError, match="file/state"):
        ours.save(tmp_path / "file" / "state")


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "train/seconds"}


def test_training_after_load_is_bitwise_equal(policy: Path, samples: list[Sample], tmp_path: Path):
    settings = LocalTrainerSettings(warmup_steps=10, kl_coef=0.1, weight_decay=0.01)
    straight = trainer(policy, settings, seed=3)
    for iteration in range(2):
        straight.train(samples, iteration=iteration)
    straight.save(tmp_path / "state")
    expected = [untimed(straight.train(samples, iteration=iteration)) for iteration in (2, 3)]

    resumed = trainer(policy, settings, seed=3)
    resumed.load(tmp_path / "state")
    assert (resumed.iteration, resumed.steps) == (1, 8)
    assert [untimed(resumed.train(samples, iteration=iteration)) for iteration in (2, 3)] == expected
    assert all(torch.equal(tensor, weights(resumed.model)[name]) for name, tensor in weights(straight.model).items())


def test_load_brings_the_seed_along_but_not_the_learning_rate(policy: Path, samples: list[Sample], tmp_path: Path):
    first = trainer(policy, seed=3)
    first.train(samples, iteration=0)
    first.save(tmp_path / "state")
    second = trainer(policy, seed=4, lr=1e-5)
    second.load(tmp_path / "state")
    assert second._seed == 3
    assert second.train(samples, iteration=1)["train/lr"] == 1e-5
    assert trainer(tmp_path / "state").iteration == -1  # the state is a checkpoint as well


def test_a_missing_broken_or_other_state_is_refused_and_changes_nothing(policy: Path, tmp_path: Path):
    ours, state = trainer(policy), tmp_path / "state"
    saved_weights = weights(ours.model)
    with pytest.raises(TrainerError, match=r"cannot be read: .* is missing"):
        ours.load(tmp_path)
    ours.save(state)
    whole = (state / "trainer_state.pt").read_bytes()
    for content in (whole[: len(whole) // 2], b"not a checkpoint"):
        (state / "trainer_state.pt").write_bytes(content)
        with pytest.raises(TrainerError, match="cannot be read"):
            ours.load(state)
    torch.save({"format": 0}, state / "trainer_state.pt")
    write_checksums(state)
    with pytest.raises(TrainerError, match="format"):
        ours.load(state)
    config = make_model().config
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    trainer(tmp_path / "other").save(tmp_path / "other_state")
    with pytest.raises(TrainerError, match="another model"):
        ours.load(tmp_path / "other_state")
    assert all(torch.equal(tensor, saved_weights[name]) for name, tensor in weights(ours.model).items())


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no config.json"), ("{", "cannot be loaded"), ('{"model_type": "no_such_model"}', "cannot be loaded")],
)
def test_a_model_path_without_a_usable_checkpoint_is_refused(tmp_path: Path, content: str | None, message: str):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        LocalTrainer(model_path=tmp_path)


def test_a_checkpoint_that_lacks_weights_or_is_truncated_is_refused(policy: Path, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    trainer(policy).save_weights(tmp_path)
    file = tmp_path / "model.safetensors"
    whole, tensors = file.read_bytes(), load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 weights .* model\.norm\.weight"):
        trainer(tmp_path)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        trainer(tmp_path)


@pytest.mark.sglang
def test_a_real_sglang_in_bfloat16_computes_the_same_with_rounded_weights(policy_dir: Path, tmp_path: Path) -> None:
    from agl_slime.engine.client.client import SGLangClient
    from agl_slime.engine.client.generation import SamplingParams
    from agl_slime.engine.client.weights import DiskWeightSync
    from tests.harness.engine_servers import real_sglang

    greedy = SamplingParams(max_new_tokens=16, temperature=0.0)
    ours = trainer(policy_dir)
    with torch.no_grad():  # other weights than the server begins with
        for parameter in ours.model.parameters():
            parameter.mul_(1 + 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    for dtype in ("float32", "bfloat16"):
        ours.save_weights(tmp_path / dtype, dtype=dtype)

    async def answers(url: str) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        sync, answers_by_version = DiskWeightSync(base_url=url), []
        assert await sync.dtype() == "bfloat16"
        async with SGLangClient(base_url=url) as client:
            for version, path in enumerate((policy_dir, tmp_path / "float32", tmp_path / "bfloat16")):
                await sync.push(str(path), str(version))
                generation = await client.generate([1, 2, 3, 4], greedy)
                answers_by_version.append((tuple(generation.output_ids), tuple(generation.log_probs)))
        return answers_by_version

    with real_sglang(policy_dir, tmp_path / "sglang.log", ("--dtype", "bfloat16")) as server:
        first, whole, rounded = asyncio.run(answers(server.url))
    assert whole[0]
    assert whole == rounded
    assert whole[1] != first[1]
