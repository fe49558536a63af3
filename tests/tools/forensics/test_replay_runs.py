"""``agl-slime replay`` on runs of the tiny policy: each step from files is the recorded one."""

import json
from typing import Any

from agl_slime.tools.forensics.replay import main, replay
from agl_slime.tools.forensics.steps import ReplayConfig
from tests.harness.training import needs_torch, run_of

pytestmark = needs_torch


FEW: dict[str, Any] = {"rollout_batch_size": 2, "autopsy": 0, "keep_rollouts": "all"}


def test_a_step_of_a_run_is_retrained_with_another_reward(policy_dir, embedded_engine, tmp_path, capsys):
    """New rewards differ between rollouts, so that the gradient changes whatever was sampled; the loss is 0 where all
    answers have one length. The run's learning rate follows from the model's size."""
    run = run_of(tmp_path / "run", policy_dir, embedded_engine, num_iterations=2, **FEW)
    assert "autopsy/" not in (run / "metrics.jsonl").read_text()  # with --autopsy 0 nothing is scored again
    (tmp_path / "mine.py").write_text("def number(line):\n    return hash(line['rollout_id']) / 2**64\n")
    result = replay(ReplayConfig(run_dir=run, step=2, reward=f"{tmp_path / 'mine.py'}:number"))
    assert result.difference == 0.0
    assert result.changed is not None
    assert result.changed["train/grad_norm"] != result.recorded["train/grad_norm"]
    main([str(run), "--step", "1", "--influences", "2"])
    output = capsys.readouterr().out
    assert "Largest difference of recorded and again: 0\n" in output
    assert "one plain gradient step with lr 0.0005" in output
    rollouts, tokens = output.split("Rollouts by influence")[1].split("Tokens by the change")
    names = [json.loads(line)["rollout_id"] for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert sum(f"  {name}, most: " in rollouts for name in names) == 2
    assert len(tokens.splitlines()[1:]) == 2
