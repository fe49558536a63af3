"""``agl-slime replay`` on runs of the tiny policy: each step from files is the recorded one."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("torch", reason='training needs torch: pip install "agl-slime[local]"')

from agl_slime.cli.local import run_training
from agl_slime.cli.replay import ReplayConfig, main, replay
from agl_slime.cli.settings import train_config
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.train.local.settings import LocalTrainerSettings

RUNS: list[tuple[int, dict[str, Any], LocalTrainerSettings]] = [
    (34, {}, LocalTrainerSettings()),
    (33, {"temperature": 0.8, "seed": 3}, LocalTrainerSettings(loss="gspo", aggregation="rollout", n_minibatches=2)),
    (33, {"seed": 5}, LocalTrainerSettings(loss="cispo", old_log_probs="recompute", epochs=2, kl_coef=0.05)),
]


def run_of(directory: Path, policy: Path, url: str, steps: int, **settings: Any) -> Path:
    """The directory of a finished run with all rollouts kept; the engine has the policy's weights again."""
    few: dict[str, Any] = {"rollout_batch_size": 2, "eval_interval": 0, "autopsy": 0, "keep_rollouts": "all"}
    config = train_config(
        **{**few, "model_path": policy, "sglang_url": url, "output_dir": directory, "num_iterations": steps, **settings}
    )
    try:
        asyncio.run(run_training(config, console=Console(file=io.StringIO())))
    finally:
        asyncio.run(DiskWeightSync(base_url=url).push(str(policy), "0"))
    return directory


@pytest.mark.slow
def test_a_hundred_steps_of_three_runs_equal_the_recorded_ones(policy_dir: Path, embedded_engine: str, tmp_path: Path):
    differences = []
    for number, (steps, settings, local) in enumerate(RUNS):
        run = run_of(tmp_path / str(number), policy_dir, embedded_engine, steps, local=local, **settings)
        shutil.rmtree(run / "checkpoints")  # a replay begins with the start model then
        result = replay(ReplayConfig(run_dir=run, step=steps))
        differences += [*result.earlier, result.difference]
    assert len(differences) == 100
    assert set(differences) == {0.0}


def test_a_wrong_reward_is_replaced_and_the_step_retrained_from_files(
    policy_dir: Path, embedded_engine: str, tmp_path: Path
):
    """Any two rollouts have different new rewards, so that the gradient is another one whatever was sampled; the loss
    is 0 where all answers have one length."""
    run = run_of(tmp_path / "run", policy_dir, embedded_engine, 2)
    (tmp_path / "mine.py").write_text("def number(line):\n    return hash(line['rollout_id']) / 2**64\n")
    result = replay(ReplayConfig(run_dir=run, step=2, reward=f"{tmp_path / 'mine.py'}:number"))
    assert result.difference == 0.0
    assert result.changed is not None
    assert result.changed["train/grad_norm"] != result.recorded["train/grad_norm"]


def test_the_command_shows_influential_rollouts_and_moved_tokens(
    policy_dir: Path, embedded_engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The learning rate of the run follows from the model's size."""
    run = run_of(tmp_path / "run", policy_dir, embedded_engine, 1)
    main([str(run), "--step", "1", "--influences", "2"])
    output = capsys.readouterr().out
    assert "Largest difference of recorded and again: 0\n" in output
    assert "one plain gradient step with lr 0.0005" in output
    rollouts, tokens = output.split("Rollouts by influence")[1].split("Tokens by the change")
    kept = [json.loads(line)["rollout_id"] for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert sum(f"  {name}, most: " in rollouts for name in kept) == 2
    assert len(tokens.splitlines()[1:]) == 2
