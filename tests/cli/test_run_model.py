"""``RUN/model``: a trained run is a Hugging Face directory that other programs load and that answers as the engine did;
it costs no second copy, and a kill leaves the old one or a way back to it."""

import asyncio
import json
import random
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from agl_slime.cli.demo import LookupDemonstrations
from agl_slime.cli.model_dir import RunModels, model_of_run, write_model
from agl_slime.cli.models import find_model
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.errors import ConfigError
from agl_slime.events import IterationFinished
from agl_slime.report import read_metrics
from agl_slime.report.files import RunDir
from agl_slime.train.local.settings import LocalTrainerSettings
from tests.harness.training import needs_torch, train, weights_restored

pytestmark = needs_torch


def short_run(engine: str, policy: Path, directory: Path, **settings: Any) -> str:
    small: dict[str, Any] = {"num_iterations": 2, "rollout_batch_size": 8, "eval_interval": 1, "eval_rollouts": 8}
    paths = {"model_path": policy, "sglang_url": engine, "output_dir": directory}
    with weights_restored(engine, policy):
        return train(save_interval=1, **paths, **{**small, **settings})


def engine_answers(url: str, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy ids of the engine."""
    answers = []
    for ids in prompts:
        body = json.dumps({"input_ids": ids, "sampling_params": {"temperature": 0.0, "max_new_tokens": 40}}).encode()
        request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            answers.append(json.load(answer)["output_ids"])
    return answers


def transformers_answers(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    import torch

    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
        answers.append(output[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def prompts(policy_dir: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer, task, rng = AutoTokenizer.from_pretrained(policy_dir), LookupDemonstrations(), random.Random(5)
    options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    return [tokenizer.apply_chat_template(task.prompt(task.make_task(rng)), **options) for _ in range(4)]


@pytest.fixture(scope="module")
def finished(policy_dir: Path, embedded_engine: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp("run") / "out"
    return directory, short_run(embedded_engine, policy_dir, directory, keep_best=True)


def test_transformers_answers_as_the_engine_does(finished, policy_dir, embedded_engine, prompts):
    from transformers import AutoModelForCausalLM

    model = finished[0] / "model"
    loaded = AutoModelForCausalLM.from_pretrained(model)
    with weights_restored(embedded_engine, policy_dir):
        asyncio.run(DiskWeightSync(base_url=embedded_engine).push(str(model), "of the test"))
        answers = engine_answers(embedded_engine, prompts)
    assert transformers_answers(loaded, prompts) == answers
    assert all(len(answer) > 3 for answer in answers)
    start = AutoModelForCausalLM.from_pretrained(policy_dir).state_dict()
    assert any(not start[name].equal(tensor) for name, tensor in loaded.state_dict().items())  # it was trained


def test_exported_weights_are_the_newest_checkpoints_files(finished: tuple[Path, str]) -> None:
    directory, text = finished
    model, newest = directory / "model", directory / "checkpoints" / "step_000002" / "trainer"
    assert (model / "model.safetensors").samefile(newest / "model.safetensors")
    # a person may edit these, and no checkpoint is damaged by it
    assert not (model / "tokenizer_config.json").samefile(newest / "tokenizer_config.json")
    assert not list(model.glob("*.pt"))
    names = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "README.md"}
    assert names <= {path.name for path in model.iterdir()}
    card = (model / "README.md").read_text()
    reward = read_metrics(directory / "metrics.jsonl")[-1]["rollout/reward_mean"]
    for line in ("trained for 2 iterations", "LookupAgent", f"| 2 | {reward:.3f} |", "transformers ", "## Licence"):
        assert line in card
    assert str(directory.parent) not in card
    assert f"--model-path {model}" in text
    assert json.loads((directory / "summary.json").read_text())["files"]["model"] == str(model)


def test_the_best_model_has_the_weights_of_the_best_validation(finished: tuple[Path, str]) -> None:
    directory, _ = finished
    values = {row["iteration"]: row["val/reward_mean"] for row in read_metrics(directory / "metrics.jsonl")}
    best = max(values, key=lambda iteration: (values[iteration], -iteration))
    about = json.loads((directory / "model-best" / "agl_slime_model.json").read_text())
    assert (about["iteration"], about["validation"]) == (best, values[best])
    checkpoint = directory / "checkpoints" / f"step_{best:06d}" / "trainer"
    weights = [(path / "model.safetensors").read_bytes() for path in (directory / "model-best", checkpoint)]
    assert weights[0] == weights[1]


def test_a_model_that_a_kill_took_is_made_from_the_newest_checkpoint(finished: tuple[Path, str], tmp_path: Path):
    directory, _ = finished
    (directory / "model").rename(directory / ".model.old-elsewhere")  # between the two renames
    model = find_model(directory, lambda text: None)
    assert model == (directory / "model").resolve()
    assert (model / "model.safetensors").is_file()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no model and no checkpoint"):
        model_of_run(tmp_path)


def test_a_model_that_cannot_be_written_leaves_the_old_one(finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch):
    directory, _ = finished
    card = (model_of_run(directory) / "README.md").read_text()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agl_slime.cli.model_dir.shutil.copyfile", full)
    newest = directory / "checkpoints" / "step_000002" / "trainer"
    with pytest.raises(Exception, match="no space left"):
        write_model(RunDir(directory), directory / "model", newest, base=directory, iteration=9)
    assert (directory / "model" / "README.md").read_text() == card


def test_an_adapter_on_its_base_answers_as_the_merged_weights(policy_dir, embedded_engine, tmp_path, prompts):
    peft = pytest.importorskip("peft", reason='adapters need peft: pip install "agl-slime[lora]"')
    import torch
    from transformers import AutoModelForCausalLM

    local = LocalTrainerSettings(lora_rank=4, lr=1e-2)
    # enough answers that some group's rewards differ: else no step is made
    short_run(embedded_engine, policy_dir, tmp_path / "run", local=local, num_iterations=1, n_samples_per_prompt=16)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    base = AutoModelForCausalLM.from_pretrained(policy_dir)
    ids = torch.tensor([prompts[0]])
    with torch.no_grad():
        logits = merged(ids).logits
        assert not torch.allclose(base(ids).logits, logits, atol=1e-3)
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "model" / "adapter").merge_and_unload()
        assert torch.allclose(adapted(ids).logits, logits, atol=1e-4)
    assert transformers_answers(merged, prompts) == transformers_answers(adapted, prompts)


def validated(iteration: int, mean: float | None, failed: int, version: int | None = None) -> IterationFinished:
    metrics = {"val/reward_mean": mean, "val/count": 16, "val/failed": failed}
    return IterationFinished(iteration=iteration, metrics={**metrics, "weights/version": str(version or iteration)})


def models_of(directory: Path) -> RunModels:
    for iteration in range(1, 9):
        weights = directory / "weights" / f"v{iteration:06d}"
        weights.mkdir(parents=True, exist_ok=True)
        (weights / "config.json").write_text(json.dumps({"n": iteration}))
    return RunModels(RunDir(directory), base=directory, weights=directory / "weights")


def best(directory: Path) -> int | None:
    about = directory / "model-best" / "agl_slime_model.json"
    return json.loads(about.read_text())["iteration"] if about.exists() else None


def test_a_validation_whose_rollouts_failed_is_not_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models = models_of(tmp_path)
    for event, iteration, warning in (
        (validated(1, 1.0, failed=15), None, "validation (1.000 of 1/16) is not compared for model-best"),
        (validated(2, 0.5, failed=0), 2, ""),
        (validated(3, None, failed=16), 2, ""),
        (validated(4, 1.0, failed=15), 2, "is not compared"),
        (validated(5, 0.6, failed=1), 5, "(0.600 of 15/16), with another share of failed rollouts than before"),
        (validated(6, 0.7, failed=1), 6, ""),
        (validated(20, 0.8, failed=1, version=3), 20, ""),  # 3 of 20 iterations had a group to train on
    ):
        caplog.clear()
        models.handle(event)
        models.save_best()
        assert best(tmp_path) == iteration
        assert warning in caplog.text
        assert bool(warning) == bool(caplog.records)
    assert json.loads((tmp_path / "model-best" / "config.json").read_text()) == {"n": 3}
    models_of(tmp_path).handle(validated(7, 0.9, failed=0))  # a resumed run remembers the share
    assert "another share of failed rollouts" in caplog.text
