"""A stand-in of slime's trainer for whole processes: it takes its batches as slime's manager does, and its checkpoints
list the tasks of each step."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from agl_slime.support.files import write_file
from agl_slime.train.slime.hooks import generate_rollout
from agl_slime.types import flat_samples
from tests.cli.test_slime_overlapped import Managed
from tests.cli.test_slime_run import BATCH, SIZE, numbered, parse
from tests.programs.agents.contract_agent import ByteTokenizer

_TASKS = 2_000
_STEP_S = 0.2  # of a training step, and of an update of weights


class SavingTrainer(Managed):
    """Its checkpoint of a step is the file ``latest`` and, of each step, the tasks that it was trained on."""

    def train(self, rollout_id: int) -> int:
        output: Any = generate_rollout(self.args, rollout_id, self.source)
        samples = [*flat_samples(output.samples)]
        time.sleep(_STEP_S)
        saved = Path(self.args.save)
        tasks = [sample.metadata["instance_id"] for sample in samples]
        write_file(saved / f"trained_{rollout_id}.json", json.dumps(tasks))
        write_file(saved / "latest", str(rollout_id))
        self.saved = rollout_id
        return sum(sum(sample.loss_mask or [1] * sample.response_length) for sample in samples)

    def update_weights(self) -> str:
        time.sleep(_STEP_S)
        self.updates += 1
        Managed.version = str(self.updates)
        return Managed.version


def take_slimes_place() -> None:
    """In this process ``--trainer slime`` is this stand-in."""
    from agl_slime.cli import slime

    slime.require_slime = lambda: None
    slime.parse_slime_args = parse
    slime.SlimeTrainer = SavingTrainer  # type: ignore[misc]
    slime.load_tokenizer = lambda path: ByteTokenizer()


def flags(directory: Path, engine_url: str) -> str:
    """Flags of train.py for a run whose checkpoints are in ``saved``."""
    model, tasks = directory / "model", directory / "tasks.jsonl"
    if not tasks.exists():
        model.mkdir()
        (model / "config.json").write_text("{}")
        tasks.write_text("".join(json.dumps(task) + "\n" for task in numbered(_TASKS)))
    ours = f"--trainer slime --agent tests.cli.test_slime_overlapped:Uneven --model-path {model} --tasks {tasks}"
    ours += f" --eval-tasks {tasks} --eval-interval 2 --eval-rollouts 3 --sglang-url {engine_url} --view lines"
    ours += f" --rollout-batch-size {BATCH} --n-samples-per-prompt {SIZE}"
    return f"{ours} -- --save {directory / 'saved'}"


def look(saved: Path) -> tuple[list[str], int]:
    """Differences between the newest checkpoint and the loop's state; the number of tasks that it was trained on."""
    step = int((saved / "latest").read_text())
    steps = [json.loads((saved / f"trained_{number}.json").read_text()) for number in range(step + 1)]
    trained = Counter(int(task) for batch in steps for task in batch)
    findings = [f"task {task} was trained on {n} times of {SIZE}" for task, n in trained.items() if n != SIZE]
    state = json.loads((saved / "rollout" / f"agl_loop_{step}.json").read_text())
    done = {*range(state["tasks_drawn"]), *state["finished_beyond"]}
    if done != {*trained}:
        findings.append(f"tasks that count as done and were trained on differ: {sorted(done ^ {*trained})}")
    return findings, len(trained)
