"""A stand-in for a trainer: takes a group per step through the agent rollout and writes a checkpoint after each.

    python -m tests.programs.buffer_trainer URL DIRECTORY STEPS

The checkpoint holds the step and the data buffer's metadata, as slime's does, and the instances trained on.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agl_slime.buffer.agent_rollout import generate_rollout
from tests.harness.agent_rollout import DataBuffer


def main() -> None:
    url, directory, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    checkpoint = directory / "checkpoint.json"
    state: dict[str, Any] = {"step": 0, "metadata": {}, "trained": []}
    if checkpoint.exists():
        state = json.loads(checkpoint.read_text())
    data_buffer = DataBuffer(state["metadata"])
    args = SimpleNamespace(
        agent_rollout_buffer_url=url,
        rollout_task_type="kill",
        rollout_batch_size=1,
        n_samples_per_prompt=2,
        num_epoch=1,
        prompt_data=str(directory / "input.jsonl"),
        rewards_normalization=False,
    )
    while state["step"] < steps:
        output = generate_rollout(args, state["step"], data_buffer)
        time.sleep(0.005)  # a moment between taking and keeping, to be killed in
        state["trained"] += [group[0].metadata["instance_id"] for group in output.samples]  # type: ignore[union-attr]
        state["step"] += 1
        state["metadata"] = data_buffer.metadata
        temporary = checkpoint.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(state))
        temporary.replace(checkpoint)


if __name__ == "__main__":
    main()
