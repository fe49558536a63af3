"""``RUN/model``: what a run has trained is a Hugging Face directory that others load and that answers as the engine
did; it costs no second copy, and a kill leaves the old one or a way back to it."""

from __future__ import annotations

import asyncio
import io
import json
import random
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("torch", reason='training needs torch: pip install "agl-slime[local]"')

from agl_slime.cli.demo import LookupDemonstrations
from agl_slime.cli.local import run_training
from agl_slime.cli.model_dir import model_of_run, write_model
from agl_slime.cli.models import find_model
from agl_slime.cli.settings import train_config
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.errors import ConfigError
from agl_slime.report import read_metrics
from agl_slime.report.files import RunDir
from agl_slime.train.local.settings import LocalTrainerSettings


def train(engine: str, policy: Path, directory: Path, **settings: Any) -> str:
    """A short run; returns its output. The shared engine is left as it was."""
    with urllib.request.urlopen(f"{engine}/model_info", timeout=10) as answer:
        before = json.loads(answer.read())["weight_version"]
    small: dict[str, Any] = {"num_iterations": 2, "rollout_batch_size": 8, "eval_interval": 1, "eval_rollouts": 8}
    config = train_config(
        model_path=policy, sglang_url=engine, save_interval=1, output_dir=directory, **{**small, **settings}
    )
    out = io.StringIO()
    try:
        asyncio.run(run_training(config, console=Console(file=out, width=200)))
    finally:
        asyncio.run(DiskWeightSync(base_url=engine).push(str(policy), before))
    return out.getvalue()


def engine_says(engine: str, policy: Path, model: Path, ids: list[int]) -> list[int]:
    """Greedy ids of the engine with the weights in ``model``."""
    with urllib.request.urlopen(f"{engine}/model_info", timeout=10) as answer:
        before = json.loads(answer.read())["weight_version"]
    asyncio.run(DiskWeightSync(base_url=engine).push(str(model), "of the test"))
    try:
        sampling = {"temperature": 0.0, "max_new_tokens": 40}
        body = json.dumps({"input_ids": ids, "sampling_params": sampling, "return_logprob": True}).encode()
        request = urllib.request.Request(f"{engine}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            found = json.loads(answer.read())["meta_info"]["output_token_logprobs"]
        return [one[1] for one in found]
    finally:
        asyncio.run(DiskWeightSync(base_url=engine).push(str(policy), before))


def transformers_says(model: Any, ids: list[int]) -> list[int]:
    import torch

    given = torch.tensor([ids])
    with torch.no_grad():
        found = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=40)
    return found[0, len(ids) :].tolist()


