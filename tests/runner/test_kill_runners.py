"""kill -9 of runner processes at random moments of a real ``train.py``; then: was each group trained on exactly once,
with its rollouts' tokens? All rollouts are kept, so that the audit has the tokens of each."""

import random
import time
from pathlib import Path

import psutil
import pytest

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.report.files import iter_jsonl
from agl_slime.tools.audit import audit
from tests.harness.train_process import Run, train
from tests.harness.training import needs_torch
from tests.programs.end_train import account

KILLS, GROUPS, SIZE = 3, 10, 3
FLAGS = f"--runners process:2 --rollout-batch-size {GROUPS} --n-samples-per-prompt {SIZE} --eval-interval 0"


def workers(run: Run) -> list[psutil.Process]:
    return [child for child in run.children() if "spawn_main" in " ".join(child.cmdline())]


@needs_torch
@pytest.mark.slow
def test_killed_runner_processes_lose_no_group_and_train_none_twice(tmp_path: Path) -> None:
    rng, agent, out = random.Random(1), LookupAgent(), tmp_path / "run"
    flags = [*FLAGS.split(), "--num-iterations", KILLS + 2, "--keep-rollouts", "all", "--output-dir", out]
    with (
        EmbeddedEngine(LOOKUP_POLICY) as engine,
        train(*flags, "--model-path", LOOKUP_POLICY, "--sglang-url", engine.url) as run,
    ):
        for number in range(1, KILLS + 1):
            run.until(f"iter {number}/")
            time.sleep(rng.uniform(0.0, 0.4))  # the moment of the kill
            rng.choice(workers(run)).kill()
        assert run.end(120)[0] == 0, run.text
    assert "killed by signal 9, most often for memory); others retry its " in " ".join(run.text.split())
    result = audit(out)
    assert (result.findings, result.finished) == ([], True)
    assert account(out) == ([], GROUPS * (KILLS + 2))
    kept = [*iter_jsonl(out / "rollouts.jsonl")]
    assert len(kept) == GROUPS * SIZE * (KILLS + 2)
    for line in kept:  # text and reward are of the rollout's own task
        _, question, *_, answer = line["messages"]
        assert f'"{line["task"]["key"]}"' in question["content"]
        assert line["reward"] == agent.compute_reward(line["task"], answer["content"])
