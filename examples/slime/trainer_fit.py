"""Online RL with ``agentlightning.Trainer``, here with the local trainer, in about a minute.

On a machine with slime and GPUs only ``SlimeAlgorithm(model_path=…, slime_flags=[…], rollout_num_gpus=…)`` changes. Run
it with ``python examples/slime/trainer_fit.py``.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

# before agentlightning, which then needs no LiteLLM
from agl_slime import BridgeStore, ConcurrentRunner, SlimeAlgorithm

# isort: split
import agentlightning as agl
from agentlightning.execution.shared_memory import SharedMemoryExecutionStrategy

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.cli.demo.agent import LookupAgent


def main() -> None:
    agent, rng = LookupAgent(), random.Random(0)
    train = [agent.make_task(rng) for _ in range(512)]
    val = [agent.make_task(rng) for _ in range(64)]
    with tempfile.TemporaryDirectory() as directory:
        algorithm = SlimeAlgorithm(
            model_path=LOOKUP_POLICY,
            trainer="local",
            num_iterations=10,
            eval_interval=10,
            output_dir=Path(directory) / "run",
        )
        trainer = agl.Trainer(
            algorithm=algorithm,
            store=BridgeStore(),
            runner=ConcurrentRunner(),
            strategy=SharedMemoryExecutionStrategy(main_thread="algorithm", n_runners=1),
        )
        trainer.fit(agent, train, val_dataset=val)
    assert algorithm.result is not None
    print("reward per iteration:", [round(reward, 2) for reward in algorithm.result.reward_means])


if __name__ == "__main__":
    main()
