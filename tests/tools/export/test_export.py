"""What ``agl-slime export`` writes is what the run has kept, and TRL trains on it."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from agl_slime.cli.export import dpo_rows, export_run, sft_rows
from agl_slime.cli.main import main
from agl_slime.errors import ConfigError
from agl_slime.report.files import iter_jsonl


def rollout(group: str, reward: float | None, *answers: str, name: str = "") -> dict[str, Any]:
    """A conversation with a tool's answer between the model's."""
    messages = [{"role": "user", "content": "?"}]
    for number, answer in enumerate(answers):
        messages += [{"role": "tool", "content": "seen"}] if number else []
        messages.append({"role": "assistant", "content": answer})
    return {"group_id": group, "rollout_id": name, "reward": reward, "messages": messages, "samples": []}


def last(row: dict[str, Any]) -> str:
    return row["messages"][-1]["content"]


def test_the_best_of_each_group_and_never_one_without_a_reward() -> None:
    rollouts = [
        rollout("a", 0.5, "so"),
        rollout("a", 1.0, "yes"),
        rollout("a", None, "failed"),
        rollout("b", 0.2, "no"),
    ]
    assert [last(row) for row in sft_rows(rollouts, best=1, min_reward=None)] == ["yes", "no"]
    assert [last(row) for row in sft_rows(rollouts, best=2, min_reward=0.5)] == ["yes", "so"]


def test_a_pair_begins_with_the_first_answer_that_differs() -> None:
    rollouts = [rollout("a", 1.0, "call", "72"), rollout("a", 0.0, "call", "27"), rollout("a", None, "x", "y")]
    (pair,) = dpo_rows(rollouts, min_reward=None, min_gap=0.0)
    assert [message["content"] for message in pair["prompt"]] == ["?", "call", "seen"]
    assert [message["content"] for message in pair["chosen"] + pair["rejected"]] == ["72", "27"]


@pytest.mark.parametrize(
    "rollouts",
    [
        [rollout("a", 1.0, "x"), rollout("a", 1.0, "y")],  # nothing to prefer
        [rollout("a", 1.0, "x"), rollout("b", 0.0, "y")],  # other tasks
        [rollout("a", 1.0, "x"), rollout("a", 0.9, "y")],  # too near
    ],
)
def test_no_pair_where_neither_is_better(rollouts: list[dict[str, Any]]) -> None:
    assert list(dpo_rows(rollouts, min_reward=None, min_gap=0.1)) == []


def test_export_of_a_run_without_rollouts_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--keep-rollouts all"):
        export_run(tmp_path, to="sft")


@pytest.fixture(scope="module")
def run_dir(policy_dir: Path, embedded_engine: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One iteration that keeps all rollouts; the shared engine is left with its weights."""
    from agl_slime.cli.local import run_training
    from agl_slime.cli.settings import train_config
    from agl_slime.engine.client.weights import DiskWeightSync

    directory = tmp_path_factory.mktemp("export") / "run"
    config = train_config(
        model_path=policy_dir,
        sglang_url=embedded_engine,
        num_iterations=1,
        eval_interval=0,
        keep_rollouts="all",
        output_dir=directory,
    )
    try:
        asyncio.run(run_training(config, console=Console(file=io.StringIO())))
    finally:
        asyncio.run(DiskWeightSync(base_url=embedded_engine).push(str(policy_dir), "default"))
    return directory


def test_exported_token_counts_equal_the_trained_ones(run_dir: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="reads the table: pip install pyarrow")
    assert main(["export", str(run_dir), "--to", "parquet"]) == 0
    rows = parquet.read_table(run_dir / "export-parquet.parquet").to_pylist()
    assert len({row["rollout_id"] for row in rows}) == len(rows) == 64
    trained = sum(sample[2] for line in iter_jsonl(run_dir / "trained.jsonl") for sample in line["samples"])
    assert sum(sum(row["loss_mask"]) for row in rows) == trained
    for row in rows:
        assert row["prompt_length"] + len(row["loss_mask"]) == len(row["input_ids"])
        assert len(row["log_probs"]) > 0
        assert np.array_equal(np.isfinite(row["log_probs"]), np.asarray(row["loss_mask"], dtype=bool))


def test_each_rollout_is_a_line_of_messages(run_dir: Path) -> None:
    path, n = export_run(run_dir, to="messages")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert n == len(rows) == 64
    known = {line["rollout_id"]: line["reward"] for line in iter_jsonl(run_dir / "rollouts.jsonl")}
    assert {row["rollout_id"]: row["reward"] for row in rows} == known


@pytest.mark.slow
def test_trl_trains_on_the_export(run_dir: Path, policy_dir: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL's trainers: pip install agl-slime[peers]")
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    told: dict[str, Any] = {
        "max_steps": 1, "per_device_train_batch_size": 2, "report_to": [], "save_strategy": "no", "use_cpu": True,
        "bf16": False, "learning_rate": 1e-3, "gradient_checkpointing": False,
    }  # fmt: skip
    for to, trainer, settings in (("sft", trl.SFTTrainer, trl.SFTConfig), ("dpo", trl.DPOTrainer, trl.DPOConfig)):
        path, n = export_run(run_dir, to=to)  # type: ignore[arg-type]
        assert n >= 4
        model = AutoModelForCausalLM.from_pretrained(policy_dir)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        made = trainer(
            model=model,
            args=settings(output_dir=str(tmp_path / to), **told),
            train_dataset=datasets.load_dataset("json", data_files=str(path), split="train"),
            processing_class=tokenizer,
        )
        assert np.isfinite(made.train().training_loss)
        assert any(not before[name].equal(tensor) for name, tensor in model.state_dict().items())
    path, n = export_run(run_dir, to="hf-dataset")
    assert len(datasets.load_from_disk(str(path))) == n == 64