def prompts(model: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer, task, rng = AutoTokenizer.from_pretrained(model), LookupDemonstrations(), random.Random(5)
    conversations = [task.prompt(task.make_task(rng)) for _ in range(4)]
    told: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    return [tokenizer.apply_chat_template(one, **told) for one in conversations]


@pytest.fixture(scope="module")
def finished(policy_dir: Path, embedded_engine: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp("run") / "out"
    return directory, train(embedded_engine, policy_dir, directory, keep_best=True)


def test_transformers_answers_as_the_engine_does(
    finished: tuple[Path, str], policy_dir: Path, embedded_engine: str
) -> None:
    from transformers import AutoModelForCausalLM

    model = finished[0] / "model"
    loaded = AutoModelForCausalLM.from_pretrained(model)
    answers = [transformers_says(loaded, ids) for ids in prompts(model)]
    assert answers == [engine_says(embedded_engine, policy_dir, model, ids) for ids in prompts(model)]
    assert all(len(answer) > 3 for answer in answers)
    before = AutoModelForCausalLM.from_pretrained(policy_dir).state_dict()
    assert any(not before[name].equal(tensor) for name, tensor in loaded.state_dict().items())  # it was trained


def test_exported_weights_are_the_newest_checkpoints_files(finished: tuple[Path, str]) -> None:
    directory, _ = finished
    newest = directory / "checkpoints" / "step_000002" / "trainer"
    assert (directory / "model" / "model.safetensors").samefile(newest / "model.safetensors")
    # a person may edit these, and no checkpoint is damaged by it
    assert not (directory / "model" / "tokenizer_config.json").samefile(newest / "tokenizer_config.json")
    assert not list((directory / "model").glob("*.pt"))
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "README.md"}
    assert wanted <= {path.name for path in (directory / "model").iterdir()}


def test_the_best_model_is_the_one_of_the_best_validation(finished: tuple[Path, str]) -> None:
    directory, _ = finished
    values = {row["iteration"]: row["val/reward_mean"] for row in read_metrics(directory / "metrics.jsonl")}
    best = max(values, key=lambda iteration: (values[iteration], -iteration))
    about = json.loads((directory / "model-best" / "agl_slime_model.json").read_text())
    assert (about["iteration"], about["validation"]) == (best, values[best])
    of_best = directory / "checkpoints" / f"step_{best:06d}" / "trainer" / "model.safetensors"
    assert (directory / "model-best" / "model.safetensors").read_bytes() == of_best.read_bytes()


def test_model_card_has_task_curve_versions_licence_and_no_local_path(finished: tuple[Path, str]) -> None:
    directory, _ = finished
    card = (directory / "model" / "README.md").read_text()
    reward = read_metrics(directory / "metrics.jsonl")[-1]["rollout/reward_mean"]
    for wanted in ("trained for 2 iterations", "LookupAgent", f"| 2 | {reward:.3f} |", "transformers ", "## Licence"):
        assert wanted in card
    assert str(directory.parent) not in card


def test_the_summary_names_the_model_and_the_command_that_serves_it(finished: tuple[Path, str]) -> None:
    directory, text = finished
    assert f"--model-path {directory / 'model'}" in text
    assert json.loads((directory / "summary.json").read_text())["files"]["model"] == str(directory / "model")


def test_a_model_that_a_kill_took_is_made_from_the_newest_checkpoint(finished: tuple[Path, str]) -> None:
    directory, _ = finished
    (directory / "model").rename(directory / ".model.old-elsewhere")  # between the two renames
    model = find_model(directory, lambda text: None)
    assert model == (directory / "model").resolve()
    assert (model / "model.safetensors").is_file()


def test_a_model_that_cannot_be_written_leaves_the_old_one(
    finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = finished
    before = (model_of_run(directory) / "README.md").read_text()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agl_slime.cli.model_dir.shutil.copyfile", full)
    with pytest.raises(Exception, match="no space left"):
        write_model(
            RunDir(directory),
            directory / "model",
            directory / "checkpoints/step_000002/trainer",
            base=directory,
            iteration=9,
        )
    assert (directory / "model" / "README.md").read_text() == before


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no model and no checkpoint"):
        model_of_run(tmp_path)


def test_an_adapter_on_its_base_answers_as_the_merged_weights(
    policy_dir: Path, embedded_engine: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason='adapters need peft: pip install "agl-slime[lora]"')
    from transformers import AutoModelForCausalLM

    local = LocalTrainerSettings(lora_rank=4, lr=1e-2)
    # so many answers that some group's rewards differ: else no step is made
    train(embedded_engine, policy_dir, tmp_path / "run", local=local, num_iterations=1, n_samples_per_prompt=16)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    base = AutoModelForCausalLM.from_pretrained(policy_dir)
    plain = [transformers_says(base, ids) for ids in prompts(policy_dir)]
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "model" / "adapter").merge_and_unload()
    import torch

    ids = torch.tensor([prompts(policy_dir)[0]])
    with torch.no_grad():
        assert torch.allclose(adapted(ids).logits, merged(ids).logits, atol=1e-4)
    answers = [transformers_says(merged, ids) for ids in prompts(policy_dir)]
    assert answers == [transformers_says(adapted, ids) for ids in prompts(policy_dir)]
    assert not torch.allclose(
        AutoModelForCausalLM.from_pretrained(policy_dir)(ids).logits, merged(ids).logits, atol=1e-3
    )
    assert plain  # the base was asked before the adapter was put on it


@pytest.mark.sglang
def test_sglang_serves_it_and_answers_as_transformers_does(finished: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM

    from agl_slime.engine.sglang_process import SGLangProcess, find_sglang

    model = model_of_run(finished[0])
    loaded = AutoModelForCausalLM.from_pretrained(model)
    with SGLangProcess(model, python=find_sglang(None)) as engine:
        for ids in prompts(model):
            body = json.dumps({"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 40}}).encode()
            request = urllib.request.Request(f"{engine.url}/generate", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.loads(answer.read())["output_ids"] == transformers_says(loaded, ids)
