"""``agl-slime export`` writes the kept rollouts of a run, and TRL trains on the files."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_slime.cli.main import main
from agl_slime.errors import ConfigError
from agl_slime.report.files import iter_jsonl
from agl_slime.tools.export.command import dpo_rows, export_run, sft_rows
from tests.harness.training import run_of


def rollout(group: str, reward: float | None, *answers: str, name: str = "") -> dict[str, Any]:
    """A conversation with a tool's answer between the model's."""
    messages = [{"role": "user", "content": "?"}]
    for number, answer in enumerate(answers):
        messages += [{"role": "tool", "content": "seen"}] if number else []
        messages.append({"role": "assistant", "content": answer})
    return {"group_id": group, "rollout_id": name, "reward": reward, "messages": messages, "samples": []}


def last(row: dict[str, Any]) -> str:
    return row["messages"][-1]["content"]


def test_the_best_of_each_group_and_no_rollout_without_a_reward(tmp_path: Path) -> None:
    answers = {"so": 0.5, "yes": 1.0, "failed": None}
    rollouts = [*(rollout("a", reward, text) for text, reward in answers.items()), rollout("b", 0.2, "no")]
    assert [last(row) for row in sft_rows(rollouts, best=1, min_reward=None, rewards={})] == ["yes", "no"]
    assert [last(row) for row in sft_rows(rollouts, best=2, min_reward=0.5, rewards={})] == ["yes", "so"]
    # of the second group only the worst of three was kept
    whole = {"a": [0.5, 1.0, None], "b": [0.2, 0.9, 0.4]}
    assert [last(row) for row in sft_rows(rollouts, best=1, min_reward=None, rewards=whole)] == ["yes"]
    assert [last(row) for row in sft_rows(rollouts, best=3, min_reward=None, rewards=whole)] == ["yes", "so", "no"]
    with pytest.raises(ConfigError, match="--keep-rollouts all"):
        export_run(tmp_path, to="sft")


def test_a_pair_begins_with_the_first_answer_that_differs() -> None:
    rollouts = [rollout("a", 1.0, "call", "72"), rollout("a", 0.0, "call", "27"), rollout("a", None, "x", "y")]
    (pair,) = dpo_rows(rollouts, min_reward=None, min_gap=0.0)
    assert [message["content"] for message in pair["prompt"]] == ["?", "call", "seen"]
    assert [message["content"] for message in pair["chosen"] + pair["rejected"]] == ["72", "27"]
    # equal rewards, another task, too small a gap
    for second in (rollout("a", 1.0, "y"), rollout("b", 0.0, "y"), rollout("a", 0.9, "y")):
        assert list(dpo_rows([rollout("a", 1.0, "x"), second], min_reward=None, min_gap=0.1)) == []


@pytest.fixture(scope="module")
def run_dir(policy_dir: Path, embedded_engine: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(
        tmp_path_factory.mktemp("export") / "run", policy_dir, embedded_engine, num_iterations=1, keep_rollouts="all"
    )


def test_exported_tokens_are_the_trained_ones(run_dir: Path, policy_dir: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="reads the table: pip install pyarrow")
    assert main(["export", str(run_dir), "--to", "parquet"]) == 0
    rows = parquet.read_table(run_dir / "export-parquet.parquet").to_pylist()
    assert len({row["rollout_id"] for row in rows}) == len(rows) == 64
    trained = sum(sample[2] for line in iter_jsonl(run_dir / "trained.jsonl") for sample in line["samples"])
    assert sum(sum(row["loss_mask"]) for row in rows) == trained
    path, n = export_run(run_dir, to="messages")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert n == len(lines) == 64
    rewards = {line["rollout_id"]: line["reward"] for line in iter_jsonl(run_dir / "rollouts.jsonl")}
    assert {line["rollout_id"]: line["reward"] for line in lines} == rewards
    # a warm-up on the right answers has their tokens, with the agent's prompts as well as with the file's
    from agl_slime.cli.demo.agent import LookupAgent
    from agl_slime.tools.warm_up.recorded import read_conversations

    right = [line for line in lines if line["reward"] == 1.0]
    tasks = [{**line, "task": json.loads(line["task"])} for line in right]
    bare = [{"messages": line["messages"]} for line in right]
    sampled = {row["rollout_id"]: (row["input_ids"], row["loss_mask"]) for row in rows}
    assert right
    for recorded in (tasks, bare):
        read = asyncio.run(read_conversations(recorded, agent=LookupAgent(), model=str(policy_dir)))
        ours = [(sample.tokens, sample.loss_mask) for (sample,) in read]
        assert ours == [sampled[line["rollout_id"]] for line in right]
    for row in rows:
        assert row["prompt_length"] + len(row["loss_mask"]) == len(row["input_ids"])
        assert len(row["log_probs"]) > 0
        assert np.array_equal(np.isfinite(row["log_probs"]), np.asarray(row["loss_mask"], dtype=bool))


def damaged(run_dir: Path, to: Path, change: Any, *, twice: bool = False) -> Path:
    """A copy of the run's files in which ``change`` was applied to the first rollout; its lines twice if asked."""
    to.mkdir()
    for name in ("groups.jsonl", "rollouts.jsonl"):
        lines = [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
        if name == "rollouts.jsonl":
            change(lines[0]["samples"][0])
        (to / name).write_text("".join(json.dumps(line) + "\n" for line in lines) * (1 + twice))
    return to


FLOATS = base64.b64encode(np.zeros(1, "<f4").tobytes()).decode()
DAMAGE: list[tuple[dict[str, Any], str]] = [
    ({"prompt_length": -1}, "different lengths"),
    ({"prompt_length": 10**6}, "different lengths"),
    ({"left_out": -1}, "leaves tokens out"),
    ({"trained": [[-3, -1]]}, "different lengths"),
    ({"trained": [[0, 10**6]]}, "different lengths"),
    ({"engine_log_probs": FLOATS}, "different lengths"),
    ({"tokens": FLOATS}, "different lengths"),
    ({"tokens": "AAA"}, "no base64 of 32-bit numbers"),
    ({"engine_log_probs": "AAAAAAAA"}, "no base64 of 32-bit numbers"),
    ({"engine_log_probs": "#"}, "no base64 of 32-bit numbers"),
]


def test_token_columns_that_do_not_fit_are_refused_by_rollout(run_dir: Path, tmp_path: Path) -> None:
    for number, (fields, sentence) in enumerate(DAMAGE):
        copy = damaged(run_dir, tmp_path / str(number), lambda sample, fields=fields: sample.update(fields))
        for to in ("parquet", "hf-dataset"):
            with pytest.raises(ConfigError, match=rf"rollouts\.jsonl: Sample 1 of rollout ro-\w+ .*{sentence}.*; "):
                export_run(copy, to=to)
    copy = damaged(run_dir, tmp_path / "lacks", lambda sample: sample.pop("advantages"))
    with pytest.raises(ConfigError, match=r"Sample 1 of rollout ro-\w+ lacks 'advantages'; "):
        export_run(copy, to="parquet")


def test_doubled_lines_are_exported_once(run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="writes the table: pip install pyarrow")
    doubled = damaged(run_dir, tmp_path / "doubled", lambda sample: None, twice=True)
    for to in ("messages", "parquet", "sft", "dpo"):
        assert export_run(doubled, to=to, best=9)[1] == export_run(run_dir, to=to, best=9)[1], to


@pytest.mark.slow
def test_trl_trains_on_the_export(run_dir: Path, policy_dir: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL's trainers: pip install agl-slime[peers]")
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    arguments: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    arguments |= {"report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False}
    for to, trainer, settings in (("sft", trl.SFTTrainer, trl.SFTConfig), ("dpo", trl.DPOTrainer, trl.DPOConfig)):
        path, n = export_run(run_dir, to=to)  # type: ignore[arg-type]
        assert n >= 4
        model = AutoModelForCausalLM.from_pretrained(policy_dir)
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        made = trainer(
            model=model,
            args=settings(output_dir=str(tmp_path / to), **arguments),
            train_dataset=datasets.load_dataset("json", data_files=str(path), split="train"),
            processing_class=tokenizer,
        )
        assert np.isfinite(made.train().training_loss)
        assert any(not start[name].equal(tensor) for name, tensor in model.state_dict().items())
    path, n = export_run(run_dir, to="hf-dataset")
    assert len(datasets.load_from_disk(str(path))) == n == 64
